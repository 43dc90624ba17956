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
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.engine.prefill_budget import PrefillBudget
from ovspec.engine.results import FinishReason, Piece, Stats
from ovspec.engine.round import RowOutcome, run_round

SLOW_STEP_SECONDS = 0.05  # seconds that a row's constraints take for a token, from which they count as slow


class Schedulable(Protocol):
    """A text that rounds generate: a ``Row``, or a text whose tokens are chosen by other software."""

    sequence: Sequence
    stats: Stats
    finish_reason: FinishReason | None
    max_length: int  # tokens that the text may grow to

    def make_row_to_draft(self) -> RowToDraft: ...

    def add_outcome(self, outcome: RowOutcome) -> Piece: ...

    def fail(self, error: Exception) -> Piece: ...

    def cancel(self) -> Piece: ...


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch, and fairness between its rows."""

    max_rows: int = 1
    max_tokens: float = math.inf  # of all rows together, at their maximum lengths
    prefill_budget: PrefillBudget | None = None  # of a round, if rows must not wait long
    isolated_errors: tuple[type[Exception], ...] = ()  # errors of a row's constraints that end only that row
    # Seconds of a row's steps slower than ``SLOW_STEP_SECONDS`` after which its constraints fail.
    max_constraint_seconds: float = math.inf


@dataclass(slots=True)
class RunningRow:
    """A row of the batch, and its number among all rows."""

    number: int
    row: Schedulable
    decoder_row: int  # the decoders' row with its tokens; EMPTY_ROW if it has none yet
    # Seconds on the wall clock, of target inference and of drafting, when the row joined.
    clocks_at_join: tuple[float, float, float]
    slow_seconds: float = 0.0  # of slow steps of its constraints


class WaitingQueue:
    """Rows that have not joined the batch yet, numbered in the order in which they came."""

    def __init__(self, rows: Iterable[Schedulable], limits: BatchLimits) -> None:
        self._incoming_rows = iter(rows)
        self._limits = limits
        self._row_numbers = itertools.count()
        self._waiting_rows: dict[int, Schedulable] = {}
        self.reserved_tokens = 0  # kept free for a background task

    def __len__(self) -> int:
        return len(self._waiting_rows)

    def add_row(self, row: Schedulable) -> int:
        """Add ``row`` to the end of the queue; return its number."""
        number = next(self._row_numbers)
        self._waiting_rows[number] = row
        return number

    def remove_row(self, number: int) -> Schedulable | None:
        return self._waiting_rows.pop(number, None)

    def count_tokens_that_fit(self, batch: list[Schedulable]) -> float:
        """Return the number of tokens that fit into memory besides ``batch``; negative if too many are reserved."""
        return self._limits.max_tokens - self.reserved_tokens - sum([row.max_length for row in batch])

    def admit_rows(self, batch: list[Schedulable]) -> list[tuple[int, Schedulable]]:
        """Remove the rows for which ``batch`` has room, at least one if it is empty; return them as (number, row).

        A row waits while another prompt with the same prefix is being read, because it can continue from there.
        """
        free_tokens = self.count_tokens_that_fit(batch)
        prefilling_sequences = [row.sequence for row in batch if not row.stats.rounds]
        cached_sequences = [row.sequence for row in batch if row.stats.rounds]
        admitted_rows: list[tuple[int, Schedulable]] = []
        for row in itertools.islice(self._incoming_rows, max(0, self._limits.max_rows - len(self._waiting_rows))):
            self.add_row(row)
        for number, row in self._waiting_rows.items():
            if len(batch) + len(admitted_rows) == self._limits.max_rows:
                break
            if row.max_length > free_tokens and (batch or admitted_rows or self.reserved_tokens):
                break
            if not prefilling_sequences or not should_wait_for_prefix(
                row.sequence, prefilling_sequences, cached_sequences
            ):
                admitted_rows.append((number, row))
                prefilling_sequences.append(row.sequence)
                free_tokens -= row.max_length
        for number, _ in admitted_rows:
            del self._waiting_rows[number]
        return admitted_rows


class Scheduler:
    """Runs rounds over a batch that rows join as others leave it.

    Args:
        target, drafter: either without rows, or with one row, which the first of ``rows`` continues.
        rows: consumed as the batch has room for more.
        learn_from_round: called with each outcome of a round with a drafter; ``lookahead.learn_round`` by default.
    """

    def __init__(
        self,
        target: Decoder,
        drafter: Drafter | None,
        lookahead: Lookahead,
        rows: Iterable[Schedulable],
        limits: BatchLimits = BatchLimits(),
        learn_from_round: Callable[[RoundOutcome], None] | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._lookahead = lookahead
        self._row_followers = [target, drafter] if drafter else [target]
        self._learn_from_round = learn_from_round or lookahead.learn_round
        self.queue = WaitingQueue(rows, limits)
        self._limits = limits
        self.last_outcome: RoundOutcome | None = None
        self._running_rows: list[RunningRow] = []
        self._initial_decoder_rows = list(range(len(target.rows)))  # the decoders' rows for the first of ``rows``

    def run_next_round(self) -> list[tuple[int, Piece]] | None:
        """Run one round; return (number, piece) for each row, or None if no row is left."""
        if len(self._running_rows) < self._limits.max_rows:
            for number, row in self.queue.admit_rows([running_row.row for running_row in self._running_rows]):
                decoder_row = self._initial_decoder_rows.pop(0) if self._initial_decoder_rows else EMPTY_ROW
                self._running_rows.append(RunningRow(number, row, decoder_row, self._take_clock_readings()))
        if not self._running_rows:
            return None
        self._reorder_decoders()
        rows_to_draft = [running_row.row.make_row_to_draft() for running_row in self._running_rows]
        lengths_before = [len(row_to_draft.sequence) for row_to_draft in rows_to_draft]
        try:
            outcomes, self.last_outcome = run_round(
                self._target, self._drafter, self._lookahead, rows_to_draft, self._limits.prefill_budget
            )
            for outcome in outcomes:
                if outcome.error and not isinstance(outcome.error, self._limits.isolated_errors):
                    raise outcome.error
        except BaseException:
            # Undo the failed round's commits.
            for row_to_draft, length_before in zip(rows_to_draft, lengths_before, strict=True):
                row_to_draft.sequence.rewind(length_before)
            raise
        if self.last_outcome:
            self._learn_from_round(self.last_outcome)
        pieces = [
            (running_row.number, self._make_piece(running_row, row_to_draft, outcome, length_before))
            for running_row, row_to_draft, outcome, length_before in zip(
                self._running_rows, rows_to_draft, outcomes, lengths_before, strict=True
            )
        ]
        for running_row in self._running_rows:
            if running_row.row.finish_reason or not running_row.row.stats.ttft_ms:
                self._record_row_times(running_row)
        self._running_rows = [running_row for running_row in self._running_rows if not running_row.row.finish_reason]
        return pieces

    def _make_piece(
        self, running_row: RunningRow, row_to_draft: RowToDraft, outcome: RowOutcome, length_before: int
    ) -> Piece:
        """Return a row's piece of text from its round; the last one if its constraints fail or take too long."""
        error = outcome.error
        constraint_seconds = row_to_draft.sampler.stopwatch.restart()
        if constraint_seconds > SLOW_STEP_SECONDS * (1 + len(outcome.proposal.tokens)):
            running_row.slow_seconds += constraint_seconds
            if running_row.slow_seconds > self._limits.max_constraint_seconds and not error:
                error = OvspecError("The grammar takes too long to evaluate; simplify it.")
        if not error:
            try:
                return running_row.row.add_outcome(outcome)
            except InferenceError:
                raise
            except OvspecError as failure:
                if not self._limits.isolated_errors:
                    raise
                error = failure
        row_to_draft.sequence.rewind(length_before)  # undo the round's commits
        return running_row.row.fail(error)

    def _reorder_decoders(self) -> None:
        """Keep the decoders' rows of texts that continue, and add empty ones for rows that have joined."""
        decoder_rows = [running_row.decoder_row for running_row in self._running_rows]
        old_row_count = len(self._target.rows)
        if decoder_rows == list(range(old_row_count)):
            return
        for follower in self._row_followers:
            if old_row_count:
                follower.reorder(decoder_rows)
            else:
                follower.reset(len(decoder_rows))
        for index, running_row in enumerate(self._running_rows):
            running_row.decoder_row = index

    def reset_decoders(self) -> None:
        """Empty the decoders of a batch without rows, which frees memory."""
        for follower in self._row_followers:
            follower.reset(0)
        self._initial_decoder_rows = []

    @property
    def free_token_count(self) -> float:
        """The number of tokens that fit into memory besides the batch; see ``WaitingQueue.count_tokens_that_fit``."""
        return self.queue.count_tokens_that_fit([running_row.row for running_row in self._running_rows])

    @property
    def running_row_numbers(self) -> list[int]:
        return [running_row.number for running_row in self._running_rows]

    def remove_rows(self, row_numbers: Collection[int]) -> None:
        """Remove waiting or running rows; their texts end where they are."""
        for row_number in row_numbers:
            if row := self.queue.remove_row(row_number):
                row.cancel()
        for running_row in self._running_rows:
            if running_row.number in row_numbers:
                running_row.row.cancel()
                self._record_row_times(running_row)
        self._running_rows = [
            running_row for running_row in self._running_rows if running_row.number not in row_numbers
        ]

    def cancel_rows(self) -> list[tuple[int, Piece]]:
        return [(running_row.number, running_row.row.cancel()) for running_row in self._running_rows]

    def record_times(self) -> None:
        for running_row in self._running_rows:
            self._record_row_times(running_row)

    def _take_clock_readings(self) -> tuple[float, float, float]:
        return time.perf_counter(), self._target.seconds, self._drafter.seconds if self._drafter else 0.0

    def _record_row_times(self, running_row: RunningRow) -> None:
        stats = running_row.row.stats
        clocks = self._take_clock_readings()
        elapsed_ms, target_ms, draft_ms = (1e3 * (clocks[i] - running_row.clocks_at_join[i]) for i in range(3))
        if not stats.ttft_ms and (stats.generated_tokens or (running_row.row.finish_reason and stats.rounds)):
            stats.ttft_ms = elapsed_ms
        if stats.generated_tokens > 1:
            stats.tpot_ms = (elapsed_ms - stats.ttft_ms) / (stats.generated_tokens - 1)
        stats.target_ms = target_ms
        stats.draft_ms = draft_ms
        stats.other_ms = elapsed_ms - target_ms - draft_ms


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
                pieces = scheduler.run_next_round()
            except KeyboardInterrupt:  # also one that another stream holds back, or that a user's function raises
                pieces = []
                interrupts.ctrl_c_pressed = True
            interrupts.delaying = False
            if pieces is None:
                return
            yield [(number, piece) for number, piece in pieces if piece.token_ids or piece.finish_reason]
            if interrupts.ctrl_c_pressed:
                yield scheduler.cancel_rows()
                raise KeyboardInterrupt
    finally:
        interrupts.restore_handler()
        scheduler.record_times()
