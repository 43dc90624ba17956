"""Every drafter, with every way of choosing tokens, gives the text of plain decoding, which is Hugging Face's."""

from __future__ import annotations

import copy
import itertools
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS, ROOT, TARGET, Reference
from hypothesis import given
from hypothesis import strategies as st

import ovspec
from ovspec.cache.sequence import Sequence
from ovspec.drafting.chain import DrafterChain
from ovspec.drafting.choice import DraftChoice, parse_draft
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import (
    MAX_INDEX_EXCESS_TOKENS,
    MAX_MATCH_TOKENS,
    MIN_MATCH_TOKENS,
    LookupDrafter,
    NgramIndex,
    index_texts,
)
from ovspec.sampling.samplers import GreedySampler
from ovspec.setup.engine_choice import EngineName
from ovspec.setup.model_folders import resolve_draft
from ovspec.text.generation_config import GenerationConfigFile

Load = Callable[..., ovspec.LanguageModel]
TOKENS = 32
SOME = PROMPTS[:3]


class Earlier(ovspec.Drafter):
    """Proposes what followed the previous occurrence of the last token."""

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        places = np.flatnonzero(tokens[:-1] == tokens[-1])
        return tokens[places[-1] + 1 :][:budget] if len(places) else []


def first_letters(logits: np.ndarray, tokens: np.ndarray, among: int) -> int:
    """A user's sampler: picks one of the ``among`` most likely tokens, depending on the tokens so far."""
    best = np.argsort(-logits[0])[:among]
    return int(best[int(tokens.sum()) % among])


DRAFTS: dict[str, Any] = {"model": True, "lookup": "lookup", "chain": "lookup,draft", "own": Earlier}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"repetition_penalty": 1.05, "frequency_penalty": 0.05, "logit_bias": {34: 2.0}, "min_tokens": 20},
    "T=1": {"temperature": 1.0, "seed": 5},
    "narrow": {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.3, "seed": 6},
    "typical": {"temperature": 0.5, "typical_p": 0.9, "seed": 7},
    "user": {"sampler": first_letters, "sampler_options": {"among": 2}},
}


SLOW = pytest.mark.slow
# Quick runs have every choice once, most with the chain, which has both kinds of drafters; slow runs have all pairs.
QUICK = {
    ("chain", "narrow"),
    ("chain", "typical"),
    ("chain", "user"),
    ("model", "T=1"),
    ("lookup", "penalised"),
    ("own", "greedy"),
}
CASES = [
    pytest.param(draft, choice, marks=() if (draft, choice) in QUICK else SLOW)
    for draft in DRAFTS
    for choice in CHOICES
]


@pytest.mark.parametrize("lookaheads", [(4, "auto"), pytest.param((1, 2, 8), marks=SLOW)], ids=["some", "more"])
@pytest.mark.parametrize("engine", [pytest.param("stateful", marks=SLOW), "paged"])
@pytest.mark.parametrize(("draft", "choice"), CASES)
def test_every_drafter_gives_the_plain_text(
    load: Load, draft: str, engine: EngineName, choice: str, lookaheads: tuple[Any, ...]
) -> None:
    options, lm = CHOICES[choice], load(draft=DRAFTS[draft], engine=engine)
    plain = [lm.generate(prompt, max_tokens=TOKENS, lookahead=0, **options) for prompt in SOME]
    assert all(result.stats.proposed == 0 for result in plain)
    for lookahead in lookaheads:
        alone = [lm.generate(prompt, max_tokens=TOKENS, lookahead=lookahead, **options) for prompt in SOME]
        batch = lm.generate(SOME, max_tokens=TOKENS, lookahead=lookahead, **options)
        for results in (alone, batch):
            assert [result.token_ids for result in results] == [result.token_ids for result in plain]
            stats = [result.stats for result in results]
            if lookahead != "auto":
                assert sum(s.proposed for s in stats) > 0
                assert sum(s.accepted for s in stats) > 0
            assert all(s.rounds <= s.generated_tokens <= s.rounds + s.accepted for s in stats)
            assert {name for s in stats for name in s.drafters} <= {
                "model": {"draft"},
                "chain": {"draft", "lookup"},
            }.get(draft, {"lookup" if draft == "lookup" else "Earlier"})


@pytest.mark.parametrize("draft", ["chain", *[pytest.param(name, marks=SLOW) for name in DRAFTS if name != "chain"]])
def test_rejection_proposes_and_ends_the_same_way(load: Load, draft: str) -> None:
    """The texts depend on the draft, and the same draft gives the same text; test_sampling checks the distribution."""
    lm = load(draft=DRAFTS[draft])
    options: dict[str, Any] = {"temperature": 0.6, "seed": 3, "accept": "rejection", "max_tokens": TOKENS}
    twice = [[lm.generate(prompt, lookahead=4, **options) for prompt in SOME] for _ in range(2)]
    assert [result.token_ids for result in twice[0]] == [result.token_ids for result in twice[1]]
    assert sum(result.stats.accepted for result in twice[0]) > 0
    without = lm.generate(SOME[0], lookahead=0, **options)
    assert without.token_ids == lm.generate(SOME[0], **options | {"accept": "compare", "lookahead": 0}).token_ids


class Failing(Earlier):
    """Proposes until ``error`` is set, which ``where`` then raises."""

    def __init__(self, error: BaseException, where: str) -> None:
        self.error, self.where = error, where

    def reset(self, rows: int) -> None:
        if self.where == "reset" and rows:
            raise self.error

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        if self.where == "guess":
            raise self.error
        return super().guess(tokens, budget)


@pytest.mark.parametrize("where", ["guess", "reset"])
@pytest.mark.parametrize("chained", [False, True])
def test_a_drafter_that_fails_is_named(load: Load, where: str, chained: bool) -> None:
    lm, error = load(draft=True), ValueError("no idea.")

    def drafting(drafter: Any) -> ovspec.LanguageModel:
        return lm.with_drafters(parse_draft(["lookup", drafter] if chained else drafter))

    said = "^The drafter Failing raised ValueError: no idea; fix the drafter, or leave it out.$"
    with pytest.raises(ovspec.OvspecError, match=said) as raised:
        drafting(Failing(error, where)).generate("a b c", max_tokens=20, lookahead=3)
    assert raised.value.__cause__ is error
    with pytest.raises(KeyboardInterrupt):
        drafting(Failing(KeyboardInterrupt(), where)).generate("a b c", max_tokens=20, lookahead=3)

    def make() -> Any:
        raise error

    with pytest.raises(ovspec.OvspecError, match="The drafter make raised ValueError"):
        drafting(make).generate("a", max_tokens=4)

    class Plain:
        def guess(self, tokens: np.ndarray, budget: int) -> list[int]:  # noqa: ARG002
            return []

    with pytest.raises(ovspec.OvspecError, match=r"The drafter Plain is not an `ovspec.Drafter`"):
        drafting(Plain).generate("a", max_tokens=4)


def test_each_row_has_the_proposal_of_one_drafter_within_its_budget() -> None:
    class First(Drafter):
        def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:  # noqa: ARG002
            return itertools.repeat(1) if tokens[0] == 0 else []

    class Second(Drafter):
        def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:  # noqa: ARG002
            assert tokens[0] != 0, "it has a proposal"
            return itertools.repeat(2)

    rows = [
        RowToDraft(Sequence([begin]), GreedySampler(), budget) for begin, budget in ((0, 9), (1, 4), (0, 3), (2, 1))
    ]
    found = DrafterChain(First(), Second()).propose(rows, Lookahead(5))
    assert [each.tokens.tolist() for each in found] == [[1] * 5, [2] * 3, [1] * 2, []]


def test_guesses_without_end_are_cut(load: Load) -> None:
    class Endless(ovspec.Drafter):
        def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:  # noqa: ARG002
            return itertools.repeat(5)

    lm = load(draft=True)
    result = lm.with_drafters(parse_draft(Endless)).generate(SOME[0], max_tokens=20, lookahead=3)
    assert result.stats.proposed > 0
    assert result.token_ids == lm.generate(SOME[0], max_tokens=20, lookahead=0).token_ids


def test_a_drafter_is_counted_by_its_own_name(load: Load) -> None:
    class Named(Earlier):
        name = "mine"

    for drafter, name in ((Earlier(), "Earlier"), (lambda: Earlier(), "Earlier"), (Named, "mine"), (Named(), "mine")):
        lm = load(draft=True).with_drafters(parse_draft(drafter))
        pieces = list(lm.stream(PROMPTS[0], max_tokens=TOKENS, lookahead=3))
        assert {source for piece in pieces for source in piece.sources} == {"target", name}
        assert set(lm.generate(PROMPTS[0], max_tokens=TOKENS, lookahead=3).stats.drafters) == {name}


@pytest.mark.parametrize("draft", DRAFTS)
def test_one_inference_a_round(load: Load, draft: str) -> None:
    with load(draft=DRAFTS[draft]).session() as session:
        session.append(PROMPTS[0])
        assert session._decoders
        before = session._decoders.target.inferences
        result = session.generate(max_tokens=40, ignore_eos=True, lookahead=4)
        assert session._decoders.target.inferences - before == result.stats.rounds < 40


QUICK_SAMPLES = ((True, "stateful"), ("lookup,draft", "paged"))


def test_penalties_as_hugging_face(load: Load, reference: Reference) -> None:
    """Greedy texts agree token for token, with every option that Hugging Face also has."""
    lm = load(draft="lookup,draft")
    bias = {34: 3.0, 12: -5.0}
    for prompt in SOME:
        ids = reference.tokenizer(prompt, return_tensors="pt")
        out = reference.model.generate(
            **ids,
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
            repetition_penalty=1.2,
            min_new_tokens=25,
            sequence_bias=[[[token], value] for token, value in bias.items()],
        )
        expected = out[0, ids["input_ids"].shape[1] :].tolist()
        options: dict[str, Any] = {"repetition_penalty": 1.2, "min_tokens": 25, "logit_bias": bias}
        for lookahead in (0, 4):
            assert lm.generate(prompt, max_tokens=TOKENS, lookahead=lookahead, **options).token_ids == expected


def test_logprobs_as_hugging_face(load: Load, reference: Reference) -> None:
    sampled: dict[str, Any] = {"temperature": 1.0, "top_k": 5, "seed": 1}
    for options in ({}, sampled):
        result = load(draft=True).generate(PROMPTS[1], max_tokens=12, lookahead=3, logprobs=4, **options)
        assert result.logprobs
        assert len(result.logprobs) == len(result.token_ids)
        prompt = load().encode(PROMPTS[1]).tolist()
        logits = reference.logits([*prompt, *result.token_ids])[len(prompt) - 1 : -1].astype(float)
        expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        for token, found, right in zip(result.token_ids, result.logprobs, expected, strict=True):
            assert found.token_id == token
            assert abs(found.logprob - right[token]) < 1e-4
            assert [i for i, _ in found.top] == np.argsort(-right)[:4].tolist()
            assert all(abs(value - right[i]) < 1e-4 for i, value in found.top)


@pytest.mark.parametrize(
    ("draft", "engine"),
    [
        pytest.param(draft, engine, marks=() if (draft, engine) in QUICK_SAMPLES else SLOW)
        for draft in (False, True, "lookup,draft")
        for engine in ("stateful", "paged")
    ],
)
def test_samples_of_one_prompt(load: Load, draft: Any, engine: EngineName) -> None:
    """The prompt is read once. The texts differ, and each is the same whatever it is generated together with."""
    lm = load(draft=draft, engine=engine, cache_memory=0)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 9, "max_tokens": 20, "ignore_eos": True}
    began = time.perf_counter()
    four = lm.samples(PROMPTS[0], n=4, **options)
    elapsed = (time.perf_counter() - began) * 1e3
    assert len({result.text for result in four}) == 4
    assert four[0].token_ids == lm.generate(PROMPTS[0], **options).token_ids
    assert [r.token_ids for r in lm.samples(PROMPTS[0], n=2, **options)] == [r.token_ids for r in four[:2]]
    both = lm.samples(PROMPTS[:2], n=3, **options)
    assert [r.token_ids for r in both[0]] == [r.token_ids for r in four[:3]]
    assert both[1][0].token_ids == lm.generate(PROMPTS[1], **options).token_ids
    assert lm.generate(PROMPTS[:2], **options)[1].token_ids == both[1][0].token_ids
    options["seed"] = None
    free = lm.samples(PROMPTS[:2], n=2, **options)
    assert free[0][0].stats.seed == free[0][1].stats.seed != free[1][0].stats.seed
    options["seed"] = free[0][0].stats.seed
    again = lm.samples(PROMPTS[0], n=2, **options)
    assert [r.token_ids for r in again] == [r.token_ids for r in free[0]]
    assert four[0].stats.cached_tokens == 0
    for stats in (result.stats for result in four):
        assert min(stats.target_ms, stats.other_ms) > 0
        assert stats.target_ms + stats.draft_ms + stats.other_ms <= elapsed


@pytest.mark.parametrize(
    ("draft", "engine"),
    [
        pytest.param(draft, engine, marks=() if (draft, engine) == (True, "paged") else SLOW)
        for draft in (False, True, "lookup,draft")
        for engine in ("stateful", "paged")
    ],
)
def test_the_loop_takes_less_time_than_the_target(draft: Any, engine: EngineName, cache_dir: Path) -> None:
    lm = ovspec.load(ROOT / "models" / "demo", draft, engine=engine, precision="f32", cache_dir=cache_dir)
    [first, *_] = lm.samples(PROMPTS[0], n=4, temperature=1.0, seed=9, max_tokens=20, ignore_eos=True)
    assert first.stats.other_ms < first.stats.target_ms


def test_greedy_samples_are_all_the_same(load: Load) -> None:
    texts = load().samples("a", n=2, max_tokens=8)
    assert [each.text for each in texts] == [load().generate("a", max_tokens=8).text] * 2
    with pytest.raises(ovspec.OvspecError, match=re.escape("call samples()")):
        load().generate("a", n=2, temperature=1.0)


def test_seeds(load: Load) -> None:
    lm = load(draft=True)
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 16, "ignore_eos": True}
    first = lm.generate(PROMPTS[0], **options)
    assert first.stats.seed is not None
    assert lm.generate(PROMPTS[0], seed=first.stats.seed, **options).token_ids == first.token_ids
    assert lm.generate(PROMPTS[0], **options).token_ids != first.token_ids
    assert lm.generate(PROMPTS[0], max_tokens=2).stats.seed is None
    sampling = ovspec.SamplingParams(temperature=1.0, seed=4, max_tokens=9, ignore_eos=True)
    assert (
        lm.generate(PROMPTS[0], sampling=sampling).token_ids
        == lm.generate(PROMPTS[0], **options | {"seed": 4, "max_tokens": 9}).token_ids  # type: ignore[arg-type]
    )


def test_min_tokens_and_stop_ids(load: Load) -> None:
    lm = load(draft=True)
    whole = lm.generate(PROMPTS[0], max_tokens=20, ignore_eos=True)
    stop = whole.token_ids[4]
    for lookahead in (0, 4):
        result = lm.generate(PROMPTS[0], max_tokens=20, ignore_eos=True, stop_ids=[stop], lookahead=lookahead)
        first = whole.token_ids.index(stop)
        assert (result.finish_reason, result.token_ids) == ("stop", whole.token_ids[: first + 1])
        assert result.text == lm.tokenizer.decode(whole.token_ids[:first])
        # Before min_tokens, a stop id can't be generated, and stop strings aren't searched for.
        later = lm.generate(PROMPTS[0], max_tokens=20, min_tokens=8, stop_ids=[stop], lookahead=lookahead)
        assert len(later.token_ids) >= 8
        assert stop not in later.token_ids[:8]
        text = lm.generate(
            PROMPTS[0], max_tokens=20, min_tokens=9, ignore_eos=True, stop=whole.text[3], lookahead=lookahead
        )
        assert len(text.token_ids) >= 9


def test_generation_config_penalties_are_applied(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load()
    expected = lm.generate(PROMPTS[0], max_tokens=16, repetition_penalty=1.5, logit_bias={34: -np.inf}).token_ids
    monkeypatch.setattr(
        lm.generation_config,
        "settings",
        GenerationConfigFile(repetition_penalty=1.5, suppress_tokens=[34], eos_token_id=0),
    )
    assert lm.generate(PROMPTS[0], max_tokens=16).token_ids == expected
    assert lm.generate(PROMPTS[0], max_tokens=16, repetition_penalty=1.0).token_ids != expected


@pytest.mark.parametrize("options", [{"logit_bias": {9999: 1.0}}, {"stop_ids": [-1]}])
def test_ids_that_are_not_in_the_vocabulary(load: Load, options: dict[str, Any]) -> None:
    with pytest.raises(ovspec.OvspecError, match="is not in the vocabulary"):
        load().generate("a", **options)


# ---------------------------------------------------------------- user drafters


class Reckless(ovspec.Drafter):
    """Proposes more tokens than it may, and ids that don't exist."""

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        assert len(tokens)
        return [5, 6, 99_999, 7, *range(budget)]


def test_a_drafter_that_goes_astray_changes_nothing(load: Load) -> None:
    lm = load(draft=Reckless)
    result = lm.generate(PROMPTS[0], max_tokens=20, lookahead=8)
    assert result.token_ids == load().generate(PROMPTS[0], max_tokens=20).token_ids
    assert 0 < result.stats.proposed <= 2 * (result.stats.rounds - 1), "tokens after an unknown id are dropped"


def test_a_drafter_object_and_what_makes_one(load: Load) -> None:
    a, b = load(draft=Earlier), load(draft=Earlier())
    assert a.generate(PROMPTS[0], max_tokens=9).token_ids == b.generate(PROMPTS[0], max_tokens=9).token_ids
    both = load(draft=("lookup", Earlier))
    assert both.generate(PROMPTS[0], max_tokens=9).token_ids == b.generate(PROMPTS[0], max_tokens=9).token_ids


class Counting(ovspec.Drafter):
    """Keeps a count for each row in a list that only ``reset`` creates."""

    def reset(self, rows: int) -> None:
        self.rows = [0] * rows

    def reorder(self, rows: list[int]) -> None:
        self.rows = [0 if row < 0 else self.rows[row] for row in rows]

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        assert self.rows
        self.rows[0] += 1
        return tokens[-1:][:budget]


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[:2]], ids=["one", "batch"])
def test_a_drafter_is_reset_before_anything_else(load: Load, prompt: Any) -> None:
    lm = load(draft=Counting).with_drafters(parse_draft(Counting))  # a new drafter, not used yet
    lm.generate(prompt, max_tokens=5, lookahead=2)
    lm.generate(prompt, max_tokens=5, lookahead=2)


class Slow(ovspec.Drafter):
    """Slow, and never right."""

    calls = 0

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        Slow.calls += 1
        time.sleep(0.05)
        return [(int(tokens[-1]) + 1) % 4096][:budget]


def test_a_drafter_that_loses_is_hardly_asked(load: Load) -> None:
    result = load(draft=Slow).generate(PROMPTS[0], max_tokens=100, ignore_eos=True)
    assert result.stats.generated_tokens == 100
    assert 0 < Slow.calls < 20


@pytest.mark.parametrize("draft", [pytest.param("lookup", marks=SLOW), "lookup,draft"])
def test_auto_in_a_batch_too_wide_for_it(load: Load, draft: str) -> None:
    """With so many rows, a round exceeds the widths with known costs: it decodes plainly, or with few proposals."""
    prompts = [PROMPTS[i % 20][: 40 + i] for i in range(70)]
    lm = load(draft=draft)
    for count in (20, 70):
        together = lm.generate(prompts[:count], max_tokens=8, ignore_eos=True)
        plain = lm.generate(prompts[:count], max_tokens=8, ignore_eos=True, lookahead=0)
        assert [r.token_ids for r in together] == [r.token_ids for r in plain]


# ---------------------------------------------------------------- values of --draft


def parsed(draft: Any, folder: Path) -> DraftChoice | None:
    return resolve_draft(parse_draft(draft), folder)


def test_what_a_draft_may_be(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    exported = parsed(True, tmp_path)
    assert exported
    assert exported.model == tmp_path / "draft"
    assert parsed("none", tmp_path) is parsed(None, tmp_path) is parsed(False, tmp_path) is None
    chain = parsed("lookup, draft", tmp_path)
    assert chain
    assert (chain.lookup, chain.model) == (True, tmp_path / "draft")
    assert parsed(["lookup", True], tmp_path) == chain
    assert parsed(f"lookup,{tmp_path}", tmp_path).model == tmp_path  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("draft,lookup", "must come first"),
        ("draft,draft", "must come last"),
        ("lookup,lookup", "must come first"),
        (["lookup", Earlier, True], "two different drafters"),
        ("self", "not made from the target's layers"),
        ("lookup,", "is not a draft"),
        (3, "is not a draft"),
    ],
)
def test_drafts_that_cannot_be(tmp_path: Path, draft: Any, message: str) -> None:
    (tmp_path / "draft").mkdir()
    with pytest.raises(ovspec.OvspecError, match=message):
        parsed(draft, tmp_path)


@pytest.mark.slow
def test_self(tmp_path: Path, cache_dir: Path, load: Load) -> None:
    """The draft is the target's first layers, exported by --draft-layers."""
    from ovspec_export import Compression, export_pair

    folder = tmp_path / "own"
    export_pair(str(TARGET), None, folder, Compression("fp32"), draft_layers=1)
    lm = ovspec.load(folder, "lookup,self", precision="f32", cache_dir=cache_dir)
    result = lm.generate(PROMPTS[0], max_tokens=20, lookahead=2)
    assert result.token_ids == load().generate(PROMPTS[0], max_tokens=20).token_ids
    assert result.stats.drafters["draft"]["proposed"] > 0


# ---------------------------------------------------------------- lookup


def naive(texts: list[list[int]]) -> tuple[int, list[list[int]]]:
    """Return (length of the longest match with the end of the last text, what followed each match), by full search."""
    tail, best, followed = texts[-1][-MAX_MATCH_TOKENS:], 0, []
    for text in texts:
        for end in range(MIN_MATCH_TOKENS, len(text)):
            match = 0
            while match < min(end, len(tail)) and text[end - 1 - match] == tail[-1 - match]:
                match += 1
            if match > best:
                best, followed = match, []
            if match == best:
                followed.append(text[end:])
    return (best, followed) if best >= MIN_MATCH_TOKENS else (0, [])


@given(st.lists(st.integers(0, 3), min_size=3, max_size=30))
def test_the_longest_match_is_found(tokens: list[int]) -> None:
    index = NgramIndex()
    for end in range(1, len(tokens) + 1):  # as the text grows
        index.follow_sequence(Sequence(tokens[:end]))
    match, places = index.find_matches(np.array(tokens[-MAX_MATCH_TOKENS:]))
    expected, followed = naive([tokens])
    assert match == expected
    text = index._indexed_text.tokens.tolist()
    assert [text[place:] for place in places] == followed[::-1]


@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=20), st.integers(0, 20), st.lists(st.integers(0, 2), max_size=9)
)
def test_a_rewound_text_is_still_known(first: list[int], keep: int, more: list[int]) -> None:
    index, sequence = NgramIndex(), Sequence(first)
    index.follow_sequence(sequence)
    sequence.rewind(min(keep, len(first)))
    sequence.commit(more)
    index.follow_sequence(sequence)
    now = sequence.tokens.tolist()
    if len(now) >= MIN_MATCH_TOKENS:
        match, places = index.find_matches(np.array(now[-MAX_MATCH_TOKENS:]))
        assert match >= naive([now])[0] if len(now) > MAX_MATCH_TOKENS else True
        text = index._indexed_text.tokens.tolist()
        assert all(text[place - match : place] == now[len(now) - match :] for place in places)


def test_rewinding_again_and_again_takes_no_more_memory() -> None:
    index, sequence = NgramIndex(), Sequence(range(100))
    for turn in range(5000):
        sequence.commit([10_000 + turn, 20_000 + turn, 30_000 + turn, *range(2000, 2020)])
        index.follow_sequence(sequence)
        assert len(index._indexed_text) <= 2 * MAX_INDEX_EXCESS_TOKENS
        earlier = np.array([10_000, 20_000, 30_000]) + turn - 300
        assert turn < 300 or index.find_matches(earlier)[0] == 3, "what was rolled back lately is known"
        assert index.find_matches(np.arange(50))[0] == MAX_MATCH_TOKENS, "so is the text itself"
        sequence.rewind(100)


def test_the_most_frequent_and_then_the_latest_goes_on() -> None:
    index = NgramIndex()
    index.follow_sequence(Sequence([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8, 1, 2]))
    match, places = index.find_matches(np.array([9, 1, 2])[-2:])
    assert match == 2
    assert index.find_continuation(places, 2)[0] == [3, 8], "3 followed twice; then 9 and 8 tie, and 8 is the latest"
    tie = NgramIndex()
    tie.follow_sequence(Sequence([1, 2, 3, 9, 1, 2, 4, 8, 1, 2]))
    assert tie.find_continuation(tie.find_matches(np.array([1, 2]))[1], 2) == ([4, 8], [0.5, 1.0])


def test_a_text_that_repeats_goes_on_repeating() -> None:
    index = NgramIndex()
    index.follow_sequence(Sequence([7, 1, 2, 3, 1, 2, 3]))
    match, places = index.find_matches(np.array([1, 2, 3]))
    assert match == 3
    assert index.find_continuation(places, 8)[0] == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_corpus_does_not_run_into_the_next_text() -> None:
    index = index_texts([np.array([1, 2, 3]), np.array([4, 5, 6])])
    assert index.find_continuation(index.find_matches(np.array([1, 2]))[1], 5)[0] == [3]
    assert index.find_matches(np.array([3, 4])) == (0, [])


def test_lookup_copies_its_rows() -> None:
    lookup = LookupDrafter()
    lookup.reset(1)
    lookup._row_indexes[0].follow_sequence(Sequence([1, 2, 3]))
    lookup.reorder([0, 0])
    lookup._row_indexes[0].follow_sequence(Sequence([1, 2, 3, 4]))
    assert len(lookup._row_indexes[1]._followed_sequence) == 3
    assert copy.deepcopy(lookup)._row_indexes[0]._followed_sequence.tokens.tolist() == [1, 2, 3, 4]


def test_lookup_corpus(load: Load, tmp_path: Path) -> None:
    """If a file has the text that the model is about to generate, few rounds are needed."""
    text = load().generate(PROMPTS[0], max_tokens=48, ignore_eos=True).text
    file = tmp_path / "notes.txt"
    file.write_text("something else\n" + PROMPTS[0] + text, encoding="utf-8")
    lm = load(draft="lookup", lookup_corpus=(str(file),))
    result = lm.generate(PROMPTS[0], max_tokens=48, ignore_eos=True, lookahead=8)
    assert result.text == text
    assert result.stats.rounds < 16
    assert load(draft="lookup").generate(PROMPTS[0], max_tokens=48, ignore_eos=True, lookahead=8).stats.rounds > 16
    with pytest.raises(ovspec.OvspecError, match="give a text file"):
        load(draft="lookup", lookup_corpus=(str(tmp_path / "none.txt"),))
    with pytest.raises(ovspec.OvspecError, match="`lookup_corpus` needs prompt lookup"):
        load(draft=True, lookup_corpus=(str(file),))


def test_what_a_session_said_earlier_is_looked_up(load: Load) -> None:
    with load(draft="lookup").session() as session:
        session.append(PROMPTS[3])
        first = session.generate(max_tokens=40, ignore_eos=True, lookahead=8)
        start = len(session.sequence) - 40
        session.sequence.rewind(start)
        again = session.generate(max_tokens=40, ignore_eos=True, lookahead=8)
        assert again.token_ids == first.token_ids
        assert again.stats.rounds < first.stats.rounds
        assert again.stats.rounds <= 8


def test_a_draft_that_holds_a_longer_text(load: Load) -> None:
    """After a rewind the draft still holds more tokens than the text has."""
    lm = load(draft=True, lookahead=None)
    session = lm.session()
    session.append(PROMPTS[0])
    mark = session.mark()
    long = session.generate(max_tokens=150, ignore_eos=True)
    assert long.stats.proposed > 0
    session.rewind(mark)
    assert session.generate(max_tokens=40, ignore_eos=True).token_ids == long.token_ids[:40]
