"""The bounds on the tokens and logits of an inference hold wherever the target is fed, and change no text.

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
from moves import moving_texts

import ovspec
from ovspec.cache.decoder import FAST_RULE, FeedRule, RollbackMethod, compute_logits_indices, split_into_inferences
from ovspec.cache.paged import MAX_INFERENCE_TOKENS, PagedDecoder
from ovspec.cache.stateful import StatefulDecoder
from ovspec.drafting.costs import WIDEST_INFERENCE, InferenceCosts
from ovspec.engine.decoders import DecoderPool
from ovspec.engine.engine_thread import EngineThread, Job, run_steps
from ovspec.ir.compile import CompiledIR
from ovspec.ir.request import InferenceRequest
from ovspec.protocols.logprobs import compute_prompt_logprobs

MOST = 24
FEWEST, FEWEST_LOGITS = 5, 7
LONG_TEXT = "".join(PROMPTS[:3])
REPEATS = "for i in range(10):\n    print(i)\n" * 4
OPTIONS: Any = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def lm(pair: Path, cache_dir: Path) -> ovspec.LanguageModel:
    lm = ovspec.load(pair, "lookup", precision="f32", cache_dir=cache_dir, cache_memory=0)
    if lm.target.arithmetic_note != "exact":
        pytest.skip(f"on this processor the arithmetic is {lm.target.arithmetic_note}")
    lm.target.feed_rule = replace(lm.target.feed_rule, fewest=FEWEST, most=MOST, fewest_logits=FEWEST_LOGITS)
    return lm


@pytest.fixture(scope="module")
def keeping(pair: Path, cache_dir: Path, lm: ovspec.LanguageModel) -> ovspec.LanguageModel:
    """Return the same model with a prefix cache."""
    keeping = ovspec.load(pair, "lookup", precision="f32", cache_dir=cache_dir)
    keeping.target.feed_rule = lm.target.feed_rule
    return keeping


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list of the (tokens, logits) of each inference."""
    seen: list[tuple[int, int]] = []
    infer = InferenceRequest.infer

    def noting(self: InferenceRequest, arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        if "draft" not in self._ir.folder.parts:
            seen.append((arrays[0].size, len(logits_idx)))
        return infer(self, arrays, logits_idx)

    monkeypatch.setattr(InferenceRequest, "infer", noting)
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
    return run_steps(compute_prompt_logprobs(lm, lm.encode(LONG_TEXT).tolist(), 2))


def perplexity(lm: ovspec.LanguageModel) -> Any:
    return lm.perplexity(LONG_TEXT * 2, context=100).nats


def certificates(lm: ovspec.LanguageModel) -> Any:
    result = lm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    found = lm.verify(result)
    assert found.ok
    return found.exact


def a_server(lm: ovspec.LanguageModel) -> Any:
    """Rows that generate, some of which read prompts beside the others."""
    engine = EngineThread(lm.runtime, max_rows=6)
    engine.start()
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    texts = [*PROMPTS[:6], LONG_TEXT, LONG_TEXT[5:]]
    rows = [
        lm.runtime.row_maker.make_rows(text, lm.runtime.row_maker.make_complete_params(OPTIONS), memory_reserved=True)[
            0
        ]
        for text in texts
    ]
    for row in rows:
        engine.submit(Job([row], told.put))
    left = len(rows)
    while left:
        left -= sum(piece.finish_reason is not None for _, piece in told.get(timeout=60))
    engine.stop()
    return [row.token_ids for row in rows]


def short_texts(lm: ovspec.LanguageModel) -> Any:
    """Rows that are shorter than an inference has to be, alone, in pairs and joined by others."""
    ids = [[5], [6], [7, 8], [9]]
    alone = [lm.generate(tokens, **OPTIONS).token_ids for tokens in ids]
    together = lm.generate(ids, batch_size=2, max_tokens=3, ignore_eos=True)
    return alone, [result.token_ids for result in together]


def rewinds_and_forks(lm: ovspec.LanguageModel) -> Any:
    return moving_texts(lm, [prompt[:6] for prompt in PROMPTS], max_tokens=12, lookahead=0)


def prefix_hits(lm: ovspec.LanguageModel) -> Any:
    results = [lm.generate(LONG_TEXT[:400], **OPTIONS) for _ in range(2)]
    return [result.token_ids for result in results]


def forced_tokens(lm: ovspec.LanguageModel) -> Any:
    return lm.generate("{", choice=["abcdefgh", "abcdefgi", "x"], max_tokens=20).token_ids


PLACES = [
    a_prompt,
    short_texts,
    rewinds_and_forks,
    prefix_hits,
    forced_tokens,
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
def test_the_bounds_hold_wherever_the_target_is_fed(
    lm: ovspec.LanguageModel,
    keeping: ovspec.LanguageModel,
    widths: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[ovspec.LanguageModel], Any],
) -> None:
    lm = keeping if place is prefix_hits else lm
    bounded = place(lm)
    assert widths and max(map(max, widths)) <= MOST
    assert not is_narrow(widths)
    widths.clear()
    monkeypatch.setattr(PagedDecoder, "_max_tokens", MAX_INFERENCE_TOKENS)
    monkeypatch.setattr(lm.target, "feed_rule", replace(lm.target.feed_rule, fewest=1, fewest_logits=1))
    monkeypatch.setattr(lm.runtime, "decoder_pool", DecoderPool(lm.runtime.models))
    assert place(lm) == bounded, "the bound changes a bit"
    narrow = place in (short_texts, rewinds_and_forks, prefix_hits, forced_tokens)
    exceeds = is_narrow(widths) if narrow else max(map(max, widths)) > MOST
    assert exceeds, "nothing here exceeds the bounds, so the test can't fail"


def is_narrow(widths: list[tuple[int, int]]) -> bool:
    """Return whether an inference has too few tokens or logits."""
    return any(tokens < FEWEST or logits < FEWEST_LOGITS for tokens, logits in widths)


@pytest.mark.parametrize("draft", [pytest.param("draft", marks=pytest.mark.slow), "lookup,draft"])
def test_the_bounds_hold_beside_a_draft(
    pair: Path, cache_dir: Path, lm: ovspec.LanguageModel, widths: list[tuple[int, int]], draft: str
) -> None:
    expected = moving_texts(lm, PROMPTS, max_tokens=12, lookahead=0)
    drafting = ovspec.load(pair, draft, precision="f32", cache_dir=cache_dir)
    drafting.target.feed_rule = lm.target.feed_rule
    widths.clear()
    assert moving_texts(drafting, PROMPTS, max_tokens=12, lookahead=3) == expected
    assert widths and not is_narrow(widths)


def no_filling(decoder: type[PagedDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "_fill_up_inference", lambda self, computed, width: computed)  # noqa: ARG005


def no_filling_behind_short_rows(decoder: type[PagedDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    fill_up = decoder._fill_up_inference

    def filled(self: PagedDecoder, computed: list[tuple[int, np.ndarray]], width: int) -> Any:
        cached = sum([begin for begin, new in computed if len(new)])
        return fill_up(self, computed, width) if cached >= FEWEST else computed

    monkeypatch.setattr(decoder, "_fill_up_inference", filled)


def a_fork_without_the_rule(decoder: type[PagedDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    fork = decoder.fork

    def forked(self: PagedDecoder) -> PagedDecoder:
        other = fork(self)
        other.rule, other._padded_token_counts = (
            replace(other.rule, fewest=1),
            list(range(len(other._padded_token_counts))),
        )
        return other

    monkeypatch.setattr(decoder, "fork", forked)


def no_more_logits(decoder: type[PagedDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    del decoder

    def positions(counts: Any, wanted: Any, fewest: int, packed: bool = False) -> np.ndarray:
        return compute_logits_indices(counts, wanted, min(fewest, 2), packed)

    monkeypatch.setattr("ovspec.cache.paged.compute_logits_indices", positions)


@pytest.mark.parametrize(
    ("plant", "place"),
    [
        (no_filling, a_prompt),
        (no_filling_behind_short_rows, short_texts),
        (a_fork_without_the_rule, rewinds_and_forks),
        (no_more_logits, a_prompt),
    ],
)
def test_a_place_that_ignores_the_rule_is_found(
    lm: ovspec.LanguageModel,
    widths: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[..., None],
    place: Callable[[ovspec.LanguageModel], Any],
) -> None:
    plant(PagedDecoder, monkeypatch)
    place(lm)
    assert is_narrow(widths)


@pytest.mark.parametrize("rule", [FeedRule(most=7), FeedRule(most=7, first_apart=True, rows_apart=True)])
def test_the_stateful_engine_keeps_to_it(target_ir: CompiledIR, widths: list[tuple[int, int]], rule: FeedRule) -> None:
    text = np.random.default_rng(0).integers(3, 4096, 60)
    for wanted in (1, 8, 50, 60):
        whole, bounded = (StatefulDecoder(target_ir, RollbackMethod("trim"), rule=each) for each in (FAST_RULE, rule))
        expected = whole.feed([text], [wanted])[0].copy()
        widths.clear()
        found = bounded.feed([text], [wanted])[0]
        assert found.shape == expected.shape and bounded.rows[0].tokens.tolist() == text.tolist()
        np.testing.assert_allclose(found, expected, atol=1e-3)
        assert max(tokens for tokens, _ in widths) == 7 and (widths[0][0] == 1) == rule.first_apart


def test_inferences_take_the_rows_in_order() -> None:
    assert list(split_into_inferences([3, 0, 4], 5)) == [[(0, 3), (0, 0), (0, 2)], [(3, 3), (0, 0), (2, 4)]]
    assert list(split_into_inferences([5], 5)) == [[(0, 5)]]
    random = np.random.default_rng(0)
    for _ in range(50):
        counts, most = random.integers(0, 9, 4).tolist(), int(random.integers(1, 12))
        parts = list(split_into_inferences(counts, most))
        assert all(0 < sum(end - begin for begin, end in each) <= most for each in parts)
        for row, count in enumerate(counts):
            assert [i for each in parts for i in range(*each[row])] == list(range(count))


def test_the_lookahead_knows_what_a_second_inference_costs() -> None:
    free, bounded = (
        InferenceCosts({1: 10.0, 2: 10.0, 16: 12.0, 256: 60.0}, 0.0, rule=FeedRule(most=most)) for most in (None, 32)
    )
    assert (free.ms_by_width[:33] == bounded.ms_by_width[:33]).all()
    assert bounded(33) == bounded(32) + bounded(1) > free(33) + 9
    assert bounded(WIDEST_INFERENCE) == 2 * bounded(32)


def test_prompts_fill_inferences_beside_others() -> None:
    assert FAST_RULE.choose_token_count_to_add(40, 100) == 100
    rule = FeedRule(most=64)
    for width, wanted, room in ((8, 100, 56), (8, 40, 40), (60, 3, 3), (100, 64, 28)):
        assert rule.choose_token_count_to_add(width, wanted) == room
    assert rule.choose_token_count_to_add(60, 100) == 68, "four tokens are too few to read a prompt by"
