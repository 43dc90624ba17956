"""A bound on the tokens of an inference holds wherever the target is fed, and changes no text.

The weights are f32, with which no processor needs a bound, so that the texts without one are the reference.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS

import ovspec
from ovspec.cache.decoder import FAST, FeedRule, Rollback, inferences
from ovspec.cache.paged import PREFILL_CHUNK, PagedDecoder
from ovspec.cache.stateful import StatefulDecoder
from ovspec.drafting.costs import WIDEST, Costs
from ovspec.ir.compile import CompiledIR
from ovspec.ir.request import Request
from ovspec.openai.logprobs import at_once, prompt_logprobs
from ovspec.server.engine_thread import EngineThread, Job

MOST = 24
LONG_TEXT = "".join(PROMPTS[:3])
REPEATS = "for i in range(10):\n    print(i)\n" * 4
OPTIONS: Any = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def lm(pair: Path, cache_dir: Path) -> ovspec.LanguageModel:
    lm = ovspec.load(pair, "lookup", precision="f32", cache_dir=cache_dir, cache_memory=0)
    if lm.target.promise != "exact":
        pytest.skip(f"on this processor the arithmetic is {lm.target.promise}")
    lm.target.rule = replace(lm.target.rule, most=MOST)
    return lm


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list of the (tokens, logits) of each inference."""
    seen: list[tuple[int, int]] = []
    infer = Request.infer

    def noting(self: Request, arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        seen.append((arrays[0].size, len(logits_idx)))
        return infer(self, arrays, logits_idx)

    monkeypatch.setattr(Request, "infer", noting)
    return seen


def a_prompt(lm: ovspec.LanguageModel) -> Any:
    return lm.generate(LONG_TEXT, **OPTIONS).token_ids


def logits_after_a_prompt(lm: ovspec.LanguageModel) -> Any:
    return lm.next_logits(LONG_TEXT).tolist()


def rounds_with_proposals(lm: ovspec.LanguageModel) -> Any:
    results = lm.generate([REPEATS + prompt[:8] for prompt in PROMPTS[:8]], lookahead=8, **OPTIONS)
    assert sum(result.stats.accepted for result in results) > 0
    return [result.token_ids for result in results]


def many_rows(lm: ovspec.LanguageModel) -> Any:
    results = lm.samples(PROMPTS[0], n=32, batch_size=32, temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
    return [result.token_ids for result in results]


def a_session(lm: ovspec.LanguageModel) -> Any:
    with lm.session() as session:
        session.append(PROMPTS[0][:10])
        first = session.generate(**OPTIONS).token_ids
        session.append(LONG_TEXT)
        return first, session.generate(**OPTIONS).token_ids


def scores(lm: ovspec.LanguageModel) -> Any:
    with lm.session() as session:
        session.append(PROMPTS[0])
        found = session.select([prompt[:20] for prompt in PROMPTS[:12]])
        return found.index, found.logprobs, session.generate(**OPTIONS).token_ids


def log_probabilities_of_a_prompt(lm: ovspec.LanguageModel) -> Any:
    return at_once(prompt_logprobs(lm, lm.encode(LONG_TEXT).tolist(), 2))


def perplexity(lm: ovspec.LanguageModel) -> Any:
    return lm.perplexity(LONG_TEXT * 2, context=100).nats


def certificates(lm: ovspec.LanguageModel) -> Any:
    result = lm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    found = lm.verify(result)
    assert found.ok
    return found.exact


def a_server(lm: ovspec.LanguageModel) -> Any:
    """Rows that generate, some of which read prompts beside the others."""
    engine = EngineThread(lm, rows=6)
    engine.start()
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    texts = [*PROMPTS[:6], LONG_TEXT, LONG_TEXT[5:]]
    rows = [lm.runtime.rows(text, lm.runtime.params(OPTIONS), reserved=True)[0] for text in texts]
    for row in rows:
        engine.submit(Job([row], told.put))
    left = len(rows)
    while left:
        left -= sum(piece.finish_reason is not None for _, piece in told.get(timeout=60))
    engine.end()
    return [row.token_ids for row in rows]


PLACES = [
    a_prompt,
    logits_after_a_prompt,
    rounds_with_proposals,
    many_rows,
    a_session,
    scores,
    log_probabilities_of_a_prompt,
    perplexity,
    certificates,
    a_server,
]


@pytest.mark.parametrize("place", PLACES)
def test_the_bound_holds_wherever_the_target_is_fed(
    lm: ovspec.LanguageModel,
    widths: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[ovspec.LanguageModel], Any],
) -> None:
    bounded = place(lm)
    assert widths and max(map(max, widths)) <= MOST
    widths.clear()
    monkeypatch.setattr(PagedDecoder, "_most", PREFILL_CHUNK)
    assert place(lm) == bounded, "the bound changes a bit"
    assert max(map(max, widths)) > MOST, "nothing here exceeds the bound, so the test can't fail"


@pytest.mark.parametrize("rule", [FeedRule(most=7), FeedRule(most=7, apart=True)])
def test_the_stateful_engine_keeps_to_it(target_ir: CompiledIR, widths: list[tuple[int, int]], rule: FeedRule) -> None:
    text = np.random.default_rng(0).integers(3, 4096, 60)
    for wanted in (1, 8, 50, 60):
        whole, bounded = (StatefulDecoder(target_ir, Rollback("trim"), rule=each) for each in (FAST, rule))
        expected = whole.feed([text], [wanted])[0].copy()
        widths.clear()
        found = bounded.feed([text], [wanted])[0]
        assert found.shape == expected.shape and bounded.rows[0].tokens.tolist() == text.tolist()
        np.testing.assert_allclose(found, expected, atol=1e-3)
        assert max(tokens for tokens, _ in widths) == 7 and (widths[0][0] == 1) == rule.apart


def test_inferences_take_the_rows_in_order() -> None:
    assert list(inferences([3, 0, 4], 5)) == [[(0, 3), (0, 0), (0, 2)], [(3, 3), (0, 0), (2, 4)]]
    assert list(inferences([5], 5)) == [[(0, 5)]]
    random = np.random.default_rng(0)
    for _ in range(50):
        counts, most = random.integers(0, 9, 4).tolist(), int(random.integers(1, 12))
        parts = list(inferences(counts, most))
        assert all(0 < sum(end - begin for begin, end in each) <= most for each in parts)
        for row, count in enumerate(counts):
            assert [i for each in parts for i in range(*each[row])] == list(range(count))


def test_the_lookahead_knows_what_a_second_inference_costs() -> None:
    free, bounded = (Costs({1: 10.0, 2: 10.0, 16: 12.0, 256: 60.0}, 0.0, most=most) for most in (None, 32))
    assert (free.ms[:33] == bounded.ms[:33]).all()
    assert bounded(33) == bounded(32) + bounded(1) > free(33) + 9
    assert bounded(WIDEST) == 2 * bounded(32)


def test_prompts_fill_inferences_beside_others() -> None:
    assert FAST.room_beside(40, 100) == 100
    rule = FeedRule(most=64)
    for width, wanted, room in ((8, 100, 56), (8, 40, 40), (60, 3, 3), (100, 64, 28)):
        assert rule.room_beside(width, wanted) == room
    assert rule.room_beside(60, 100) == 68, "four tokens are too few to read a prompt by"
