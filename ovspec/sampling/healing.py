"""Token healing: the end of a prompt is generated again, so that a token may extend past it.

A model that always saw ``://`` as one token rarely continues with ``//`` after the token ``:``. So the last tokens are
taken back, and what is generated must begin with their bytes. The idea is Lundberg's (Guidance, 2023).
"""

from __future__ import annotations

import math

import numpy as np

from ovspec.cache.sequence import Sequence
from ovspec.sampling.byte_vocabulary import ByteVocabulary
from ovspec.sampling.constraint import Constraint
from ovspec.sampling.masks import pack


def healable(
    prompt: np.ndarray,
    first: int,
    vocabulary: ByteVocabulary,
    most_bytes: float = math.inf,
    whole_characters: bool = False,
) -> int:
    """Return how many tokens at the end of ``prompt``, (n,) int64, to generate again.

    This is the largest number for which a longer token begins with all their bytes. They must not include a token
    before ``first`` or one that adds nothing to the text, and must not have more than ``most_bytes``. With
    ``whole_characters``, they must not begin inside a character.
    """
    found, text = 0, b""
    for count, token in enumerate(reversed(prompt[first:].tolist()), 1):
        spelt = vocabulary.vocabulary[token] if token < vocabulary.size else None
        text = (spelt or b"") + text
        if not spelt or len(text) >= vocabulary.longest or len(text) > most_bytes:
            break
        if vocabulary.extend(text) and (not whole_characters or text.decode(errors="ignore").encode() == text):
            found = count
    return found


class Healing(Constraint):
    """Takes back the last ``count`` tokens of a prompt, (n,); what is generated must begin with their bytes.

    If no token is left, the text begins with ``bos``, (n,) int64.
    """

    def __init__(self, prompt: np.ndarray, count: int, vocabulary: ByteVocabulary, bos: np.ndarray) -> None:
        self._taken, self._bos, self._vocabulary = prompt[len(prompt) - count :].copy(), bos, vocabulary
        self._masks: dict[bytes, np.ndarray] = {}
        self.text = vocabulary.spell(self._taken)  # their bytes
        self.start = len(prompt) - count or len(bos)  # tokens of the prompt that are left

    def take_back(self, sequence: Sequence) -> None:
        """Remove from ``sequence``, the prompt, the tokens that are generated again."""
        sequence.rewind(len(sequence) - len(self._taken))
        if not len(sequence):
            sequence.commit(self._bos)

    def mask(self, tokens: np.ndarray) -> np.ndarray | None:
        # Each token has at least one byte, so no more tokens than bytes can matter.
        left = self.text[len(self._vocabulary.spell(tokens[self.start : self.start + len(self.text)])) :]
        if not left:
            return None
        if left not in self._masks:
            self._masks[left] = pack(self._vocabulary.along(left), self._vocabulary.size)
        return self._masks[left]

    def likely(self, tokens: np.ndarray) -> np.ndarray | None:
        """Return the remaining tokens taken back: usually none extends past them, and proposing them is free."""
        again = tokens[self.start :]
        if len(again) >= len(self._taken) or not (again == self._taken[: len(again)]).all():
            return None
        return self._taken[len(again) :]

    def healed(self, tokens: np.ndarray) -> int | None:
        """Return how many bytes of the last of ``tokens`` were in the prompt; None if it has no others."""
        left = len(self.text) - len(self._vocabulary.spell(tokens[self.start : -1]))
        if left <= 0:
            return 0
        return left if len(self._vocabulary.spell(tokens[-1:])) > left else None

    def prompt_length(self, tokens: np.ndarray) -> int:
        """Return how many of the tokens so far have only bytes of the prompt."""
        length = self.start
        while length < len(tokens) and self.healed(tokens[: length + 1]) is None:
            length += 1
        return length
