"""The probe of exact arithmetic: what it finds, when it runs again, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS, ROOT

import ovspec
import ovspec.setup.engine
import ovspec.setup.exactness
from ovspec.decoders.base import Rollback
from ovspec.decoders.paged import PagedDecoder, pairs
from ovspec.decoders.recurrent import decoder_of
from ovspec.decoders.stateful import StatefulDecoder
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.setup.engine import compile_paged
from ovspec.setup.exactness import FULL, SHORT, Exactness, Trial, probe_exactness

DEMO = ROOT / "models" / "demo"
OPTIONS = DeviceOptions(precision="f32")


@pytest.fixture(scope="module", params=[None, 1], ids=["all threads", "one thread"])
def make(request: pytest.FixtureRequest) -> Callable[..., PagedDecoder]:
    ir = compile_paged(DEMO, DeviceOptions(precision="f32", threads=request.param))
    return lambda **options: PagedDecoder(ir, **options)


@pytest.mark.parametrize("trial", [SHORT, pytest.param(FULL, marks=pytest.mark.slow)], ids=["short", "full"])
def test_the_paged_engine_is_exact(make: Callable[..., PagedDecoder], trial: Trial) -> None:
    found = probe_exactness(make(), 4096, trial)
    ways = 2 + len(trial.batches)
    assert found == Exactness(len(trial.contexts) * ways * sum(trial.widths), 0, found.seconds)


@pytest.mark.parametrize("context", [40, 90, 120])
def test_no_row_is_probed_beyond_the_context(
    make: Callable[..., PagedDecoder], monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    """A model with learned positions has none beyond it."""
    decoder, longest = make(), 0
    inner = PagedDecoder.feed

    def feed(self: PagedDecoder, tokens: list[np.ndarray], *rest: Any) -> list[np.ndarray]:
        nonlocal longest
        found = inner(self, tokens, *rest)
        longest = max(longest, *map(len, self.rows))
        return found

    monkeypatch.setattr(PagedDecoder, "feed", feed)
    decoder.context_length = context
    found = probe_exactness(decoder, 4096, Trial((70, 103), (1, 2, 1, 5, 8), (2, 9)))
    assert found.exact and found.positions > 0
    assert longest <= context


def alone(decoder: PagedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder.narrowest = 1
    del monkeypatch


def stale(decoder: PagedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feed a wrong token in front of one that is alone in an inference, which spoils the cache."""

    def doubled(row: int, new: np.ndarray) -> tuple[int, np.ndarray]:
        held = len(decoder.rows[row])
        return (held - 1, np.concatenate((new, new))) if held and len(new) else (held, new)

    monkeypatch.setattr(decoder, "_doubled", doubled)


def second(decoder: PagedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the result of a token's second query, which also sees itself."""
    del decoder

    def wrong(counts: tuple[int, ...], queries: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        query_tokens, token_queries = pairs(counts, queries)
        return query_tokens, np.append(token_queries[1:], len(query_tokens)).astype(np.int32) - 1

    monkeypatch.setattr("ovspec.decoders.paged.pairs", wrong)


@pytest.mark.parametrize("plant", [alone, stale, second])
def test_planted_differences_are_found(
    make: Callable[..., PagedDecoder], monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None]
) -> None:
    decoder = make()
    plant(decoder, monkeypatch)
    fork = decoder.fork

    def planted_fork() -> PagedDecoder:
        made = fork()
        plant(made, monkeypatch)
        return made

    monkeypatch.setattr(decoder, "fork", planted_fork)
    assert not probe_exactness(decoder, 4096).exact


@pytest.mark.parametrize(
    ("rollback", "first_alone"), [(Rollback("mask"), True), (Rollback("trim"), False)], ids=["masked", "together"]
)
def test_the_stateful_engine_by_its_rule(rollback: Rollback, first_alone: bool) -> None:
    """Only with a first token of its own, and with rejected tokens cut off. One thread: more may split attention."""
    ir = compile_ir(DEMO, DeviceOptions(precision="f32", threads=1))
    trial = Trial((40, 70), (1, 2, 1, 8), ())
    found = probe_exactness(decoder_of(ir, Rollback("mask")), ir.logits_width, trial)
    assert found.exact and found.positions == 48
    assert not probe_exactness(StatefulDecoder(ir, rollback, first_alone=first_alone), 4096, trial).exact


def test_remembered_by_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[int] = []

    def counted(*arguments: Any) -> Exactness:
        probed.append(1)
        return probe_exactness(*arguments)

    monkeypatch.setattr(ovspec.setup.exactness, "probe_exactness", counted)
    usual, small = dict[str, Any](), dict[str, Any](kv_precision="u8")
    coarse: dict[str, Any] = {"properties": {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "64"}}
    for options, count in ((usual, 1), (usual, 1), (coarse, 2), (small, 3), (coarse, 3)):
        ovspec.load(DEMO, cache_dir=tmp_path, **options)
        assert len(probed) == count, options
    ovspec.load(DEMO, arithmetic="fast", cache_dir=tmp_path, precision="f32")
    assert len(probed) == 3
    for file in (tmp_path / "exactness").iterdir():
        file.write_text("[]", encoding="utf-8")
    ovspec.load(DEMO, cache_dir=tmp_path, **usual)
    assert len(probed) == 4, "what is damaged is probed again"


def test_a_weaker_promise_is_shown_and_changes_the_default(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A u8 cache isn't exact after a rollback, so a guess isn't free and nothing is proposed unasked."""
    lm = ovspec.load(DEMO, kv_precision="u8", cache_dir=cache_dir)
    result = lm.generate(PROMPTS[0], max_tokens=8)
    assert result.stats.arithmetic.startswith("inexact (")
    assert "probed positions differ)" in result.stats.arithmetic
    assert not lm.workspace.choice
    monkeypatch.setattr(ovspec.setup.engine, "find_exactness", lambda *_: Exactness(51, 2, 0.1))
    stateful = ovspec.load(DEMO, engine="stateful", cache_dir=cache_dir).generate("a", max_tokens=2).stats
    assert (stateful.arithmetic, stateful.rollback) == ("inexact (2 of 51 probed positions differ)", "mask")


def test_the_default_is_lookup_where_a_guess_is_free(cache_dir: Path) -> None:
    texts = {}
    ways: tuple[tuple[Any, dict[str, Any], bool], ...] = (
        (None, {}, True),
        ("none", {}, False),
        (False, {}, False),
        (None, {"arithmetic": "fast"}, False),
        (None, {"engine": "stateful"}, False),
        ("lookup", {"arithmetic": "fast"}, True),
        (None, {"engine": "stateful", "lookup_corpus": [ROOT / "README.md"]}, True),  # a corpus asks for lookup
    )
    for draft, options, proposes in ways:
        lm = ovspec.load(DEMO, draft, cache_dir=cache_dir, **options)
        result = lm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
        assert (result.stats.proposed > 0) == proposes, (draft, options)
        texts.setdefault(lm.target.engine, result.token_ids)
        if not options:
            assert result.token_ids == texts["paged"]


def test_stateful_batches_and_drafts_are_exact_where_the_probe_says_so(cache_dir: Path) -> None:
    lm = ovspec.load(DEMO, "lookup,draft", engine="stateful", precision="f32", threads=1, cache_dir=cache_dir)
    assert lm.target.promise == "exact"
    prompts = PROMPTS[:4]
    plain = [lm.generate(prompt, max_tokens=40, ignore_eos=True, lookahead=0) for prompt in prompts]
    drafted = [lm.generate(prompt, max_tokens=40, ignore_eos=True, lookahead=4) for prompt in prompts]
    batch = lm.generate(prompts, max_tokens=40, ignore_eos=True, lookahead=3)
    assert sum(result.stats.accepted for result in drafted) > 0
    for found in (drafted, batch):
        assert [result.token_ids for result in found] == [result.token_ids for result in plain]
        assert all(result.stats.rollback == "trim" and lm.verify(result).ok for result in found)
