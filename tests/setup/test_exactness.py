"""The probe of exact arithmetic: which rule it finds, when it runs again, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiling import compile_once, trust_paged
from conftest import PROMPTS, ROOT, STRICT

import ovspec
import ovspec.setup.engine_choice
from ovspec.cache.decoder import FAST_RULE, Arithmetic, FeedRule, RollbackMethod
from ovspec.cache.decoder_maker import make_decoder
from ovspec.cache.paged import PagedDecoder, map_queries_to_tokens
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.compile import CompiledIR, compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.ir.paged_attention import QUERY_INPUTS
from ovspec.ir.request import InferenceRequest
from ovspec.setup.engine_choice import load_compiled_model
from ovspec.setup.exactness import (
    FULL_TRIAL,
    GPU_RULES,
    SHORT_TRIAL,
    Exactness,
    ExactnessTrial,
    find_exactness,
    find_exactness_on_gpu,
    probe_feed_rule,
)
from ovspec.setup.paging import compile_paged

DEMO = ROOT / "models" / "demo"
SMALL = DEMO / "draft"  # which is compiled sooner
SLOW = pytest.mark.slow
Make = Callable[[FeedRule], PagedDecoder]


@pytest.fixture(scope="module", params=[None, pytest.param(1, marks=SLOW)], ids=["all threads", "one thread"])
def ir(request: pytest.FixtureRequest) -> CompiledIR:
    return compile_paged(DEMO, DeviceOptions(precision="f32", threads=request.param))


@pytest.fixture
def make(ir: CompiledIR) -> Make:
    return lambda rule: PagedDecoder(ir, rule=rule)


@pytest.mark.parametrize("trial", [SHORT_TRIAL, pytest.param(FULL_TRIAL, marks=SLOW)], ids=["short", "full"])
def test_a_rule_is_found_for_the_paged_engine(make: Make, trial: ExactnessTrial) -> None:
    found = find_exactness(make, "paged", 4096, trial)
    ways = 1 + len(trial.batch_sizes)  # the first one also compares the context
    assert found.rule and not found.differing, found
    assert found.positions >= len(trial.context_lengths) * ways * sum(trial.widths)
    # Only what is needed here is demanded.
    for name in ("fewest", "fewest_logits"):
        if (count := getattr(found.rule, name)) > 1:
            assert not probe_feed_rule(make(replace(found.rule, **{name: count - 1})), 4096).is_exact
    if found.rule.queries > 1:
        assert not probe_feed_rule(make(replace(found.rule, queries=1, fewest=1)), 4096).is_exact
    if found.rule.most:
        assert not probe_feed_rule(make(replace(found.rule, most=None)), 4096, ExactnessTrial((180,), (1, 2))).is_exact
    assert find_exactness(make, "paged", 4096).rule == found.rule, "the same at each time"


Differs = Callable[[int, int], bool]  # whether an inference of so many tokens and logits has other bits


def wider_than(width: int) -> Differs:
    return lambda tokens, logits: tokens > width and logits >= 0


def plant_kernels(monkeypatch: pytest.MonkeyPatch, differs: Differs) -> list[tuple[int, int]]:
    """Let inferences round differently where ``differs`` says so; return a list of their (tokens, logits)."""
    infer, inferences = InferenceRequest.infer, list[tuple[int, int]]()

    def rounded(self: InferenceRequest, arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        inferences.append((arrays[0].size, len(logits_idx)))
        logits = infer(self, arrays, logits_idx)
        return logits + 1e-3 if differs(*inferences[-1]) else logits

    monkeypatch.setattr(InferenceRequest, "infer", rounded)
    return inferences


@pytest.fixture(scope="module")
def f32_rule(make_paged: Callable[..., PagedDecoder]) -> FeedRule | None:
    """Return the rule for weights in f32."""
    return find_exactness(lambda rule: make_paged(rule=rule), "paged", 4096).rule


@pytest.mark.parametrize(
    ("differs", "rule"),
    [
        (lambda tokens, logits: tokens < 4 or logits < 9, FeedRule(2, 4, fewest_logits=10)),
        (lambda tokens, logits: tokens < 7 and logits < 3, FeedRule(2, 1, fewest_logits=3)),
        (lambda tokens, _: tokens < 3 or 6 <= tokens < 8, FeedRule(2, 8)),  # several thresholds
        (lambda tokens, logits: tokens < 5 or logits < 5 or tokens > 80, FeedRule(2, 5, 64, fewest_logits=5)),
        (lambda tokens, _: tokens < 17, None),
        (wider_than(200), FeedRule(2, 1, 96)),
        (wider_than(63), FeedRule(2, 1, 48)),
        (wider_than(31), None),
        (lambda _, logits: logits > 70, FeedRule(2, 1, 64)),  # the lm_head
        *[
            pytest.param(*case, marks=SLOW)
            for case in (
                (lambda tokens, _: tokens < 5, FeedRule(2, 5)),  # AMX's matrix products
                (lambda _, logits: logits < 5, FeedRule(2, 1, fewest_logits=5)),
                (lambda tokens, logits: tokens < 5 or logits < 5, FeedRule(2, 5, fewest_logits=5)),
                (lambda tokens, _: tokens == 15, FeedRule(2, 16)),
                (wider_than(300), FeedRule(2, 1)),
                (wider_than(80), FeedRule(2, 1, 64)),
                (wider_than(40), FeedRule(2, 1, 32)),
                (lambda tokens, _: tokens == 1, FeedRule(2, 2)),
                (lambda tokens, _: tokens in (1, *range(90, 400)), FeedRule(2, 2, 64)),
                (lambda tokens, _: tokens == 3, FeedRule(2, 4)),
            )
        ],
    ],
)
def test_the_rule_for_kernels_that_round_differently(
    make_paged: Callable[..., PagedDecoder],
    f32_rule: FeedRule | None,
    monkeypatch: pytest.MonkeyPatch,
    differs: Differs,
    rule: FeedRule | None,
) -> None:
    """With weights in f32, tokens are only computed differently where this test says so, and alone in attention."""
    if f32_rule != FeedRule(2, 1):
        pytest.skip("this processor computes f32 in other ways")
    inferences = plant_kernels(monkeypatch, differs)
    found = find_exactness(lambda rule: make_paged(rule=rule), "paged", 4096)
    assert found.rule == rule, found
    assert bool(found.differing) == (rule is None)
    assert found.tried == {} or rule is None or found.tried[str(rule)] == 0
    if rule:
        inferences.clear()
        assert probe_feed_rule(make_paged(rule=rule), 4096).is_exact
        assert not any(differs(*inference) for inference in inferences), "each keeps to the rule"


ON_A_GPU = ExactnessTrial((40,), SHORT_TRIAL.widths, (3,))


def plant_gpu_kernels(monkeypatch: pytest.MonkeyPatch, differs: Differs) -> None:
    """Let attention round as on a GPU: differently without any past, and where each row has a single token.

    ``differs``: inferences of which numbers of tokens and rows round differently, too.
    """
    infer = InferenceRequest.infer

    def rounded(self: InferenceRequest, arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        tokens, positions, past = arrays[:3]
        changed = positions[logits_idx] > 0 if not past.any() else np.full(len(logits_idx), False)
        if len(tokens) == len(past) or differs(len(tokens), len(past)):
            changed[:] = True
        return infer(self, arrays, logits_idx) + 1e-3 * changed[:, None]

    monkeypatch.setattr(InferenceRequest, "infer", rounded)


@pytest.mark.parametrize(
    ("differs", "rule"),
    [
        (lambda *_: False, GPU_RULES[0]),
        (lambda tokens, _: tokens < 8, GPU_RULES[1]),
        (lambda tokens, _: tokens < 16 or tokens > 32, GPU_RULES[2]),
        (lambda tokens, _: tokens != 16, GPU_RULES[3]),
        (lambda tokens, rows: tokens % 3 == rows % 3, None),
    ],
)
def test_the_rule_for_a_gpu(
    make_paged: Callable[..., PagedDecoder], monkeypatch: pytest.MonkeyPatch, differs: Differs, rule: FeedRule | None
) -> None:
    plant_gpu_kernels(monkeypatch, differs)
    found = find_exactness_on_gpu(lambda rule: make_paged(rule=replace(rule, queries=2)), 4096, ON_A_GPU)
    assert found.rule == (rule and replace(rule, queries=2)), found
    assert bool(found.differing) == (rule is None)
    assert len(found.tried) == (GPU_RULES.index(rule) + 1 if rule else len(GPU_RULES))


def test_kernels_that_a_gpu_compiles_in_the_background_are_waited_for(
    make_paged: Callable[..., PagedDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dict[int, int]()

    def general(tokens: int, rows: int) -> bool:  # noqa: ARG001
        seen[tokens] = seen.get(tokens, 0) + 1
        return seen[tokens] == 1  # the first time that there are so many tokens

    plant_gpu_kernels(monkeypatch, general)
    make: Make = lambda rule: make_paged(rule=replace(rule, queries=2))  # noqa: E731
    assert not probe_feed_rule(make(GPU_RULES[0]), 4096, ON_A_GPU).is_exact
    seen.clear()
    assert find_exactness_on_gpu(make, 4096, ON_A_GPU).is_exact
    assert list(seen)[:7] == [1, 2, 4, 8, 16, 32, 64] or list(seen)[:6] == [2, 4, 8, 16, 32, 64]


def test_differences_that_rounding_mostly_hides_are_found(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits, a token that is computed alone may have other bits at a few positions only: here at none of a text
    as short as those of a first load's probe.
    """
    inner = PagedDecoder._append_tokens

    def append(self: PagedDecoder, tokens: list[np.ndarray], wanted: list[int], *more: Any, **named: Any) -> Any:
        single = max(self.rule.fewest, sum(map(len, tokens))) == 1  # alone, and late enough to be missed at first
        found = inner(self, tokens, wanted, *more, **named)
        return [logits + 1e-3 for logits in found] if single and len(self.rows[0]) == 70 else found

    monkeypatch.setattr(PagedDecoder, "_append_tokens", append)
    found = find_exactness(make, "paged", 4096)
    assert found.rule and found.rule.fewest == 2


@pytest.mark.parametrize("context", [20, 90, *[pytest.param(more, marks=SLOW) for more in (40, 120)]])
def test_no_row_is_probed_beyond_the_context(make: Make, monkeypatch: pytest.MonkeyPatch, context: int) -> None:
    """A model with learned positions has none beyond it."""
    longest = 0
    inner = PagedDecoder.feed

    def feed(self: PagedDecoder, tokens: list[np.ndarray], *rest: Any) -> list[np.ndarray]:
        nonlocal longest
        found = inner(self, tokens, *rest)
        longest = max(longest, *map(len, self.rows))
        return found

    def shorter(rule: FeedRule) -> PagedDecoder:
        decoder = make(rule)
        decoder.context_length = context
        return decoder

    monkeypatch.setattr(PagedDecoder, "feed", feed)
    found = find_exactness(shorter, "paged", 4096, ExactnessTrial((70, 103), (1, 2, 1, 5, 8), (2, 9)))
    assert found.is_exact and found.positions > 0
    assert longest <= context


def alone(decoder: PagedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder.rule = replace(STRICT, queries=1, fewest=1)
    del monkeypatch


def stale(decoder: PagedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed a wrong token in front of one that is alone in an inference, which spoils the cache."""

    def filled(computed: list[tuple[int, np.ndarray]], width: int) -> list[tuple[int, np.ndarray]]:
        right = fill_up(computed.copy(), width)
        alone = sum(len(new) for _, new in computed) == 1
        return [(begin, np.full(len(new), new[-1])) if alone and len(new) else (begin, new) for begin, new in right]

    fill_up = decoder._fill_up_inference
    monkeypatch.setattr(decoder, "_fill_up_inference", filled)


def second(decoder: PagedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the result of a token's second query, which also sees itself."""
    del decoder

    def wrong(counts: tuple[int, ...], queries: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        query_tokens, token_queries = map_queries_to_tokens(counts, queries)
        return query_tokens, np.append(token_queries[1:], len(query_tokens)).astype(np.int32) - 1

    monkeypatch.setattr("ovspec.cache.paged.map_queries_to_tokens", wrong)


@pytest.mark.parametrize("plant", [alone, stale, second])
def test_planted_differences_are_found(make: Make, monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None]) -> None:
    decoder = make(STRICT)
    plant(decoder, monkeypatch)
    fork = decoder.fork

    def planted_fork() -> PagedDecoder:
        made = fork()
        plant(made, monkeypatch)
        return made

    monkeypatch.setattr(decoder, "fork", planted_fork)
    assert not probe_feed_rule(decoder, 4096).is_exact


@pytest.mark.parametrize(
    ("rollback", "rule"),
    [(RollbackMethod("mask"), FeedRule(first_apart=True, rows_apart=True)), (RollbackMethod("trim"), FAST_RULE)],
    ids=["masked", "together"],
)
def test_the_stateful_engine_by_its_rule(pair: Path, rollback: RollbackMethod, rule: FeedRule) -> None:
    """Only with a first token of its own, and with rejected tokens cut off. One thread: more may split attention."""
    ir = compile_ir(pair, DeviceOptions(precision="f32", threads=1))
    found = find_exactness(
        lambda rule: make_decoder(ir, RollbackMethod("mask"), rule=rule), "stateful", ir.logits_width
    )
    if not found.rule:
        pytest.skip(f"no rule for the stateful engine on this processor: {found}")
    trial = ExactnessTrial((40, 70), (1, 2, 1, 8), ())
    assert probe_feed_rule(make_decoder(ir, RollbackMethod("mask"), rule=found.rule), ir.logits_width, trial).is_exact
    assert not probe_feed_rule(StatefulDecoder(ir, rollback, rule=rule), 4096, trial).is_exact


def test_remembered_by_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[int] = []

    def counted(*_: Any) -> Exactness:
        probed.append(1)
        return Exactness(STRICT, 51, 0)

    compile_once(monkeypatch)
    trust_paged(monkeypatch)
    monkeypatch.setattr(ovspec.setup.engine_choice, "find_exactness", counted)
    usual, small = dict[str, Any](), dict[str, Any](kv_precision="u8")
    coarse: dict[str, Any] = {"properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "64"}}

    def load(arithmetic: Arithmetic = "exact", **options: Any) -> None:
        load_compiled_model(SMALL, DeviceOptions(cache_dir=tmp_path, **options), arithmetic=arithmetic)

    for options, count in ((usual, 1), (usual, 1), (coarse, 2), (small, 3), (coarse, 3), (small, 3)):
        load(**options)
        assert len(probed) == count, options
    load("fast", precision="f32")
    assert len(probed) == 3
    for file in (tmp_path / "exactness").iterdir():
        file.write_text("[]", encoding="utf-8")
    load(**usual)
    assert len(probed) == 4, "what is damaged is probed again"
    monkeypatch.setattr("ovspec.ir.device.describe_instruction_set", lambda: "another")
    load(**usual)
    assert len(probed) == 5, "another instruction set may compute in another way"


def test_without_a_rule_nothing_is_paid_for_one(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A u8 cache isn't exact after a rollback: the model runs as with fast arithmetic, at every load, and says so."""
    compile_once(monkeypatch)
    for load in ("first", "second"):
        lm = ovspec.load(SMALL, kv_precision="u8", cache_dir=cache_dir)
        stats = lm.generate(PROMPTS[0], max_tokens=8).stats
        assert stats.arithmetic.startswith("fast, not exact here (") and not stats.rule, load
        assert "probed positions differ)" in stats.arithmetic
        assert lm.target.feed_rule == FAST_RULE and QUERY_INPUTS[0] not in lm.target.ir.inputs
        assert not lm.runtime.models.draft_choice
    monkeypatch.setattr(ovspec.setup.engine_choice, "read_saved_exactness", lambda *_: Exactness(None, 51, 2))
    stateful = ovspec.load(SMALL, engine="stateful", cache_dir=cache_dir).generate("a", max_tokens=2).stats
    assert (stateful.arithmetic, stateful.rollback) == (
        "fast, not exact here (2 of 51 probed positions differ)",
        "mask",
    )


def test_the_rule_is_told(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ovspec.setup.engine_choice, "read_saved_exactness", lambda *_: Exactness(STRICT, 51, 0))
    stats = ovspec.load(SMALL, cache_dir=cache_dir).generate("a", max_tokens=2).stats
    words = (
        "at least 5 tokens an inference, at least 5 logits an inference, at most 64 tokens an inference, "
        "attention gets at least 2 tokens of a row"
    )
    assert (stats.arithmetic, stats.rule) == ("exact", words)


def test_the_default_is_lookup_where_a_guess_is_free(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, guess = {}, 1.0
    compile_once(monkeypatch)
    known = ovspec.setup.engine_choice.read_saved_exactness

    def measured(*arguments: Any) -> Exactness | None:
        found = known(*arguments)
        return found and replace(found, guess=guess)

    ovspec.load(SMALL, cache_dir=cache_dir)
    monkeypatch.setattr(ovspec.setup.engine_choice, "read_saved_exactness", measured)
    ways: tuple[tuple[Any, dict[str, Any], float, bool], ...] = (
        (None, {}, 1.0, True),
        (None, {}, 1.2, False),
        ("none", {}, 1.0, False),
        (False, {}, 1.0, False),
        (None, {"arithmetic": "fast"}, 1.0, False),
        (None, {"engine": "stateful"}, 1.0, False),
        ("lookup", {"arithmetic": "fast"}, 1.0, True),
        (None, {"engine": "stateful", "lookup_corpus": [ROOT / "README.md"]}, 1.0, True),  # a corpus asks for lookup
    )
    for draft, options, guess, proposes in ways:
        lm = ovspec.load(SMALL, draft, cache_dir=cache_dir, **options)
        result = lm.generate(PROMPTS[0], max_tokens=30, ignore_eos=True)
        assert bool(lm.runtime.models.draft_choice) == proposes, (draft, options, guess)
        assert proposes or not result.stats.proposed
        texts.setdefault(lm.target.engine, result.token_ids)
        if not options:
            assert result.token_ids == texts["paged"]


def test_stateful_batches_and_drafts_are_exact_where_the_probe_says_so(pair: Path, cache_dir: Path) -> None:
    lm = ovspec.load(pair, "lookup,draft", engine="stateful", precision="f32", threads=1, cache_dir=cache_dir)
    if lm.target.arithmetic_note != "exact":
        pytest.skip(f"on this processor, the stateful engine is {lm.target.arithmetic_note}")
    prompts = PROMPTS[:2]
    plain = [lm.generate(prompt, max_tokens=40, ignore_eos=True, lookahead=0) for prompt in prompts]
    drafted = [lm.generate(prompt, max_tokens=40, ignore_eos=True, lookahead=4) for prompt in prompts]
    batch = lm.generate(prompts, max_tokens=40, ignore_eos=True, lookahead=3)
    assert sum(result.stats.accepted for result in drafted) > 0
    for found in (drafted, batch):
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        assert all(result.stats.rollback == "trim" and lm.verify(result).ok for result in found)


def test_a_long_probe_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_once(monkeypatch)
    trust_paged(monkeypatch)
    monkeypatch.setattr(ovspec.setup.engine_choice, "LONG_PROBE_BYTES", 1e6)
    told = f"{SMALL}: finding out how each token gets the same bits, once; `arithmetic='fast'` skips it.\n"
    for expected in (told, ""):
        ovspec.load(SMALL, cache_dir=tmp_path)
        assert capsys.readouterr().err == expected


def test_the_last_token_of_a_piece_is_compared(
    make_paged: Callable[..., PagedDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only one of pieces that are a single token, as in plain decoding."""
    plain = probe_feed_rule(make_paged(rule=FeedRule(2, 1)), 4096)
    plant_kernels(monkeypatch, lambda _, logits: logits == 1)
    assert probe_feed_rule(make_paged(rule=FeedRule(2, 1)), 4096).differing > plain.differing


def plant_rejections(monkeypatch: pytest.MonkeyPatch, differs: Differs) -> None:
    """Let inferences round differently where ``differs`` says so, but only after a few tokens were rejected."""
    truncate, rejected = PagedDecoder.truncate, [False]

    def truncated(self: PagedDecoder, row: int, length: int) -> None:
        rejected[0] = 0 < len(self.rows[row]) - length <= 3
        truncate(self, row, length)

    monkeypatch.setattr(PagedDecoder, "truncate", truncated)
    plant_kernels(monkeypatch, lambda tokens, logits: rejected[0] and differs(tokens, logits))


def test_what_a_rejection_leaves_in_the_cache_is_found(
    make_paged: Callable[..., PagedDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = probe_feed_rule(make_paged(rule=FeedRule(2, 1)), 4096)
    plant_rejections(monkeypatch, lambda *_: True)
    assert probe_feed_rule(make_paged(rule=FeedRule(2, 1)), 4096).differing > plain.differing


def test_a_rule_between_is_found_where_only_the_probe_sees_a_difference(
    make_paged: Callable[..., PagedDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for the least rule rejects nothing."""
    if find_exactness(lambda rule: make_paged(rule=rule), "paged", 4096).rule != FeedRule(2, 1):
        pytest.skip("this processor computes f32 in other ways")
    plant_rejections(monkeypatch, lambda tokens, _: tokens < 5)
    found = find_exactness(lambda rule: make_paged(rule=rule), "paged", 4096)
    assert found.rule == FeedRule(2, 5, fewest_logits=5), found
