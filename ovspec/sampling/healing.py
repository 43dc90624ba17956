"""Token healing: generate the end of a prompt again, to allow a token across the prompt's end.

A model trained on ``://`` as a single token rarely continues with ``//`` after the token ``:``. So the last tokens are
removed, and the generated text must begin with their bytes. The idea is Lundberg's (Guidance, 2023).
"""

from __future__ import annotations

import math

import numpy as np

from ovspec.cache.sequence import Sequence
from ovspec.sampling.constraint import Constraint
from ovspec.sampling.masks import pack_mask
from ovspec.sampling.vocabulary_index import VocabularyIndex


def count_healable_tokens(
    prompt_ids: np.ndarray,
    first_healable: int,
    vocabulary: VocabularyIndex,
    max_bytes: float = math.inf,
    whole_characters: bool = False,
) -> int:
    """Return how many tokens at the end of ``prompt_ids``, (n,) int64, to generate again.

    It is the largest number of tokens such that a longer token begins with all their bytes. They must not include a
    token before ``first_healable`` or an empty token, and have at most ``max_bytes`` bytes. With ``whole_characters``,
    they must not begin inside a character.
    """
    healable_count = 0
    suffix = b""
    for token_count, token in enumerate(reversed(prompt_ids[first_healable:].tolist()), 1):
        added_bytes = vocabulary.added_bytes(token)
        suffix = added_bytes + suffix
        if not added_bytes or len(suffix) >= vocabulary.max_length or len(suffix) > max_bytes:
            break
        if vocabulary.has_longer_token(suffix) and (
            not whole_characters or suffix.decode(errors="ignore").encode() == suffix
        ):
            healable_count = token_count
    return healable_count


class Healing(Constraint):
    """Removes the last ``removed_count`` tokens of a prompt, (n,); the generated text must begin with their bytes.

    If no token is left, the text begins with ``bos``, (n,) int64.
    """

    def __init__(
        self, prompt_ids: np.ndarray, removed_count: int, vocabulary: VocabularyIndex, bos_ids: np.ndarray
    ) -> None:
        self._removed_ids = prompt_ids[len(prompt_ids) - removed_count :].copy()
        self._bos_ids = bos_ids
        self._vocabulary = vocabulary
        self._masks_by_remaining_bytes: dict[bytes, np.ndarray] = {}
        self.removed_bytes = vocabulary.join_bytes(self._removed_ids)  # their bytes
        self.kept_length = len(prompt_ids) - removed_count or len(bos_ids)  # remaining tokens of the prompt

    def take_back_tokens(self, sequence: Sequence) -> None:
        """Remove from ``sequence``, the prompt, the tokens to generate again."""
        sequence.rewind(len(sequence) - len(self._removed_ids))
        if not len(sequence):
            sequence.commit(self._bos_ids)

    def token_mask(self, tokens: np.ndarray) -> np.ndarray | None:
        # Each token has a byte or more, so at most as many tokens as bytes can matter.
        generated_bytes = self._vocabulary.join_bytes(
            tokens[self.kept_length : self.kept_length + len(self.removed_bytes)]
        )
        remaining_bytes = self.removed_bytes[len(generated_bytes) :]
        if not remaining_bytes:
            return None
        if remaining_bytes not in self._masks_by_remaining_bytes:
            self._masks_by_remaining_bytes[remaining_bytes] = pack_mask(
                self._vocabulary.ids_compatible_with(remaining_bytes), self._vocabulary.size
            )
        return self._masks_by_remaining_bytes[remaining_bytes]

    def likely_tokens(self, tokens: np.ndarray) -> np.ndarray | None:
        """Return the removed tokens not generated again yet: they are the likely continuation, and free to propose."""
        generated_ids = tokens[self.kept_length :]
        generated_count = len(generated_ids)
        if (
            generated_count >= len(self._removed_ids)
            or not (generated_ids == self._removed_ids[:generated_count]).all()
        ):
            return None
        return self._removed_ids[generated_count:]

    def count_healed_bytes(self, tokens: np.ndarray) -> int | None:
        """Return the number of prompt bytes in the last of ``tokens``; None if it has no other bytes."""
        remaining_count = len(self.removed_bytes) - len(self._vocabulary.join_bytes(tokens[self.kept_length : -1]))
        if remaining_count <= 0:
            return 0
        if len(self._vocabulary.join_bytes(tokens[-1:])) <= remaining_count:
            return None
        return remaining_count

    def count_prompt_tokens(self, tokens: np.ndarray) -> int:
        """Return how many of the tokens so far have only bytes of the prompt."""
        prompt_length = self.kept_length
        while prompt_length < len(tokens) and self.count_healed_bytes(tokens[: prompt_length + 1]) is None:
            prompt_length += 1
        return prompt_length
