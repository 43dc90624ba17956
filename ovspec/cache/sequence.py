"""The tokens of one row, and the rule by which a cache catches up with them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol

import numpy as np

EMPTY = -1  # in a reordering of rows: a new, empty row


class Unshared:
    """The owner of texts that share no prefix with any other; it equals no owner, not even itself."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return False


UNSHARED = Unshared()


class Sequence:
    """The token ids of a row: commits append to it, rewinds shorten it.

    What keeps state for a row, such as a KV cache, holds a Sequence of the tokens it has processed, and catches up from
    the ``common_prefix`` of that Sequence and the row.

    owner: whose text it is. Texts of different owners share no prefix, because that would tell one what another wrote;
        those of ``UNSHARED`` share none at all.
    """

    __slots__ = ("_buffer", "_length", "owner")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.owner: Hashable = None
        start = np.fromiter(tokens, dtype=np.int64)
        self._length = len(start)
        self._buffer = np.empty(max(64, 2 * len(start)), dtype=np.int64)
        self._buffer[: self._length] = start

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """The tokens (length,) int64, as a view that is valid until the next commit."""
        return self._buffer[: self._length]

    def commit(self, tokens: np.ndarray | list[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._buffer):
            grown = np.empty(2 * end, dtype=np.int64)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : end] = tokens
        self._length = end

    def rewind(self, length: int) -> None:
        """Keep only the first ``length`` tokens."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot rewind a sequence of {self._length} tokens to {length}")
        self._length = length

    def shared(self, tokens: np.ndarray) -> int:
        """Return the number of leading tokens that are the same in ``tokens``, (n,) int64."""
        n = min(self._length, len(tokens))
        if not n:
            return 0
        differ = self._buffer[:n] != tokens[:n]
        first = int(differ.argmax())
        return first if differ[first] else n

    def copy(self) -> Sequence:
        other = Sequence(self.tokens)
        other.owner = self.owner
        return other


class Follower(Protocol):
    """What keeps state for each row, such as a decoder."""

    @property
    def rows(self) -> list[Sequence]: ...

    def truncate(self, row: int, length: int) -> None: ...


def common_prefix(a: Sequence, b: Sequence) -> int:
    """Return the number of leading tokens that ``a`` and ``b`` share."""
    return a.shared(b.tokens)


def catch_up(follower: Follower, row: int, sequence: Sequence) -> np.ndarray:
    """Roll ``row`` back to the prefix it shares with ``sequence``; return the tokens it has not seen yet."""
    held = follower.rows[row]
    held.owner = sequence.owner
    # If the cache already holds every token, the last one is fed again, because its logits are needed.
    shared = min(common_prefix(held, sequence), len(sequence) - 1)
    if shared < len(held):
        follower.truncate(row, shared)
    return sequence.tokens[len(follower.rows[row]) :]
