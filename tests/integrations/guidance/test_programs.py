"""guidance programs give the same results as on guidance's own Transformers backend, with fewer inferences."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS, ROOT, TARGET
from guidance import gen, models
from guidance.models._engine import Engine
from programs import PROGRAMS, PROMPT, branches, free_text, loops, schemas

import ovspec.guidance
from ovspec.base.errors import OvspecError

DRAFTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "lookup": {"draft": "lookup"},
    "model": {"draft": True},
    "chain": {"draft": "lookup,draft"},
    "fixed": {"draft": "lookup,draft", "lookahead": 4},
    "stateful": {"draft": "lookup,draft", "rollback": "mask"},
    "trimmed": {"draft": True, "rollback": "trim", "lookahead": 3},
}
Load = Callable[..., ovspec.LanguageModel]


@pytest.fixture(scope="module")
def oracle() -> models.Transformers:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it falls back to ChatML, which the template is
        return models.Transformers(str(TARGET), echo=False, enable_monitoring=False, dtype="float32")


@pytest.fixture(scope="module")
def expected(oracle: models.Transformers) -> Callable[[str], dict[str, Any]]:
    @functools.cache
    def expected(name: str) -> dict[str, Any]:
        return PROGRAMS[name](oracle)

    return expected


@pytest.fixture(scope="module")
def model(load: Load) -> Callable[[str], ovspec.guidance.OpenVINO]:
    """Return one model per drafter, shared by all programs, as in an application."""

    @functools.cache
    def model(drafter: str) -> ovspec.guidance.OpenVINO:
        return fresh(load, drafter)

    return model


def fresh(load: Load, drafter: str, echo: bool = False) -> ovspec.guidance.OpenVINO:
    return ovspec.guidance.OpenVINO(load(**DRAFTERS[drafter]), echo=echo, enable_monitoring=False)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_texts_and_captures_are_those_of_transformers(
    name: str, drafter: str, model: Callable[[str], Any], expected: Callable[[str], dict[str, Any]]
) -> None:
    assert PROGRAMS[name](model(drafter)) == expected(name)


@pytest.mark.parametrize("drafter", ["lookup", "model", "chain", "fixed"])
def test_inferences_are_saved(drafter: str, cache_dir: Path) -> None:
    """The demo pair has a good draft; whether drafting pays must not depend on the machine."""
    load = functools.partial(ovspec.load, ROOT / "models" / "demo", precision="f32", cache_dir=cache_dir)
    lm = fresh(functools.partial(load, lookahead=3) if drafter == "model" else load, drafter)
    for program in (free_text, schemas, branches, loops):
        program(lm)
    stats = lm.stats
    assert stats.proposed > stats.accepted > 0
    assert stats.requests == stats.inferences + stats.answered
    assert stats.inferences < 0.8 * stats.requests
    assert sum(counts["accepted"] for counts in stats.drafters.values()) == stats.accepted
    assert set(stats.drafters) == {"lookup": {"lookup"}, "model": {"draft"}}.get(drafter, {"lookup", "draft"})


@pytest.mark.parametrize("drafter", ["none", "fixed"])
@pytest.mark.parametrize("program", [free_text, branches, loops])
def test_tokens_are_read_once(
    program: Callable[[Any], Any], drafter: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, asked = fresh(load, drafter), list[list[int]]()
    get_logits = lm.engine.get_logits

    def watched(token_ids: list[int], include_all_uncached_tokens: bool = False) -> Any:
        asked.append(list(token_ids))
        return get_logits(token_ids, include_all_uncached_tokens)

    monkeypatch.setattr(lm.engine, "get_logits", watched)
    program(lm)
    different = {tuple(ids[:length]) for ids in asked for length in range(1, len(ids) + 1)}
    assert lm.stats.read <= len(different) + lm.stats.forks + 2  # the last token is read again when a text is continued
    assert (lm.stats.forks > 0) == (program is branches)


def test_echo_changes_no_text_and_gives_probabilities(load: Load, expected: Callable[[str], dict[str, Any]]) -> None:
    lm = fresh(load, "fixed", echo=True)
    for name in ("free_text", "choices", "loops", "chat"):
        assert PROGRAMS[name](lm) == expected(name)
    assert lm.stats.answered > 0


def test_rows_of_all_new_tokens_are_those_of_transformers(load: Load, oracle: models.Transformers) -> None:
    ids = oracle.engine.tokenizer.encode(PROMPTS[0].encode())[:60]
    engine = fresh(load, "fixed").engine
    for length in (20, 21, 22, 30, 30, 50, 35, 36, 60):
        ours, theirs = rows(engine, ids[:length]), rows(oracle.engine, ids[:length])
        shared = min(len(ours), len(theirs))
        assert shared
        np.testing.assert_allclose(ours[-shared:], theirs[-shared:], atol=2e-3)


def rows(engine: Engine, ids: list[int]) -> np.ndarray:
    return engine.get_logits(ids, include_all_uncached_tokens=True)["logits"]


def test_logits_stay_what_they_are(load: Load) -> None:
    lm = fresh(load, "fixed")
    ids = lm.engine.tokenizer.encode(PROMPT.encode())
    first = lm.engine.get_logits(ids)["logits"]
    kept = first.copy()
    first[0, :10] = 7.0
    assert (lm.engine.get_logits(ids)["logits"] == kept).all()
    for _ in range(5):
        ids.append(int(lm.engine.get_logits(ids)["logits"][-1].argmax()))
    assert (lm.engine.get_logits(ids[:-5])["logits"].argmax() == kept.argmax()) and first.dtype == np.float32


def test_sampled_text_follows_the_same_numbers(load: Load, oracle: models.Transformers) -> None:
    """guidance samples the tokens, so equal logits and the same state of numpy's generator give equal texts."""

    def sampled(lm: Any) -> str:
        np.random.seed(3)
        return str(lm + PROMPT + gen(max_tokens=30, temperature=0.7))

    texts = {sampled(fresh(load, drafter)) for drafter in ("none", "model", "chain")}
    assert texts == {sampled(oracle)}


def test_usage_counts_what_was_saved(load: Load) -> None:
    lm = fresh(load, "fixed")
    lm += PROMPT + gen(max_tokens=40)
    usage = lm._get_usage()
    assert usage.forward_passes == lm.stats.inferences
    assert usage.cached_output_tokens == lm.stats.answered > 10


def test_a_text_that_is_too_long_is_refused(load: Load) -> None:
    lm = fresh(load, "none")
    with pytest.raises(OvspecError, match="the context is 2048"):
        lm += "x = 1\n" * 2000 + gen(max_tokens=2)
    assert str(lm + PROMPT + gen(max_tokens=4)).startswith(PROMPT)


def test_a_template_that_guidance_does_not_know(load: Load) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        template = fresh(load, "none").engine.get_chat_template()
    assert template.get_role_start("assistant") == "<|im_start|>assistant\n"
    assert template.get_role_end("user") == "<|im_end|>\n"
    with pytest.raises(Exception, match="Role tool is not supported"):
        template.get_role_start("tool")


def test_the_model_serves_other_calls_meanwhile(load: Load) -> None:
    language_model = load(**DRAFTERS["chain"])
    lm = fresh(load, "chain") + PROMPT + gen("doc", max_tokens=10)
    text = language_model.generate(PROMPT, max_tokens=20).text
    assert str(lm + gen(max_tokens=10)) == PROMPT + text


def test_schemas_of_our_own_need_a_newer_llguidance(load: Load) -> None:
    lm = load()
    assert lm.generate("x = ", regex="[0-9]{3}", max_tokens=8).text.isdigit()
    assert lm.generate("x = ", choice=["one", "two"]).text in ("one", "two")
    with pytest.raises(OvspecError, match=r"llguidance 1\.5\.0 is too old to enforce schemas"):
        lm.generate("x = ", json_schema={"type": "integer"})
