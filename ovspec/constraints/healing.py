"""Token healing: the end of a prompt is generated anew, so that a token may reach over it.

A model that always saw ``://`` as one token hardly ever goes on with ``//`` behind the token ``:``. So the last tokens
are taken back, and what is generated must begin with their bytes. The idea is Lundberg's (Guidance, 2023).
"""

from __future__ import annotations

import bisect
import collections.abc
import math

import numpy as np

from ovspec.constraints.base import Constraint
from ovspec.constraints.masks import pack
from ovspec.decoders.sequence import Sequence


class ByteTokens:
    """The tokens of a vocabulary in the order of their bytes; ids that add nothing to a text don't count."""

    def __init__(self, vocabulary: collections.abc.Sequence[bytes | None]) -> None:
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


def healable(
    prompt: np.ndarray, first: int, vocabulary: ByteTokens, most_bytes: float = math.inf, whole_characters: bool = False
) -> int:
    """How many tokens at the end of ``prompt``, (n,) int64, should be generated anew.

    The largest number of them whose bytes a longer token begins with; none before ``first``, none across a token that
    adds nothing to the text, and no more than ``most_bytes``.
    """
    found, text = 0, b""
    for count, token in enumerate(reversed(prompt[first:].tolist()), 1):
        spelt = vocabulary.vocabulary[token] if token < vocabulary.size else None
        text = (spelt or b"") + text
        if not spelt or len(text) >= vocabulary.longest or len(text) > most_bytes:
            break
        if vocabulary.extend(text) and (not whole_characters or is_utf8(text)):
            found = count
    return found


def is_utf8(text: bytes) -> bool:
    return text.decode(errors="ignore").encode() == text


class Healing(Constraint):
    """Takes ``count`` tokens of a prompt (n,) back; what is generated must begin with their bytes.

    Where that is all of them, the text begins with ``bos`` (n,) int64.
    """

    def __init__(self, prompt: np.ndarray, count: int, vocabulary: ByteTokens, bos: np.ndarray) -> None:
        self._taken, self._bos, self._vocabulary = prompt[len(prompt) - count :].copy(), bos, vocabulary
        self._masks: dict[bytes, np.ndarray] = {}
        self.text = vocabulary.spell(self._taken)  # their bytes
        self.start = len(prompt) - count or len(bos)  # tokens of the prompt that are left

    def take_back(self, sequence: Sequence) -> None:
        """Leave of ``sequence``, the prompt, what isn't generated anew."""
        sequence.rewind(len(sequence) - len(self._taken))
        if not len(sequence):
            sequence.commit(self._bos)

    def mask(self, tokens: np.ndarray) -> np.ndarray | None:
        # Each token has a byte at least, so no more of them than bytes can matter.
        left = self.text[len(self._vocabulary.spell(tokens[self.start : self.start + len(self.text)])) :]
        if not left:
            return None
        if left not in self._masks:
            self._masks[left] = pack(self._vocabulary.along(left), self._vocabulary.size)
        return self._masks[left]

    def likely(self, tokens: np.ndarray) -> np.ndarray | None:
        """The tokens that were taken back: mostly none reaches over them, and guessing them costs nothing."""
        again = tokens[self.start :]
        if len(again) >= len(self._taken) or not (again == self._taken[: len(again)]).all():
            return None
        return self._taken[len(again) :]

    def healed(self, tokens: np.ndarray) -> int | None:
        """How many bytes of the last of ``tokens`` were in the prompt; None where it has no other."""
        left = len(self.text) - len(self._vocabulary.spell(tokens[self.start : -1]))
        if left <= 0:
            return 0
        return left if len(self._vocabulary.spell(tokens[-1:])) > left else None

    def prompt_length(self, tokens: np.ndarray) -> int:
        """How many of the tokens so far have nothing but bytes of the prompt."""
        length = self.start
        while length < len(tokens) and self.healed(tokens[: length + 1]) is None:
            length += 1
        return length
