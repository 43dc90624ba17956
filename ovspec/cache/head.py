"""The decoder of an EAGLE-3 head (Li et al., arXiv 2503.01840), which reads its target's features beside each token.

An entry of its cache is a token with the features of the token before it, so a text has one entry fewer than tokens.
Tokens that the target hasn't read have no features. Behind these, the head reads what it has computed itself for the
entry before; such entries are dropped once it has proposed.
"""

from __future__ import annotations

import numpy as np

from ovspec.cache.decoder import FAST_RULE, Decoder, reorder_sequences
from ovspec.cache.prefill import MIN_SHARED_TOKENS
from ovspec.cache.sequence import Sequence

NO_LOGITS = np.empty((0, 0), dtype=np.float32)


class HeadDecoder:
    """A ``Reader`` whose rows follow the texts of a target's rows.

    Args:
        entries: the decoder of the head's own graph; its row i holds the entries of the target's row i.
        target: the decoder that has the features.
    """

    fills_width = False
    rule = FAST_RULE

    def __init__(self, entries: Decoder, target: Decoder) -> None:
        self._entries, self._target = entries, target
        self.context_length = entries.context_length
        self._reset_rows(len(entries.rows))

    @property
    def seconds(self) -> float:
        return self._entries.seconds

    @property
    def inferences(self) -> int:
        return self._entries.inferences

    def count_known_features(self, row: int, sequence: Sequence) -> int:
        """Return how many of the tokens before the last one of ``sequence`` have features."""
        return max(0, min(self._target.rows[row].common_prefix_length(sequence.tokens), len(sequence) - 1))

    def reset(self, rows: int) -> None:
        self._entries.reset(rows)
        self._reset_rows(rows)

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        """Keep of each row the entries that fit its text, or take those that another text has left."""
        texts: list[Sequence] = []
        for row, sequence in enumerate(sequences):
            tokens, held, known = sequence.tokens, self._entries.rows[row], self.count_known_features(row, sequence)
            # Entries are also computed from the first token, which none of them holds.
            owner = (sequence.owner, int(tokens[0])) if len(tokens) else None
            shared = (
                held.common_prefix_length(tokens[1:known]) if held.owner == owner else 0
            )  # the last one is read again
            if shared < len(held):
                self._entries.truncate(row, shared)
            text = Sequence(tokens[1 : known + 1]) if known - shared > MIN_SHARED_TOKENS else held
            text.owner = owner
            texts.append(text)
            self._known_counts[row], self._last_hidden[row] = known, None
        self._entries.reuse_prefixes(texts)
        for row, (text, sequence) in enumerate(zip(self.rows, sequences, strict=True)):
            entries = self._entries.rows[row]
            entries.owner = texts[row].owner
            tokens = sequence.tokens[: len(entries) + 1 if len(entries) else 0]
            shared = text.common_prefix_length(tokens)
            text.rewind(shared)
            text.commit(tokens[shared:])

    def feed(self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0) -> list[np.ndarray]:  # noqa: ARG002
        """Append tokens as ``Decoder.feed`` does; of each row at most the logits after its last token are wanted.

        Tokens with features are read in one inference, those behind them one by one.
        """
        logits = [NO_LOGITS] * len(tokens)
        left = [self._skip_first_token(row, new) for row, new in enumerate(tokens)]
        while any(map(len, left)):
            together = [
                max(1, known - len(text) + 1) for known, text in zip(self._known_counts, self.rows, strict=True)
            ]
            parts = [new[:count] for new, count in zip(left, together, strict=True)]
            left = [new[len(part) :] for new, part in zip(left, parts, strict=True)]
            wants = [
                int(len(part) > 0 and bool(want or len(rest)))
                for part, want, rest in zip(parts, logits_counts, left, strict=True)
            ]
            features = [self._next_features(row, len(part)) for row, part in enumerate(parts)]
            found, more = self._entries.feed(parts, wants, 0, features), any(map(len, left))
            for row, (part, want) in enumerate(zip(parts, wants, strict=True)):
                self.rows[row].commit(part)
                if want:
                    logits[row] = found[row].copy() if more else found[row]
                    self._last_hidden[row] = self._entries.hidden[row].copy()
        return logits

    def drop_guessed_entries(self) -> None:
        """Drop the entries that were made without features."""
        for row, (known, held) in enumerate(zip(self._known_counts, self._entries.rows, strict=True)):
            if len(held) > known:
                held.rewind(known)  # first, so that no other text finds them
                self._entries.truncate(row, known)

    def truncate(self, row: int, length: int) -> None:
        self.rows[row].rewind(length)
        self._entries.truncate(row, max(0, length - 1))

    def reorder(self, rows: list[int]) -> None:
        self._entries.reorder(rows)
        texts = reorder_sequences(self.rows, rows)
        self._reset_rows(len(rows))
        self.rows = texts

    def _reset_rows(self, rows: int) -> None:
        self.rows = [Sequence() for _ in range(rows)]  # the text that each row has read, its first token included
        # Tokens of the text with features: at least those of the entries that remain.
        self._known_counts = [len(held) for held in self._entries.rows]
        self._last_hidden: list[np.ndarray | None] = [
            None
        ] * rows  # what the head computed for the last entry, (1, width)

    def _skip_first_token(self, row: int, new_tokens: np.ndarray) -> np.ndarray:
        """Begin a text, whose first token has no entry; return the ``new`` tokens that have one."""
        if len(self.rows[row]) or not len(new_tokens):
            return new_tokens
        self.rows[row].commit(new_tokens[:1])
        return new_tokens[1:]

    def _next_features(self, row: int, count: int) -> np.ndarray:
        """Return what is read beside the next ``count`` tokens of ``row``, (count, width)."""
        begin = len(self.rows[row]) - 1
        if not count:
            return self._target.features(row, 0, 0)
        if begin < self._known_counts[row]:
            return self._target.features(row, begin, begin + count)
        last = self._last_hidden[row]
        assert last is not None, "the entry before was read, and its logits were wanted"
        return last
