"""A vocabulary's tokens sorted by their bytes, to find the tokens that begin with, or belong to, some text."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

import numpy as np


class ByteVocabulary:
    """The tokens of a vocabulary sorted by their bytes, without ids that add nothing to a text."""

    def __init__(self, vocabulary: Sequence[bytes | None]) -> None:
        self.vocabulary = vocabulary
        self.size = len(vocabulary)
        spelt = sorted((token, index) for index, token in enumerate(vocabulary) if token)
        self._bytes = [token for token, _ in spelt]
        self._ids = [index for _, index in spelt]
        self.longest = max(map(len, self._bytes), default=0)

    def extend(self, prefix: bytes) -> bool:
        """Return whether a token is longer than ``prefix`` and begins with it."""
        after = bisect.bisect_right(self._bytes, prefix)
        return after < len(self._bytes) and self._bytes[after].startswith(prefix)

    def along(self, text: bytes) -> list[int]:
        """Return the ids of the tokens that ``text`` begins with, and of those that begin with ``text``."""
        return self.before(text[:-1]) + self.beginning(text)

    def before(self, text: bytes) -> list[int]:
        """Return the ids of the tokens that ``text`` begins with."""
        found = []
        for length in range(1, len(text) + 1):
            first = bisect.bisect_left(self._bytes, text[:length])
            if first == len(self._bytes) or not self._bytes[first].startswith(text[:length]):
                break  # no token begins with more of it
            found += self._ids[first : bisect.bisect_right(self._bytes, text[:length])]
        return found

    def beginning(self, text: bytes) -> list[int]:
        """Return the ids of the tokens that begin with ``text``."""
        first = bisect.bisect_left(self._bytes, text)
        # They are adjacent, and all of them are shorter than this many 0xFF.
        last = bisect.bisect_left(self._bytes, text + b"\xff" * (self.longest + 1))
        return self._ids[first:last]

    def containing(self, text: bytes) -> list[int]:
        """Return the ids of the tokens that have ``text``, of UTF-8, in them."""
        whole, starts = self._joined
        found, at = list[int](), whole.find(text)
        while at >= 0:
            index = bisect.bisect_right(starts, at) - 1
            found.append(self._ids[index])
            at = whole.find(text, starts[index + 1])
        return found

    @functools.cached_property
    def _joined(self) -> tuple[bytes, list[int]]:
        """All tokens with 0xFF between them, which UTF-8 never has, and where each begins; at last, the length."""
        lengths = (len(token) + 1 for token in self._bytes)
        return b"\xff".join([*self._bytes, b""]), list(itertools.accumulate(lengths, initial=0))

    def spell(self, tokens: np.ndarray) -> bytes:
        """Return the bytes that ``tokens``, (n,), add to a text."""
        known = (int(token) for token in tokens if token < self.size)
        return b"".join([self.vocabulary[token] or b"" for token in known])
