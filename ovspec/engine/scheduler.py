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
from ovspec.engine.cache_budget import CacheBudget
from ovspec.engine.prefill_budget import PrefillBudget
from ovspec.engine.results import FinishReason, Piece, Stats
from ovspec.engine.round import RowOutcome, run_round

MAX_SECONDS_WITHOUT_ROOM = 30.0  # a row waits for memory; after this time, younger rows are set back for it
SLOW_STEP_SECONDS = 0.05  # a row's constraints count as slow above this time per token


class Schedulable(Protocol):
    """A text to generate in rounds: a ``Row``, or a text with tokens chosen by other software."""

    sequence: Sequence
    stats: Stats
    finish_reason: FinishReason | None
    max_length: int  # maximum length of the text in tokens
    waits_for_memory: bool  # whether other texts hold the memory needed for it

    def make_row_to_draft(self) -> RowToDraft: ...

    def add_outcome(self, outcome: RowOutcome) -> Piece: ...

    def fail(self, error: Exception) -> Piece: ...

    def cancel(self) -> Piece: ...


@dataclass(frozen=True)
class BatchLimits:
    """Limits of a batch, and fairness between its rows."""

    max_rows: int = 1
    max_tokens: float = math.inf  # in the KV caches of all rows together
    rows_grow: bool = False  # whether rows reserve memory as they grow, not for their maximum length: ``CacheBudget``
    prefill_budget: PrefillBudget | None = None  # limits prompt tokens per round; None if rows may wait for prompts
    isolated_errors: tuple[type[Exception], ...] = ()  # errors of a row's constraints ending only this row
    # Maximum seconds of a row in steps slower than ``SLOW_STEP_SECONDS``; above, its constraints fail.
    max_constraint_seconds: float = math.inf


@dataclass(slots=True, eq=False)
class RunningRow:
    """A row in the batch, and its number among all rows."""

    number: int
    row: Schedulable
    decoder_row: int  # the decoders' row with its tokens; EMPTY_ROW if it has none yet
    # At the row's joining, in seconds: wall clock, time in the target's forward passes, time in the drafter's.
    clocks_at_join: tuple[float, float, float]
    slow_seconds: float = 0.0  # seconds in slow steps of its constraints
    set_back_at: float | None = None  # when it was set back; None again once its text has been read again

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is being read, or, after it was set back, its text."""
        return self.set_back_at is not None or not self.row.stats.rounds


class WaitingQueue:
    """Rows waiting to join the batch, new or set back, numbered by arrival."""

    def __init__(self, rows: Iterable[Schedulable], max_rows: int, budget: CacheBudget) -> None:
        self._incoming_rows = iter(rows)
        self._max_rows = max_rows
        self._budget = budget
        self._row_numbers = itertools.count()
        self._waiting_rows: dict[int, Schedulable] = {}  # by number, oldest first
        self.row_without_room: tuple[int, Schedulable] | None = None  # the oldest row waiting for memory
        self._short_since = 0.0  # time since which this row has waited

    def __len__(self) -> int:
        return len(self._waiting_rows)

    def add_row(self, row: Schedulable) -> int:
        """Add ``row`` to the end of the queue; return its number."""
        number = next(self._row_numbers)
        self._waiting_rows[number] = row
        return number

    def return_row(self, number: int, row: Schedulable) -> None:
        """Insert a row just set back, before younger rows."""
        self._waiting_rows = dict(sorted([*self._waiting_rows.items(), (number, row)], key=lambda item: item[0]))

    def remove_row(self, number: int) -> Schedulable | None:
        return self._waiting_rows.pop(number, None)

    @property
    def seconds_without_room(self) -> float:
        """How long ``row_without_room`` has waited."""
        return time.perf_counter() - self._short_since if self.row_without_room else 0.0

    def admit_rows(self, batch: list[RunningRow]) -> list[tuple[int, Schedulable]]:
        """Remove the rows with room in ``batch``, at least one for an empty batch; return them as (number, row).

        A row waits while another prompt with a common prefix is being read, to use its KV cache.
        """
        budget = self._budget
        is_limited = budget.is_limited
        free_tokens = budget.count_free_tokens(batch) if is_limited else math.inf
        prefilling_sequences = [running_row.row.sequence for running_row in batch if running_row.is_reading]
        cached_sequences = [running_row.row.sequence for running_row in batch if not running_row.is_reading]
        admitted_rows: list[tuple[int, Schedulable]] = []
        for row in itertools.islice(self._incoming_rows, max(0, self._max_rows - len(self._waiting_rows))):
            self.add_row(row)
        row_without_room = None
        for number, row in self._waiting_rows.items():
            row.waits_for_memory = row_without_room is not None  # rows behind a row without room wait for it
            if row_without_room or len(batch) + len(admitted_rows) == self._max_rows:
                continue
            token_count = budget.count_tokens_to_join(row, batch) if is_limited else 0
            if token_count > free_tokens and (batch or admitted_rows or budget.task_tokens):
                row.waits_for_memory = True
                row_without_room = number, row
            elif not prefilling_sequences or not should_wait_for_prefix(
                row.sequence, prefilling_sequences, cached_sequences
            ):
                admitted_rows.append((number, row))
                prefilling_sequences.append(row.sequence)
                free_tokens -= token_count
        if row_without_room != self.row_without_room:
            self.row_without_room = row_without_room
            self._short_since = time.perf_counter()
        for number, _ in admitted_rows:
            del self._waiting_rows[number]
        return admitted_rows


class Scheduler:
    """Runs rounds with continuous batching: rows join as others leave.

    Args:
        target, drafter: without rows, or with a single row, the KV cache for the first of ``rows``.
        lookahead: the number of tokens to propose.
        rows: consumed when the batch has room.
        limits: of the batch.
        learn_from_round: called with the outcome of each round with a drafter; ``lookahead.learn_round`` by default.
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
        self._budget = CacheBudget(target, limits.max_tokens, limits.rows_grow)
        self.queue = WaitingQueue(rows, limits.max_rows, self._budget)
        self._limits = limits
        self.last_outcome: RoundOutcome | None = None
        self.set_back_count = 0  # how often a row was set back so far
        self._running_rows: list[RunningRow] = []
        self._set_back_rows: dict[int, RunningRow] = {}  # by number, in the queue
        self._initial_decoder_rows = list(range(len(target.rows)))  # the decoders' rows for the first of ``rows``

    def run_next_round(self) -> list[tuple[int, Piece]] | None:
        """Run a round; return (number, piece) for each row, or None if no row is left."""
        if len(self._running_rows) < self._limits.max_rows:
            self._admit_rows()
        if not self._running_rows:
            return None
        self._reorder_decoders()
        max_new_tokens = math.inf
        if self._budget.is_limited:
            max_new_tokens = self._make_room_for_round()
        rows_to_draft = [running_row.row.make_row_to_draft() for running_row in self._running_rows]
        if self._budget.is_limited:
            rows_to_draft = self._limit_rows_to_draft(rows_to_draft, max_new_tokens)
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
        self.record_times()
        self._running_rows = [running_row for running_row in self._running_rows if not running_row.row.finish_reason]
        return pieces

    def _admit_rows(self) -> None:
        """Let rows join the batch."""
        if self._budget.is_limited and self._running_rows and not self._initial_decoder_rows:
            self._reorder_decoders()  # ended rows free their memory
        if self.queue.seconds_without_room > MAX_SECONDS_WITHOUT_ROOM and self._budget.rows_grow:
            self._free_memory_of_younger_rows()
        for number, row in self.queue.admit_rows(self._running_rows):
            running_row = self._set_back_rows.pop(number, None)
            if not running_row:
                decoder_row = self._initial_decoder_rows.pop(0) if self._initial_decoder_rows else EMPTY_ROW
                running_row = RunningRow(number, row, decoder_row, self._take_clock_readings())
            self._running_rows.append(running_row)

    def _free_memory_of_younger_rows(self) -> None:
        """Set back rows younger than the waiting row, if this frees enough memory for it."""
        assert self.queue.row_without_room
        number, row = self.queue.row_without_room
        budget = self._budget
        needed_tokens = budget.count_tokens_to_join(row, self._running_rows)

        def find_younger_rows() -> dict[int, Schedulable]:
            return {other.number: other.row for other in self._running_rows if other.number > number}

        freed_tokens = sum([budget.count_tokens_to_join(younger, []) for younger in find_younger_rows().values()])
        if budget.count_free_tokens(self._running_rows) + freed_tokens < needed_tokens:
            return
        while (younger_rows := find_younger_rows()) and budget.count_free_tokens(self._running_rows) < needed_tokens:
            self._set_back_row(budget.choose_row_to_set_back(younger_rows))

    def _make_room_for_round(self) -> float:
        """Set back rows until all others have room for a round; return the maximum new tokens per row in the round."""
        budget = self._budget
        free_tokens = budget.count_free_tokens(self._running_rows)
        if free_tokens < 0 and budget.rows_grow and len(self._running_rows) > 1:
            self._target.reuse_prefixes([running_row.row.sequence for running_row in self._running_rows])
            while len(self._running_rows) > 1 and not budget.has_room_for_round(self._running_rows):
                self._set_back_row(budget.choose_row_to_set_back(self.running_row_numbers))
            free_tokens = budget.count_free_tokens(self._running_rows)
        budget.reserved_tokens = budget.max_tokens - free_tokens
        # A single row, or rows with their maximum length reserved, need no limit.
        if not budget.rows_grow or len(self._running_rows) == 1:
            return math.inf
        return budget.divide_free_tokens(self._running_rows, free_tokens)

    def _limit_rows_to_draft(self, rows_to_draft: list[RowToDraft], max_new_tokens: float) -> list[RowToDraft]:
        """Return the rows with budgets of at most ``max_new_tokens``.

        Rows set back and being read again get no proposals, because these couldn't be verified yet.
        """
        limited_rows = rows_to_draft[:]
        for index, (running_row, row_to_draft) in enumerate(zip(self._running_rows, rows_to_draft, strict=True)):
            if row_to_draft.budget > max_new_tokens or running_row.set_back_at is not None:
                limited_rows[index] = row_to_draft._replace(
                    budget=int(min(row_to_draft.budget, max_new_tokens)),
                    drafters_may_propose=row_to_draft.drafters_may_propose and running_row.set_back_at is None,
                )
        return limited_rows

    def _set_back_row(self, number: int) -> None:
        """Free the blocks of a running row, and put it back into the queue until there is room for its text."""
        row_numbers = self.running_row_numbers
        running_row = self._running_rows.pop(row_numbers.index(number))
        self._reorder_decoders()
        running_row.decoder_row = EMPTY_ROW
        running_row.set_back_at = time.perf_counter()
        running_row.row.waits_for_memory = True
        self._set_back_rows[number] = running_row
        self.queue.return_row(number, running_row.row)
        self.set_back_count += 1

    def _make_piece(
        self, running_row: RunningRow, row_to_draft: RowToDraft, outcome: RowOutcome, length_before: int
    ) -> Piece:
        """Return a row's piece from its round; if its constraints fail or take too long, this ends the text."""
        error = outcome.error
        constraint_seconds = row_to_draft.sampler.stopwatch.restart()
        if constraint_seconds > SLOW_STEP_SECONDS * (1 + len(outcome.proposal.tokens)):
            running_row.slow_seconds += constraint_seconds
            if running_row.slow_seconds > self._limits.max_constraint_seconds and not error:
                error = OvspecError("The grammar takes too long to evaluate; simplify the grammar.")
        if len(outcome.tokens) > outcome.forced_count:
            running_row.set_back_at = None
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
        """Drop the decoders' rows of ended texts, and add empty rows for rows that have joined."""
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
        """Empty the decoders of an empty batch, to free memory."""
        for follower in self._row_followers:
            follower.reset(0)
        self._initial_decoder_rows = []

    @property
    def free_token_count(self) -> float:
        """Number of tokens in the memory left over by the batch's reservations."""
        return self._budget.count_free_tokens(self._running_rows)

    @property
    def reserved_token_count(self) -> float:
        """Number of tokens reserved by the batch."""
        return self._budget.reserved_tokens if self._running_rows else 0.0

    def reserve_for_task(self, token_count: int, has_begun: bool = False) -> None:
        """Reserve room for a background task, waiting or begun (``has_begun``), until a call with 0 tokens."""
        self._budget.task_tokens = token_count
        self._budget.task_has_begun = has_begun

    @property
    def running_row_numbers(self) -> list[int]:
        return [running_row.number for running_row in self._running_rows]

    def remove_rows(self, row_numbers: Collection[int]) -> None:
        """Cancel and remove waiting or running rows."""
        for row_number in row_numbers:
            if row := self.queue.remove_row(row_number):
                row.cancel()
            if set_back_row := self._set_back_rows.pop(row_number, None):
                self._record_row_times(set_back_row)
        for running_row in self._running_rows:
            if running_row.number in row_numbers:
                running_row.row.cancel()
                self._record_row_times(running_row)
        self._running_rows = [
            running_row for running_row in self._running_rows if running_row.number not in row_numbers
        ]

    def cancel_rows(self) -> list[tuple[int, Piece]]:
        return [(running_row.number, running_row.row.cancel()) for running_row in self._list_begun_rows()]

    def record_times(self) -> None:
        for running_row in self._list_begun_rows():
            self._record_row_times(running_row)

    def _list_begun_rows(self) -> list[RunningRow]:
        return [*self._running_rows, *self._set_back_rows.values()]

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
    """Run rounds until every row is finished; yield each round's list of (row number, piece).

    On Ctrl-C, finish the round (or only its current forward pass while reading a prompt), yield its pieces, then a last
    piece "cancelled" for each row, and raise KeyboardInterrupt.
    """
    interrupts = DelayedInterrupts()
    try:
        while True:
            interrupts.delaying = True
            try:
                pieces = scheduler.run_next_round()
            except KeyboardInterrupt:  # also held back by another stream, or raised by a user's function
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
