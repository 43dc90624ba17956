"""The engine thread: it owns the decoders, and generates the texts of all requests, round by round."""

import queue
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psutil

from ovspec.base.errors import InferenceError, OvspecError
from ovspec.drafting.costs import InferenceCosts
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import NgramIndex
from ovspec.drafting.proposal import Proposal
from ovspec.engine.cache_budget import CacheUsage
from ovspec.engine.decoders import NO_LOOKAHEAD
from ovspec.engine.prefill_budget import PrefillBudget
from ovspec.engine.results import Piece
from ovspec.engine.row import Row
from ovspec.engine.runtime import Runtime
from ovspec.engine.scheduler import BatchLimits, Scheduler
from ovspec.ir.memory import count_tokens_in_bytes, kv_bytes_per_token, recurrent_row_bytes

T = TypeVar("T")
MIN_CACHE_TOKENS = 32  # minimum size of the KV cache, in tokens
FREE_MEMORY_SHARE = 0.8  # maximum share of the free memory for KV caches
MAX_CONSTRAINT_SECONDS = 2.0  # for all slow steps of a text's grammar together: they delay the other texts
WARM_UP_TEXT = "The quick brown fox jumps over the lazy dog. " * 8


@dataclass(eq=False)
class Job:
    """The texts of a request, from its submission until all have ended.

    deliver: called in the engine thread after each round with the new pieces, (row's index in ``rows``, piece), or
        with an error at the end of a failed request.
    started: whether any of the rows has joined the batch.
    """

    rows: list[Row]
    deliver: Callable[[list[tuple[int, Piece]] | OvspecError], None]
    started: bool = False


@dataclass(eq=False)
class BackgroundTask:
    """Work for the engine thread in short steps between rounds, with little delay for texts.

    steps: a generator; each step should take a few milliseconds.
    cache_tokens: tokens of KV cache needed. The task waits for room, and keeps new rows waiting in the meantime.
    has_begun: whether it has got its room.
    future: the generator's return value, or an OvspecError if a step or the engine fails; may be cancelled.
    """

    steps: Generator[None, None, Any]
    cache_tokens: int = 0
    has_begun: bool = False
    future: Future[Any] = field(default_factory=Future)

    def set_error(self, error: OvspecError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EngineThread:
    """Continuous batching of all jobs' texts, in a separate thread.

    Args:
        runtime: the loaded model.
        max_rows: maximum number of rows in the batch.
        lookup_tokens: number of tokens of earlier texts to keep for lookup's proposals.
        prefill_tokens: prompt tokens per round; None to choose a number with little delay for other texts.
    """

    def __init__(
        self,
        runtime: Runtime,
        max_rows: int,
        lookup_tokens: int = 0,
        prefill_tokens: int | None = None,
    ) -> None:
        self.runtime = runtime
        # Called in the engine thread after each round with its pieces and (proposal, number of accepted tokens).
        self.on_round: Callable[[list[tuple[int, Piece]], list[tuple[Proposal, int]]], object] = lambda *_: None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # The scheduler's number of a waiting or running row -> its job, and its index in the job.
        self._jobs: dict[int, tuple[Job, int]] = {}
        self._tasks: list[BackgroundTask] = []
        self._fatal_error: OvspecError | None = None  # for all requests after a failure of the engine
        self._stopping = self._stopped = False
        self._command_lock = threading.Lock()  # for commands after the end of the thread's loop
        self._max_rows = max_rows
        self._lookup_tokens = lookup_tokens
        self._earlier_texts = NgramIndex()
        if lookup_tokens:
            runtime.models.corpora.append(self._earlier_texts)
        self._decoders = runtime.decoder_pool.acquire()
        self._drafter, self._lookahead = self._decoders.select_drafter_and_lookahead(
            runtime.row_maker.make_complete_params({})
        )
        feed_rule = self._decoders.target.rule
        costs = self._lookahead.target_costs if self._drafter else InferenceCosts(rule=feed_rule)
        self._prefill_budget = PrefillBudget(costs, feed_rule, not self._drafter, prefill_tokens)
        self._thread = threading.Thread(target=self._run_loop, name="ovspec engine", daemon=True)

    def start(self, warm_up: bool = True) -> None:
        """Determine how many tokens fit into memory, and start the thread.

        warm_up: for a server. Warm up first, move weights into large pages between rounds, and let the prefix cache
            use all the memory of KV caches, unless it has a lower limit.

        Raises OvspecError if the memory is too small for KV caches.
        """
        runtime = self.runtime
        irs = runtime.models.compiled_irs(self._drafter is not None)
        if warm_up:
            self._warm_up()
            self.add_task(BackgroundTask(step for ir in irs for step in ir.large_page_mover.move_in_steps()))
        self._cache_limit_bytes = runtime.models.cache_limit_bytes or (
            FREE_MEMORY_SHARE * psutil.virtual_memory().available
        )
        self.max_cache_tokens = int(min(count_tokens_in_bytes(irs, self._max_rows, self._cache_limit_bytes), 2**62))
        if self.max_cache_tokens < MIN_CACHE_TOKENS:
            advice = "raise `cache_size`" if runtime.models.cache_limit_bytes else "close other programs to free memory"
            raise OvspecError(
                f"The memory for KV caches holds only {max(0, self.max_cache_tokens)} tokens, but at least "
                f"{MIN_CACHE_TOKENS} are needed; {advice}."
            )
        if warm_up:
            runtime.models.free_idle_caches()  # from the warm-up
            runtime.models.limit_cached_tokens(self.max_cache_tokens)
        batch_limits = BatchLimits(
            self._max_rows,
            self.max_cache_tokens,
            runtime.models.rows_grow,
            self._prefill_budget,
            isolated_errors=(Exception,),
            max_constraint_seconds=MAX_CONSTRAINT_SECONDS,
        )
        self._scheduler = Scheduler(self._decoders.target, self._drafter, self._lookahead, (), batch_limits)
        self._thread.start()

    def _warm_up(self) -> None:
        """Generate some short texts, to compile kernels and measure costs before the first request."""
        row_maker = self.runtime.row_maker
        context_length = self.runtime.models.target.ir.context_length or len(WARM_UP_TEXT)
        prompt_ids = self.runtime.prompt_encoder.encode(WARM_UP_TEXT)[: context_length // 2]
        warm_up_batches: list[tuple[int, Drafter | None, Lookahead]] = [(1, self._drafter, self._lookahead)]
        if self._drafter:  # a fixed lookahead, to make sure the draft runs
            params = row_maker.make_complete_params({"lookahead": 2})
            warm_up_batches.append((1, *self._decoders.select_drafter_and_lookahead(params)))
        warm_up_batches += [(row_count, None, NO_LOOKAHEAD) for row_count in (2, 8) if row_count <= self._max_rows]
        for row_count, drafter, lookahead in warm_up_batches:
            params = row_maker.make_complete_params({"max_tokens": 8, "ignore_eos": True, "n": row_count})
            rows = row_maker.make_rows(prompt_ids, params, memory_reserved=True)
            batch_limits = BatchLimits(row_count, prefill_budget=self._prefill_budget)
            scheduler = Scheduler(self._decoders.target, drafter, lookahead, rows, batch_limits)
            while scheduler.run_next_round():
                pass
            scheduler.reset_decoders()

    # ------------------------------------------------------------ called from any thread

    def submit(self, job: Job) -> None:
        """Add a job to the queue; none of its rows may need more than ``max_cache_tokens``."""
        self._commands.put(lambda: self._add_job(job))
        if self._stopped:  # the thread may have ended without seeing the job
            self._run_last_commands()

    def cancel_job(self, job: Job) -> None:
        """Cancel a job's texts before the next round, without further calls of its ``deliver``."""
        self._commands.put(lambda: self._remove_job(job))

    def add_task(self, task: BackgroundTask) -> Future[Any]:
        """Queue a task; tasks run one at a time, because each may need a whole prompt's KV cache."""

        def queue_or_fail_task() -> None:
            if self._fatal_error:
                task.set_error(self._fatal_error)
            else:
                self._tasks.append(task)

        self._commands.put(queue_or_fail_task)
        return task.future

    def fail_all_requests(self, error: OvspecError) -> None:
        """End all requests with ``error``, whether running, waiting or future."""

        def fail_jobs_and_tasks() -> None:
            self._fatal_error = error
            self._fail_jobs({job for job, _ in self._jobs.values()}, error)
            for task in self._tasks:
                task.set_error(error)
            self._tasks.clear()
            self._scheduler.reserve_for_task(0)

        self._commands.put(fail_jobs_and_tasks)

    def stop(self, timeout_s: float = 10.0) -> None:
        """End the thread; running texts stop without further pieces."""
        self._stopping = True
        self._commands.put(lambda: None)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running_row_count(self) -> int:
        """Number of rows in the batch."""
        return len(self._scheduler.running_row_numbers)

    @property
    def waiting_row_count(self) -> int:
        """Number of rows waiting for the batch."""
        return len(self._scheduler.queue)

    def measure_cache_usage(self) -> CacheUsage:
        """Return the memory use of the KV caches of target and drafts."""
        models = self.runtime.models
        decoders = [self._decoders.target, *(self._decoders.drafts if self._drafter else [])]
        irs = models.compiled_irs(self._drafter is not None)
        token_bytes = sum(map(kv_bytes_per_token, irs))
        states_bytes = self.running_row_count * sum(map(recurrent_row_bytes, irs))
        used_bytes = [
            decoder.blocks_used * decoder.block_size * kv_bytes_per_token(ir)
            for decoder, ir in zip(decoders, irs, strict=True)
        ]
        return CacheUsage(
            limit_bytes=self._cache_limit_bytes,
            reserved_bytes=self._scheduler.reserved_token_count * token_bytes + states_bytes,
            used_bytes=sum(used_bytes) + states_bytes,
            kept_bytes=models.idle_cache_bytes,
            set_back_count=self._scheduler.set_back_count,
        )

    def count_cache_blocks(self) -> tuple[int, int]:
        """Return (used blocks, free blocks) of the target's KV cache; without blocks, one token is a block."""
        target = self._decoders.target
        used_blocks = target.blocks_used
        return used_blocks, max(0, self.max_cache_tokens // target.block_size - used_blocks)

    # ------------------------------------------------------------ in the engine thread

    def _run_loop(self) -> None:
        while not self._stopping:
            try:
                self._run_commands(wait_for_first=not self._jobs and not self._tasks)
                if self._tasks:
                    self._advance_task(self._tasks[0])
                if self._jobs:
                    self._run_batch_round()
            except BaseException as error:  # the thread must survive any error; a panic in Rust is no Exception
                row_numbers = self._scheduler.running_row_numbers
                running_jobs = {self._jobs[row_number][0] for row_number in row_numbers if row_number in self._jobs}
                self._fail_jobs(running_jobs, as_inference_error(error))
        self._stopped = True
        self._run_last_commands()

    def _run_last_commands(self) -> None:
        """Run the remaining commands at or after the end of the thread."""
        with self._command_lock:
            self._run_commands(wait_for_first=False)

    def _run_commands(self, wait_for_first: bool) -> None:
        """Run the queued commands of other threads; ``wait_for_first``: wait if there are none."""
        try:
            self._commands.get(block=wait_for_first)()
            while True:
                self._commands.get(block=False)()
        except queue.Empty:
            pass

    def _advance_task(self, task: BackgroundTask) -> None:
        task_tokens = min(task.cache_tokens, self.max_cache_tokens)
        if not task.has_begun:
            self._scheduler.reserve_for_task(task_tokens)
            if self._scheduler.free_token_count < 0:
                return  # wait for texts to end
            task.has_begun = True
            self._scheduler.reserve_for_task(task_tokens, has_begun=True)
        try:
            if not task.future.cancelled():
                next(task.steps)
                return
            task.steps.close()
        except StopIteration as stop_iteration:
            if task.future.set_running_or_notify_cancel():
                task.future.set_result(stop_iteration.value)
        except BaseException as error:
            task.set_error(as_inference_error(error))
        self._tasks.remove(task)
        self._scheduler.reserve_for_task(0)

    def _run_batch_round(self) -> None:
        pieces = self._scheduler.run_next_round() or []
        self.on_round(pieces, self._scheduler.last_outcome.proposals if self._scheduler.last_outcome else [])
        job_pieces: dict[Job, list[tuple[int, Piece]]] = {}
        job_errors: dict[Job, OvspecError] = {}
        for row_number, piece in pieces:
            job, job_index = self._jobs[row_number]
            job.started = True
            row = job.rows[job_index]
            if row.error:
                job_errors[job] = row.error if isinstance(row.error, OvspecError) else as_inference_error(row.error)
            if row.finish_reason:
                del self._jobs[row_number]
                if self._lookup_tokens and not row.error:
                    self._earlier_texts.remember_text(row.sequence.tokens, self._lookup_tokens)
            if piece.token_ids or piece.text or piece.finish_reason:
                job_pieces.setdefault(job, []).append((job_index, piece))
        for job, error in job_errors.items():
            job_pieces.pop(job, None)
            self._fail_jobs({job}, error)
        if not self._jobs:
            self._scheduler.reset_decoders()  # frees memory
        for job, new_pieces in job_pieces.items():
            job.deliver(new_pieces)

    def _add_job(self, job: Job) -> None:
        if self._fatal_error:
            job.deliver(self._fatal_error)
            return
        for job_index, row in enumerate(job.rows):
            self._jobs[self._scheduler.queue.add_row(row)] = job, job_index

    def _remove_job(self, job: Job) -> None:
        row_numbers = [row_number for row_number, (row_job, _) in self._jobs.items() if row_job is job]
        for row_number in row_numbers:
            del self._jobs[row_number]
        self._scheduler.remove_rows(row_numbers)
        if not self._scheduler.running_row_numbers:
            self._scheduler.reset_decoders()

    def _fail_jobs(self, jobs: set[Job], error: OvspecError) -> None:
        for job in jobs:
            self._remove_job(job)
        for job in jobs:
            job.deliver(error)


def run_steps(steps: Generator[None, None, T]) -> T:
    """Run all steps of a task at once, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop_iteration:
            return stop_iteration.value


def as_inference_error(error: BaseException) -> InferenceError:
    """Return the error to report to clients for ``error``, an error they didn't cause."""
    error_message = str(error)
    if not isinstance(error, OvspecError):
        error_message = (
            f"Text generation failed ({type(error).__name__}: {error}); try again, or report this bug to ovspec."
        )
    inference_error = InferenceError(error_message)
    inference_error.__cause__ = error
    return inference_error
