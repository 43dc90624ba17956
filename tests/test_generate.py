"""Texts, how they end, sessions, Ctrl-C."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
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
from ovspec.generate import StopStrings
from ovspec.model import LanguageModel
from ovspec.sequence import Sequence

Load = Callable[..., LanguageModel]


@pytest.fixture(scope="module", params=["stateful", "paged"])
def load(load: Load, request: pytest.FixtureRequest) -> Load:
    """Everything here is the same with either engine."""
    return functools.partial(load, engine=request.param)


@given(st.text("ab\n", max_size=30), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_in_any_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    finder, shown, rest = StopStrings(stops), "", text
    stopped = False
    while rest and not stopped:
        size = data.draw(st.integers(1, len(rest)))
        piece, rest = rest[:size], rest[size:]
        new, stopped = finder.push(piece)
        shown += new
    if not stopped:
        shown += finder.flush()
    seen = text[: len(text) - len(rest)]
    places = [at for stop in stops if (at := seen.find(stop)) >= 0]
    assert stopped == bool(places)
    if not places:
        assert shown == text
    else:
        # Streaming decides at the first piece that completes a stop string; nothing of it is ever shown.
        assert text.startswith(shown)
        assert any(text.startswith(stop, len(shown)) for stop in stops)
        assert not any(stop in shown for stop in stops)


@pytest.mark.parametrize("draft", [False, True])
def test_stop_string_is_left_out(load: Load, draft: bool) -> None:
    lm = load(draft=draft)
    whole = lm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True)
    stop = whole.text.strip()[4:8]
    result = lm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True, stop=["never there", stop])
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


@pytest.mark.parametrize("draft", [False, True, "lookup", "lookup,draft"])
@pytest.mark.parametrize(
    "options", [{}, {"stop": "self"}, {"temperature": 1.0, "seed": 3}, {"regex": r"(import os\.path, [a-z]{3,9}\n){9}"}]
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
    """What is accepted of a proposal stands in front of the target's own token; what is cut off is not counted."""
    lm = load(draft=True)
    pieces = list(lm.stream(PROMPTS[3], max_tokens=61, lookahead=4, ignore_eos=True))
    assert pieces[0].sources == ["target"]
    assert {tuple(piece.sources) for piece in pieces[:-1]} <= {("draft",) * n + ("target",) for n in range(5)}
    assert lm.row(Sequence(lm.encode("a")), {}).cancel().sources == []


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
        monkeypatch.setattr(lm, "_generation_config", {"eos_token_id": ends})
        result = lm.generate(PROMPTS[2], max_tokens=30)
        first = min(whole.token_ids.index(token) for token in ends if token in whole.token_ids)
        assert result.finish_reason == "eos"
        assert result.token_ids == whole.token_ids[: first + 1]
        assert lm.generate(PROMPTS[2], max_tokens=30, ignore_eos=True).token_ids == whole.token_ids


def test_defaults_come_from_the_generation_config(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load()
    assert lm.eos_ids == {0, 2}
    monkeypatch.setattr(lm, "_generation_config", {"eos_token_id": 0, "max_new_tokens": 5})
    assert lm.generate(PROMPTS[0]).stats.generated_tokens <= 5


@pytest.mark.parametrize("draft", [False, True])
def test_the_context_limit(load: Load, draft: bool) -> None:
    lm = load(draft=draft)
    ids: list[int] = np.resize(lm.tokenizer.encode(PROMPTS[4]), 2040).tolist()
    result = lm.generate(ids, ignore_eos=True)
    assert result.finish_reason == "length"
    assert result.stats.generated_tokens == 8
    assert lm.generate(ids, max_tokens=8, ignore_eos=True).token_ids == result.token_ids
    with pytest.raises(ovspec.OvspecError, match="context is 2048"):
        lm.generate(ids, max_tokens=9)
    with pytest.raises(ovspec.OvspecError, match="context is 2048"):
        lm.generate(ids + ids)


def test_prompts_that_cannot_be_used(load: Load) -> None:
    lm = load()
    with pytest.raises(ovspec.OvspecError, match="Token id 5000"):
        lm.generate([5, 5000])
    with pytest.raises(ovspec.OvspecError, match="max_tokens is 0"):
        lm.generate("a", max_tokens=0)
    with pytest.raises(ovspec.OvspecError, match="stop string is empty"):
        lm.generate("a", stop="")
    with pytest.raises(ovspec.OvspecError, match="lookahead is -1"):
        lm.generate("a", lookahead=-1)
    with pytest.raises(TypeError, match="unknown option 'max_new_tokens'"):
        lm.generate("a", max_new_tokens=5)  # type: ignore[call-arg]
    # After refusals the model still works.
    assert lm.generate("a", max_tokens=2).stats.generated_tokens == 2


def test_an_empty_prompt_begins_with_bos(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load()
    assert lm.generate("", max_tokens=4, ignore_eos=True).token_ids == (
        lm.generate([0], max_tokens=4, ignore_eos=True).token_ids
    )
    monkeypatch.setattr(lm, "_generation_config", {})
    with pytest.raises(ovspec.OvspecError, match="prompt is empty"):
        lm.generate("")


@pytest.mark.parametrize("draft", [False, True])
def test_a_session_goes_on_where_it_was(load: Load, draft: bool) -> None:
    lm = load(draft=draft)
    whole = lm.generate(PROMPTS[0], max_tokens=30, ignore_eos=True)
    with lm.session() as session:
        session.append(PROMPTS[0])
        first = session.generate(max_tokens=13, ignore_eos=True)
        second = session.generate(max_tokens=17, ignore_eos=True)
        assert first.token_ids + second.token_ids == whole.token_ids
        # Only the last token of the first call was not in the cache yet.
        assert second.stats.cached_tokens == second.stats.prompt_tokens - 1
        session.append("\n# and then\n")
        third = session.generate(max_tokens=5, ignore_eos=True)
        fresh = lm.generate(session.sequence.tokens[:-5].tolist(), max_tokens=5, ignore_eos=True)
        assert third.token_ids == fresh.token_ids
        assert session.text.startswith(PROMPTS[0])
        # An edit: everything behind the common prefix is rolled back when next used.
        session.sequence.rewind(20)
        edited = session.generate(max_tokens=5, ignore_eos=True)
        fresh = lm.generate(session.sequence.tokens[:20].tolist(), max_tokens=5, ignore_eos=True)
        assert edited.token_ids == fresh.token_ids
        assert edited.stats.cached_tokens == 19
    with pytest.raises(ovspec.OvspecError, match="closed"):
        session.generate()


def test_a_session_cancels_the_stream_it_leaves(load: Load) -> None:
    lm = load(draft=True)
    whole = lm.generate(PROMPTS[0], max_tokens=30, ignore_eos=True).token_ids
    with lm.session() as session:
        session.append(PROMPTS[0])
        start = len(session.sequence)
        first = session.stream(max_tokens=10, ignore_eos=True)
        next(iter(first))
        second = session.stream(max_tokens=10, ignore_eos=True)
        assert list(first) == []
        assert first.result().finish_reason == "cancelled"
        assert session.sequence.tokens[start:].tolist() == whole[:1]
        assert len([token for piece in second for token in piece.token_ids]) == 10
        assert session.sequence.tokens[start:].tolist() == whole[:11]
        third = session.stream(max_tokens=5, ignore_eos=True)
        session.append("\n")
        assert list(third) == []
    assert lm.generate(PROMPTS[0], max_tokens=30, ignore_eos=True).token_ids == whole


def test_ctrl_c_between_rounds_leaves_a_result(load: Load) -> None:
    """The caller is interrupted while it looks at a piece."""
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


def test_a_failed_inference_is_fed_again(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load(draft=True)
    whole = lm.generate(PROMPTS[0], max_tokens=30, ignore_eos=True).token_ids
    with lm.session() as session:
        session.append(PROMPTS[0])
        done = session.generate(max_tokens=10, ignore_eos=True).token_ids
        assert session._decoders
        target = session._decoders.target
        working = target._request.raw  # type: ignore[attr-defined]

        class Broken:
            def __getattr__(self, name: str) -> object:
                return getattr(working, name)

            def wait(self) -> None:
                working.wait()
                raise RuntimeError("Check 'memory' failed at x.cpp:1:\nOut of memory\n")

        monkeypatch.setattr(target._request, "raw", Broken())  # type: ignore[attr-defined]
        with pytest.raises(ovspec.OvspecError, match=r"the inference failed .*Out of memory"):
            session.generate(max_tokens=5, ignore_eos=True)
        monkeypatch.undo()
        done += session.generate(max_tokens=20, ignore_eos=True).token_ids
    assert done == whole


def test_what_is_not_applied_is_said(load: Load, pair: Path, tmp_path: Path, cache_dir: Path) -> None:
    import shutil

    folder = tmp_path / "penalised"
    shutil.copytree(pair, folder)
    (folder / "ovspec.json").unlink()
    (folder / "generation_config.json").write_text('{"no_repeat_ngram_size": 3, "bos_token_id": 0}', "utf-8")
    with pytest.warns(UserWarning, match="asks for no_repeat_ngram_size, which is not applied"):
        ovspec.load(folder, precision="f32", cache_dir=cache_dir)
    with pytest.raises(ovspec.OvspecError, match="lookahead needs a draft"):
        load().generate("a", lookahead=3)


def test_chat_messages_begin_a_session_only(load: Load) -> None:
    with load().session() as session:
        session.append([{"role": "user", "content": "hi"}])
        assert session.generate(max_tokens=3, ignore_eos=True).stats.generated_tokens == 3
        with pytest.raises(ovspec.OvspecError, match="only begin a session"):
            session.append([{"role": "user", "content": "again"}])


@pytest.mark.parametrize("draft", [False, True])
def test_a_session_holds_no_stop_string(load: Load, draft: bool) -> None:
    lm = load(draft=draft)
    whole = lm.generate(PROMPTS[0], max_tokens=40, ignore_eos=True)
    for stop in (whole.text[20:23], whole.text[41:42], whole.text[:1]):
        with lm.session() as session:
            session.append(PROMPTS[0])
            result = session.generate(max_tokens=40, ignore_eos=True, stop=stop)
            assert result.finish_reason == "stop"
            assert session.text == PROMPTS[0] + result.text
            session.append(stop)
            session.generate(max_tokens=5, ignore_eos=True)
            assert session.text.startswith(PROMPTS[0] + result.text + stop)
            # What comes later is not part of the result.
            assert result.token_ids == whole.token_ids[: len(result.token_ids)]


def test_nothing_stays_behind_an_eos(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a round committed more tokens after it."""
    lm = load(draft=True)
    whole = lm.generate(PROMPTS[2], max_tokens=30, ignore_eos=True).token_ids
    for token in set(whole):
        monkeypatch.setattr(lm, "_generation_config", {"eos_token_id": token})
        with lm.session() as session:
            session.append(PROMPTS[2])
            start = len(session.sequence)
            result = session.generate(max_tokens=30, lookahead=8)
            assert session.sequence.tokens[start:].tolist() == result.token_ids == whole[: whole.index(token) + 1]


def test_two_sessions_do_not_mix(load: Load) -> None:
    lm = load(draft=True)
    expected = [lm.generate(prompt, max_tokens=12, ignore_eos=True).token_ids for prompt in PROMPTS[:2]]
    with lm.session() as a, lm.session() as b:
        a.append(PROMPTS[0])
        b.append(PROMPTS[1])
        got = [[], []]
        for _ in range(3):
            for session, tokens in zip((a, b), got, strict=True):
                tokens += session.generate(max_tokens=4, ignore_eos=True).token_ids
    assert got == expected


def test_an_abandoned_stream_harms_nothing(load: Load) -> None:
    lm = load(draft=True)
    stream = lm.stream(PROMPTS[0], max_tokens=50)
    next(iter(stream))
    del stream
    assert lm.generate(PROMPTS[1], max_tokens=8).token_ids == load().generate(PROMPTS[1], max_tokens=8).token_ids


def test_ctrl_c_leaves_kv_and_text_in_agreement(load: Load) -> None:
    """A real SIGINT from another thread while rounds run; afterwards the session goes on as if nothing was."""
    lm = load(draft=True)
    whole = lm.generate(PROMPTS[5], max_tokens=300, ignore_eos=True)
    for delay in (0.0, 0.01, 0.02, 0.05):
        with lm.session() as session:
            session.append(PROMPTS[5])
            start = len(session.sequence)
            stream = session.stream(max_tokens=300, ignore_eos=True)
            pieces = [next(iter(stream))]
            with pytest.raises(KeyboardInterrupt):
                threading.Thread(target=lambda d=delay: (time.sleep(d), os.kill(os.getpid(), signal.SIGINT))).start()
                while True:
                    pieces += stream
                    time.sleep(0.5)  # everything was generated first: the signal still comes
            if pieces[-1].finish_reason == "cancelled":
                result = stream.result()
                assert result.text == "".join(piece.text for piece in pieces)
                assert result.token_ids == session.sequence.tokens[start:].tolist()
            done = len(session.sequence) - start
            rest = session.generate(max_tokens=320 - done, ignore_eos=True)
            assert (session.sequence.tokens[start : start + 300].tolist()) == whole.token_ids
            assert rest.finish_reason == "length"
