"""Token healing: the end of a prompt is said again, so that a token may reach over it.

A prompt that ends in ``http:`` has the token ``:`` at its end, and a model that always saw ``://`` as one token hardly
ever goes on with ``//``. So the last tokens are taken back, and what is generated must begin with their bytes.
The idea is Lundberg's (Guidance, 2023).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from ovspec.constraints.base import Constraint
from ovspec.constraints.masks import pack


class ByteTokens:
    """The tokens of a vocabulary in the order of their bytes.

    Args:
        vocabulary: what each id adds to a text; ids that add nothing don't count.
    """

    def __init__(self, vocabulary: Sequence[bytes | None]) -> None:
        self.vocabulary = vocabulary
        self.size = len(vocabulary)
        spelt = sorted((token, index) for index, token in enumerate(vocabulary) if token)
        self._bytes = [token for token, _ in spelt]
        self._ids = [index for _, index in spelt]
        self.longest = max(map(len, self._bytes), default=0)

    def extend(self, prefix: bytes) -> bool:
        """Whether a token is longer than ``prefix`` and begins with it."""
        after = bisect.bisect_right(self._bytes, prefix)
        return after < len(self._bytes) and self._bytes[after].startswith(prefix)

    def along(self, text: bytes) -> list[int]:
        """Ids of the tokens that ``text`` begins with, and of those that begin with ``text``."""
        found = []
        for length in range(1, min(len(text), self.longest + 1)):
            first = bisect.bisect_left(self._bytes, text[:length])
            last = bisect.bisect_right(self._bytes, text[:length])
            found += self._ids[first:last]
        first = bisect.bisect_left(self._bytes, text)
        # All that begin with it stand together, and 0xFF is in no token so often.
        last = bisect.bisect_left(self._bytes, text + b"\xff" * (self.longest + 1))
        return found + self._ids[first:last]

    def spell(self, tokens: np.ndarray) -> bytes:
        """What ``tokens`` (n,) add to a text."""
        known = (int(token) for token in tokens if token < self.size)
        return b"".join([self.vocabulary[token] or b"" for token in known])


def taken_back(tokens: np.ndarray, first: int, vocabulary: ByteTokens, most_bytes: int | None = None) -> int:
    """How many tokens at the end of a prompt, (n,) int64, should be said again.

    The largest number of them whose bytes a longer token begins with; not those before ``first``, not across a token
    that adds nothing to the text, and no more than ``most_bytes``, where that is given.
    """
    found, said = 0, b""
    for count, token in enumerate(reversed(tokens[first:].tolist()), 1):
        spelt = vocabulary.vocabulary[token] if token < vocabulary.size else None
        if not spelt:
            break
        said = spelt + said
        if len(said) >= vocabulary.longest or (most_bytes is not None and len(said) > most_bytes):
            break
        if vocabulary.extend(said):
            found = count
    return found


class Healing(Constraint):
    """What is generated must begin with bytes that were taken back.

    Args:
        taken: (n,) int64, the tokens that were.
        start: tokens of the prompt that are left.
    """

    def __init__(self, taken: np.ndarray, start: int, vocabulary: ByteTokens) -> None:
        self._taken, self._said = taken.copy(), vocabulary.spell(taken)
        self._start, self._vocabulary = start, vocabulary
        self._masks: dict[bytes, np.ndarray] = {}

    def mask(self, tokens: np.ndarray) -> np.ndarray | None:
        left = self._said[len(self._again(tokens)) :]
        if not left:
            return None
        if left not in self._masks:
            self._masks[left] = pack(self._vocabulary.along(left), self._vocabulary.size)
        return self._masks[left]

    def likely(self, tokens: np.ndarray) -> np.ndarray | None:
        """The tokens that were taken back: mostly none reaches over them, and saying them again is for nothing."""
        again = tokens[self._start :]
        if len(again) >= len(self._taken) or not (again == self._taken[: len(again)]).all():
            return None
        return self._taken[len(again) :]

    def over(self, tokens: np.ndarray) -> int:
        """Of the tokens so far, how many have only what was in the prompt."""
        said, place = 0, self._start
        while place < len(tokens):
            said += len(self._vocabulary.spell(tokens[place : place + 1]))
            if said > len(self._said):
                break
            place += 1
        return place

    def _again(self, tokens: np.ndarray) -> bytes:
        """What has been said of it, with what follows in the same token. Each token says a byte at least."""
        return self._vocabulary.spell(tokens[self._start : self._start + len(self._said)])
