"""Batches: rows that are generated together, in one inference a round, and leave and join between two rounds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ovspec.decoders.base import Decoder
from ovspec.decoders.prefill import shares_prefix
from ovspec.decoders.sequence import EMPTY
from ovspec.drafting.drafter import Drafter, Round
from ovspec.drafting.lookahead import Lookahead
from ovspec.loop.interrupts import HeldInterrupts
from ovspec.loop.results import Piece
from ovspec.loop.round import speculate
from ovspec.loop.row import Row


@dataclass(frozen=True)
class Limits:
    """What a batch may hold at a time: rows, and tokens that these may grow to together."""

    rows: int
    tokens: float = math.inf


@dataclass(slots=True)
class Active:
    """A row of the batch: its number among all, and the seconds on the clock, of the target and of drafting by then."""

    number: int
    row: Row
    joined: tuple[float, float, float]


def generate_rows(
    target: Decoder, drafter: Drafter | None, rows: Iterable[Row], lookahead: Lookahead, limits: Limits = Limits(1)
) -> Iterator[list[tuple[int, Piece]]]:
    """Run rounds until every row is finished; yields (number of the row, piece) for the rows of each round.

    Finished rows leave the batch, and the next of ``rows`` join it between two rounds, when they are taken from the
    iterable. ``target`` and ``drafter`` hold nothing, or the first row.
    On Ctrl-C the round is finished, its pieces and then a last one "cancelled" are yielded, and
    KeyboardInterrupt is raised.
    """

    def clocks() -> tuple[float, float, float]:
        return time.perf_counter(), target.seconds, drafter.seconds if drafter else 0.0

    def note_times(active: Active) -> None:
        stats = active.row.stats
        elapsed, on_target, on_draft = (1e3 * (now - then) for now, then in zip(clocks(), active.joined, strict=True))
        if not stats.ttft_ms and stats.generated_tokens:
            stats.ttft_ms = elapsed
        if stats.generated_tokens > 1:
            stats.tpot_ms = (elapsed - stats.ttft_ms) / (stats.generated_tokens - 1)
        stats.target_ms, stats.draft_ms, stats.other_ms = on_target, on_draft, elapsed - on_target - on_draft

    waiting, batch = Waiting(rows, limits), list[Active]()
    stay = list(range(len(target.rows)))  # rows of the decoders that go on
    interrupts = HeldInterrupts()
    try:
        while True:
            interrupts.holding = True
            if len(batch) < limits.rows:
                batch += [Active(number, row, clocks()) for number, row in waiting.take([each.row for each in batch])]
            if not batch:
                return
            order = [*stay, *[EMPTY] * (len(batch) - len(stay))]
            if order != list(range(len(target.rows))):
                target.reorder(order)
                if drafter:
                    drafter.reorder(order)
            rows_now = [each.row for each in batch]
            round = Round(
                [row.sequence for row in rows_now],
                [row.remaining() for row in rows_now],
                [row.sampler for row in rows_now],
                lookahead,
                [0 if lookahead.fixed == 0 else row.room for row in rows_now],
            )
            pieces = [
                (each.number, each.row.take(verdict))
                for each, verdict in zip(batch, speculate(target, drafter, round), strict=True)
            ]
            for each in batch:
                if each.row.finish_reason or not each.row.stats.ttft_ms:
                    note_times(each)
            stay = [place for place, each in enumerate(batch) if not each.row.finish_reason]
            batch = [batch[place] for place in stay]
            interrupts.holding = False
            yield [(number, piece) for number, piece in pieces if piece.token_ids or piece.finish_reason]
            if interrupts.pressed:
                yield [(each.number, each.row.cancel()) for each in batch]
                raise KeyboardInterrupt
    finally:
        interrupts.stop()
        for each in batch:
            note_times(each)


class Waiting:
    """Rows that have not joined yet."""

    def __init__(self, rows: Iterable[Row], limits: Limits) -> None:
        self._rows, self._limits = enumerate(rows), limits
        self._queue: list[tuple[int, Row]] = []

    def take(self, batch: list[Row]) -> list[tuple[int, Row]]:
        """(number, row) of those for which there is room beside ``batch``; one at least where that is empty.

        A row that begins like one that is being read waits, because it can go on from there.
        """
        room = self._limits.tokens - sum(row.most for row in batch)
        reading = [row.sequence for row in batch if not row.stats.rounds]
        places = self._limits.rows - len(batch)
        taken: list[tuple[int, Row]] = []
        self._queue += itertools.islice(self._rows, self._limits.rows - len(self._queue))
        for number, row in self._queue:
            if len(taken) == places or (row.most > room and (batch or taken)):
                break
            if not shares_prefix(row.sequence, reading):
                taken.append((number, row))
                reading.append(row.sequence)
                room -= row.most
        self._queue = [each for each in self._queue if each not in taken]
        return taken
