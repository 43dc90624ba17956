"""The decoder of a head: EAGLE-3 or MTP layers, reading the target's features with each token.

Entry i in the cache of layer d (from 1) combines the token at position i + d with the features of position i: the
target's for d = 1, the output of layer d - 1 at entry i for later layers (DeepSeek-V3, arXiv 2412.19437). With features
of the first n positions, every layer has n entries, and the last entry of layer d proposes the token at position n + d.

To propose more tokens than there are layers, the last layer reads its own output in place of features. These guessed
entries are dropped after the proposal.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ovspec.cache.decoder import FAST_RULE, Decoder, reorder_sequences
from ovspec.cache.prefill import MIN_SHARED_TOKENS
from ovspec.cache.sequence import Sequence

NO_LOGITS = np.empty((0, 0), dtype=np.float32)
NO_TOKENS = np.empty(0, dtype=np.int64)


class HeadDecoder:
    """A ``BaseDecoder`` for a head, with the same rows as its target's decoder.

    Args:
        layer_decoders: the decoder of each layer; an EAGLE-3 head has a single layer. Row i has the entries of the
            target's row i.
        target: the target's decoder, the source of the first layer's features.
    """

    fills_width = False
    rule = FAST_RULE

    def __init__(self, layer_decoders: list[Decoder], target: Decoder) -> None:
        self._layer_decoders = layer_decoders
        self._last_layer = layer_decoders[-1]
        self._target = target
        self.context_length = layer_decoders[0].context_length
        self._reset_rows(len(layer_decoders[0].rows))

    @property
    def seconds(self) -> float:
        return sum(decoder.seconds for decoder in self._layer_decoders)

    @property
    def inferences(self) -> int:
        return sum(decoder.inferences for decoder in self._layer_decoders)

    def count_known_features(self, row: int, sequence: Sequence) -> int:
        """Return the number of leading tokens of ``sequence`` with features, without counting its last token."""
        return max(0, min(self._target.rows[row].common_prefix_length(sequence.tokens), len(sequence) - 1))

    def reset(self, rows: int) -> None:
        for decoder in self._layer_decoders:
            decoder.reset(rows)
        self._reset_rows(rows)

    def reuse_prefixes(self, sequences: list[Sequence]) -> None:
        """Cut each row's entries to the common prefix with its text, or take a longer prefix from the prefix cache."""
        self._own_last_outputs.clear()
        for row, sequence in enumerate(sequences):
            self._feature_counts[row] = self.count_known_features(row, sequence)
        for depth, decoder in enumerate(self._layer_decoders, 1):
            self._reuse_layer_prefixes(depth, decoder, sequences)
        for row, (read_sequence, sequence) in enumerate(zip(self.rows, sequences, strict=True)):
            entry_count = len(self._layer_decoders[0].rows[row])
            tokens = sequence.tokens[: entry_count + 1 if entry_count else 0]
            shared_count = read_sequence.common_prefix_length(tokens)
            read_sequence.rewind(shared_count)
            read_sequence.commit(tokens[shared_count:])

    def feed(self, tokens: list[np.ndarray], logits_counts: list[int], width: int = 0) -> list[np.ndarray]:  # noqa: ARG002
        """Append tokens like ``Decoder.feed``; a row can get only the logits after its last token.

        Each layer reads all tokens with features in a single forward pass. The last layer then reads the tokens without
        features one by one.
        """
        for read_sequence, row_tokens in zip(self.rows, tokens, strict=True):
            read_sequence.commit(row_tokens)
        fed_rows = [row for row, row_tokens in enumerate(tokens) if len(row_tokens)]
        proposing_rows = [row for row in fed_rows if logits_counts[row]]
        # By row, the layer for proposing the next token; later layers read nothing.
        depths = dict.fromkeys(fed_rows, 1) | {row: self._choose_proposing_layer(row) for row in proposing_rows}
        logits = [NO_LOGITS] * len(tokens)
        for depth, decoder in enumerate(self._layer_decoders, 1):
            source = self._layer_decoders[depth - 2] if depth > 1 else self._target
            logits_rows = {row for row in proposing_rows if depth == depths[row]}
            parts: dict[int, np.ndarray] = {}
            features: dict[int, np.ndarray] = {}
            for row in fed_rows:
                if depth <= depths[row]:
                    parts[row] = self._select_tokens_with_features(row, depth, row in logits_rows)
                    entry_count = len(decoder.rows[row])
                    features[row] = source.features(row, entry_count, entry_count + len(parts[row]))
            self._feed_layer(decoder, parts, features, logits_rows, logits)
        guessing_rows = [row for row in proposing_rows if depths[row] == len(self._layer_decoders)]
        while parts := self._select_guessed_entries(guessing_rows):
            for row in guessing_rows:
                logits[row] = logits[row].copy()  # the next forward pass overwrites them
            self._feed_layer(self._last_layer, parts, self._own_last_outputs, {*parts}, logits)
        return logits

    def drop_guessed_entries(self) -> None:
        """Drop the entries made without the target's features."""
        for row, (feature_count, cached_entries) in enumerate(
            zip(self._feature_counts, self._last_layer.rows, strict=True)
        ):
            if len(cached_entries) > feature_count:
                cached_entries.rewind(feature_count)  # first, so ``truncate`` doesn't put them into the prefix cache
                self._last_layer.truncate(row, feature_count)

    def truncate(self, row: int, length: int) -> None:
        self.rows[row].rewind(length)
        for depth, decoder in enumerate(self._layer_decoders, 1):
            decoder.truncate(row, min(len(decoder.rows[row]), max(0, length - depth)))

    def reorder(self, rows: list[int]) -> None:
        for decoder in self._layer_decoders:
            decoder.reorder(rows)
        sequences = reorder_sequences(self.rows, rows)
        self._reset_rows(len(rows))
        self.rows = sequences

    def _reset_rows(self, row_count: int) -> None:
        self.rows = [Sequence() for _ in range(row_count)]  # the tokens read in each row, including the first token
        # Tokens with features by row, at least the number of remaining entries.
        self._feature_counts = list(map(len, self._layer_decoders[0].rows))
        # The last layer's output for its last entry, (1, width), by row.
        self._own_last_outputs: dict[int, np.ndarray] = {}

    def _reuse_layer_prefixes(self, depth: int, decoder: Decoder, sequences: list[Sequence]) -> None:
        entry_sequences: list[Sequence] = []
        for row, sequence in enumerate(sequences):
            layer_tokens = sequence.tokens[depth:]
            feature_count = self._feature_counts[row]
            cached_entries = decoder.rows[row]
            # Entries also depend on the text's first tokens, but don't contain them, so the owner includes them.
            owner = (sequence.owner, *sequence.tokens[:depth].tolist()) if len(sequence) else None
            shared_count = 0
            if cached_entries.owner == owner:
                # The last entry is read again.
                shared_count = cached_entries.common_prefix_length(layer_tokens[: max(0, feature_count - 1)])
            if shared_count < len(cached_entries):
                decoder.truncate(row, shared_count)
            entry_sequence = (
                Sequence(layer_tokens[:feature_count])
                if feature_count - shared_count > MIN_SHARED_TOKENS
                else cached_entries
            )
            entry_sequence.owner = owner
            entry_sequences.append(entry_sequence)
        decoder.reuse_prefixes(entry_sequences)
        for cached_entries, entry_sequence in zip(decoder.rows, entry_sequences, strict=True):
            cached_entries.owner = entry_sequence.owner

    def _choose_proposing_layer(self, row: int) -> int:
        """Return the number of the layer, from 1, for proposing the token after the read tokens of ``row``."""
        unknown_count = len(self.rows[row]) - self._feature_counts[row]
        return min(max(unknown_count, 1), len(self._layer_decoders))

    def _select_tokens_with_features(self, row: int, depth: int, wants_logits: bool) -> np.ndarray:
        """Return the unread tokens of ``row`` with features, for layer ``depth``.

        ``wants_logits``: if the layer has read all tokens, the last is read again.
        """
        layer_tokens = self.rows[row].tokens[depth:]
        end = min(self._feature_counts[row], len(layer_tokens))
        decoder = self._layer_decoders[depth - 1]
        if wants_logits and end == len(layer_tokens) == len(decoder.rows[row]):
            decoder.truncate(row, end - 1)
        return layer_tokens[len(decoder.rows[row]) : end]

    def _select_guessed_entries(self, rows: list[int]) -> dict[int, np.ndarray]:
        """Return, by row, the last layer's next unread token without features, (1,), if there is any."""
        entry_counts = {row: len(self._last_layer.rows[row]) for row in rows}
        layer_tokens = {row: self.rows[row].tokens[len(self._layer_decoders) :] for row in rows}
        return {
            row: layer_tokens[row][count : count + 1]
            for row, count in entry_counts.items()
            if count < len(layer_tokens[row])
        }

    def _feed_layer(
        self,
        decoder: Decoder,
        parts: Mapping[int, np.ndarray],
        features: Mapping[int, np.ndarray],
        logits_rows: set[int],
        logits: list[np.ndarray],
    ) -> None:
        """Append ``parts`` with their features, by row, to a layer, and write the logits of ``logits_rows`` in place.

        Rows without a part get no tokens.
        """
        if not any(map(len, parts.values())):
            return
        all_rows = range(len(self.rows))
        no_features = next(iter(features.values()))[:0]
        row_parts = [parts.get(row, NO_TOKENS) for row in all_rows]
        counts = [int(row in logits_rows and len(part) > 0) for row, part in zip(all_rows, row_parts, strict=True)]
        row_features = [features[row] if row in parts else no_features for row in all_rows]
        part_logits = decoder.feed(row_parts, counts, 0, row_features)
        for row in all_rows:
            if counts[row]:
                logits[row] = part_logits[row]
                if decoder is self._last_layer:
                    self._own_last_outputs[row] = decoder.hidden[row].copy()
