"""Prefill in a batch: prompts are read in chunks beside generating rows, and common prefixes only once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ovspec.cache.decoder import Decoder
from ovspec.cache.sequence import Sequence, measure_common_prefix

# A row with more unread tokens than this counts as reading a prompt: a generating row has fewer after a round.
PREFILL_THRESHOLD = 16
# Minimum length of a common prefix to copy a row for it, or to wait for it, in tokens.
MIN_SHARED_TOKENS = 32


def copy_shared_prefixes(decoder: Decoder, sequences: list[Sequence]) -> None:
    """Replace each row with many unread tokens by a copy of the row with the longest common prefix with its text.

    Nothing is copied for models with replay, because rolling recurrent states back may cost more than it saves, or on
    devices without copies of states.
    """
    cached_rows = decoder.rows
    rollback = decoder.rollback
    if len(cached_rows) < 2 or rollback.replay or not rollback.copies:
        return
    unseen_counts = [
        len(sequence) - len(cached_row) for sequence, cached_row in zip(sequences, cached_rows, strict=True)
    ]
    if max(unseen_counts) < MIN_SHARED_TOKENS:
        return
    source_rows = list(range(len(cached_rows)))
    for row, sequence in enumerate(sequences):
        if unseen_counts[row] >= MIN_SHARED_TOKENS:
            shared_lengths = [
                measure_common_prefix(cached_row, sequence) if other_sequence.owner == sequence.owner else 0
                for cached_row, other_sequence in zip(cached_rows, sequences, strict=True)
            ]
            best_row = int(np.argmax(shared_lengths))
            if shared_lengths[best_row] - shared_lengths[row] >= MIN_SHARED_TOKENS:
                source_rows[row] = best_row
    if source_rows != list(range(len(cached_rows))):
        decoder.reorder(source_rows)


def should_wait_for_prefix(
    sequence: Sequence, prefilling_sequences: Iterable[Sequence], cached_sequences: Iterable[Sequence]
) -> bool:
    """Return whether a row should wait for a prompt in ``prefilling_sequences``, to copy their common prefix.

    It should if the common prefix with ``sequence`` is clearly longer than with all ``cached_sequences``.
    """

    def find_longest_prefix(other_sequences: Iterable[Sequence]) -> int:
        return max(
            [
                measure_common_prefix(sequence, other_sequence)
                for other_sequence in other_sequences
                if other_sequence.owner == sequence.owner
            ],
            default=0,
        )

    prefix_length = find_longest_prefix(prefilling_sequences)
    return (
        prefix_length > MIN_SHARED_TOKENS and prefix_length > find_longest_prefix(cached_sequences) + MIN_SHARED_TOKENS
    )


def choose_prefill_chunks(
    decoder: Decoder, unseen_tokens: list[np.ndarray], prompt_budget: int | None = None
) -> list[np.ndarray]:
    """Choose each row's part of its ``unseen_tokens`` for this round, to keep prompts from delaying generating rows.

    ``prompt_budget``: maximum prompt tokens of all rows together, in row order. None: each row reads a chunk of the
    decoder's ``joining_chunk_tokens``, or everything if no row is generating.
    """
    if all(len(tokens) <= PREFILL_THRESHOLD for tokens in unseen_tokens):
        return unseen_tokens
    if prompt_budget is None:
        generating_counts = [
            len(tokens)
            for tokens, cached_row in zip(unseen_tokens, decoder.rows, strict=True)
            if len(cached_row) and len(tokens) <= PREFILL_THRESHOLD
        ]
        chunk_size = decoder.joining_chunk_tokens(generating_counts) if generating_counts else None
        return [tokens if len(tokens) <= PREFILL_THRESHOLD else tokens[:chunk_size] for tokens in unseen_tokens]
    chunks = []
    for tokens in unseen_tokens:
        if len(tokens) <= PREFILL_THRESHOLD:
            chunks.append(tokens)
        else:
            chunks.append(tokens[:prompt_budget])
            prompt_budget -= len(chunks[-1])
    return chunks
