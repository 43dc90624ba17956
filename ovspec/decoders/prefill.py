"""How a batch prefills: prompts in chunks beside rows that generate, and prefixes that rows share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ovspec.decoders.base import Decoder
from ovspec.decoders.sequence import Sequence, common_prefix

# A row with more unseen tokens than this is reading a prompt; what a round leaves to be fed again is less.
LONG = 16
# Shared tokens from which on copying a row, or waiting for it, pays.
WORTH_SHARING = 32


def share_prefixes(decoder: Decoder, sequences: list[Sequence]) -> None:
    """Let rows with many unseen tokens go on from a copy of the row that shares the longest prefix with them.

    So the samples of a prompt read it once, and a batch its common system message. Not for models that replay:
    taking recurrent states back to where the texts part may cost more than is saved.
    """
    held = decoder.rows
    unseen = [len(sequence) - len(row) for sequence, row in zip(sequences, held, strict=True)]
    if len(held) < 2 or max(unseen) < WORTH_SHARING or decoder.rollback.replay:
        return
    sources = list(range(len(held)))
    for row, sequence in enumerate(sequences):
        if unseen[row] >= WORTH_SHARING:
            shared = [common_prefix(other, sequence) for other in held]
            best = int(np.argmax(shared))
            if shared[best] - shared[row] >= WORTH_SHARING:
                sources[row] = best
    if sources != list(range(len(held))):
        decoder.reorder(sources)


def shares_prefix(sequence: Sequence, others: Iterable[Sequence]) -> bool:
    """Whether waiting until one of ``others`` has been read saves work."""
    return any(common_prefix(sequence, other) > WORTH_SHARING for other in others)


def prefill_chunks(decoder: Decoder, unseen: list[np.ndarray]) -> list[np.ndarray]:
    """The tokens that each row reads in this round, of its ``unseen`` ones.

    All of them where no row generates. Otherwise prompts come in chunks, so that the other rows go on meanwhile.
    """
    if all(len(new) <= LONG for new in unseen):
        return unseen
    generating = [len(new) for new, held in zip(unseen, decoder.rows, strict=True) if len(held) and len(new) <= LONG]
    if not generating:
        return unseen
    most = decoder.joining_chunk(generating)
    return [new if len(new) <= LONG else new[:most] for new in unseen]
