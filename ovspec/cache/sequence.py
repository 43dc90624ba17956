"""The tokens of a row, and the way its cache catches up with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

import numpy as np

EMPTY_ROW = -1  # in a reordering of rows: a new, empty row


class UnsharedOwner:
    """The owner of texts without a shared prefix; it equals no owner, not even itself."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return False


UNSHARED = UnsharedOwner()


class GrowingArray:
    """An array (n, ...) to append to and to cut at its end: a row's tokens, or their features."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, values: np.ndarray) -> None:
        self._length = len(values)
        self._buffer = np.empty((max(64, 2 * len(values)), *values.shape[1:]), dtype=values.dtype)
        self._buffer[: self._length] = values

    def __len__(self) -> int:
        return self._length

    @property
    def values(self) -> np.ndarray:
        """The array, as a view valid until the next commit."""
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
        """Keep only the first ``kept_length`` values; raises ValueError if there are fewer."""
        if not 0 <= kept_length <= self._length:
            raise ValueError(f"The sequence has only {self._length} tokens; it can't be rewound to {kept_length}.")
        self._length = kept_length


class Sequence(GrowingArray):
    """The token ids of a row: ``commit`` appends, ``rewind`` shortens.

    A KV cache, or another state of a row, has a Sequence of its processed tokens. To catch up with the row's text, it
    keeps their common prefix and processes the rest.

    owner: the text's owner. Texts of different owners share no prefix, because latency would reveal a text to another
        owner; texts of ``UNSHARED`` share no prefix at all.
    """

    __slots__ = ("owner",)

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        super().__init__(np.fromiter(tokens, dtype=np.int64))
        self.owner: Hashable = None

    @property
    def tokens(self) -> np.ndarray:
        """The tokens (length,) int64, as a view valid until the next commit."""
        return self._buffer[: self._length]

    def common_prefix_length(self, tokens: np.ndarray) -> int:
        """Return the length of the common prefix with ``tokens`` (n,) int64."""
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
    """A decoder, or another state per row, able to catch up with the rows' texts."""

    @property
    def rows(self) -> list[Sequence]: ...

    def truncate(self, row: int, length: int) -> None: ...


def measure_common_prefix(a: Sequence, b: Sequence) -> int:
    """Return the length of the common prefix of ``a`` and ``b``, in tokens."""
    return a.common_prefix_length(b.tokens)


def catch_up(follower: SequenceFollower, row: int, sequence: Sequence) -> np.ndarray:
    """Roll ``row`` back to its common prefix with ``sequence``; return the rest of ``sequence``, (n,) int64, n > 0."""
    cached_row = follower.rows[row]
    cached_row.owner = sequence.owner
    # If the cache has all tokens, the last is fed again for its logits.
    shared_length = min(measure_common_prefix(cached_row, sequence), len(sequence) - 1)
    if shared_length < len(cached_row):
        follower.truncate(row, shared_length)
    return sequence.tokens[len(follower.rows[row]) :]
