"""The decoder of an EAGLE-3 head (Li et al., arXiv 2503.01840), which reads its target's features with each token.

An entry of its cache is a token with the features of the token before it, so a text has one entry fewer than tokens.
Tokens that the target hasn't read have no features. After these, the head reads its own output for the entry
before; such guessed entries are dropped once it has proposed.
"""

from __future__ import annotations

import numpy as np

from ovspec.cache.decoder import FAST_RULE, Decoder, reorder_sequences
from ovspec.cache.prefill import MIN_SHARED_TOKENS
from ovspec.cache.sequence import Sequence

NO_LOGITS = np.empty((0, 0), dtype=np.float32)


class HeadDecoder:
    """A ``BaseDecoder`` whose rows follow the texts of a target's rows.

    Args:
        entry_decoder: the decoder of the head's own graph; its row i holds the entries of the target's row i.
        target: the decoder that has the features.
    """

    fills_width = False
    rule = FAST_RULE

    def __init__(self, entry_decoder: Decoder, target: Decoder) -> None:
        self._entry_decoder = entry_decoder
        self._target = target
        self.context_length = entry_decoder.context_length
        self._reset_rows(len(entry_decoder.rows))

    @property
    def seconds(self) -> float:
        return self._entry_decoder.seconds

    @property
    def inferences(self) -> int:
        return self._entry_decoder.inferences

    def count_known_features(self, row: int, sequence: Sequence) -> int:
        """Return the number of tokens before the last one of ``sequence`` that have features."""
        return max(0, min(self._target.rows[row].common_prefix_length(sequence.tokens), len(sequence) - 1))

    def reset(self, rows: int) -> None:
        self._entry_decoder.reset(rows)
        self._reset_rows(rows)

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        """Keep each row's entries that fit its text, or reuse entries that another text has left."""
        entry_sequences: list[Sequence] = []
        for row, sequence in enumerate(sequences):
            tokens = sequence.tokens
            cached_entries = self._entry_decoder.rows[row]
            feature_count = self.count_known_features(row, sequence)
            # Entries are also computed from the first token, which none of them contains.
            owner = (sequence.owner, int(tokens[0])) if len(tokens) else None
            shared_count = 0
            if cached_entries.owner == owner:
                shared_count = cached_entries.common_prefix_length(
                    tokens[1:feature_count]
                )  # the last one is read again
            if shared_count < len(cached_entries):
                self._entry_decoder.truncate(row, shared_count)
            entry_sequence = (
                Sequence(tokens[1 : feature_count + 1])
                if feature_count - shared_count > MIN_SHARED_TOKENS
                else cached_entries
            )
            entry_sequence.owner = owner
            entry_sequences.append(entry_sequence)
            self._feature_counts[row] = feature_count
            self._own_last_outputs[row] = None
        self._entry_decoder.reuse_prefixes(entry_sequences)
        for row, (read_sequence, sequence) in enumerate(zip(self.rows, sequences, strict=True)):
            row_entries = self._entry_decoder.rows[row]
            row_entries.owner = entry_sequences[row].owner
            tokens = sequence.tokens[: len(row_entries) + 1 if len(row_entries) else 0]
            shared_count = read_sequence.common_prefix_length(tokens)
            read_sequence.rewind(shared_count)
            read_sequence.commit(tokens[shared_count:])

    def feed(self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0) -> list[np.ndarray]:  # noqa: ARG002
        """Append tokens as ``Decoder.feed`` does; each row can get at most the logits after its last token.

        Tokens with features are read in one inference, tokens after them one by one.
        """
        logits = [NO_LOGITS] * len(tokens)
        unread_tokens = [self._skip_first_token(row, row_tokens) for row, row_tokens in enumerate(tokens)]
        while any(map(len, unread_tokens)):
            part_lengths = [
                max(1, feature_count - len(sequence) + 1)
                for feature_count, sequence in zip(self._feature_counts, self.rows, strict=True)
            ]
            parts = [row_tokens[:length] for row_tokens, length in zip(unread_tokens, part_lengths, strict=True)]
            unread_tokens = [row_tokens[len(part) :] for row_tokens, part in zip(unread_tokens, parts, strict=True)]
            part_logits_counts = [
                int(len(part) > 0 and bool(logits_count or len(unread_ids)))
                for part, logits_count, unread_ids in zip(parts, logits_counts, unread_tokens, strict=True)
            ]
            features = [self._next_features(row, len(part)) for row, part in enumerate(parts)]
            part_logits = self._entry_decoder.feed(parts, part_logits_counts, 0, features)
            is_last = not any(map(len, unread_tokens))
            for row, (part, logits_count) in enumerate(zip(parts, part_logits_counts, strict=True)):
                self.rows[row].commit(part)
                if logits_count:
                    logits[row] = part_logits[row] if is_last else part_logits[row].copy()
                    self._own_last_outputs[row] = self._entry_decoder.hidden[row].copy()
        return logits

    def drop_guessed_entries(self) -> None:
        """Drop the entries that were made without features."""
        for row, (feature_count, cached_entries) in enumerate(
            zip(self._feature_counts, self._entry_decoder.rows, strict=True)
        ):
            if len(cached_entries) > feature_count:
                cached_entries.rewind(feature_count)  # first, so that no other text finds them
                self._entry_decoder.truncate(row, feature_count)

    def truncate(self, row: int, length: int) -> None:
        self.rows[row].rewind(length)
        self._entry_decoder.truncate(row, max(0, length - 1))

    def reorder(self, rows: list[int]) -> None:
        self._entry_decoder.reorder(rows)
        sequences = reorder_sequences(self.rows, rows)
        self._reset_rows(len(rows))
        self.rows = sequences

    def _reset_rows(self, row_count: int) -> None:
        self.rows = [Sequence() for _ in range(row_count)]  # the text that each row has read, its first token included
        # Tokens of the text with features: at least those of the entries that remain.
        self._feature_counts = list(map(len, self._entry_decoder.rows))
        # The head's output for the last entry, (1, width).
        self._own_last_outputs: list[np.ndarray | None] = [None] * row_count

    def _skip_first_token(self, row: int, new_tokens: np.ndarray) -> np.ndarray:
        """Begin a text, whose first token has no entry; return the ``new_tokens`` that have one."""
        if len(self.rows[row]) or not len(new_tokens):
            return new_tokens
        self.rows[row].commit(new_tokens[:1])
        return new_tokens[1:]

    def _next_features(self, row: int, token_count: int) -> np.ndarray:
        """Return the features to read with the next ``token_count`` tokens of ``row``, (count, width)."""
        entry_count = len(self.rows[row]) - 1
        if not token_count:
            return self._target.features(row, 0, 0)
        if entry_count < self._feature_counts[row]:
            return self._target.features(row, entry_count, entry_count + token_count)
        own_output = self._own_last_outputs[row]
        assert own_output is not None, "the entry before was read, and its logits were wanted"
        return own_output
