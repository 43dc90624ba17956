"""A vocabulary's tokens sorted by their bytes, for searches by prefix or content."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence

import numpy as np


class VocabularyIndex:
    """The tokens of a vocabulary sorted by their bytes, without empty tokens."""

    def __init__(self, vocabulary: Sequence[bytes | None]) -> None:
        self.vocabulary = vocabulary
        self.size = len(vocabulary)
        sorted_tokens = sorted((token, token_id) for token_id, token in enumerate(vocabulary) if token)
        self._sorted_bytes = [token for token, _ in sorted_tokens]
        self._sorted_ids = [token_id for _, token_id in sorted_tokens]
        self.max_length = max(map(len, self._sorted_bytes), default=0)

    def has_longer_token(self, prefix: bytes) -> bool:
        """Return whether a token is longer than ``prefix`` and begins with it."""
        next_index = bisect.bisect_right(self._sorted_bytes, prefix)
        return next_index < len(self._sorted_bytes) and self._sorted_bytes[next_index].startswith(prefix)

    def ids_compatible_with(self, text: bytes) -> list[int]:
        """Return the ids of tokens with the prefix ``text``, and of prefixes of ``text``."""
        return self.ids_of_prefixes(text[:-1]) + self.ids_with_prefix(text)

    def ids_of_prefixes(self, text: bytes) -> list[int]:
        """Return the ids of tokens equal to a prefix of ``text``."""
        prefix_ids: list[int] = []
        for prefix_length in range(1, len(text) + 1):
            first_index = bisect.bisect_left(self._sorted_bytes, text[:prefix_length])
            if first_index == len(self._sorted_bytes) or not self._sorted_bytes[first_index].startswith(
                text[:prefix_length]
            ):
                break  # no token begins with this or a longer prefix
            prefix_ids += self._sorted_ids[first_index : bisect.bisect_right(self._sorted_bytes, text[:prefix_length])]
        return prefix_ids

    def ids_with_prefix(self, text: bytes) -> list[int]:
        """Return the ids of tokens with the prefix ``text``."""
        first_index = bisect.bisect_left(self._sorted_bytes, text)
        # They are adjacent, and all are shorter than this many 0xFF.
        last_index = bisect.bisect_left(self._sorted_bytes, text + b"\xff" * (self.max_length + 1))
        return self._sorted_ids[first_index:last_index]

    def ids_containing(self, text: bytes) -> list[int]:
        """Return the ids of tokens with ``text`` in them; ``text`` must be valid UTF-8."""
        joined_bytes, token_starts = self._joined_tokens
        containing_ids: list[int] = []
        match_position = joined_bytes.find(text)
        while match_position >= 0:
            token_index = bisect.bisect_right(token_starts, match_position) - 1
            containing_ids.append(self._sorted_ids[token_index])
            match_position = joined_bytes.find(text, token_starts[token_index + 1])
        return containing_ids

    @functools.cached_property
    def _joined_tokens(self) -> tuple[bytes, list[int]]:
        """All tokens separated by 0xFF, never part of UTF-8, and their starts; the last entry is the length."""
        token_lengths = (len(token) + 1 for token in self._sorted_bytes)
        return b"\xff".join([*self._sorted_bytes, b""]), list(itertools.accumulate(token_lengths, initial=0))

    def added_bytes(self, token: int) -> bytes:
        """Return the bytes added to a text by ``token``; empty for an empty token."""
        return (token < self.size and self.vocabulary[token]) or b""

    def join_bytes(self, tokens: np.ndarray) -> bytes:
        """Return the bytes added to a text by ``tokens``, (n,)."""
        known_ids = (int(token) for token in tokens if token < self.size)
        return b"".join([self.vocabulary[token] or b"" for token in known_ids])
