"""Where memory runs out, rows are set back and read again: each text stays the one that it is alone."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiling import trust_paged
from conftest import ROOT
from random_pairs import PAIRS, shared_pair

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.drafting.costs import InferenceCosts
from ovspec.engine import cache_budget
from ovspec.engine import scheduler as scheduler_module
from ovspec.engine.decoders import NO_LOOKAHEAD
from ovspec.engine.prefill_budget import PrefillBudget
from ovspec.engine.row import Row
from ovspec.engine.scheduler import BatchLimits, Scheduler
from ovspec.integrations.branches import BranchPool
from ovspec.ir.memory import kv_bytes_per_token

Load = Callable[..., ovspec.LanguageModel]
REAL, REAL_HEAD = ROOT / "smollm2", ROOT / "models" / "smollm2-head"
SLOW = pytest.mark.slow
MANY = 1e-3  # gigabytes; the small pair's blocks are small
MOST = 90  # tokens of a text


@dataclass
class Text:
    """A prompt with its options, and the tokens that the model gives it alone."""

    prompt: list[int]
    options: dict[str, Any]
    alone: list[int]


@functools.cache
def texts_of(lm: ovspec.LanguageModel, count: int) -> list[Text]:
    """Return texts of random prompts, some of which begin in the same way, as they are without draft and cache."""
    random = np.random.default_rng(1)
    size = min(lm.tokenizer.known_ids.size or 500, 500)
    stem, texts = random.integers(5, size, 80).tolist(), list[Text]()
    for number in range(count):
        end = random.integers(5, size, int(random.integers(2, 60))).tolist()
        prompt = [*stem[: int(random.choice([0, 0, 40, 80]))], *end]
        options: dict[str, Any] = {"max_tokens": MOST, "ignore_eos": True}
        if number % 3 == 2:
            options |= {"temperature": 1.0, "seed": number}
        texts.append(Text(prompt, options, lm.generate(prompt, **options).token_ids))
    return texts


class Crowd:
    """Rows that come at random times and ask for more memory than there is, in rounds of their own."""

    def __init__(self, lm: ovspec.LanguageModel, texts: list[Text], seed: int) -> None:
        self.lm, self.texts, self.random = lm, texts, np.random.default_rng(seed)
        self.decoders = lm.runtime.decoder_pool.acquire()
        self.block = self.decoders.target.block_size
        self.victims = list[int]()
        self.rows: dict[int, tuple[Row, Text, int]] = {}
        asked = [texts[index] for index in self.random.choice(len(texts), int(self.random.integers(4, 9)))]
        self.asked = [(text, int(self.random.integers(20, MOST + 1))) for text in asked]
        longest = max(len(text.prompt) + count for text, count in self.asked)
        room = -(-longest // self.block) + int(self.random.integers(0, 2 if self.block > 1 else 20))
        self.limit = room * self.block
        drafter, lookahead = self.decoders.select_drafter_and_lookahead(
            lm.runtime.row_maker.make_complete_params({"lookahead": 3} if lm.runtime.models.draft_choice else {})
        )
        prefill = None
        if seed % 2:
            prefill = PrefillBudget(InferenceCosts(), self.decoders.target.rule, True, 24)
        self.scheduler = Scheduler(
            self.decoders.target, drafter, lookahead, (), BatchLimits(6, self.limit, True, prefill)
        )
        set_back = self.scheduler._set_back_row

        def noting(number: int) -> None:
            assert len(self.scheduler.running_row_numbers) > 1
            self.victims.append(number)
            set_back(number)

        self.scheduler._set_back_row = noting  # type: ignore[method-assign]

    def submit(self) -> None:
        text, count = self.asked.pop()
        params = self.lm.runtime.row_maker.make_complete_params(text.options | {"max_tokens": count})
        [row] = self.lm.runtime.row_maker.make_rows(text.prompt, params, memory_reserved=True)
        self.rows[self.scheduler.queue.add_row(row)] = row, text, count

    def run(self) -> int:
        """Run all rows to their ends, but some that are cancelled; return how often rows were set back."""
        cancelled = set[int]()
        while self.asked or any(not row.finish_reason for row, _, _ in self.rows.values()):
            if self.asked and (self.random.random() < 0.5 or not self.rows):
                self.submit()
            if self.rows and self.random.random() < 0.01:
                number = int(self.random.choice(list(self.rows)))
                if not self.rows[number][0].finish_reason:
                    self.scheduler.remove_rows([number])
                    cancelled.add(number)
            self.scheduler.run_next_round()
            if len(self.scheduler.running_row_numbers) > 1:
                assert self.decoders.target.blocks_used * self.block <= self.limit
        for number, (row, text, count) in self.rows.items():
            expected = text.alone[: len(row.token_ids) if number in cancelled else count]
            assert row.token_ids == expected, (number, cancelled)
            assert 0 <= row.stats.cached_tokens <= row.stats.prompt_tokens
        assert all(a != b for a, b in zip(self.victims, self.victims[1:], strict=False)), "nobody twice in a row"
        assert len(self.victims) == self.scheduler.set_back_count
        self.lm.runtime.decoder_pool.release(self.decoders)
        return len(self.victims)


@pytest.fixture(autouse=True)
def small_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows that join have little room to grow, so that short texts are set back, too."""
    monkeypatch.setattr(cache_budget, "JOINING_GROWTH_TOKENS", 36)
    monkeypatch.setattr(cache_budget, "MIN_ROUND_TOKENS", 4)


def start(lm: ovspec.LanguageModel, prompts: list[Any], blocks: int, tokens: int = 300, rows_grow: bool = True) -> Any:
    """Return a scheduler with room for ``blocks``, its rows and its decoders."""
    decoders = lm.runtime.decoder_pool.acquire()
    params = lm.runtime.row_maker.make_complete_params({"max_tokens": tokens, "ignore_eos": True})
    rows = [row for prompt in prompts for row in lm.runtime.row_maker.make_rows(prompt, params)]
    limits = BatchLimits(8, blocks * decoders.target.block_size, rows_grow)
    scheduler = Scheduler(decoders.target, None, NO_LOOKAHEAD, (), limits)
    for row in rows:
        scheduler.queue.add_row(row)
    return scheduler, rows, decoders


def run_until(scheduler: Scheduler, holds: Callable[[], bool]) -> int:
    rounds = 0
    while not holds():
        assert scheduler.run_next_round() is not None
        rounds += 1
    return rounds


def test_rows_that_ask_for_much_run_beside_each_other(load: Load) -> None:
    """As many as fit with what they have, though two would fit with what they ask for."""
    lm = load(draft="none", cache_memory=0)
    prompts = [f"def number_{number}(" for number in range(8)]
    for rows_grow, most in ((True, 8), (False, 2)):
        scheduler, rows, _ = start(lm, prompts, 40, 600, rows_grow)
        run_until(scheduler, lambda rows=rows: len(rows[0].token_ids) == 100)
        assert len(scheduler.running_row_numbers) == most
        assert scheduler.set_back_count == 0
        assert [len(row.token_ids) > 0 for row in rows] == [number < most for number in range(8)]


def test_the_youngest_is_set_back_and_nobody_twice_in_a_row(load: Load) -> None:
    lm = load(draft="none", cache_memory=0)
    scheduler, rows, decoders = start(lm, [[number + 5] * 30 for number in range(4)], 12, 200)
    run_until(scheduler, lambda: scheduler.set_back_count == 1)
    assert scheduler.running_row_numbers == [0, 1, 2], "the youngest"
    assert rows[3].waits_for_memory and not rows[0].waits_for_memory
    length = len(rows[3].token_ids)
    assert length > 30 and decoders.target.blocks_used <= 12
    run_until(scheduler, lambda: scheduler.set_back_count == 2)
    assert scheduler.running_row_numbers == [0, 1]
    run_until(scheduler, lambda: rows[0].finish_reason is not None)
    assert len(rows[3].token_ids) == length, "its tokens are kept"
    run_until(scheduler, lambda: all(row.finish_reason for row in rows))
    alone = [lm.generate([number + 5] * 30, max_tokens=200, ignore_eos=True).token_ids for number in range(4)]
    assert [row.token_ids for row in rows] == alone
    budget = cache_budget.CacheBudget(decoders.target, 100, True)
    assert [budget.choose_row_to_set_back([1, 2, 3]) for _ in range(3)] == [3, 2, 3]
    assert budget.choose_row_to_set_back([3]) == 3, "it is alone"


def test_an_older_row_takes_memory_back(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may wait for younger ones, because none is set back twice in a row, but not for long."""
    lm = load(draft="none", cache_memory=0)
    for seconds in (1e9, 0.0):
        monkeypatch.setattr(scheduler_module, "MAX_SECONDS_WITHOUT_ROOM", seconds)
        scheduler, rows, _ = start(lm, [[number + 5] * 30 for number in range(2)], 10, 280)
        run_until(scheduler, lambda rows=rows: len(rows[1].token_ids) == 60)
        scheduler._set_back_row(0)
        scheduler._budget.max_tokens = 5 * scheduler._target.block_size
        for _ in range(3):
            scheduler.run_next_round()
        assert scheduler.running_row_numbers == [int(seconds > 0)]
        run_until(scheduler, lambda rows=rows: all(row.finish_reason for row in rows))
        alone = [lm.generate([number + 5] * 30, max_tokens=280, ignore_eos=True).token_ids for number in range(2)]
        assert [row.token_ids for row in rows] == alone


def test_what_rows_share_counts_once_and_sessions_count(load: Load) -> None:
    lm = load(draft="none", cache_memory=0.1)
    prompt = np.random.default_rng(3).integers(5, 400, 320).tolist()
    scheduler, rows, decoders = start(lm, [[*prompt, end] for end in range(9, 15)], 22, 20)
    run_until(scheduler, lambda: len(scheduler.running_row_numbers) == 6)
    assert decoders.target.blocks_used <= 22, "of 66 blocks that they would take by themselves"
    run_until(scheduler, lambda: all(row.finish_reason for row in rows))
    scheduler.reset_decoders()
    with lm.session() as session:
        session.append(np.random.default_rng(4).integers(5, 400, 300).tolist())
        session.generate(max_tokens=4)
        scheduler, rows, _ = start(lm, [[number + 5] * 40 for number in range(4)], 22, 100)
        run_until(scheduler, lambda: all(row.finish_reason for row in rows))
        assert scheduler.set_back_count > 0
        scheduler.reset_decoders()
    scheduler, rows, _ = start(lm, [[number + 5] * 40 for number in range(4)], 22, 100)
    run_until(scheduler, lambda: all(row.finish_reason for row in rows))
    assert scheduler.set_back_count == 0


@pytest.mark.parametrize("options", [{}, {"engine": "stateful"}, {"cache_memory": 0}, {"arithmetic": "fast"}])
def test_cache_size_is_the_limit_of_all_texts(load: Load, options: dict[str, Any]) -> None:
    """Batches, samples, sessions and guidance's branches, each beside a session that has half of the memory."""
    cold = load(draft="none", **options)
    size = 640 * kv_bytes_per_token(cold.target.ir) / 1e9
    lm = load(draft="none", cache_size=size, **options)
    models = lm.runtime.models
    prompts, asked = [[number + 5] * 30 for number in range(8)], {"max_tokens": 200, "ignore_eos": True}
    with lm.session() as session:
        session.append([7] * 20)
        session.generate(max_tokens=300, ignore_eos=True)
        used = models.count_cached_tokens()
        assert 319 <= used <= 352
        most = list[int]()

        def count(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:  # noqa: ARG001
            most.append(models.count_cached_tokens())
            return logits

        results = lm.generate(prompts, logits_processors=[count], **asked)
        lm.samples(prompts[0], n=8, temperature=1.0, seed=1, logits_processors=[count], **asked)
        assert len(most) == 16 * 200 and used + 200 < max(most) <= 640
        if models.rows_grow:
            assert [found.token_ids for found in results] == [
                found.token_ids for found in cold.generate(prompts, **asked)
            ]
        for refused in (
            lambda: lm.generate(prompts[0], max_tokens=400),
            lambda: lm.session(context=400),
            lambda: session.generate(max_tokens=400),
        ):
            with pytest.raises(OvspecError, match=r"KV cache of 4\d\d tokens, but `cache_size` has room for \d+; "):
                refused()
        branches = BranchPool(lm)
        for number in range(4):  # of which two fit
            branches.request_logits([number + 5] * 100)
            assert models.count_cached_tokens() <= 640
        assert branches.counts.forks == 0 and len(branches._branches) == 2
        for branch in list(branches._branches):
            branches._drop_branch(branch)
        rest = session.generate(max_tokens=-1, ignore_eos=True)
        assert rest.finish_reason == "length" and models.count_cached_tokens() <= 640 + 32 and lm.verify(rest).ok
    alone = lm.generate(prompts[0], max_tokens=-1, ignore_eos=True)
    assert alone.finish_reason == "length" and 600 <= len(alone.token_ids) <= 610


def test_sessions_dropped_without_close_free_their_memory(load: Load) -> None:
    lm = load(draft="none", cache_memory=0.1)
    empty_session = lm.session()  # counts the blocks of all
    for _ in range(3):
        session = lm.session()
        session.append([7] * 40)
        session.generate(max_tokens=8, ignore_eos=True)
        fork = session.fork()
        fork.generate(max_tokens=8, ignore_eos=True)
        assert lm.runtime.models.count_cached_tokens() >= 64
        del session, fork
        gc.collect()
        assert lm.runtime.models.count_cached_tokens() == 0
    empty_session.close()


def test_a_task_that_waits_for_memory_sets_nobody_back(load: Load) -> None:
    """Rows would wait with it for the last of them; once there was room for it, they must leave it."""
    scheduler, rows, _ = start(load(draft="none", cache_memory=0), [[number + 5] * 30 for number in range(3)], 40, 100)
    scheduler.run_next_round()
    scheduler.reserve_for_task(39 * scheduler._target.block_size)
    assert scheduler.free_token_count < 0
    run_until(scheduler, lambda: len(rows[0].token_ids) == 50)
    assert scheduler.set_back_count == 0 and scheduler.running_row_numbers == [0, 1, 2]
    scheduler.reserve_for_task(33 * scheduler._target.block_size, has_begun=True)
    run_until(scheduler, lambda: len(rows[0].token_ids) == 80)
    assert scheduler.running_row_numbers == [0]
    scheduler.reserve_for_task(0)
    run_until(scheduler, lambda: all(row.finish_reason for row in rows))
    assert scheduler.set_back_count == 2


def test_a_row_that_was_set_back_can_be_cancelled(load: Load) -> None:
    lm = load(draft="none", cache_memory=0)
    scheduler, rows, decoders = start(lm, [[number + 5] * 30 for number in range(3)], 9, 200)
    run_until(scheduler, lambda: scheduler.set_back_count == 1)
    tokens = list(rows[2].token_ids)
    scheduler.remove_rows([2])
    assert rows[2].finish_reason == "cancelled" and rows[2].token_ids == tokens and len(tokens) > 20
    assert rows[2].stats.tpot_ms > 0 and not len(scheduler.queue)
    run_until(scheduler, lambda: rows[0].finish_reason is not None)
    assert decoders.target.blocks_used <= 9
    scheduler, rows, _ = start(lm, [[number + 5] * 30 for number in range(3)], 9, 200)
    run_until(scheduler, lambda: scheduler.set_back_count == 1)
    assert sorted(number for number, _ in scheduler.cancel_rows()) == [0, 1, 2]


def check_crowds(
    lm: ovspec.LanguageModel, cold: ovspec.LanguageModel, count: int, first_seed: int = 0, set_back: float = 0.6
) -> None:
    """Run ``count`` crowds; at least a share ``set_back`` of as many rows must be set back."""
    assert lm.runtime.models.rows_grow, "exact on every machine that runs these tests"
    texts = texts_of(cold, 10)
    found = [Crowd(lm, texts, first_seed + seed).run() for seed in range(count)]
    assert sum(map(bool, found)) > 0.3 * count and sum(found) > set_back * count


@pytest.mark.parametrize("memory", [0, MANY])
def test_forty_crowds(load: Load, memory: float) -> None:
    check_crowds(load(draft="lookup,draft", cache_memory=memory), load(draft="none", cache_memory=0), 40)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "qwen2-int8-head" else SLOW) for name in PAIRS]
)
def test_crowds_of_random_models(name: str, tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> None:
    folder = shared_pair(name, tmp_path_factory)
    with pytest.MonkeyPatch.context() as patched:
        trust_paged(patched)
        lm = ovspec.load(folder, ["lookup", folder / "draft"], cache_dir=cache_dir, cache_memory=MANY)
        cold = ovspec.load(folder, "none", cache_dir=cache_dir, cache_memory=0)
    check_crowds(lm, cold, 20)


@SLOW
def test_crowds_on_the_stateful_engine(cache_dir: Path) -> None:
    demo, options = ROOT / "models" / "demo", {"engine": "stateful", "arithmetic": "exact", "cache_dir": cache_dir}
    lm = ovspec.load(demo, ["lookup", demo / "draft"], cache_memory=MANY, **options)
    if not lm.runtime.models.rows_grow:
        pytest.skip("the stateful engine isn't exact on this machine")
    check_crowds(lm, ovspec.load(demo, "none", cache_memory=0, **options), 20, set_back=0.4)  # no blocks to fill


@SLOW
@pytest.mark.skipif(not REAL.is_dir(), reason="the real model could not be fetched")
def test_crowds_of_the_real_model(cache_dir: Path) -> None:
    cold = ovspec.load(REAL, "none", cache_dir=cache_dir, cache_memory=0)
    check_crowds(ovspec.load(REAL, ["lookup", REAL_HEAD], cache_dir=cache_dir, cache_memory=0.2), cold, 10)


@pytest.mark.soak
def test_a_thousand_crowds(load: Load) -> None:
    cold = load(draft="none", cache_memory=0)
    for draft in ("none", "lookup,draft"):
        for memory in (0.1, MANY):
            check_crowds(load(draft=draft, cache_memory=memory), cold, 250, 100)
