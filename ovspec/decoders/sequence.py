"""The tokens of one row, and nothing else about them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

EMPTY = -1  # where rows are put in another order: a new one with nothing in it


class Sequence:
    """A growable row of token ids that grows by commits and shrinks by rewinds.

    Whatever keeps state along a row (a decoder's KV cache, a drafter's index) holds a Sequence of
    what it has followed, and catches up from the ``common_prefix`` with the row when next used.
    """

    __slots__ = ("_buffer", "_length")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        start = np.fromiter(tokens, dtype=np.int64)
        self._length = len(start)
        self._buffer = np.empty(max(64, 2 * len(start)), dtype=np.int64)
        self._buffer[: self._length] = start

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """(length,) int64, a view that is valid until the next commit."""
        return self._buffer[: self._length]

    def commit(self, tokens: np.ndarray | list[int]) -> None:
        """Append ``tokens``."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            grown = np.empty(2 * end, dtype=np.int64)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : end] = tokens
        self._length = end

    def rewind(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot rewind a sequence of {self._length} tokens to {length}")
        self._length = length

    def copy(self) -> Sequence:
        return Sequence(self.tokens)


class Follower(Protocol):
    """Whatever holds what it has followed of each row, such as a decoder."""

    @property
    def rows(self) -> list[Sequence]: ...

    def truncate(self, row: int, length: int) -> None: ...


def common_prefix(a: Sequence, b: Sequence) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    n = min(a._length, b._length)
    if not n:
        return 0
    differ = a._buffer[:n] != b._buffer[:n]
    first = int(differ.argmax())
    return first if differ[first] else n


def catch_up(follower: Follower, row: int, sequence: Sequence) -> np.ndarray:
    """Roll ``row`` back to what it shares with ``sequence``; returns the tokens it has not seen yet.

    The one rule after a rejection, a fully accepted round, a rewind or an edited text.
    """
    held = follower.rows[row]
    # The last token is fed again where the cache already holds all: its logits are what is asked for.
    shared = min(common_prefix(held, sequence), len(sequence) - 1)
    if shared < len(held):
        follower.truncate(row, shared)
    return sequence.tokens[len(follower.rows[row]) :]
