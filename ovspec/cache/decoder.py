"""The interface of a decoder, a language model with its KV cache, and code shared by the implementations."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from ovspec.base.errors import InferenceError
from ovspec.cache.sequence import EMPTY_ROW, Sequence
from ovspec.ir.compile import last_error_line

# "exact": a token's logits have the same bits whether it is fed alone, with others, or in a pass over the whole text.
# "fast": the fastest plain decoding, without this guarantee.
Arithmetic = Literal["exact", "fast"]


@dataclass(frozen=True)
class FeedRule:
    """Limits on forward passes under which a token's bits don't depend on how its text is divided into passes.

    OpenVINO chooses between differently rounding kernels by the number of tokens, and in the lm_head by the number of
    logits. The rule, found by ``setup/exactness.py``, stays with kernels of equal results. The default, for fast
    arithmetic, sets no limit.

    queries: minimum tokens of a row in attention; paged engine only.
    fewest: minimum tokens in a forward pass; paged engine only.
    most: maximum tokens in a forward pass, and so maximum logits; None for no limit.
    first_apart: a text's first token has its own forward pass; on the paged engine, a pass also has more tokens than
        rows.
    rows_apart: rejected tokens are cut off, and rows share no forward pass; stateful engine only.
    fewest_logits: minimum number of tokens with logits in a forward pass.
    rounded: tokens and logits of a forward pass are padded to powers of two; paged engine only. This is for speed: a
        GPU compiles kernels for every new number.
    """

    queries: int = 1
    fewest: int = 1
    most: int | None = None
    first_apart: bool = False
    rows_apart: bool = False
    fewest_logits: int = 1
    rounded: bool = False

    def padded_token_count(self, count: int) -> int:
        """Return the number of computed tokens in a forward pass over ``count`` tokens."""
        return max(self.fewest, next_power_of_two(count) if self.rounded else count)

    def padded_logits_count(self, count: int) -> int:
        """Return the number of tokens with computed logits in a forward pass if ``count`` are needed."""
        return max(self.fewest_logits, next_power_of_two(count) if self.rounded else count)

    def choose_token_count_to_add(self, width: int, count: int) -> int:
        """Return how many of ``count`` tokens to feed together with ``width`` others.

        The result is below ``count`` if a few last tokens would need another forward pass: even a narrow pass takes
        time.
        """
        if not self.most:
            return count
        remaining_tokens = self.most - width % self.most
        if remaining_tokens < min(self.most // 4, count):
            remaining_tokens += self.most
        return min(count, remaining_tokens)

    @functools.cached_property
    def label(self) -> str:
        """The rule in words; cached, because it is in the statistics of every text."""
        demands = {
            f"at least {self.fewest} tokens an inference": self.fewest > 1,
            f"at least {self.fewest_logits} logits an inference": self.fewest_logits > 1,
            f"at most {self.most} tokens an inference": self.most,
            f"attention gets at least {self.queries} tokens of a row": self.queries > 1,
            "first tokens apart": self.first_apart,
            "rejected tokens cut off, each row by itself": self.rows_apart,
        }
        return ", ".join(demand for demand, is_demanded in demands.items() if is_demanded) or "tokens as they come"

    def __str__(self) -> str:
        return self.label


def next_power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least ``count``."""
    return 1 << max(count - 1, 0).bit_length()


FAST_RULE = FeedRule()
FAST_GPU_RULE = FeedRule(rounded=True)
Features = list[np.ndarray] | None  # by row, (tokens, width) float32; None unless the model is a head


def split_into_inferences(counts: list[int], max_tokens: int) -> Iterator[list[tuple[int, int]]]:
    """Divide rows of ``counts`` tokens into forward passes of at most ``max_tokens``, row after row.

    Yields, for each pass, every row's (begin, end) among its tokens.
    """
    row_begins = [0, *itertools.accumulate(counts)]
    for first_token in range(0, row_begins[-1], max_tokens):
        yield [
            (min(max(first_token - begin, 0), count), min(max(first_token + max_tokens - begin, 0), count))
            for begin, count in zip(row_begins, counts, strict=False)
        ]


# Prompt tokens of a joining row per forward pass, if the other rows aren't padded to this width. The pass reads all
# weights anyway, so fewer tokens would waste memory bandwidth.
JOINING_CHUNK_TOKENS = 64
MAX_REUSED_WIDTH = 16  # token arrays up to this width are kept and reused


StateCopies = Literal["any", "run"] | None


@dataclass(frozen=True)
class RollbackMethod:
    """How a model's tokens are rolled back, found by probing (``setup/rollback_probing.py``).

    kv: "mask": attention skips dead slots. "trim": slots must be contiguous, so the state is cut. "blocks": the paged
        decoder passes a smaller length to the next forward pass. None: the model has no keys and values.
    mask_until: number of slots up to which masking is exact (set by a sliding window); None for no limit.
    replay: some states can't be cut (convolution, SSM): a snapshot is restored, and the kept tokens after it are fed
        again.
    advances: some states can't be cut: the states before the last forward pass are kept, and advanced by its kept
        tokens; paged decoder only.
    copies: stateful engine: infer requests able to compute with copied states: "any", or only a request that has "run"
        since its reset. None: copies never work, not even in the original request, so texts are read again instead.
    """

    kv: Literal["mask", "trim", "blocks"] | None
    mask_until: int | None = None
    replay: bool = False
    advances: bool = False
    copies: StateCopies = "any"

    @functools.cached_property
    def label(self) -> str:
        """The method in words; cached, because it is in the statistics of every text."""
        kv_label: str | None = self.kv
        if kv_label == "mask" and self.mask_until:
            kv_label = f"mask until {self.mask_until}"
        parts = (kv_label, "replay" if self.replay else None, "advance" if self.advances else None)
        return " + ".join(filter(None, parts))

    def __str__(self) -> str:
        return self.label


def replace_masking_by_trimming(rollback: RollbackMethod) -> RollbackMethod:
    """Return ``rollback`` with rejected tokens cut off instead of masked."""
    return replace(rollback, kv="trim", mask_until=None) if rollback.kv else rollback


class BaseDecoder(Protocol):
    """The interface shared by decoders of models and of heads: rows of tokens in, logits out.

    ``sequence.catch_up`` brings a decoder's rows up to date with their texts.
    """

    context_length: int | None
    rule: FeedRule
    fills_width: bool  # whether ``feed`` fills a forward pass up to ``width`` tokens

    @property
    def rows(self) -> list[Sequence]:
        """Each row's tokens in the cache."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds spent in forward passes so far."""
        ...

    @property
    def inferences(self) -> int: ...

    def reset(self, rows: int) -> None:
        """Empty the cache, and start over with ``rows`` empty rows; 0 rows free its memory."""

    def feed(self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0) -> list[np.ndarray]:
        """Append ``tokens[row]`` (n,) int64 to each row, in a single forward pass unless the rule demands more.

        Returns, for each row, the logits after its last ``logits_counts[row]`` new tokens: (logits_counts[row], vocab)
        float32, valid until the next call. A row may get no tokens.

        ``width``: minimum number of tokens to compute, if the decoder ``fills_width``: it computes some tokens again,
        because a change of width between forward passes costs time.
        """
        ...

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        """Start each row with many unread tokens in ``sequences`` from the cached prefix of another row or text."""

    def truncate(self, row: int, length: int) -> None:
        """Roll ``row`` back to its first ``length`` tokens, or fewer: ``rows[row]`` has the remaining tokens."""

    def reorder(self, rows: list[int]) -> None:
        """Make new row i a copy of old row ``rows[i]``, or an empty row if ``rows[i]`` is EMPTY_ROW."""


class Decoder(BaseDecoder, Protocol):
    """A language model with its KV cache, for a batch of rows."""

    rollback: RollbackMethod
    block_size: int  # tokens in a block of the KV cache; 1 for a cache without blocks

    @property
    def blocks_used(self) -> int:
        """Number of blocks in use by rows, including rows of other decoders with the same blocks."""
        ...

    def feed(
        self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0, features: Features = None
    ) -> list[np.ndarray]:
        """See ``BaseDecoder``. ``features``: for a head, the target's features of each row's new tokens."""
        ...

    def features(self, row: int, begin: int, end: int) -> np.ndarray:
        """Return a head's input for the tokens ``begin`` to ``end`` of ``row``: their features, (n, width) float32.

        Features are part of the cache: kept, shared and copied together with keys and values.
        """
        ...

    @property
    def hidden(self) -> list[np.ndarray]:
        """A head's outputs of its last forward pass, by row, (logits, width): its next input in place of features."""
        ...

    def joining_chunk_tokens(self, counts: list[int]) -> int:
        """Return how many prompt tokens fit beside rows with ``counts`` new tokens without much delay."""
        ...

    def fork(self) -> Decoder:
        """Return a decoder with copies of the rows and its own infer request; empty if copies aren't exact."""
        ...

    def dump(self) -> dict[str, np.ndarray]:
        """Return the cache of row 0, for ``restore`` in another process; {} if copies aren't exact."""
        ...

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Start over with a single row of ``tokens`` (n,) and its cache from ``dump``.

        Raises ValueError if the cache is from another model or another KV precision.
        """


class PrefixCache(Protocol):
    """KV caches of a model's ended texts, kept for texts with the same prefix; shared by the model's decoders."""

    @property
    def idle_count(self) -> int:
        """Number of kept blocks without a running text; tokens on the stateful engine."""
        ...

    @property
    def evicted_count(self) -> int:
        """Number of blocks evicted so far; tokens on the stateful engine."""
        ...

    @property
    def idle_bytes(self) -> float:
        """Size of the kept caches without a running text, in bytes."""
        ...

    def limit_cached_tokens(self, max_cached_tokens: float) -> None:
        """Evict kept caches from now on if more than ``max_cached_tokens`` are cached."""

    def free_idle(self) -> None:
        """Free all kept caches without a running text."""


# ---------------------------------------------------------------- shared by the implementations


@functools.lru_cache(maxsize=256)
def compute_logits_indices(
    counts: tuple[int, ...], logits_counts: tuple[int, ...], min_positions: int, packed: bool = False
) -> np.ndarray:
    """Return the flat indices (n,) of each row's last ``logits_counts`` of ``counts`` tokens.

    Rows are padded to the longest, or follow each other without gaps if ``packed``. The last index is repeated up to
    ``min_positions`` indices. Callers ask for at least 1: some devices can't run a kernel on an empty list.

    Raises ValueError if no row has tokens, or a row has fewer tokens than logits.
    """
    if not any(counts):
        raise ValueError("`feed` needs at least one token.")
    if any(logits_count > count for logits_count, count in zip(logits_counts, counts, strict=True)):
        raise ValueError("`feed` returns logits only for the tokens it feeds; request fewer logits.")
    row_ends = list(itertools.accumulate(counts))
    if not packed:
        row_ends = [row * max(counts) + count for row, count in enumerate(counts)]
    logits_indices = [
        np.arange(end - logits_count, end) for end, logits_count in zip(row_ends, logits_counts, strict=True)
    ]
    repeated_indices = np.full(max(0, min_positions - sum(logits_counts)), row_ends[-1] - 1)
    return np.concatenate([*logits_indices, repeated_indices])


def count_computed_tokens(decoder: BaseDecoder, tokens: list[np.ndarray]) -> int:
    """Return how many tokens ``decoder`` computes for ``tokens``, without filling up to a width."""
    token_count = sum(map(len, tokens))
    return token_count and decoder.rule.padded_token_count(token_count)


def split_logits_by_row(logits: np.ndarray, logits_counts: list[int]) -> list[np.ndarray]:
    """Split ``logits`` (tokens, vocab) into one array (logits_counts[row], vocab) per row."""
    row_ends = itertools.accumulate(logits_counts)
    return [logits[end - logits_count : end] for end, logits_count in zip(row_ends, logits_counts, strict=True)]


def reorder_sequences(sequences: list[Sequence], rows: list[int]) -> list[Sequence]:
    """Return copies of ``sequences`` in the order ``rows``; see ``Decoder.reorder``."""
    return [Sequence() if row == EMPTY_ROW else sequences[row].copy() for row in rows]


class TokenArrayCache(dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]):
    """Int64 arrays for token ids and positions, by shape; small arrays are reused, which saves binding new ones."""

    def __missing__(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        arrays = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        if shape[-1] <= MAX_REUSED_WIDTH:
            self[shape] = arrays
        return arrays


def convert_feed_error(error: BaseException, device: str) -> BaseException:
    """Return an InferenceError if ``error`` is a failed forward pass or lack of memory, else ``error`` itself."""
    if isinstance(error, MemoryError):
        return InferenceError("The KV cache doesn't fit into memory; shorten the prompt or lower `max_tokens`.")
    if isinstance(error, RuntimeError):
        return InferenceError(
            f"{device}: OpenVINO failed to run the model ({last_error_line(error)}); load the model again, "
            "or choose another `device`."
        )
    return error
