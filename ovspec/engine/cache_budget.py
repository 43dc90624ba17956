"""The memory of KV caches: the rows of a batch that fit, and the row to set back if memory runs out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from ovspec.cache.decoder import Decoder
from ovspec.cache.sequence import EMPTY_ROW, Sequence, measure_common_prefix

# A joining row's room to grow before it may be set back: at least this many tokens, or this share of its length (1/8),
# because a longer text takes longer to read again.
JOINING_GROWTH_TOKENS = 256
JOINING_GROWTH_SHARE = 8
MIN_ROUND_TOKENS = 32  # tokens per row and round; if fewer fit, a row is set back


class GrowingText(Protocol):
    """A text, as seen by the budget."""

    sequence: Sequence
    max_length: int  # in tokens


class RowInBatch(Protocol):
    """A row of a batch."""

    @property
    def row(self) -> GrowingText: ...

    @property
    def decoder_row(self) -> int:
        """The target's row with its tokens; EMPTY_ROW if it has none yet."""
        ...


@dataclass(frozen=True)
class CacheUsage:
    """The bytes of KV caches, of all models together, and how often a row was set back so far."""

    limit_bytes: float
    reserved_bytes: float  # of rows, with their room to grow
    used_bytes: float  # of rows
    kept_bytes: float  # of ended texts, evicted for rows
    set_back_count: int


class CacheBudget:
    """Counts the blocks of a target's KV cache that rows need, among ``max_tokens`` tokens.

    A row reserves its tokens and room to grow; if memory runs out, a row is set back: its blocks are freed, and its
    text is read again later. If that could change the text (``rows_grow`` is False), each row reserves its maximum
    length instead.

    Other decoders' blocks in the target's pool count too, and blocks shared by rows count once. A draft or a
    head holds the same tokens as the target, so a token's bytes include theirs.
    """

    def __init__(self, target: Decoder, max_tokens: float = math.inf, rows_grow: bool = False) -> None:
        self.max_tokens = max_tokens
        self.task_tokens = 0  # kept free for a background task when rows join
        self.task_has_begun = False  # then also kept free from rows in the batch
        self.reserved_tokens = 0.0  # by all rows in the last round
        self.rows_grow = rows_grow
        self._target = target
        self._last_set_back: int | None = None  # the number of the row

    @property
    def is_limited(self) -> bool:
        return self.max_tokens < math.inf

    def choose_row_to_set_back(self, row_numbers: Collection[int]) -> int:
        """Return the number of the youngest row; never the row set back last, unless it is alone."""
        self._last_set_back = max(set(row_numbers) - {self._last_set_back}, default=self._last_set_back)
        assert self._last_set_back is not None
        return self._last_set_back

    def count_free_tokens(self, batch: Collection[RowInBatch]) -> float:
        """Return the number of tokens beyond the reservations of ``batch``; negative if these exceed the memory."""
        return self._count_free_blocks(batch, self._reserved_length, self.task_tokens) * self._target.block_size

    def has_room_for_round(self, batch: Collection[RowInBatch]) -> bool:
        """Return whether each row of ``batch`` can get ``MIN_ROUND_TOKENS``."""
        free_blocks = self._count_free_blocks(batch, length_after_short_round, self._begun_task_tokens)
        return free_blocks >= self._count_copies(batch)

    def divide_free_tokens(self, batch: Collection[RowInBatch], free_tokens: float) -> float:
        """Return the maximum number of tokens per row of ``batch`` and round, at least ``MIN_ROUND_TOKENS``.

        ``free_tokens``: from ``count_free_tokens``.
        """
        if free_tokens >= 0:
            return JOINING_GROWTH_TOKENS + free_tokens // len(batch)
        free_blocks = int(self._count_free_blocks(batch, current_length, self._begun_task_tokens))
        free_blocks -= self._count_copies(batch)
        return max(free_blocks // len(batch) * self._target.block_size, MIN_ROUND_TOKENS)

    def count_tokens_to_join(self, row: GrowingText, batch: Collection[RowInBatch]) -> int:
        """Return how many tokens ``row`` reserves, without blocks it can share with rows of ``batch``."""
        reserved_length = self._reserved_length(row)
        if self._target.block_size == 1:
            return reserved_length
        shared_lengths = [
            measure_common_prefix(row.sequence, self._target.rows[other_row.decoder_row])
            for other_row in batch
            if other_row.decoder_row != EMPTY_ROW and other_row.row.sequence.owner == row.sequence.owner
        ]
        shared_blocks = max(shared_lengths, default=0) // self._target.block_size
        return (self._count_blocks(reserved_length) - shared_blocks) * self._target.block_size

    @property
    def _max_blocks(self) -> float:
        return self.max_tokens // self._target.block_size

    def _reserved_length(self, row: GrowingText) -> int:
        if not self.rows_grow:
            return row.max_length
        length = len(row.sequence)
        return min(length + max(JOINING_GROWTH_TOKENS, length // JOINING_GROWTH_SHARE), row.max_length)

    def _count_blocks(self, length: int) -> int:
        return -(-length // self._target.block_size)

    def _count_copies(self, batch: Collection[RowInBatch]) -> int:
        """Return how many shared blocks rows may have to copy in a round before writing to them."""
        return len(batch) if self._target.block_size > 1 else 0

    @property
    def _begun_task_tokens(self) -> int:
        return self.task_tokens if self.task_has_begun else 0

    def _count_free_blocks(
        self, batch: Collection[RowInBatch], length_of: Callable[[GrowingText], int], task_tokens: int
    ) -> float:
        """Return the number of blocks that are free if each row of ``batch`` has the length of ``length_of``."""
        cached_blocks = missing_blocks = 0
        cached_rows = self._target.rows
        for running_row in batch:
            row_blocks = 0
            if running_row.decoder_row != EMPTY_ROW:
                row_blocks = self._count_blocks(len(cached_rows[running_row.decoder_row]))
            cached_blocks += row_blocks
            missing_blocks += max(0, self._count_blocks(length_of(running_row.row)) - row_blocks)
        used_blocks = self._target.blocks_used
        if not batch:  # an empty batch frees the blocks of its ended rows, but not those of other decoders
            used_blocks = max(0, used_blocks - sum(self._count_blocks(len(ended_row)) for ended_row in cached_rows))
        if task_tokens:  # the task may already use some
            used_blocks = max(used_blocks, cached_blocks + self._count_blocks(task_tokens))
        return self._max_blocks - used_blocks - missing_blocks


def current_length(row: GrowingText) -> int:
    return len(row.sequence)


def length_after_short_round(row: GrowingText) -> int:
    return min(len(row.sequence) + MIN_ROUND_TOKENS, row.max_length)
