"""The tokens of one row, and the rule by which a cache catches up with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

import numpy as np

EMPTY_ROW = -1  # in a reordering of rows: a new, empty row


class UnsharedOwner:
    """The owner of texts that share no prefix with another text; it equals no owner, not even itself."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return False


UNSHARED = UnsharedOwner()


class GrowingArray:
    """An array (n, ...) that grows at its end, and is cut there: a row's tokens, or their features."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, values: np.ndarray) -> None:
        self._length = len(values)
        self._buffer = np.empty((max(64, 2 * len(values)), *values.shape[1:]), dtype=values.dtype)
        self._buffer[: self._length] = values

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> np.ndarray:
        """The array, as a view that is valid until the next commit."""
        return self._buffer[: self._length]

    def commit(self, values: np.ndarray | list[int]) -> None:
        end = self._length + len(values)
        if end > len(self._buffer):
            larger_buffer = np.empty((2 * end, *self._buffer.shape[1:]), dtype=self._buffer.dtype)
            larger_buffer[: self._length] = self.values
            self._buffer = larger_buffer
        self._buffer[self._length : end] = values
        self._length = end

    def rewind(self, kept_length: int) -> None:
        """Keep only the first ``kept_length`` values."""
        if not 0 <= kept_length <= self._length:
            raise ValueError(f"The sequence has only {self._length} tokens; it can't be rewound to {kept_length}.")
        self._length = kept_length


class Sequence(GrowingArray):
    """The token ids of a row: commits append to it, rewinds shorten it.

    A KV cache, or other state of a row, has a Sequence of the tokens it has processed, and catches up from the
    ``measure_common_prefix`` of that Sequence and the row.

    owner: of the text. Texts of different owners share no prefix, because latency would reveal one owner's text to
        another; texts of ``UNSHARED`` share none at all.
    """

    __slots__ = ("owner",)

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        super().__init__(np.fromiter(tokens, dtype=np.int64))
        self.owner: Hashable = None

    @property
    def tokens(self) -> np.ndarray:
        """The tokens (length,) int64, as a view that is valid until the next commit."""
        return self._buffer[: self._length]

    def common_prefix_length(self, tokens: np.ndarray) -> int:
        """Return the number of leading tokens that are the same in ``tokens``, (n,) int64."""
        length = min(self._length, len(tokens))
        if not length:
            return 0
        is_different = self._buffer[:length] != tokens[:length]
        first_difference = int(is_different.argmax())
        return first_difference if is_different[first_difference] else length

    def copy(self) -> Sequence:
        copied_sequence = Sequence(self.tokens)
        copied_sequence.owner = self.owner
        return copied_sequence


class SequenceFollower(Protocol):
    """A decoder, or other state of each row, that follows the rows' sequences."""

    @property
    def rows(self) -> list[Sequence]: ...

    def truncate(self, row: int, length: int) -> None: ...


def measure_common_prefix(a: Sequence, b: Sequence) -> int:
    """Return the number of leading tokens that ``a`` and ``b`` share."""
    return a.common_prefix_length(b.tokens)


def catch_up(follower: SequenceFollower, row: int, sequence: Sequence) -> np.ndarray:
    """Roll ``row`` back to the prefix it shares with ``sequence``; return the tokens it has not seen yet."""
    cached_row = follower.rows[row]
    cached_row.owner = sequence.owner
    # If the cache already has every token, the last one is fed again, because its logits are needed.
    shared_length = min(measure_common_prefix(cached_row, sequence), len(sequence) - 1)
    if shared_length < len(cached_row):
        follower.truncate(row, shared_length)
    return sequence.tokens[len(follower.rows[row]) :]
