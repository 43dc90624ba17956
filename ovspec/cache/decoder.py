"""The interface of a language model with its KV cache, and the code that its implementations share."""

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

# "exact": a token has the same bits however it was computed: alone, with others, or in one pass over its text.
# "fast": whatever is fastest for plain decoding, without that promise.
Arithmetic = Literal["exact", "fast"]


@dataclass(frozen=True)
class FeedRule:
    """How tokens are fed, so that each has the same bits however its text is cut; found by ``setup/exactness.py``.

    OpenVINO has several kernels for one operation, which round differently, and chooses among them by the number of
    tokens, or of logits in the lm_head. The rule keeps to those that agree. The default, for fast arithmetic, demands
    nothing.

    queries: the fewest tokens of a row that attention gets; paged engine only.
    fewest: the fewest tokens that an inference computes; paged engine only.
    most: the most tokens that an inference computes, and so the most logits; None for any number.
    first_apart: a text's first token has an inference of its own; and on the paged engine, an inference has more tokens
        than rows.
    rows_apart: rejected tokens are cut off, and rows share no inference; stateful engine only.
    fewest_logits: the fewest tokens whose logits an inference computes.
    rounded: paged engine only: an inference computes a power of two of tokens, and of logits. This one is for speed: a
        GPU makes kernels for every number.
    """

    queries: int = 1
    fewest: int = 1
    most: int | None = None
    first_apart: bool = False
    rows_apart: bool = False
    fewest_logits: int = 1
    rounded: bool = False

    def padded_token_count(self, count: int) -> int:
        """Return how many tokens an inference computes that is fed ``count`` tokens."""
        return max(self.fewest, next_power_of_two(count) if self.rounded else count)

    def padded_logits_count(self, count: int) -> int:
        """Return for how many tokens an inference computes logits if those of ``count`` tokens are needed."""
        return max(self.fewest_logits, next_power_of_two(count) if self.rounded else count)

    def choose_token_count_to_add(self, width: int, count: int) -> int:
        """Return how many of ``count`` tokens to feed together with ``width`` others.

        The number is smaller than ``count`` where the last tokens would begin another inference, which takes time for
        any number of tokens.
        """
        if not self.most:
            return count
        remaining_tokens = self.most - width % self.most
        if remaining_tokens < min(self.most // 4, count):
            remaining_tokens += self.most
        return min(count, remaining_tokens)

    @functools.cached_property
    def label(self) -> str:
        """The rule in words, kept because every text's statistics have them."""
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
Features = list[np.ndarray] | None  # of each row (tokens, width) float32; None for a model that isn't a head


def split_into_inferences(counts: list[int], max_tokens: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, for each inference of at most ``max_tokens``, every row's (begin, end) among its ``counts`` tokens."""
    row_begins = [0, *itertools.accumulate(counts)]
    for first_token in range(0, row_begins[-1], max_tokens):
        yield [
            (min(max(first_token - begin, 0), count), min(max(first_token + max_tokens - begin, 0), count))
            for begin, count in zip(row_begins, counts, strict=False)
        ]


# Tokens that a joining row reads per inference if that doesn't widen the other rows: enough to make good use of the
# weights, which the inference reads in any case.
JOINING_CHUNK_TOKENS = 64
MAX_REUSED_WIDTH = 16  # token arrays up to this width are kept and reused


StateCopies = Literal["any", "run"] | None


@dataclass(frozen=True)
class RollbackMethod:
    """How a model's tokens are rolled back, found by probing (``setup/rollback_probing.py``).

    kv: "mask": attention skips dead slots. "trim": slots must be contiguous, so the state is cut. "blocks": the paged
        decoder passes a smaller length to the next inference. None: the model has no keys and values.
    mask_until: number of slots up to which masking is exact (set by a sliding window); None for any number.
    replay: whether some states can't be cut (convolution, SSM), so that a snapshot is restored and the tokens after
        it that remain are fed again.
    advances: the same, but the states before the last inference are kept, and advanced by those of its tokens that
        remain; paged decoder only.
    copies: stateful engine: which infer requests compute rightly with copied states: "any", or only one that has "run"
        since it was reset. None: not even the one that they come from, so that texts are read again instead.
    """

    kv: Literal["mask", "trim", "blocks"] | None
    mask_until: int | None = None
    replay: bool = False
    advances: bool = False
    copies: StateCopies = "any"

    @functools.cached_property
    def label(self) -> str:
        """The way in words, kept as a rule's are."""
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
    """The part of the interface that decoders of models and of heads share: rows of tokens in, logits out.

    See ``sequence.catch_up``.
    """

    context_length: int | None
    rule: FeedRule
    fills_width: bool  # whether ``feed`` fills an inference up to a width

    @property
    def rows(self) -> list[Sequence]:
        """Each row's tokens in the cache."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds spent in inference so far."""
        ...

    @property
    def inferences(self) -> int: ...

    def reset(self, rows: int) -> None:
        """Empty the cache and start over with ``rows`` empty rows; with 0 rows, release its memory."""

    def feed(self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0) -> list[np.ndarray]:
        """Append ``tokens[row]`` (n,) int64 to each row, in one inference or in as many as the rule demands.

        Returns, for each row, the logits after its last ``logits_counts[row]`` new tokens: (logits_counts[row], vocab)
        float32, valid until the next call. A row may get no tokens.

        ``width``: a decoder that ``fills_width`` computes at least this many tokens, some of them once more, because
        an inference of another width than the one before takes longer.
        """
        ...

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        """Let each row with many unread tokens in ``sequences`` start from a prefix of another row or text."""

    def truncate(self, row: int, length: int) -> None:
        """Roll ``row`` back to its first ``length`` tokens, or fewer: ``rows[row]`` shows which tokens remain."""

    def reorder(self, rows: list[int]) -> None:
        """Make new row i a copy of old row ``rows[i]``, or an empty row if ``rows[i]`` is EMPTY_ROW."""


class Decoder(BaseDecoder, Protocol):
    """A language model with its KV cache, for a batch of rows."""

    rollback: RollbackMethod
    block_size: int  # tokens in a block of the KV cache; 1 for a cache without blocks

    @property
    def blocks_used(self) -> int:
        """The number of blocks that rows use, including the rows of decoders that share the blocks."""
        ...

    def feed(
        self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0, features: Features = None
    ) -> list[np.ndarray]:
        """See ``BaseDecoder``. ``features``: the target's features that a head reads with each token."""
        ...

    def features(self, row: int, begin: int, end: int) -> np.ndarray:
        """Return the features of the tokens from ``begin`` to ``end`` of ``row``, (n, width) float32, for a head.

        They are part of the cache: kept, shared and copied together with keys and values.
        """
        ...

    @property
    def hidden(self) -> list[np.ndarray]:
        """A head's own outputs, which it reads in place of features: each row's (logits, width), last inference."""
        ...

    def joining_chunk_tokens(self, counts: list[int]) -> int:
        """Return how many prompt tokens a row may read while others feed ``counts`` tokens, without much delay."""
        ...

    def fork(self) -> Decoder:
        """Return a decoder with the same rows and an infer request of its own; empty if a copy would not be exact."""
        ...

    def dump(self) -> dict[str, np.ndarray]:
        """Return the cache of row 0, for ``restore`` in another process; {} if a copy would not be exact."""
        ...

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        """Start over with a row ``tokens`` (n,) and its cache from ``dump``; raises ValueError if it doesn't fit."""


class PrefixCache(Protocol):
    """The KV caches of ended texts of a model, kept for texts with the same prefix. Decoders of the model share it."""

    @property
    def idle_count(self) -> int:
        """The number of blocks that are kept though no text needs them; tokens on the stateful engine."""
        ...

    @property
    def evicted_count(self) -> int:
        """The number of blocks so far that were kept and then evicted; tokens on the stateful engine."""
        ...

    @property
    def idle_bytes(self) -> float:
        """The bytes of kept caches that no text needs."""
        ...

    def limit_cached_tokens(self, max_cached_tokens: float) -> None:
        """Evict kept caches once ``max_cached_tokens`` are cached."""

    def free_idle(self) -> None:
        """Free the caches that no text needs."""


# ---------------------------------------------------------------- shared by the implementations


@functools.lru_cache(maxsize=256)
def compute_logits_indices(
    counts: tuple[int, ...], logits_counts: tuple[int, ...], min_positions: int, packed: bool = False
) -> np.ndarray:
    """Return the flat indices of each row's last ``logits_counts`` of ``counts`` tokens.

    Rows are padded to the longest, or, if ``packed``, follow each other without a gap. The last index is repeated until
    there are ``min_positions``, at least one: not every device can run a kernel on an empty list.
    """
    if not any(counts):
        raise ValueError("`feed` needs at least one token.")
    if any(logits_count > count for logits_count, count in zip(logits_counts, counts, strict=True)):
        raise ValueError("Logits can be requested only for the tokens being fed; request fewer.")
    row_ends = list(itertools.accumulate(counts))
    if not packed:
        row_ends = [row * max(counts) + count for row, count in enumerate(counts)]
    logits_indices = [
        np.arange(end - logits_count, end) for end, logits_count in zip(row_ends, logits_counts, strict=True)
    ]
    repeated_indices = np.full(max(0, min_positions - sum(logits_counts)), row_ends[-1] - 1)
    return np.concatenate([*logits_indices, repeated_indices])


def count_computed_tokens(decoder: BaseDecoder, tokens: list[np.ndarray]) -> int:
    """Return how many tokens ``decoder`` computes if it is fed ``tokens`` and not filled up."""
    token_count = sum(map(len, tokens))
    return token_count and decoder.rule.padded_token_count(token_count)


def split_logits_by_row(logits: np.ndarray, logits_counts: list[int]) -> list[np.ndarray]:
    """Split ``logits`` (tokens, vocab) into one array (logits_counts[row], vocab) per row."""
    row_ends = itertools.accumulate(logits_counts)
    return [logits[end - logits_count : end] for end, logits_count in zip(row_ends, logits_counts, strict=True)]


def reorder_sequences(sequences: list[Sequence], rows: list[int]) -> list[Sequence]:
    """Return copies of ``sequences`` in the new order; see ``Decoder.reorder``."""
    return [Sequence() if row == EMPTY_ROW else sequences[row].copy() for row in rows]


class TokenArrayCache(dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]):
    """Maps a shape to int64 arrays for token ids and positions; keeps small ones, which saves binding new ones."""

    def __missing__(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        arrays = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        if shape[-1] <= MAX_REUSED_WIDTH:
            self[shape] = arrays
        return arrays


def convert_feed_error(error: BaseException, device: str) -> BaseException:
    """Return what ``feed`` raises for ``error``: an InferenceError if the inference failed, else ``error`` itself."""
    if isinstance(error, MemoryError):
        return InferenceError("The KV cache doesn't fit into memory; shorten the prompt or lower `max_tokens`.")
    if isinstance(error, RuntimeError):
        return InferenceError(
            f"{device}: OpenVINO failed to run the model ({last_error_line(error)}); load the model again, "
            "or choose another `device`."
        )
    return error
