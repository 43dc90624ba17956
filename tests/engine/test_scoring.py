"""``score`` and ``select``, compared with Hugging Face's log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from conftest import PROMPTS, Reference

import ovspec
from ovspec.api.model import LanguageModel
from ovspec.engine.scoring import MAX_LOGITS_PER_INFERENCE, MAX_TEXTS_PER_INFERENCE, group_texts_by_inference
from ovspec.text.generation_config import GenerationConfigFile

Load = Callable[..., LanguageModel]
OPTIONS = ["self", "None", "os.path.join(", "import", "x", "x1", "return not name"]


@pytest.fixture(scope="module", params=["stateful", "paged"])
def load(load: Load, request: pytest.FixtureRequest) -> Load:
    """Load with each engine: every test in this file must pass with both."""
    return functools.partial(load, engine=request.param)


def expected_logprobs(reference: Reference, tokens: list[int], begin: int) -> list[float]:
    """Return the log-probability of each token from position ``begin`` on, computed from scratch."""
    return all_logprobs(reference, tuple(tokens))[begin - 1 :]


@functools.cache
def all_logprobs(reference: Reference, tokens: tuple[int, ...]) -> list[float]:
    from scipy.special import log_softmax

    logprobs = log_softmax(reference.logits([*tokens]).astype(np.float64), axis=-1)
    return [float(logprobs[place - 1, tokens[place]]) for place in range(1, len(tokens))]


@pytest.mark.parametrize("text", [" return", "\n    return self.name", "s", "def f(x):\n    pass\n"])
def test_a_score_is_the_models_own(load: Load, reference: Reference, text: str) -> None:
    lm = load(draft=True)
    for prompt in PROMPTS[:2]:
        with lm.session() as session:
            session.append(prompt)
            score = session.score(text)
            together = lm.tokenizer.encode(prompt + text).tolist()
            begin = len(together) - len(score.token_ids)
            assert score.token_ids == together[begin:]
            assert together[:begin] == session.tokens[:begin]
            np.testing.assert_allclose(score.logprobs, expected_logprobs(reference, together, begin), atol=1e-3)
            assert score.logprob == pytest.approx(sum(score.logprobs))
            assert session.tokens == lm.tokenizer.encode(prompt).tolist()


@pytest.mark.parametrize("terminator", [None, pytest.param("\n", marks=pytest.mark.slow), "("])
def test_the_most_likely_option_is_taken(load: Load, reference: Reference, terminator: str | None) -> None:
    """Tokens that span the end of the prompt count, and all options are scored from the same position."""
    lm = load(draft=True)
    for prompt in (PROMPTS[0], "import o", "http:", "x = "):
        with lm.session() as session:
            session.append(prompt)
            before = session.tokens
            chosen = session.select(OPTIONS, terminator)
            texts = [lm.tokenizer.encode(prompt + option + (terminator or "")).tolist() for option in OPTIONS]
            begin = min(
                next((i for i, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
                for text in texts
            )
            if not begin:
                continue  # no token comes before the options
            totals = [sum(expected_logprobs(reference, text, begin)) for text in texts]
            np.testing.assert_allclose(chosen.logprobs, totals, atol=2e-3)
            assert chosen.index == int(np.argmax(totals))
            assert chosen.text == OPTIONS[chosen.index]
            assert session.text == prompt + chosen.text
            result = session.generate(max_tokens=4, ignore_eos=True)
            assert result.token_ids == lm.generate(session.tokens[:-4], max_tokens=4, ignore_eos=True).token_ids


def test_a_beginning_wins_only_without_a_terminator(load: Load) -> None:
    with load().session() as session:
        session.append("import os\n\nname = os.")
        mark = session.mark()
        assert session.select(["path.join", "path"]).text == "path"
        session.rewind(mark)
        assert session.select(["path.join", "path"], terminator="(").text == "path.join"
        session.rewind(mark)
        assert session.select(["", "path"], terminator=".").text == "path"


def test_one_inference_scores_all(load: Load) -> None:
    lm = load()
    with lm.session() as session:
        session.append(PROMPTS[0] * 3)
        session.generate(max_tokens=1)
        assert session._decoders
        target = session._decoders.target
        before = target.inferences
        session.select(OPTIONS, terminator="\n")
        assert target.inferences == before + 1, "the text is already in the cache"
        assert len(target.rows) == 1
        held = len(target.rows[0])
        assert held >= len(session) - 1, "the chosen option is in the cache too"
        session.append("\n# a long text" * 10)
        before = target.inferences
        session.select(OPTIONS)
        assert target.inferences == before + 2, "the common prefix is read once"


def test_many_options(load: Load, reference: Reference) -> None:
    options = [f"name_{number}" for number in range(70)]
    with load().session() as session:
        session.append(PROMPTS[0])
        before = session.tokens
        chosen = session.select(options)
        assert len(chosen.logprobs) == 70
        for number in (0, 33, 69):
            text = session.runtime.prompt_encoder.tokenizer.encode(PROMPTS[0] + options[number]).tolist()
            total = sum(expected_logprobs(reference, text, len(before)))
            assert chosen.logprobs[number] == pytest.approx(total, abs=2e-3)
        assert session.text == PROMPTS[0] + chosen.text


def test_groups_are_bounded() -> None:
    texts = [np.zeros(10 + length, dtype=np.int64) for length in (300, 5, 250, 1, 3, *[1] * 40)]
    found = list(group_texts_by_inference(texts, 10))
    assert [len(text) for group in found for text in group] == [len(text) for text in texts]
    assert all(len(group) <= MAX_TEXTS_PER_INFERENCE for group in found)
    assert all(sum(len(text) - 10 for text in group) <= MAX_LOGITS_PER_INFERENCE or len(group) == 1 for group in found)
    assert len(found) == 4


def test_an_empty_session_begins_with_the_models_own_token(
    load: Load, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load()
    with lm.session() as session:
        score = session.score("import os")
        tokens = lm.tokenizer.encode("import os").tolist()
        assert score.token_ids == tokens
        np.testing.assert_allclose(score.logprobs, expected_logprobs(reference, [0, *tokens], 1), atol=1e-3)
        assert session.tokens == []
        monkeypatch.setattr(lm.generation_config, "settings", GenerationConfigFile())
        with pytest.raises(ovspec.OvspecError, match="no BOS token to start with"):
            session.score("import os")


def test_a_failure_leaves_a_usable_session(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load()
    with lm.session() as session:
        session.append(PROMPTS[0])
        session.generate(max_tokens=3, ignore_eos=True)
        before = session.tokens
        monkeypatch.setattr("ovspec.engine.scoring.score_tokens", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session.select(["one", "two"])
        monkeypatch.undo()
        assert session.tokens == before
        expected = lm.generate(before, max_tokens=5, ignore_eos=True).token_ids
        assert session.generate(max_tokens=5, ignore_eos=True).token_ids == expected
