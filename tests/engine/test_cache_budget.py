"""Where memory runs out, rows are set back and read again: each text stays the one that it is alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiling import trust_paged
from conftest import PROMPTS, ROOT
from random_pairs import PAIRS, shared_pair

import ovspec
from ovspec.cache.block_pool import BlockPool
from ovspec.cache.blocks import BlockTensors
from ovspec.engine import cache_budget, scheduler
from ovspec.engine.prefill_budget import PrefillBudget
from ovspec.engine.results import Piece
from ovspec.engine.row import Row
from ovspec.engine.scheduler import BatchLimits, Scheduler
from ovspec.drafting.costs import InferenceCosts

Load = Callable[..., ovspec.LanguageModel]
REAL, REAL_HEAD = ROOT / "smollm2", ROOT / "models" / "smollm2-head"
SLOW = pytest.mark.slow
MANY = 1e-3  # gigabytes; the small pair's blocks are small
MOST = 60  # tokens of a text


@dataclass
class Text:
    """A prompt with its options, and the tokens that the model gives it alone."""

    prompt: list[int]
    options: dict[str, Any]
    alone: list[int]


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
        self.asked = [(text, int(self.random.integers(1, MOST + 1))) for text in asked]
        longest = max(len(text.prompt) + count for text, count in self.asked)
        room = -(-longest // self.block) + int(self.random.integers(0, 4 if self.block > 1 else 60))
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
    monkeypatch.setattr(cache_budget, "JOINING_GROWTH_TOKENS", 4)
    monkeypatch.setattr(cache_budget, "MIN_ROUND_TOKENS", 8)


def check_crowds(lm: ovspec.LanguageModel, cold: ovspec.LanguageModel, count: int, first_seed: int = 0) -> None:
    assert lm.runtime.models.rows_grow, "exact on every machine that runs these tests"
    texts = texts_of(cold, 20)
    found = [Crowd(lm, texts, first_seed + seed).run() for seed in range(count)]
    assert sum(map(bool, found)) > 0.3 * count and sum(found) > 0.6 * count


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
    check_crowds(lm, ovspec.load(demo, "none", cache_memory=0, **options), 20)


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
