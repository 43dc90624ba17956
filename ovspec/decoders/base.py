"""The interface of everything that holds a KV cache, and what its implementations share.

A Decoder is a language model with its cache, for a batch of rows: ``feed`` runs one inference, ``truncate`` takes
tokens back, ``reorder`` forks, drops and adds rows. A SessionDecoder can also copy its cache or write it down.
``catch_up`` is the rule by which a decoder follows a text, whatever has happened to it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from ovspec.decoders.sequence import EMPTY, Sequence
from ovspec.errors import OvspecError
from ovspec.ir.compile import last_line

# Tokens that a row reads beside others, where they don't make those wider: enough to use the weights that are read.
JOINING_CHUNK = 64
# Arrays for inferences up to this wide are kept for the next one.
KEPT_WIDTH = 16


@dataclass(frozen=True)
class Rollback:
    """How tokens are taken back, found by probing (``setup/probing.py``).

    kv: "mask", attention skips dead slots; "trim", slots must be contiguous, so the state is cut; "blocks",
        the paged decoder's, each inference is told how much counts; None for a model without keys and values.
    mask_until: slots up to which masking is exact (a sliding window), None for any number.
    replay: some states can't be cut (convolution, SSM): a snapshot is restored and what stays is fed again.
    """

    kv: Literal["mask", "trim", "blocks"] | None
    mask_until: int | None = None
    replay: bool = False

    @functools.cached_property
    def label(self) -> str:
        """For people."""
        kv = f"mask until {self.mask_until}" if self.kv == "mask" and self.mask_until else self.kv
        return " + ".join(filter(None, (kv, "replay" if self.replay else None)))

    def __str__(self) -> str:
        return self.label


class Decoder(Protocol):
    """A language model with its KV cache, for a batch of rows. Target and draft are both Decoders."""

    rollback: Rollback
    context_length: int | None

    @property
    def rows(self) -> list[Sequence]:
        """The tokens whose keys and values the cache holds, a row each."""
        ...

    @property
    def seconds(self) -> float:
        """Spent in inference so far."""
        ...

    @property
    def inferences(self) -> int: ...

    def reset(self, rows: int) -> None:
        """Empty the cache and start over with ``rows`` empty rows; with none, give its memory back."""
        ...

    def feed(self, tokens: list[np.ndarray], wanted: list[int]) -> list[np.ndarray]:
        """Run one inference that appends ``tokens[row]`` (n,) int64 to each row.

        Returns for each row the logits after its last ``wanted[row]`` new tokens,
        (wanted[row], vocab) float32, valid until the next call. A row may get no token.
        """
        ...

    def truncate(self, row: int, length: int) -> None:
        """Roll ``row`` back to its first ``length`` tokens, or fewer: ``rows[row]`` tells what is left."""
        ...

    def reorder(self, rows: list[int]) -> None:
        """Make new row i a copy of old row ``rows[i]``, or an empty one where that is EMPTY.

        Repeat an index to fork, leave it out to drop.
        """
        ...

    def joining_chunk(self, counts: list[int]) -> int:
        """Tokens that a further row may read beside rows that are fed ``counts``, without making them wait long."""
        ...


class SessionDecoder(Decoder, Protocol):
    """A decoder whose cache outlives a call: every decoder but those of tests."""

    def fork(self) -> SessionDecoder:
        """A decoder with a request of its own and the same text.

        Its cache is shared until one of them writes, or a copy, or, where a copy would not be exact, empty.
        """
        ...

    def dump(self) -> dict[str, np.ndarray]:
        """The cache of row 0, for ``restore`` in another process; nothing where a copy would not be exact."""
        ...

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Start over with a single row that holds ``tokens`` (n,), whose cache ``dump`` gave as ``arrays``.

        Raises:
            ValueError: the arrays are not of this model's shapes and types.
        """
        ...


# ---------------------------------------------------------------- what implementations share


@functools.lru_cache(maxsize=256)
def logit_positions(counts: tuple[int, ...], wanted: tuple[int, ...], packed: bool = False) -> np.ndarray:
    """Flat indices of each row's last ``wanted`` of ``counts`` tokens.

    Every row is as wide as the longest, or ``packed``: rows follow each other without a gap. At least one
    index: not every device runs a kernel on an empty list.
    """
    if not any(counts):
        raise ValueError("feed needs at least one token")
    if any(want > count for want, count in zip(wanted, counts, strict=True)):
        raise ValueError("logits can be wanted for new tokens only")
    starts = [0, *itertools.accumulate(counts if packed else [max(counts)] * len(counts))]
    ends = [start + count for start, count in zip(starts, counts, strict=False)]
    indices = [np.arange(end - want, end) for end, want in zip(ends, wanted, strict=True)]
    return np.concatenate(indices) if any(wanted) else np.zeros(1, dtype=np.int64)


def split_by_row(logits: np.ndarray, wanted: list[int]) -> list[np.ndarray]:
    """(tokens, vocab) -> for each row (wanted[row], vocab)"""
    ends = itertools.accumulate(wanted)
    return [logits[end - want : end] for end, want in zip(ends, wanted, strict=True)]


def reordered(old: list[Sequence], rows: list[int]) -> list[Sequence]:
    """Copies, as ``Decoder.reorder`` has them."""
    return [Sequence() if row == EMPTY else old[row].copy() for row in rows]


class TokenArrays(dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]):
    """Shape -> token ids and positions, int64; small ones are used again, because binding costs."""

    def __missing__(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        arrays = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        if shape[-1] <= KEPT_WIDTH:
            self[shape] = arrays
        return arrays


def feed_error(error: BaseException, device: str) -> BaseException:
    """What ``feed`` raises for ``error``: a sentence where inference has failed, else the error itself."""
    if isinstance(error, MemoryError):
        return OvspecError("The KV cache doesn't fit into memory; shorten the prompt or lower max_tokens.")
    if isinstance(error, RuntimeError):
        return OvspecError(f"{device}: the inference failed ({last_line(error)}).")
    return error
