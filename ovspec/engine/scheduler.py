"""The scheduler: rows join and leave a batch between rounds."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ovspec.base.errors import InferenceError, OvspecError
from ovspec.base.interrupts import DelayedInterrupts
from ovspec.cache.decoder import Decoder
from ovspec.cache.prefill import should_wait_for_prefix
from ovspec.cache.sequence import EMPTY_ROW, Sequence
from ovspec.drafting.drafter import Drafter, RowStep
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.engine.prefill_budget import PrefillBudget
from ovspec.engine.results import FinishReason, Piece, Stats
from ovspec.engine.round import RowOutcome, run_round

SLOW_STEP_SECONDS = 0.05  # seconds that a row's constraints take for a token, from which they count as slow


class Schedulable(Protocol):
    """What rounds run on: a ``Row``, or a text whose tokens are chosen by other software."""

    sequence: Sequence
    stats: Stats
    finish_reason: FinishReason | None
    max_length: int  # tokens that the text may grow to

    def row_step(self) -> RowStep: ...

    def add_outcome(self, outcome: RowOutcome) -> Piece: ...

    def fail(self, error: Exception) -> Piece: ...

    def cancel(self) -> Piece: ...


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch, and fairness between its rows."""

    max_rows: int = 1
    max_tokens: float = math.inf  # that the rows may grow to together
    prefill_budget: PrefillBudget | None = None  # how much of the prompts a round reads, if rows must not wait long
    isolated_errors: tuple[
        type[Exception], ...
    ] = ()  # errors of a row's constraints that end it alone, not the whole round
    max_constraint_seconds: float = (
        math.inf
    )  # of a row's steps slower than ``SLOW_STEP``, after which its constraints fail


@dataclass(slots=True)
class RunningRow:
    """A row of the batch, and its number among all rows."""

    number: int
    row: Schedulable
    decoder_row: int  # the decoders' row that holds its tokens; EMPTY if it has none yet
    start_clocks: tuple[
        float, float, float
    ]  # seconds on the wall clock, of target inference and of drafting at that time
    slow_seconds: float = 0.0  # seconds that slow steps of its constraints have taken


class WaitingQueue:
    """Rows that have not joined the batch yet, numbered in the order in which they came."""

    def __init__(self, rows: Iterable[Schedulable], limits: BatchLimits) -> None:
        self._incoming_rows, self._limits = iter(rows), limits
        self._numbers = itertools.count()
        self._waiting_rows: dict[int, Schedulable] = {}
        self.reserved_tokens = 0  # tokens that are kept free for something else

    def __len__(self) -> int:
        return len(self._waiting_rows)

    def add_row(self, row: Schedulable) -> int:
        """Let ``row`` wait behind the others; return its number."""
        number = next(self._numbers)
        self._waiting_rows[number] = row
        return number

    def remove_row(self, number: int) -> Schedulable | None:
        return self._waiting_rows.pop(number, None)

    def free_tokens(self, batch: list[Schedulable]) -> float:
        """Return how many tokens there is memory for beside ``batch``; negative if too many are reserved."""
        return self._limits.max_tokens - self.reserved_tokens - sum([row.max_length for row in batch])

    def admit_rows(self, batch: list[Schedulable]) -> list[tuple[int, Schedulable]]:
        """Return (number, row) of the rows for which ``batch`` has room; if it is empty, at least one.

        A row waits while another prompt with the same beginning is being read, because it can continue from there.
        """
        room = self.free_tokens(batch)
        reading = [row.sequence for row in batch if not row.stats.rounds]
        read = [row.sequence for row in batch if row.stats.rounds]
        taken: list[tuple[int, Schedulable]] = []
        for row in itertools.islice(self._incoming_rows, max(0, self._limits.max_rows - len(self._waiting_rows))):
            self.add_row(row)
        for number, row in self._waiting_rows.items():
            if len(batch) + len(taken) == self._limits.max_rows or (
                row.max_length > room and (batch or taken or self.reserved_tokens)
            ):
                break
            if not reading or not should_wait_for_prefix(row.sequence, reading, read):
                taken.append((number, row))
                reading.append(row.sequence)
                room -= row.max_length
        for number, _ in taken:
            del self._waiting_rows[number]
        return taken


class Scheduler:
    """Runs rounds over a batch that rows join as others leave it.

    Args:
        target, drafter: either without rows, or with one row, which the first of ``rows`` takes over.
        rows: consumed as the batch has room for more.
        learn: called with the outcome of each round that has a drafter; ``lookahead.learn_round`` by default.
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
        self._followers = [target, drafter] if drafter else [target]
        self._learn = learn or lookahead.learn_round
        self.queue, self._limits = WaitingQueue(rows, limits), limits
        self.last_outcome: RoundOutcome | None = None  # of the last round
        self._running_rows: list[RunningRow] = []
        self._initial_decoder_rows = list(range(len(target.rows)))  # the decoders' rows for the first of ``rows``

    def step(self) -> list[tuple[int, Piece]] | None:
        """Run one round; return (number, piece) for each row, or None if no row is left."""
        if len(self._running_rows) < self._limits.max_rows:
            for number, row in self.queue.admit_rows([active.row for active in self._running_rows]):
                held = self._initial_decoder_rows.pop(0) if self._initial_decoder_rows else EMPTY_ROW
                self._running_rows.append(RunningRow(number, row, held, self._read_clocks()))
        if not self._running_rows:
            return None
        self._reorder_decoders()
        steps = [active.row.row_step() for active in self._running_rows]
        lengths = [len(step.sequence) for step in steps]
        try:
            outcomes, self.last_outcome = run_round(
                self._target, self._drafter, self._lookahead, steps, self._limits.prefill_budget
            )
            for outcome in outcomes:
                if outcome.error and not isinstance(outcome.error, self._limits.isolated_errors):
                    raise outcome.error
        except BaseException:
            for step, length in zip(steps, lengths, strict=True):  # undo what the failed round committed
                step.sequence.rewind(length)
            raise
        if self.last_outcome:
            self._learn(self.last_outcome)
        pieces = [
            (active.number, self._make_piece(active, step, outcome, length))
            for active, step, outcome, length in zip(self._running_rows, steps, outcomes, lengths, strict=True)
        ]
        for active in self._running_rows:
            if active.row.finish_reason or not active.row.stats.ttft_ms:
                self._record_row_times(active)
        self._running_rows = [active for active in self._running_rows if not active.row.finish_reason]
        return pieces

    def _make_piece(self, active: RunningRow, step: RowStep, outcome: RowOutcome, length: int) -> Piece:
        """Return the piece that a row makes of its round; its last one if its constraints fail or take too long."""
        error, seconds = outcome.error, step.sampler.stopwatch.restart()
        if seconds > SLOW_STEP_SECONDS * (1 + len(outcome.proposal.tokens)):
            active.slow_seconds += seconds
            if active.slow_seconds > self._limits.max_constraint_seconds and not error:
                error = OvspecError("The grammar takes too long to follow; simplify it.")
        if not error:
            try:
                return active.row.add_outcome(outcome)
            except InferenceError:
                raise
            except OvspecError as failure:
                if not self._limits.isolated_errors:
                    raise
                error = failure
        step.sequence.rewind(length)  # undo what was committed to it
        return active.row.fail(error)

    def _reorder_decoders(self) -> None:
        """Keep the decoders' rows of texts that continue, and add empty ones for rows that have joined."""
        rows, before = [active.decoder_row for active in self._running_rows], len(self._target.rows)
        if rows == list(range(before)):
            return
        for follower in self._followers:
            if before:
                follower.reorder(rows)
            else:
                follower.reset(len(rows))
        for index, active in enumerate(self._running_rows):
            active.decoder_row = index

    def reset_decoders(self) -> None:
        """Empty the decoders of a batch without rows, which frees memory."""
        for follower in self._followers:
            follower.reset(0)
        self._initial_decoder_rows = []

    @property
    def free_tokens(self) -> float:
        """Tokens that there is memory for beside the batch; see ``Queue.room``."""
        return self.queue.free_tokens([active.row for active in self._running_rows])

    @property
    def running_numbers(self) -> list[int]:
        return [active.number for active in self._running_rows]

    def remove_rows(self, numbers: Collection[int]) -> None:
        """Take waiting or running rows out; their texts end where they are."""
        for number in numbers:
            if row := self.queue.remove_row(number):
                row.cancel()
        for active in self._running_rows:
            if active.number in numbers:
                active.row.cancel()
                self._record_row_times(active)
        self._running_rows = [active for active in self._running_rows if active.number not in numbers]

    def cancel_rows(self) -> list[tuple[int, Piece]]:
        return [(active.number, active.row.cancel()) for active in self._running_rows]

    def record_times(self) -> None:
        for active in self._running_rows:
            self._record_row_times(active)

    def _read_clocks(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._target.seconds, self._drafter.seconds if self._drafter else 0.0

    def _record_row_times(self, active: RunningRow) -> None:
        stats = active.row.stats
        now = self._read_clocks()
        elapsed, on_target, on_draft = (1e3 * (now[i] - active.start_clocks[i]) for i in range(3))
        if not stats.ttft_ms and (stats.generated_tokens or (active.row.finish_reason and stats.rounds)):
            stats.ttft_ms = elapsed
        if stats.generated_tokens > 1:
            stats.tpot_ms = (elapsed - stats.ttft_ms) / (stats.generated_tokens - 1)
        stats.target_ms, stats.draft_ms, stats.other_ms = on_target, on_draft, elapsed - on_target - on_draft


def run_rows(scheduler: Scheduler) -> Iterator[list[tuple[int, Piece]]]:
    """Run rounds until every row is finished; yield each round's list of (number of the row, piece).

    On Ctrl-C, finish the round, or the inference if the round reads a prompt, yield its pieces, then a last piece
    "cancelled" for each row, and raise KeyboardInterrupt.
    """
    interrupts = DelayedInterrupts()
    try:
        while True:
            interrupts.delaying = True
            try:
                pieces = scheduler.step()
            except KeyboardInterrupt:  # also one that another stream holds back, or that a user's function raises
                pieces, interrupts.pressed = [], True
            interrupts.delaying = False
            if pieces is None:
                return
            yield [(number, piece) for number, piece in pieces if piece.token_ids or piece.finish_reason]
            if interrupts.pressed:
                yield scheduler.cancel_rows()
                raise KeyboardInterrupt
    finally:
        interrupts.stop()
        scheduler.record_times()
