"""The engine by itself: what fails, fails alone, and reading prompts doesn't hold up those who generate."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS, STRICT_UNBOUND

import ovspec
from ovspec.base.errors import InferenceError, OvspecError
from ovspec.cache.prefill import PREFILL_THRESHOLD, should_wait_for_prefix
from ovspec.cache.sequence import Sequence
from ovspec.drafting.costs import InferenceCosts
from ovspec.drafting.lookahead import CATCH_UP_TOKENS, Lookahead
from ovspec.drafting.proposal import Proposal
from ovspec.engine.engine_thread import BackgroundTask, EngineThread, Job
from ovspec.engine.prefill_budget import (
    MAX_PROMPT_TOKENS,
    MAX_SLOWDOWN,
    MIN_JOINING_TOKENS,
    MIN_PROMPT_TOKENS,
    WIDTH_SLACK_TOKENS,
    PrefillBudget,
    RoundLoad,
)
from ovspec.engine.results import Piece
from ovspec.engine.round import RowOutcome
from ovspec.engine.row import Row
from ovspec.engine.scheduler import SLOW_STEP_SECONDS
from ovspec.ir.memory import kv_bytes_per_token
from ovspec.protocols.logprobs import compute_prompt_logprobs
from ovspec.sampling.constraint import Constraint

OPTIONS: Any = {"max_tokens": 30, "ignore_eos": True}


@pytest.fixture
def engine(load: Callable[..., ovspec.LanguageModel]) -> Iterator[EngineThread]:
    made = EngineThread(load(draft="lookup,draft", lookahead=3).runtime, max_rows=4)
    made.start()
    yield made
    made.stop()
    assert not made.is_alive


class Asked:
    """A job whose pieces are kept."""

    def __init__(self, engine: EngineThread, prompt: str, **options: Any) -> None:
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        whole: Any = {**OPTIONS, **options}
        self.rows = engine.runtime.row_maker.make_rows(
            prompt, engine.runtime.row_maker.make_complete_params(whole), memory_reserved=True
        )
        self.times: list[float] = []
        self.blocks, self._engine = 0, engine  # the most that all texts took while this one grew
        self.job = Job(self.rows, self._deliver)
        engine.submit(self.job)

    def _deliver(self, found: Any) -> None:
        self.times.append(time.perf_counter())
        self.blocks = max(self.blocks, self._engine.count_cache_blocks()[0])
        self._told.put(found)

    def result(self, seconds: float = 60.0) -> Any:
        """Return the tokens of the texts, or the error that ended them."""
        left = len(self.rows)
        while left:
            found = self._told.get(timeout=seconds)
            if isinstance(found, OvspecError):
                return found
            left -= sum(piece.finish_reason is not None for _, piece in found)
        return [row.token_ids for row in self.rows]


def lm_of(engine: EngineThread) -> ovspec.LanguageModel:
    return ovspec.LanguageModel(engine.runtime)


def counted(engine: EngineThread) -> Counter[tuple[str, str]]:
    """Return how many tokens of each drafter are proposed and accepted from now on, as ("accepted", "draft")."""
    counts = Counter[tuple[str, str]]()

    def note(_: Any, judged: list[tuple[Proposal, int]]) -> None:
        for proposal, accepted in judged:
            counts["proposed", proposal.source] += len(proposal.tokens)
            counts["accepted", proposal.source] += accepted

    engine.on_round = note
    return counts


def test_texts_are_those_of_generate(engine: EngineThread) -> None:
    counts, asked = counted(engine), [Asked(engine, prompt) for prompt in PROMPTS[:6]]
    alone = [lm_of(engine).generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS[:6]]
    assert [each.result()[0] for each in asked] == alone
    assert counts["accepted", "draft"] > 0


def test_a_failed_inference_fails_those_in_it_only(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    target, feed = engine._decoders.target, engine._decoders.target.feed
    all_asked, failures = threading.Event(), [InferenceError("CPU: OpenVINO failed to run the model (a test).")]

    def feed_or_fail(*arguments: Any, **options: Any) -> Any:
        all_asked.wait(30)
        if engine.running_row_count == 4 and failures:
            raise failures.pop()
        return feed(*arguments, **options)

    monkeypatch.setattr(target, "feed", feed_or_fail)
    running = [Asked(engine, prompt, max_tokens=200) for prompt in PROMPTS[:4]]
    waiting = Asked(engine, PROMPTS[5])
    all_asked.set()
    assert all(isinstance(each.result(), InferenceError) for each in running)
    assert waiting.result() == [lm_of(engine).generate(PROMPTS[5], **OPTIONS).token_ids]
    assert Asked(engine, PROMPTS[0]).result() == [lm_of(engine).generate(PROMPTS[0], **OPTIONS).token_ids]
    assert engine.count_cache_blocks()[0] == 0


def test_blocks_of_the_cache_are_counted(engine: EngineThread) -> None:
    used, free = engine.count_cache_blocks()
    assert used == 0 and free > 100
    size = engine._decoders.target.block_size  # type: ignore[attr-defined]
    asked = [Asked(engine, prompt, max_tokens=150) for prompt in PROMPTS[:3]]
    for each in asked:
        each.result()
    most, fewest = max(each.blocks for each in asked), min(each.blocks for each in asked)
    tokens = [len(row.sequence) for each in asked for row in each.rows]
    assert fewest > 0 and max(tokens) // size <= most <= sum(tokens) // size + 2 * len(tokens)
    assert engine.count_cache_blocks() == (0, free)


def test_weights_are_moved_into_large_pages_between_rounds(engine: EngineThread) -> None:
    first = Asked(engine, PROMPTS[0], max_tokens=200)
    first.result()
    irs = engine.runtime.models.compiled_irs()
    ends = time.monotonic() + 30
    while not all(ir.large_page_mover.is_done for ir in irs):
        assert time.monotonic() < ends
        time.sleep(0.01)


class Breaks(Constraint):
    """Fails at a text's tenth token."""

    def __init__(self, at: int, error: Exception) -> None:
        self._at, self._error = at, error

    def process_logits(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if len(tokens) >= self._at:
            raise self._error
        return logits


def test_background_tasks_run_one_after_the_other(engine: EngineThread) -> None:
    steps, ended = list[str](), threading.Event()

    def task(name: str) -> Generator[None]:
        for _ in range(3):
            steps.append(name)
            yield

    def last() -> Generator[None]:
        ended.set()
        yield

    for each in (task("a"), task("b"), last()):
        engine.add_task(BackgroundTask(each))
    assert ended.wait(60)
    assert steps == [*"aaabbb"]


def test_a_background_task_that_fails_leaves_the_server_alive(engine: EngineThread) -> None:
    def task() -> Generator[None]:
        yield
        raise ValueError("planted")

    failing = BackgroundTask(task())
    engine.add_task(failing)
    assert "planted" in str(failing.future.exception(60))
    assert Asked(engine, PROMPTS[0], max_tokens=1).result() == [[lm_of(engine).generate(PROMPTS[0]).token_ids[0]]]


def endless() -> Generator[None]:
    while True:
        yield


def test_giving_up_ends_what_is_yet_to_come(engine: EngineThread) -> None:
    running, tasks = Asked(engine, PROMPTS[0], max_tokens=1000), [BackgroundTask(endless()), BackgroundTask(endless())]
    engine.add_task(tasks[0])
    engine.fail_all_requests(OvspecError("The end."))
    later = Asked(engine, PROMPTS[1])
    engine.add_task(tasks[1])
    engine.stop()
    last = Asked(engine, PROMPTS[2])
    assert {str(each.result(10)) for each in (running, later, last)} == {"The end."}
    assert {str(each.future.exception(60)) for each in tasks} == {"The end."}


def test_a_cancelled_background_task_makes_room_for_the_next(engine: EngineThread) -> None:
    cancelled = BackgroundTask(endless())
    engine.add_task(cancelled)
    next_one = BackgroundTask(compute_prompt_logprobs(lm_of(engine), [100] * 40, 0), 40)
    engine.add_task(next_one)
    assert cancelled.future.cancel()
    assert len(next_one.future.result(60)) == 40


def test_a_row_waits_only_for_what_nobody_has_read() -> None:
    text, other = [*range(200)], [*range(100), *range(500, 600)]

    def waits(reading: list[list[int]], read: list[list[int]], owner: int | None = None) -> bool:
        new = Sequence(text)
        new.owner = owner
        return should_wait_for_prefix(new, map(Sequence, reading), map(Sequence, read))

    assert waits([text], []) and waits([text], [other]) and waits([other], [])
    assert not waits([], []) and not waits([text], [text]) and not waits([other], [other])
    assert not waits([[*range(20), 7]], []) and not waits([text], [], owner=1)


def test_a_text_that_cannot_go_on_fails_alone(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it is a draft's guess that first goes too far."""
    monkeypatch.setattr(Lookahead, "can_afford_drafting", lambda *_: True)
    monkeypatch.setattr(Lookahead, "should_draft", lambda *_: True)
    others = [Asked(engine, prompt) for prompt in PROMPTS[:2]]
    start = len(engine.runtime.prompt_encoder.encode(PROMPTS[3]))
    broken = Breaks(start + 9, OvspecError("No token can be chosen."))
    failing = Asked(
        engine, PROMPTS[3], logits_processors=[lambda tokens, logits: broken.process_logits(logits, tokens)]
    )
    assert "No token can be chosen" in str(failing.result())
    for other, prompt in zip(others, PROMPTS[:2], strict=True):
        assert other.result() == [lm_of(engine).generate(prompt, **OPTIONS).token_ids]


def test_any_other_error_leaves_the_server_alive(engine: EngineThread) -> None:
    broken = Breaks(0, RuntimeError("a defect"))
    failing = Asked(
        engine, PROMPTS[3], logits_processors=[lambda tokens, logits: broken.process_logits(logits, tokens)]
    )
    found = failing.result()
    assert isinstance(found, InferenceError) and "RuntimeError: a defect" in str(found)
    assert Asked(engine, PROMPTS[0]).result() == [lm_of(engine).generate(PROMPTS[0], **OPTIONS).token_ids]


class Panic(BaseException):
    """What code in Rust raises when it panics is no Exception."""


def test_a_panic_leaves_the_server_alive(engine: EngineThread) -> None:
    broken = Breaks(0, Panic("a defect"))  # type: ignore[arg-type]
    failing = Asked(
        engine, PROMPTS[3], logits_processors=[lambda tokens, logits: broken.process_logits(logits, tokens)]
    )
    assert "Panic: a defect" in str(failing.result())
    assert Asked(engine, PROMPTS[0]).result() == [lm_of(engine).generate(PROMPTS[0], **OPTIONS).token_ids]


def test_a_text_whose_end_cannot_be_judged_fails_alone(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may fail when it is asked whether it is complete, after the round."""
    take = Row.add_outcome

    def taking(row: Row, outcome: RowOutcome) -> Piece:
        if row.prompt_length == marked and len(row.token_ids) > 5:
            raise OvspecError("The grammar fails.")
        return take(row, outcome)

    marked = len(engine.runtime.prompt_encoder.encode(PROMPTS[3]))
    assert marked not in [len(engine.runtime.prompt_encoder.encode(prompt)) for prompt in PROMPTS[:2]]
    monkeypatch.setattr(Row, "add_outcome", taking)
    others, failing = [Asked(engine, prompt) for prompt in PROMPTS[:2]], Asked(engine, PROMPTS[3])
    assert "The grammar fails" in str(failing.result())
    assert len(failing.rows[0].token_ids) > 5
    monkeypatch.undo()
    for other, prompt in zip(others, PROMPTS[:2], strict=True):
        assert other.result() == [lm_of(engine).generate(prompt, **OPTIONS).token_ids]


def test_a_slow_grammar_ends_before_others_have_waited_long(
    load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps below ``SLOW_STEP_SECONDS`` don't count, however many there are."""
    monkeypatch.setattr("ovspec.engine.engine_thread.MAX_CONSTRAINT_SECONDS", 0.3)

    def burning(seconds: float) -> Any:
        def burn(_: Any, logits: np.ndarray) -> np.ndarray:
            ends = time.thread_time() + seconds
            while time.thread_time() < ends:
                pass
            return logits

        return burn

    engine = EngineThread(load(draft="lookup,draft").runtime, max_rows=4)
    engine.start()
    slow = Asked(engine, PROMPTS[3], logits_processors=[burning(1.1 * SLOW_STEP_SECONDS)])
    steady = Asked(engine, PROMPTS[1], logits_processors=[burning(0.02)], max_tokens=40)
    assert "takes too long" in str(slow.result())
    assert 0 < len(slow.rows[0].token_ids) < 8
    assert steady.result() == [lm_of(engine).generate(PROMPTS[1], max_tokens=40, ignore_eos=True).token_ids]
    engine.stop()


def test_a_background_task_waits_for_memory_and_rows_wait_for_it(load: Callable[..., ovspec.LanguageModel]) -> None:
    lm = load(draft="none", cache_size=700 * kv_bytes_per_token(load(draft="none").target.ir) / 1e9)
    engine = EngineThread(lm.runtime, max_rows=4)
    engine.start()
    assert 600 <= engine.max_cache_tokens <= 700
    order = list[str]()

    def task() -> Generator[None]:
        assert engine.running_row_count == 0
        order.append("background task")
        yield
        assert engine.running_row_count == 0
        order.append("background task")

    first = Asked(engine, PROMPTS[0], max_tokens=300)
    while not first.job.started:
        time.sleep(0.005)
    engine.add_task(BackgroundTask(task(), cache_tokens=600))
    second = Asked(engine, PROMPTS[1], max_tokens=60)
    first.result()
    second.result()
    assert order == ["background task", "background task"] and second.times[0] > first.times[-1]
    assert second.rows[0].token_ids == lm.generate(PROMPTS[1], max_tokens=60, ignore_eos=True).token_ids
    engine.stop()


def test_cancelled_rows_leave(engine: EngineThread) -> None:
    jobs = [Asked(engine, prompt, max_tokens=150) for prompt in PROMPTS[:6]]
    while not jobs[0].job.started:
        time.sleep(0.005)
    for each in jobs[:5]:
        engine.cancel_job(each.job)
    assert jobs[5].result() == [lm_of(engine).generate(PROMPTS[5], max_tokens=150, ignore_eos=True).token_ids]
    assert all(row.finish_reason == "cancelled" for each in jobs[:5] for row in each.rows)
    assert engine.running_row_count == engine.waiting_row_count == 0


def test_earlier_texts_are_proposed_from(load: Callable[..., ovspec.LanguageModel]) -> None:
    """With a lookup memory; the texts stay the same."""
    found = []
    for memory in (0, 5000):
        lm = load(draft="lookup", lookahead=4)
        lm.runtime.models.corpora.clear()
        engine = EngineThread(lm.runtime, max_rows=2, lookup_tokens=memory)
        engine.start()
        counts = counted(engine)
        texts = [Asked(engine, PROMPTS[1], temperature=1.0, seed=3).result() for _ in range(2)]
        assert texts[0] == texts[1]
        found.append((texts[0], counts["accepted", "lookup"]))
        engine.stop()
        lm.runtime.models.corpora.clear()
    assert found[0][0] == found[1][0]
    assert found[1][1] > found[0][1] + 10


@pytest.mark.parametrize("per_token", [0.05, 0.5, 2.0])
def test_the_pace_keeps_rounds_short(per_token: float) -> None:
    """A round that reads a prompt may take ``MAX_SLOWDOWN`` times as long as a plain one of all rows.

    Whatever a token or a row costs, and whatever the costs of widths say.
    """

    def ms(load: RoundLoad, read: int) -> float:
        return 20 + 3 * load.generating_rows + per_token * (load.catch_up_tokens + load.proposed_tokens + read)

    prefill_budget = PrefillBudget(InferenceCosts({2: 20.0, 32: 50.0}, 0.0), STRICT_UNBOUND, teaches_costs=False)
    assert prefill_budget.choose_prompt_token_count(RoundLoad(0, 8)) == MAX_PROMPT_TOKENS
    for rows in range(1, 9):
        for _ in range(20):
            prefill_budget.learn_costs(RoundLoad(rows), 0, ms(RoundLoad(rows), 0))
    for generating in range(1, 9):
        load, most, read = RoundLoad(generating, 8 - generating), MAX_SLOWDOWN * ms(RoundLoad(8), 0), 0
        for _ in range(80):
            read = prefill_budget.choose_prompt_token_count(load)
            prefill_budget.learn_costs(load, read, ms(load, read))
        assert (
            read in (MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS)
            or ms(load, read) > most - (WIDTH_SLACK_TOKENS + 1) * per_token - 1
        )
        assert read == MIN_PROMPT_TOKENS or ms(load, read) <= most + 1
        busy = replace(load, proposed_tokens=8)
        assert prefill_budget.choose_prompt_token_count(busy, drafting_ms=5.0) < read or read in (
            MIN_PROMPT_TOKENS,
            MAX_PROMPT_TOKENS,
        )


def test_the_width_of_rounds_stays_while_it_nearly_fits() -> None:
    prefill_budget = PrefillBudget(InferenceCosts({2: 20.0, 32: 50.0}, 0.0), STRICT_UNBOUND, teaches_costs=False)
    widths = set()
    for number in range(40):
        load = RoundLoad(4 + number % 2, 4 - number % 2)
        read = prefill_budget.choose_prompt_token_count(load, drafting_ms=0.1 * (number % 3))
        prefill_budget.learn_costs(load, read, 20 + load.generating_rows + read + 0.1 * (number % 5))
        widths.add(load.non_prompt_tokens + read)
    assert len(widths) < 5


def test_the_ends_of_prompts_count_as_reading() -> None:
    prefill_budget = PrefillBudget(InferenceCosts({2: 20.0, 32: 110.0}, 0.0), STRICT_UNBOUND, teaches_costs=False)
    assert (
        prefill_budget.choose_prompt_token_count(RoundLoad(2, 1))
        == MIN_PROMPT_TOKENS
        > prefill_budget.choose_prompt_token_count(RoundLoad(2, 1, catch_up_tokens=MIN_PROMPT_TOKENS - 3))
        == 3
    )
    assert prefill_budget.choose_prompt_token_count(RoundLoad(2, 1, catch_up_tokens=30)) == MIN_JOINING_TOKENS


def test_proposals_give_way_to_prompts() -> None:
    prefill_budget = PrefillBudget(InferenceCosts({2: 20.0, 32: 26.0}, 0.0), STRICT_UNBOUND, teaches_costs=False)
    assert prefill_budget.max_proposal_ms(RoundLoad(1), 0) == math.inf, "a row that is alone keeps nobody waiting"
    left = [prefill_budget.max_proposal_ms(RoundLoad(4, 1), unread) for unread in (0, 20, 40, 400)]
    assert left[0] > left[1] > left[2] > left[3] == 0
    assert prefill_budget.max_proposal_ms(RoundLoad(5), 0) < (MAX_SLOWDOWN - 1) * 21 + 1
    assert (
        PrefillBudget(InferenceCosts({2: 20.0}), STRICT_UNBOUND, teaches_costs=False, fixed_tokens=256).max_proposal_ms(
            RoundLoad(4, 4), 900
        )
        == math.inf
    )
    assert PrefillBudget(InferenceCosts(), STRICT_UNBOUND, teaches_costs=True).max_proposal_ms(RoundLoad(4), 1) == 0, (
        "costs aren't known yet"
    )
    rooms = [
        PrefillBudget(
            InferenceCosts({2: 20.0, 32: 26.0}, 0.0), STRICT_UNBOUND, teaches_costs=False
        ).choose_prompt_token_count(RoundLoad(4, 1, 0, proposed))
        for proposed in (0, 20, 40)
    ]
    assert rooms[0] > rooms[1] > rooms[2], "what is proposed takes time that prompts could have"


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 37, 400])
def test_a_chosen_chunk_is_what_rounds_read(
    load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Whatever that takes; the texts stay those of ``generate``."""
    lm = load(draft="lookup,draft")
    prompts = [f"# {number}\n{' '.join(PROMPTS)[: 200 + 700 * number]}" for number in range(3)]
    alone = [lm.generate(prompt, max_tokens=12, ignore_eos=True).token_ids for prompt in prompts]
    engine = EngineThread(lm.runtime, max_rows=3, prefill_tokens=chunk)
    engine.start()
    target, fed = engine._decoders.target, list[list[int]]()
    feed = target.feed

    def noting(tokens: list[np.ndarray], *rest: Any) -> Any:
        fed.append([len(new) for new in tokens])
        return feed(tokens, *rest)

    monkeypatch.setattr(target, "feed", noting)
    asked = [Asked(engine, prompt, max_tokens=12) for prompt in prompts]
    assert [each.result()[0] for each in asked] == alone
    engine.stop()
    most = max(row.stats.prompt_tokens for each in asked for row in each.rows)
    read = [sum(count for count in counts if count > PREFILL_THRESHOLD) for counts in fed]
    assert most > 400
    assert max(read) == (chunk if chunk > PREFILL_THRESHOLD else 0)
    assert len(fed) > (most - PREFILL_THRESHOLD) // chunk


@pytest.mark.slow  # tests/drafting/test_lookahead.py says how much a draft may read at a time
def test_a_draft_reads_prompts_in_parts(
    load: Callable[..., ovspec.LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often the draft is asked; the texts stay those of ``generate``."""
    prompts = [f"# {number}\n{' '.join(PROMPTS)[: 1500 + 300 * number]}" for number in range(4)]
    lm = load(draft="draft")
    alone = [lm.generate(prompt, max_tokens=200, ignore_eos=True).token_ids for prompt in prompts]
    monkeypatch.setattr(Lookahead, "can_afford_drafting", lambda *_: True)
    monkeypatch.setattr(Lookahead, "should_draft", lambda *_: True)
    engine = EngineThread(lm.runtime, max_rows=4)
    engine.start()
    (draft,) = engine._decoders.drafts
    fed, feed = list[list[int]](), draft.feed

    def noting(tokens: list[np.ndarray], *rest: Any) -> Any:
        fed.append([len(new) for new in tokens])
        return feed(tokens, *rest)

    monkeypatch.setattr(draft, "feed", noting)
    counts = counted(engine)
    asked = [Asked(engine, prompt, max_tokens=200) for prompt in prompts]
    assert [each.result()[0] for each in asked] == alone
    assert counts["proposed", "draft"] > 0
    engine.stop()
    together = [counts for counts in fed if sum(count > 0 for count in counts) > 1]
    read = [sum(count for count in counts if count >= CATCH_UP_TOKENS // 4) for counts in together]
    assert 0 < max(read) <= CATCH_UP_TOKENS and sum(read) > 500


def test_generating_goes_on_while_prompts_are_read(engine: EngineThread) -> None:
    first = Asked(engine, PROMPTS[0], max_tokens=300)
    while len(first.times) < 20:
        time.sleep(0.005)
    before = len(first.times)
    long = "\n".join(PROMPTS * 2)[:6000]
    other = Asked(engine, long, max_tokens=3)
    other.result()
    read = other.rows[0].stats.prompt_tokens
    assert read > 500
    assert len(first.times) - before > 4, "the first text must grow while the other's prompt is read"
    first.result()
    assert other.rows[0].token_ids == lm_of(engine).generate(long, max_tokens=3, ignore_eos=True).token_ids
