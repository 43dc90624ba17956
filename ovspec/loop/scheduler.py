"""The scheduler: rows join and leave a batch between rounds."""

from __future__ import annotations

import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ovspec.decoders.base import Decoder
from ovspec.decoders.prefill import shares_prefix
from ovspec.decoders.sequence import EMPTY, Sequence
from ovspec.drafting.drafter import Drafter, RoundRow
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.loop.results import FinishReason, Piece, Stats
from ovspec.loop.round import run_round


class Schedulable(Protocol):
    """What rounds run over: a ``Row``, or the text of somebody else who chooses the tokens."""

    sequence: Sequence
    stats: Stats
    finish_reason: FinishReason | None

    @property
    def most(self) -> int:
        """Tokens that the text may grow to."""
        ...

    def round_row(self) -> RoundRow: ...

    def take(self, turn: RoundRow) -> Piece: ...

    def cancel(self) -> Piece: ...


@dataclass(frozen=True)
class BatchLimits:
    """What a batch may hold at a time: rows, and tokens that these may grow to together."""

    rows: int = 1
    tokens: float = math.inf


@dataclass(slots=True)
class Active:
    """A row of the batch: its number among all, and the seconds on the clock, of the target and of drafting by then."""

    number: int
    row: Schedulable
    joined: tuple[float, float, float]


class Queue:
    """Rows that have not joined yet."""

    def __init__(self, rows: Iterable[Schedulable], limits: BatchLimits) -> None:
        self._rows, self._limits = enumerate(rows), limits
        self._waiting: list[tuple[int, Schedulable]] = []

    def take(self, batch: list[Schedulable]) -> list[tuple[int, Schedulable]]:
        """(number, row) of those for which there is room beside ``batch``; one at least where that is empty.

        A row that begins like one whose prompt is being read waits, because it can go on from there.
        """
        room = self._limits.tokens - sum([row.most for row in batch])
        reading = [row.sequence for row in batch if not row.stats.rounds]
        taken: list[tuple[int, Schedulable]] = []
        self._waiting += itertools.islice(self._rows, self._limits.rows - len(self._waiting))
        for number, row in self._waiting:
            if len(batch) + len(taken) == self._limits.rows or (row.most > room and (batch or taken)):
                break
            if not reading or not shares_prefix(row.sequence, reading):
                taken.append((number, row))
                reading.append(row.sequence)
                room -= row.most
        self._waiting = [each for each in self._waiting if each not in taken]
        return taken


class Scheduler:
    """Runs rounds over rows that join a batch as others leave it.

    Args:
        target, drafter: hold nothing, or the first row.
        rows: taken from when there is room.
        learn: told what each round has brought; the lookahead by default.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        lookahead: Lookahead,
        rows: Iterable[Schedulable],
        limits: BatchLimits = BatchLimits(),
        learn: Callable[[RoundOutcome], None] | None = None,
    ) -> None:
        self._target, self._drafter, self._lookahead = target, drafter, lookahead
        self._learn = learn or lookahead.learn
        self._queue, self._most_rows = Queue(rows, limits), limits.rows
        self._batch: list[Active] = []
        self._stay = list(range(len(target.rows)))  # rows of the decoders that go on

    def step(self) -> list[tuple[int, Piece]] | None:
        """Run one round; (number of the row, piece) for each row, or None where there is no row left."""
        if len(self._batch) < self._most_rows:
            joining = self._queue.take([active.row for active in self._batch])
            self._batch += [Active(number, row, self._clocks()) for number, row in joining]
        if not self._batch:
            return None
        if self._stay != list(range(len(self._target.rows))) or len(self._stay) < len(self._batch):
            self._reorder()
        turns = [active.row.round_row() for active in self._batch]
        try:
            outcome = run_round(self._target, self._drafter, self._lookahead, turns)
        except BaseException:
            for turn in turns:  # undo what the failed round committed
                turn.sequence.rewind(len(turn.sequence) - len(turn.tokens))
            raise
        if outcome:
            self._learn(outcome)
        pieces = [(active.number, active.row.take(turn)) for active, turn in zip(self._batch, turns, strict=True)]
        for active in self._batch:
            if active.row.finish_reason or not active.row.stats.ttft_ms:
                self._note_times(active)
        self._stay = [index for index, active in enumerate(self._batch) if not active.row.finish_reason]
        self._batch = [self._batch[index] for index in self._stay]
        return pieces

    def _reorder(self) -> None:
        """Have the decoders go on with the rows that stay, and begin with those that have joined."""
        order = [*self._stay, *[EMPTY] * (len(self._batch) - len(self._stay))]
        begins = not self._target.rows
        for follower in (self._target, self._drafter):
            if follower and begins:
                follower.reset(len(order))
            elif follower:
                follower.reorder(order)

    def cancel(self) -> list[tuple[int, Piece]]:
        """End all rows of the batch where they are."""
        return [(active.number, active.row.cancel()) for active in self._batch]

    def note_times(self) -> None:
        """Bring the statistics of the batch's rows up to date."""
        for active in self._batch:
            self._note_times(active)

    def _clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._target.seconds, self._drafter.seconds if self._drafter else 0.0

    def _note_times(self, active: Active) -> None:
        stats = active.row.stats
        now = self._clocks()
        elapsed, on_target, on_draft = (1e3 * (now[i] - active.joined[i]) for i in range(3))
        if not stats.ttft_ms and stats.generated_tokens:
            stats.ttft_ms = elapsed
        if stats.generated_tokens > 1:
            stats.tpot_ms = (elapsed - stats.ttft_ms) / (stats.generated_tokens - 1)
        stats.target_ms, stats.draft_ms, stats.other_ms = on_target, on_draft, elapsed - on_target - on_draft


class HeldInterrupts:
    """Has Ctrl-C wait for the end of a round, so that KV cache and text stay in agreement.

    Notes Ctrl-C while ``holding`` is set, and hands it on at once while it is not.

    The handler is installed once for a whole generation: doing so every round would cost as much as
    half the rest of the loop. Outside the main thread, where Python handles no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.holding = self.pressed = self._stopped = False
        self._previous: Any = None
        handler = signal.getsignal(signal.SIGINT)
        # A process that ignores Ctrl-C, as one in the background does, goes on doing so.
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._previous = handler
            signal.signal(signal.SIGINT, self._note)

    def stop(self) -> None:
        """Give the signal back to whoever had it. Streams may end in another order than they began."""
        self._stopped = True
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) != self._note:
            return
        previous = self._previous
        while isinstance(owner := getattr(previous, "__self__", None), HeldInterrupts) and owner._stopped:
            previous = owner._previous
        signal.signal(signal.SIGINT, previous)

    def _note(self, *arguments: Any) -> None:
        if self.holding:
            self.pressed = True
        else:
            self._previous(*arguments)


def run_rows(scheduler: Scheduler) -> Iterator[list[tuple[int, Piece]]]:
    """Run rounds until every row is finished; yields (number of the row, piece) for the rows of each round.

    On Ctrl-C the round is finished, its pieces and then a last one "cancelled" are yielded, and KeyboardInterrupt is
    raised.
    """
    interrupts = HeldInterrupts()
    try:
        while True:
            interrupts.holding = True
            pieces = scheduler.step()
            interrupts.holding = False
            if pieces is None:
                return
            yield [(number, piece) for number, piece in pieces if piece.token_ids or piece.finish_reason]
            if interrupts.pressed:
                yield scheduler.cancel()
                raise KeyboardInterrupt
    finally:
        interrupts.stop()
        scheduler.note_times()
