"""Batches whose rows can't share an inference, and the choice of the decoder that fits a model's states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ovspec.decoders.base import FAST, JOINING_CHUNK, FeedRule, Rollback, SessionDecoder
from ovspec.decoders.sequence import EMPTY, Sequence
from ovspec.decoders.stateful import StatefulDecoder
from ovspec.ir.compile import CompiledIR
from ovspec.text.vocabulary import ALL_IDS, KnownIds


class RowByRow:
    """A ``SessionDecoder`` in which every row has an infer request of its own.

    Rows that share an inference are padded, which changes the last bits of attention, and which a convolution or an SSM
    would process.
    """

    fills = False

    def __init__(self, make: Callable[[], StatefulDecoder]) -> None:
        self._make = make
        self._decoders = [make()]
        self._spare: list[StatefulDecoder] = []
        first = self._decoders[0]
        self.rule, self.rollback, self.context_length = first.rule, first.rollback, first.context_length

    @property
    def rows(self) -> list[Sequence]:
        return [decoder.rows[0] for decoder in self._decoders]

    @property
    def seconds(self) -> float:
        return sum(decoder.seconds for decoder in self._decoders + self._spare)

    @property
    def inferences(self) -> int:
        return sum(decoder.inferences for decoder in self._decoders + self._spare)

    def reset(self, rows: int) -> None:
        decoders = self._decoders + self._spare
        decoders += [self._make() for _ in range(rows - len(decoders))]
        self._decoders, self._spare = decoders[:rows], decoders[rows:]
        for decoder in self._decoders:
            decoder.reset(1)
        for decoder in self._spare:
            decoder.reset(0)

    def feed(self, tokens: list[np.ndarray], wanted: list[int], width: int = 0) -> list[np.ndarray]:  # noqa: ARG002
        nothing = np.empty((0, 0), dtype=np.float32)
        return [
            decoder.feed([new], [want])[0] if len(new) else nothing
            for decoder, new, want in zip(self._decoders, tokens, wanted, strict=True)
        ]

    def truncate(self, row: int, length: int) -> None:
        self._decoders[row].truncate(0, length)

    def reorder(self, rows: list[int]) -> None:
        old = self._decoders
        kept: dict[int, StatefulDecoder] = {}
        self._spare += [decoder for row, decoder in enumerate(old) if row not in rows]
        self._decoders = []
        for row in rows:
            if row != EMPTY and row not in kept:
                kept[row] = old[row]
                self._decoders.append(old[row])
                continue
            another = self._spare.pop() if self._spare else self._make()
            if row == EMPTY:
                another.reset(1)
            else:
                kept[row].copy_to(another)
            self._decoders.append(another)

    def joining_chunk(self, counts: list[int]) -> int:  # noqa: ARG002
        return JOINING_CHUNK

    def fork(self) -> RowByRow:
        other = RowByRow(self._make)
        other._decoders = [decoder.fork() for decoder in self._decoders]
        return other

    def dump(self) -> dict[str, np.ndarray]:
        return self._decoders[0].dump()

    def restore(self, tokens: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        self.reset(1)
        self._decoders[0].restore(tokens, arrays)


def trimming(rollback: Rollback) -> Rollback:
    """Return ``rollback`` with rejected tokens cut off instead of masked."""
    return replace(rollback, kv="trim", mask_until=None) if rollback.kv else rollback


def decoder_of(
    ir: CompiledIR, rollback: Rollback, vocabulary: KnownIds = ALL_IDS, rule: FeedRule = FAST
) -> SessionDecoder:
    """Return the stateful decoder that fits the model's states and the rule.

    Where the rule keeps rows apart, rejected tokens are cut off, because masked slots change bits as padding does.
    """
    rollback = trimming(rollback) if rule.apart else rollback

    def make() -> StatefulDecoder:
        return StatefulDecoder(ir, rollback, vocabulary, rule=rule)

    return RowByRow(make) if rule.apart or ir.rows_alone else make()
