"""How a batch prefills: in chunks while other rows generate, and with shared prefixes read once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ovspec.cache.decoder import Decoder
from ovspec.cache.sequence import Sequence, common_prefix

# A row with more unseen tokens than this is reading a prompt; a round leaves fewer tokens to feed.
PREFILL_THRESHOLD = 16
# Shared tokens needed to make it worth copying a row, or waiting for it.
MIN_SHARED_TOKENS = 32


def copy_shared_prefixes(decoder: Decoder, sequences: list[Sequence]) -> None:
    """Replace each row with many unseen tokens by a copy of the row that shares the longest prefix with its text.

    Models that replay are left as they are: rolling recurrent states back may cost more than it saves. So are devices
    that copy no states.
    """
    held, rollback = decoder.rows, decoder.rollback
    if len(held) < 2 or rollback.replay or not rollback.copies:
        return
    unseen = [len(sequence) - len(row) for sequence, row in zip(sequences, held, strict=True)]
    if max(unseen) < MIN_SHARED_TOKENS:
        return
    sources = list(range(len(held)))
    for row, sequence in enumerate(sequences):
        if unseen[row] >= MIN_SHARED_TOKENS:
            shared = [
                common_prefix(other, sequence) if owned.owner == sequence.owner else 0
                for other, owned in zip(held, sequences, strict=True)
            ]
            best = int(np.argmax(shared))
            if shared[best] - shared[row] >= MIN_SHARED_TOKENS:
                sources[row] = best
    if sources != list(range(len(held))):
        decoder.reorder(sources)


def should_wait_for_prefix(sequence: Sequence, reading: Iterable[Sequence], read: Iterable[Sequence]) -> bool:
    """Return whether waiting until one of ``reading`` has been read saves work that none of ``read`` saves at once."""

    def longest(others: Iterable[Sequence]) -> int:
        return max([common_prefix(sequence, other) for other in others if other.owner == sequence.owner], default=0)

    found = longest(reading)
    return found > MIN_SHARED_TOKENS and found > longest(read) + MIN_SHARED_TOKENS


def choose_prefill_chunks(
    decoder: Decoder, unseen: list[np.ndarray], prompt_budget: int | None = None
) -> list[np.ndarray]:
    """Return which of its ``unseen`` tokens each row reads in this round, so that rows that generate can continue.

    ``room``: how many tokens of prompts are read, the first row's first. By default each row reads what the decoder
    finds fit to join the others, and everything if no row is generating.
    """
    if all(len(new) <= PREFILL_THRESHOLD for new in unseen):
        return unseen
    if prompt_budget is None:
        others = [
            len(new)
            for new, held in zip(unseen, decoder.rows, strict=True)
            if len(held) and len(new) <= PREFILL_THRESHOLD
        ]
        most = decoder.prefill_chunk_size(others) if others else None
        return [new if len(new) <= PREFILL_THRESHOLD else new[:most] for new in unseen]
    chunks = []
    for new in unseen:
        reading = len(new) > PREFILL_THRESHOLD
        chunks.append(new[:prompt_budget] if reading else new)
        prompt_budget -= len(chunks[-1]) if reading else 0
    return chunks
