"""Generated texts, how they end, and Ctrl-C."""

from __future__ import annotations

import functools
import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PROMPTS, Reference
from hypothesis import given
from hypothesis import strategies as st

import ovspec
from ovspec.api.model import LanguageModel
from ovspec.api.verify import record_as_json, result_from_json
from ovspec.batch.requests import BatchRequest
from ovspec.batch.run import BatchRun
from ovspec.engine.row import IndentationFilter, StopStringFilter
from ovspec.params import make_params
from ovspec.protocols.requests import TextRequest
from ovspec.text.generation_config import GenerationConfigFile

Load = Callable[..., LanguageModel]


@pytest.fixture(scope="module", params=[pytest.param("stateful", marks=pytest.mark.slow), "paged"])
def load(load: Load, request: pytest.FixtureRequest) -> Load:
    """Load with each engine: every test in this file must pass with both. A row doesn't know which one it is."""
    return functools.partial(load, engine=request.param)


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_in_any_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    finder, shown, rest = StopStringFilter(stops), "", text
    found = None
    while rest and found is None:
        size = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:size], rest[size:]
        new, found = finder.push(piece)
        shown += new
    if found is None:
        shown += finder.flush()
    seen = text[: len(text) - len(rest)]
    places = [at for stop in stops if (at := seen.find(stop)) >= 0]
    if found is None:
        assert not places and shown == text
    else:
        # The text stops at the first piece that completes a stop string; no part of the string is ever shown.
        assert text.startswith(shown)
        assert found in stops and text.startswith(found, len(shown))
        assert not any(stop in shown for stop in stops)


def test_the_first_of_two_stop_strings_in_a_piece_ends_the_text() -> None:
    for stops in (["bc", "aa"], ["aa", "bc"], ["a", "aa"]):
        assert StopStringFilter(stops).push("xaabc")[0] == "x"


@given(st.text("a \t\n", max_size=30), st.integers(0, 4), st.data())
def test_indentation_in_any_pieces(text: str, least: int, data: st.DataObject) -> None:
    finder, shown, rest, ended = IndentationFilter(least), "", text, False
    while rest and not ended:
        size = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:size], rest[size:]
        new, ended = finder.push(piece)
        shown += new
        assert text.startswith(shown)
    if not ended:
        shown += finder.flush()
    first, *lines = text.split("\n")
    kept = [first]
    for number, line in enumerate(lines, 1):
        # The last line of what has come may yet be indented further, if it is nothing but an indentation.
        known = line.strip(" \t") or number < len(lines)
        if known and len(line) - len(line.lstrip(" \t")) < least:
            break
        kept.append(line)
    assert shown == "\n".join(kept)
    assert ended == (len(kept) <= len(lines))


def test_a_text_ends_before_a_line_that_is_indented_less(load: Load) -> None:
    lm = load()
    whole = lm.generate(PROMPTS[0], regex=r"a\n    b\n  c\n    d", max_tokens=60)
    assert whole.text == "a\n    b\n  c\n    d" and whole.finish_reason != "length"
    options: Any = {"regex": r"a\n    b\n  c\n    d", "max_tokens": 60, "min_indent": 4}
    result = lm.generate(PROMPTS[0], **options)
    assert (result.text, result.finish_reason, result.stop_string) == ("a\n    b", "length", None)
    assert result.token_ids == whole.token_ids[: len(result.token_ids)] != whole.token_ids
    assert "".join(piece.text for piece in lm.stream(PROMPTS[0], **options)) == result.text
    assert lm.verify(result).ok
    early = lm.generate(PROMPTS[0], **options, stop=["c", "  b"])
    assert (early.text, early.finish_reason, early.stop_string) == ("a\n  ", "stop", "  b")
    late = lm.generate(PROMPTS[0], **options, stop="d")
    assert (late.text, late.finish_reason, late.stop_string) == ("a\n    b", "length", None)


def test_a_text_ends_at_a_line_break_when_its_time_is_over(load: Load) -> None:
    lm = load()
    options: Any = {"regex": r"([ab]{2}\n){40}", "max_tokens": 200, "lookahead": 0, "temperature": 1.0, "seed": 1}
    whole, result = lm.generate(PROMPTS[0], **options), lm.generate(PROMPTS[0], **options, max_predict_ms=0.001)
    assert whole.text.startswith(result.text) and result.text.endswith("\n") and len(result.text) < len(whole.text)
    assert result.finish_reason == "length" and lm.verify(result).ok
    again = result_from_json(json.loads(json.dumps({**as_json(result), "record": record_as_json(result)})))
    assert lm.verify(again).ok
    for unlimited in (-1, 0, 60_000):
        assert lm.generate(PROMPTS[0], **options, max_predict_ms=unlimited).text == whole.text
    patient = lm.generate(PROMPTS[0], **options, max_predict_ms=0.001, min_tokens=30)
    assert len(patient.token_ids) > 30 and patient.text.startswith(result.text) and lm.verify(patient).ok


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heal": True},
        {"json_schema": {"const": 7}},
        {"json_schema": {"type": "object"}, "json_schema_mode": "checked", "temperature": 1.0, "retries": 2},
    ],
    ids=["plain", "heal", "forced", "checked"],
)
def test_no_tokens_only_read_the_prompt(load: Load, options: dict[str, Any]) -> None:
    lm = load(draft="lookup", cache_memory=1)
    lm.runtime.models.free_idle_caches()
    prompt = PROMPTS[0] * 4
    read = lm.generate(prompt, max_tokens=0, **options)
    assert (read.text, read.token_ids, read.finish_reason, read.schema_errors) == ("", [], "length", None)
    assert read.stats.prompt_tokens == len(lm.encode(prompt)) and read.stats.ttft_ms > 0
    assert lm.verify(read).ok
    again = result_from_json(json.loads(json.dumps({**as_json(read), "record": record_as_json(read)})))
    assert lm.verify(again).ok
    longer = lm.generate(prompt, max_tokens=4)
    assert longer.stats.cached_tokens > read.stats.prompt_tokens - 50 or lm.target.engine == "stateful"
    assert not lm.verify(ovspec.Result(longer.text, longer.token_ids, "length", record=read.record)).ok


def test_no_tokens_in_streams_batches_and_sessions(load: Load) -> None:
    lm = load()
    assert [piece.finish_reason for piece in lm.stream(PROMPTS[0], max_tokens=0)] == ["length"]
    assert [result.token_ids for result in lm.generate(PROMPTS[:2], max_tokens=0)] == [[], []]
    with lm.session() as session:
        session.append(PROMPTS[0])
        before = session.tokens
        session.generate(max_tokens=0)
        assert session.tokens == before
        longer = session.generate(max_tokens=4, heal=False)
    assert longer.stats.cached_tokens >= len(before) - 1
    assert longer.token_ids == lm.generate(PROMPTS[0], max_tokens=4).token_ids


def as_json(result: ovspec.Result) -> dict[str, Any]:
    return {"text": result.text, "token_ids": result.token_ids, "finish_reason": result.finish_reason}


@pytest.mark.parametrize("draft", [False, True])
def test_stop_string_is_left_out(load: Load, draft: bool) -> None:
    lm = load(draft=draft)
    whole = lm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True)
    stop = whole.text.strip()[4:8]
    result = lm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, stop=["never there", stop])
    assert result.stop_string == stop and whole.stop_string is None
    assert result.finish_reason == "stop"
    assert result.text == whole.text[: whole.text.index(stop)]
    assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert stop in lm.tokenizer.decode(result.token_ids)


@pytest.mark.parametrize("draft", [False, True])
def test_pieces_add_up(load: Load, draft: bool) -> None:
    stream = load(draft=draft).stream(PROMPTS[3], max_tokens=50)
    pieces = list(stream)
    result = stream.result()
    assert "".join(piece.text for piece in pieces) == result.text
    assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == result.finish_reason
    assert result.text == load(draft=draft).tokenizer.decode(result.token_ids)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop": {"stop": "self"},
    "sampled": {"temperature": 1.0, "seed": 3},
    "regex": {"regex": r"(import os\.path, [a-z]{3,9}\n){9}"},
}
QUICK = [(False, "greedy"), (True, "sampled"), ("lookup,draft", "stop"), ("lookup,draft", "regex")]


@pytest.mark.parametrize(
    ("draft", "options"),
    [
        pytest.param(draft, options, marks=() if (draft, way) in QUICK else pytest.mark.slow, id=f"{draft}-{way}")
        for draft in (False, True, "lookup", "lookup,draft")
        for way, options in WAYS.items()
    ],
)
def test_pieces_say_where_each_token_came_from(load: Load, draft: bool | str, options: dict[str, Any]) -> None:
    lm = load(draft=draft)
    for lookahead in (0, 4, "auto") if draft else (0,):
        stream = lm.stream(PROMPTS[3], max_tokens=60, lookahead=lookahead, **options)
        pieces = list(stream)
        assert all(len(piece.sources) == len(piece.token_ids) for piece in pieces)
        found, stats = Counter(source for piece in pieces for source in piece.sources), stream.result().stats
        accepted = {name: counts["accepted"] for name, counts in stats.drafters.items()}
        expected = Counter(accepted) + Counter(forced=stats.forced)
        assert found == expected + Counter(target=stats.generated_tokens - expected.total())
        assert set(found) == {"target"} or lookahead
        if lookahead == 4:
            assert sum(accepted.values()) > 0
            assert bool(stats.forced) == ("regex" in options)


def test_where_tokens_came_from_is_in_order(load: Load) -> None:
    """Accepted proposed tokens come before the target's own token; tokens that are cut off are not counted."""
    lm = load(draft=True)
    pieces = list(lm.stream(PROMPTS[3], max_tokens=61, lookahead=4, ignore_eos=True))
    assert pieces[0].sources == ["target"]
    assert {tuple(piece.sources) for piece in pieces[:-1]} <= {("draft",) * n + ("target",) for n in range(5)}
    assert lm.runtime.row_maker.make_rows("a", lm.runtime.row_maker.make_complete_params({}))[0].cancel().sources == []


def test_texts_of_requests_may_fill_the_context(with_generation_config: Callable[..., Path], cache_dir: Path) -> None:
    """Where neither the request nor the model's generation config has a limit."""
    for settings, expected in (({}, -1), ({"max_new_tokens": 7}, 7)):
        lm = ovspec.load(with_generation_config(settings), "none", precision="f32", cache_dir=cache_dir)
        row_maker = lm.runtime.row_maker
        assert row_maker.with_long_texts(make_params({})).max_tokens == expected
        assert row_maker.with_long_texts(make_params({"max_tokens": 3})).max_tokens == 3
        lines = []
        context, params = lm.target.ir.context_length or 0, make_params({"ignore_eos": True, "lookahead": 0})
        prompt = [100] * (context - 300 if expected == -1 else 3)
        requests = [BatchRequest("1", "", TextRequest("batch_line", [prompt]))]
        for _ in BatchRun(lm, params, requests, lambda _, line, lines=lines: lines.append(line)).run_rounds():
            pass
        assert lines[0]["generated_tokens"] == (300 if expected == -1 else expected), "more than 256"
        assert lm.generate("a", ignore_eos=True).stats.generated_tokens == (256 if expected == -1 else expected)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_exact(load: Load, reference: Reference, draft: bool, max_tokens: int) -> None:
    result = load(draft=draft).generate(PROMPTS[1], max_tokens=max_tokens, ignore_eos=True)
    assert result.finish_reason == "length"
    assert result.token_ids == reference.generate(PROMPTS[1], max_tokens, ignore_eos=True)


@pytest.mark.parametrize("draft", [False, True])
def test_every_id_of_an_eos_list_ends_the_text(load: Load, monkeypatch: pytest.MonkeyPatch, draft: bool) -> None:
    lm = load(draft=draft)
    whole = lm.generate(PROMPTS[2], max_tokens=30, ignore_eos=True)
    for at in (0, 3, 11):
        ends = [4090, whole.token_ids[at]]
        monkeypatch.setattr(lm.generation_config, "eos_ids", frozenset(ends))
        result = lm.generate(PROMPTS[2], max_tokens=30)
        first = min(whole.token_ids.index(token) for token in ends if token in whole.token_ids)
        assert result.finish_reason == "eos"
        assert result.token_ids == whole.token_ids[: first + 1]
        beside = lm.generate(PROMPTS[2], max_tokens=30, stop_ids=[4091])
        assert (beside.finish_reason, beside.token_ids) == ("eos", result.token_ids), "stop ids take nothing away"
        assert lm.generate(PROMPTS[2], max_tokens=30, ignore_eos=True).token_ids == whole.token_ids


def test_defaults_come_from_the_generation_config(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load()
    assert lm.generation_config.eos_ids == {0, 2}
    monkeypatch.setattr(lm.generation_config, "settings", GenerationConfigFile(eos_token_id=0, max_new_tokens=5))
    assert lm.generate(PROMPTS[0]).stats.generated_tokens <= 5


@pytest.mark.parametrize("draft", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_context_limit(load: Load, draft: bool) -> None:
    lm = load(draft=draft)
    ids: list[int] = np.resize(lm.tokenizer.encode(PROMPTS[4]), 2040).tolist()
    result = lm.generate(ids, ignore_eos=True)
    assert result.finish_reason == "length"
    assert result.stats.generated_tokens == 8
    assert lm.generate(ids, max_tokens=8, ignore_eos=True).token_ids == result.token_ids
    for more in (9, 10**9, -1):
        longer = lm.generate(ids, max_tokens=more, ignore_eos=True)
        assert (longer.token_ids, longer.finish_reason) == (result.token_ids, "length")
    assert lm.verify(result).ok
    with pytest.raises(ovspec.OvspecError, match="context is 2048"):
        lm.generate(ids + ids)


def test_a_text_without_a_limit_ends_by_itself_or_with_the_context(load: Load) -> None:
    """``max_tokens=-1`` alone, in a batch, in a session with a context of its own, and with ``min_tokens``."""
    lm = load(draft=True)
    ids: list[int] = np.resize(lm.tokenizer.encode(PROMPTS[4]), 1990).tolist()
    found = lm.generate([ids, ids[:1980]], max_tokens=-1, ignore_eos=True, min_tokens=3)
    assert [(len(each.token_ids), each.finish_reason) for each in found] == [(58, "length"), (68, "length")]
    eos = lm.generate(PROMPTS[0], max_tokens=-1, min_tokens=2, logit_bias={0: 100.0})
    assert (len(eos.token_ids), eos.finish_reason) == (3, "eos")
    with lm.session(context=60) as session:
        session.append(ids[:40])
        result = session.generate(max_tokens=-1, ignore_eos=True)
        assert (len(result.token_ids), result.finish_reason) == (20, "length")
        assert lm.verify(result).ok


def test_prompts_that_cannot_be_used(load: Load) -> None:
    lm = load()
    with pytest.raises(ovspec.OvspecError, match="Token id 5000"):
        lm.generate([5, 5000])
    with pytest.raises(ovspec.OvspecError, match="`max_tokens` is -2; it must be 0 or more, or -1 for the rest"):
        lm.generate("a", max_tokens=-2)
    with pytest.raises(ovspec.OvspecError, match="`stop` has an empty string"):
        lm.generate("a", stop="")
    with pytest.raises(ovspec.OvspecError, match="`lookahead` is -1"):
        lm.generate("a", lookahead=-1)
    with pytest.raises(TypeError, match="unknown option 'max_new_tokens'"):
        lm.generate("a", max_new_tokens=5)  # type: ignore[call-arg]
    # The model still works after these errors.
    assert lm.generate("a", max_tokens=2).stats.generated_tokens == 2


def test_options_and_prompts_of_other_types(load: Load) -> None:
    """Options may be numpy numbers and arrays, and a prompt may be a single message."""
    lm = load(draft=True)
    options: dict[str, Any] = {"max_tokens": np.int64(9), "ignore_eos": True, "lookahead": np.int64(3)}
    result = lm.generate(PROMPTS[0], stop_ids=np.array([4000, 4001]), **options)
    assert result.token_ids == lm.generate(PROMPTS[0], **options).token_ids
    assert 3 < result.stats.proposed <= 3 * result.stats.rounds
    with pytest.raises(ovspec.OvspecError, match="9999 is not in the vocabulary"):
        lm.generate("a", stop_ids=np.array([9999]))
    message = {"role": "user", "content": "hi"}
    assert lm.generate(message, max_tokens=5).token_ids == lm.generate([message], max_tokens=5).token_ids


def test_a_lookahead_of_none_is_the_models(pair: Path, cache_dir: Path) -> None:
    lm = ovspec.load(pair, True, lookahead=0, precision="f32", cache_dir=cache_dir)
    both: list[Any] = [{}, {"lookahead": None}]
    for options in both:
        assert lm.generate("a", max_tokens=3, **options).stats.draft_device is None


def test_an_empty_prompt_begins_with_bos(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load()
    assert lm.generate("", max_tokens=4, ignore_eos=True).token_ids == (
        lm.generate([0], max_tokens=4, ignore_eos=True).token_ids
    )
    monkeypatch.setattr(lm.generation_config, "settings", GenerationConfigFile())
    with pytest.raises(ovspec.OvspecError, match="prompt is empty"):
        lm.generate("")


def test_ctrl_c_between_rounds_leaves_a_result(load: Load) -> None:
    """Ctrl-C comes while the caller handles a piece."""
    stream = load(draft=True).stream(PROMPTS[0], max_tokens=50, stop="never there")
    with pytest.raises(KeyboardInterrupt):
        for piece in stream:
            if piece.token_ids:
                signal.raise_signal(signal.SIGINT)
    stream.cancel()
    result = stream.result()
    assert result.finish_reason == "cancelled"
    assert len(result.token_ids) == result.stats.generated_tokens == 1
    assert result.stats.other_ms > 0


def test_what_is_not_applied_is_said(pair: Path, tmp_path: Path, cache_dir: Path) -> None:
    import json
    import shutil

    folder = tmp_path / "penalised"
    shutil.copytree(pair, folder)
    (folder / "ovspec.json").unlink()
    settings = {"no_repeat_ngram_size": 3, "forced_eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0} | settings), "utf-8")
    named = "sets (?=.*no_repeat_ngram_size)(?=.*forced_eos_token_id).*, which ovspec does not apply"
    with pytest.warns(UserWarning, match=named):
        ovspec.load(folder, engine="stateful", arithmetic="fast", precision="f32", cache_dir=cache_dir)


def test_a_lookahead_needs_something_that_proposes(load: Load) -> None:
    for call in (load().generate, load().stream):  # a stream fails too, before it is iterated over
        with pytest.raises(ovspec.OvspecError, match="`lookahead` needs a source of proposals"):
            call("a", lookahead=3)


def test_an_abandoned_stream_harms_nothing(load: Load) -> None:
    lm = load(draft=True)
    stream = lm.stream(PROMPTS[0], max_tokens=50)
    next(iter(stream))
    del stream
    assert lm.generate(PROMPTS[1], max_tokens=8).token_ids == load().generate(PROMPTS[1], max_tokens=8).token_ids
