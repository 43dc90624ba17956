"""Sessions: texts that keep their KV caches through rewinds, forks and edits."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
import pytest
from conftest import PROMPTS, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import ovspec
from ovspec.api.model import LanguageModel
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.sequence import Sequence, measure_common_prefix
from ovspec.setup.engine_choice import EngineName

Load = Callable[..., LanguageModel]
DRAFTS: list[Any] = [None, True, "lookup", "lookup,draft"]


@pytest.fixture(scope="module", params=["stateful", "paged"])
def load(load: Load, request: pytest.FixtureRequest) -> Load:
    """Load with each engine: every test in this file must pass with both."""
    return functools.partial(load, engine=request.param)


@pytest.fixture
def session(load: Load) -> Iterator[ovspec.Session]:
    with load(draft=True).session() as session:
        yield session


# ---------------------------------------------------------------- generating


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
        # After an edit, everything past the common prefix is rolled back at the next use.
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


def test_a_failed_inference_is_fed_again(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load(draft=True)
    whole = lm.generate(PROMPTS[0], max_tokens=30, ignore_eos=True).token_ids
    with lm.session() as session:
        session.append(PROMPTS[0])
        done = session.generate(max_tokens=10, ignore_eos=True).token_ids
        assert session._decoders
        target = session._decoders.target
        working = target._request.openvino_request  # type: ignore[attr-defined]

        class Broken:
            def __getattr__(self, name: str) -> object:
                return getattr(working, name)

            def wait(self) -> None:
                working.wait()
                raise RuntimeError("Check 'memory' failed at x.cpp:1:\nOut of memory\n")

        monkeypatch.setattr(target._request, "openvino_request", Broken())  # type: ignore[attr-defined]
        with pytest.raises(ovspec.OvspecError, match=r"OpenVINO failed to run the model .*Out of memory"):
            session.generate(max_tokens=5, ignore_eos=True)
        monkeypatch.undo()
        done += session.generate(max_tokens=20, ignore_eos=True).token_ids
    assert done == whole


def test_a_round_that_fails_leaves_nothing(load: Load) -> None:
    """A failed round leaves no tokens, not even those that the grammar forced at its start."""
    calls = 0

    def failing(logits: np.ndarray, tokens: np.ndarray) -> int:  # noqa: ARG001
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ZeroDivisionError
        return int(logits.argmax())

    with load(draft=True).session() as session:
        session.append(PROMPTS[0])
        seen = ""
        with pytest.raises(ZeroDivisionError):
            for piece in session.stream(regex="([a-c]forced)+", sampler=failing, max_tokens=40, heal=False):
                seen += piece.text
        assert "forced" in seen
        assert session.text == PROMPTS[0] + seen
        tokens = session.sequence.tokens.tolist()
        more = session.generate(max_tokens=8, ignore_eos=True, heal=False)
    assert more.token_ids == load(draft=True).generate(tokens, max_tokens=8, ignore_eos=True).token_ids


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
            # Later calls do not change the result.
            assert result.token_ids == whole.token_ids[: len(result.token_ids)]


def test_nothing_stays_behind_an_eos(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens after an EOS are dropped, even if a round committed them."""
    lm = load(draft=True)
    whole = lm.generate(PROMPTS[2], max_tokens=30, ignore_eos=True).token_ids
    for token in set(whole):
        monkeypatch.setattr(lm.generation_config, "eos_ids", frozenset({token}))
        with lm.session() as session:
            session.append(PROMPTS[2])
            start = len(session.sequence)
            result = session.generate(max_tokens=30, lookahead=8, heal=False)
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


def test_ctrl_c_leaves_kv_and_text_in_agreement(load: Load) -> None:
    """Another thread sends a real SIGINT while rounds run; afterwards the session continues as if nothing happened."""
    lm = load(draft=True)
    whole = lm.generate(PROMPTS[5], max_tokens=150, ignore_eos=True)
    for delay in (0.0, 0.01, 0.02, 0.05):
        with lm.session() as session:
            session.append(PROMPTS[5])
            start = len(session.sequence)
            stream = session.stream(max_tokens=150, ignore_eos=True)
            pieces = [next(iter(stream))]
            with pytest.raises(KeyboardInterrupt):
                threading.Thread(target=lambda d=delay: (time.sleep(d), os.kill(os.getpid(), signal.SIGINT))).start()
                while True:
                    pieces += stream
                    time.sleep(0.5)  # generation finished first: wait for the signal
            if pieces[-1].finish_reason == "cancelled":
                result = stream.result()
                assert result.text == "".join(piece.text for piece in pieces)
                assert result.token_ids == session.sequence.tokens[start:].tolist()
            done = len(session.sequence) - start
            rest = session.generate(max_tokens=160 - done, ignore_eos=True)
            assert (session.sequence.tokens[start : start + 150].tolist()) == whole.token_ids
            assert rest.finish_reason == "length"


# ---------------------------------------------------------------- the text


@given(st.lists(st.text("abc\n .(é€", max_size=6), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_a_text_in_pieces_is_the_text(load: Load, pieces: list[str]) -> None:
    lm = load()
    with lm.session() as session:
        session.append("# ")
        for piece in pieces:
            session.append(piece)
        text = "# " + "".join(pieces)
        assert session.tokens == lm.tokenizer.encode(text).tolist()
        assert session.text == text


class Program:
    """Random operations on sessions; after each one, text and tokens must be what a simple model of them predicts.

    Each generation is compared with one from scratch on the same tokens, without a draft, and may read only tokens
    that its caches did not hold.
    """

    def __init__(self, lm: LanguageModel, plain: LanguageModel, seed: int) -> None:
        self.plain, self.random = plain, random.Random(seed)
        self.sessions = [lm.session()]
        self.marks: list[tuple[ovspec.Mark, str]] = []
        self.append(self.sessions[0])

    def append(self, session: ovspec.Session) -> None:
        prompt = self.random.choice(PROMPTS)
        start = self.random.randrange(len(prompt))
        before, more = session.text, prompt[start : start + self.random.randint(1, 40)]
        session.append(more)
        assert session.text == before + more

    def generate(self, session: ovspec.Session) -> None:
        assert session._decoders
        target = session._decoders.target
        healed = bool(self.random.getrandbits(1))
        given, mark = session.tokens, session.mark()
        options: Any = {"max_tokens": self.random.randint(1, 12), "ignore_eos": True, "heal": healed}
        if self.random.random() < 0.3:
            options["stop"] = self.random.choice("aeinr_\n(")
        with self.plain.session() as fresh:
            fresh.rewind(mark)
            expected = fresh.generate(**options)
        shared = measure_common_prefix(target.rows[0], Sequence(given))
        result = session.generate(**options)
        assert result.token_ids == expected.token_ids
        assert result.text == expected.text
        # Healing removes tokens, and the last token is fed again; recurrent states may be rolled back further.
        if not (target.rollback.replay or target.rollback.advances):
            assert result.stats.cached_tokens >= min(shared, len(given) - 1) - (16 if healed else 0)
        assert session.text == self.plain.tokenizer.decode(given) + result.text

    def go_back(self, session: ovspec.Session) -> None:
        if self.marks:
            mark, text = self.random.choice(self.marks)
            session.rewind(mark)
            assert session.text == text

    def mark(self, session: ovspec.Session) -> None:
        self.marks.append((session.mark(), session.text))

    def fork(self, session: ovspec.Session) -> None:
        if len(self.sessions) < 4:
            self.sessions.append(session.fork())
            assert self.sessions[-1].tokens == session.tokens

    def close(self, session: ovspec.Session) -> None:
        if len(self.sessions) > 1:
            self.sessions.remove(session)
            session.close()

    def score(self, session: ovspec.Session) -> None:
        before = session.tokens
        assert session.score("return").logprob < 0
        assert session.tokens == before

    def select(self, session: ovspec.Session) -> None:
        before = session.text
        chosen = session.select(["self", "None", "import os", "\n"])
        assert session.text == before + chosen.text

    def run(self, steps: int) -> None:
        doing = [self.append, self.generate, self.generate, self.go_back, self.mark, self.fork, self.close]
        doing += [self.score, self.select]
        for _ in range(steps):
            self.random.choice(doing)(self.random.choice(self.sessions))
            if max(map(len, self.sessions)) > 1500:
                self.sessions[0].reset()
                self.append(self.sessions[0])
        for session in self.sessions:
            if len(session):
                self.generate(session)
            session.close()


@pytest.mark.parametrize("draft", [None, True, "lookup,draft"])
def test_whatever_is_done_to_a_session(load: Load, draft: Any) -> None:
    for seed in range(2):
        Program(load(draft=draft), load(), seed).run(40)


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("cache", [{}, {"rollback": "trim"}, {"compact_at": 3}])
def test_whatever_is_done_to_any_session(load: Load, cache: dict[str, Any], draft: Any) -> None:
    if cache and load().target.engine == "paged":
        pytest.skip("only the stateful engine has these options")
    for seed in range(100, 130):
        Program(load(draft=draft, **cache), load(**cache), seed).run(60)


@pytest.mark.slow  # tests/cache/test_stateful.py rolls such states back
@pytest.mark.parametrize("attention", [None, "mask"])
def test_sessions_of_recurrent_models(attention: str | None, tmp_path: Path, cache_dir: Path) -> None:
    """Convolution and SSM states can't be rolled back to every position, so some tokens are read again."""
    model = hybrid.Hybrid(4096, attention)
    folder = hybrid.export(model, tmp_path / "ir", ROOT / "models" / "demo")
    lm = ovspec.load(folder, "lookup", precision="f32", cache_dir=cache_dir)
    for seed in range(4):
        Program(lm, lm.with_drafters(None), seed).run(30)


def test_what_a_stop_string_leaves_of_a_token(load: Load) -> None:
    """The tokens before a cut token stay; what is left of it is encoded again with the appended text."""
    lm = load()
    whole = lm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True)
    spelt = [lm.tokenizer.decode([token]) for token in whole.token_ids]
    place = next(i for i, text in enumerate(spelt) if len(text.strip()) > 3 and text not in "".join(spelt[:i]))
    token = spelt[place]
    first = next(i for i, char in enumerate(token) if not char.isspace())
    stop, kept = token[first + 2 :], token[: first + 2]
    with lm.session() as session:
        session.append(PROMPTS[0])
        start = len(session)
        result = session.generate(max_tokens=60, ignore_eos=True, stop=stop)
        assert result.text.endswith(kept)
        assert result.finish_reason == "stop"
        said = len(result.token_ids) - 1
        assert session.tokens[start : start + said] == whole.token_ids[:said]
        session.append(stop)
        assert session.tokens[start:] == [*whole.token_ids[:said], *lm.tokenizer.encode_continuation(token).tolist()]
        assert session.text == PROMPTS[0] + result.text + stop


def test_a_cancelled_stream_gives_back_what_healing_took(session: ovspec.Session) -> None:
    session.append("import os.pa")
    before = session.tokens
    session.stream(max_tokens=5)
    assert session.mark().tokens.tolist() == before, "nothing has been generated"
    session.append("th")
    assert session.text == "import os.path"


def test_an_edited_text_pays_for_what_changed(session: ovspec.Session) -> None:
    beginning = session.mark()
    session.append(PROMPTS[0])
    session.generate(max_tokens=10, ignore_eos=True)
    session.rewind(beginning)
    assert session.text == ""
    session.append(PROMPTS[0][:-10] + "changed")
    result = session.generate(max_tokens=3, heal=False)
    assert result.stats.cached_tokens >= len(session.runtime.prompt_encoder.encode(PROMPTS[0][:-10])) - 2


def test_misuse_is_refused(load: Load, session: ovspec.Session) -> None:
    for options in ([], "cat", ["a", "a"], ["a", ""], [1]):
        with pytest.raises(ovspec.OvspecError, match=r"`select` (needs|has)"):
            session.select(options)  # type: ignore[arg-type]
    for text in ("", 3, [3]):
        with pytest.raises(ovspec.OvspecError, match="`score` needs a non-empty string"):
            session.score(text)  # type: ignore[arg-type]
    for prompt in (None, 3, b"abc", ["a", 3], {1, 2}):
        with pytest.raises(ovspec.OvspecError, match="A prompt must be a string, token ids or chat messages"):
            session.append(prompt)  # type: ignore[arg-type]
    with pytest.raises(ovspec.OvspecError, match="`terminator` must be a string"):
        session.select(["a"], terminator=3)  # type: ignore[arg-type]
    with pytest.raises(ovspec.OvspecError, match="`rewind` needs a mark"):
        session.rewind(3)  # type: ignore[arg-type]
    with pytest.raises(ovspec.OvspecError, match="not in the vocabulary"):
        session.append([10**6])
    with pytest.raises(ovspec.OvspecError, match="an unpaired surrogate"):
        session.append("\ud800")
    session.append("x = ")
    with pytest.raises(ovspec.OvspecError, match=r"can't be appended to plain text"):
        session.append({"role": "user", "content": "hi"})
    assert session.text == "x = "
    for context in (0, 10**6):
        with pytest.raises(ovspec.OvspecError, match=f"`context` is {context}"):
            load().session(context=context)
    session.close()
    for call in (
        session.fork,
        lambda: session.append("x"),
        lambda: session.rewind(session.mark()),
        lambda: session.select(["a", "b"]),
        lambda: session.save("x"),
        session.reset,
    ):
        with pytest.raises(ovspec.OvspecError, match="closed"):
            call()


def test_a_context_given_ahead(load: Load) -> None:
    lm = load(draft=True)
    assert lm.cache_bytes(100) > lm.cache_bytes(10) > 0
    with lm.session(context=40) as session:
        session.append(PROMPTS[0][:30])
        result = session.generate(ignore_eos=True, heal=False)
        assert result.finish_reason == "length"
        assert len(session) == 40
        with pytest.raises(ovspec.OvspecError, match="context is 40"):
            session.generate(max_tokens=1)
        with pytest.raises(ovspec.OvspecError, match="context is 40"):
            session.select(["one", "two"])


# ---------------------------------------------------------------- memory


def test_forks_share_blocks_until_they_part(load: Load) -> None:
    lm = load(draft=True)
    if lm.target.engine != "paged":
        pytest.skip("the stateful engine copies its cache")
    with lm.session() as session:
        session.append(PROMPTS[0] * 4)
        session.generate(max_tokens=4, ignore_eos=True)
        assert session._decoders
        target = session._decoders.target
        assert isinstance(target, PagedDecoder)
        used = target.blocks_used
        forks = [session.fork() for _ in range(5)]
        assert target.blocks_used == used
        for fork in forks:
            fork.generate(max_tokens=4, ignore_eos=True)
        assert target.blocks_used <= used + 5 * 2
        for fork in forks:
            fork.close()
        assert target.blocks_used == used
    assert target.blocks_used == 0


def test_forks_in_threads(load: Load) -> None:
    lm = load(draft=True)
    expected = lm.generate(PROMPTS[0], max_tokens=60, ignore_eos=True).token_ids
    with lm.session() as session:
        session.append(PROMPTS[0])
        session.generate(max_tokens=20, ignore_eos=True)
        forks = [session.fork() for _ in range(4)]
        found: list[list[int]] = []

        def go_on(fork: ovspec.Session) -> None:
            found.append(fork.generate(max_tokens=40, ignore_eos=True).token_ids)
            fork.append(PROMPTS[1] * 3)
            fork.generate(max_tokens=8)

        threads = [threading.Thread(target=go_on, args=(fork,)) for fork in forks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected[20:]] * 4
        assert session.generate(max_tokens=40, ignore_eos=True).token_ids == expected[20:]
        for fork in forks:
            fork.close()


def test_turns_do_not_grow_beyond_their_text(load: Load) -> None:
    lm = load(draft=True, cache_memory=0)
    with lm.session() as session:
        session.append(PROMPTS[0])
        mark = session.mark()
        for turn in range(60):
            session.append(f"\n# {turn}\n")
            session.generate(max_tokens=6, ignore_eos=True)
            if turn % 10:
                session.rewind(mark)
            mark = session.mark()
        assert session._decoders
        for decoder in (session._decoders.target, *session._decoders.drafts):
            if isinstance(decoder, PagedDecoder):
                size = decoder._tensors.block_size
                assert decoder.blocks_used <= -(-(len(session) + 20) // size) + 1
                assert decoder._tensors.capacity <= max(8, 2 * -(-(len(session) + 20) // size))
            else:
                assert decoder._slot_tables.slot_count <= len(session) + 256 + 20  # type: ignore[union-attr]
        decoders = session._decoders
    for decoder in (decoders.target, *decoders.drafts):
        if isinstance(decoder, PagedDecoder):
            assert decoder._tensors.capacity == 8, "closing must free the memory"


@pytest.mark.slow  # the test above sees what closing frees, without measuring it
@pytest.mark.parametrize("engine", ["stateful", "paged"])
def test_closing_frees_the_memory(engine: EngineName, cache_dir: Path) -> None:
    """Measured on the demo model, whose cache is large compared with other allocations."""
    import gc

    import psutil

    lm = ovspec.load(ROOT / "models" / "demo", engine=engine, precision="f32", cache_dir=cache_dir, cache_memory=0)

    def held(texts: int) -> float:
        sessions = [lm.session() for _ in range(texts)]
        for session in sessions:
            session.append(list(range(5, 1905)))
            session.generate(max_tokens=2)
        most = psutil.Process().memory_info().rss
        for session in sessions:
            session.close()
        gc.collect()
        return (most - psutil.Process().memory_info().rss) / lm.cache_bytes(1900)

    held(1)  # warm-up: other memory that inferences need stays allocated
    assert held(1) > 0.75


# ---------------------------------------------------------------- chats


def test_each_turn_goes_on_from_the_last(session: ovspec.Session, load: Load) -> None:
    lm = load()
    turns = ["Write a loop.", "Now with a list.", {"role": "user", "content": "And a class?"}]
    for number, turn in enumerate(turns):
        before = len(session)
        session.append(turn if isinstance(turn, dict) else [{"role": "user", "content": turn}])
        assert [message["role"] for message in session.messages] == ["user", "assistant"] * number + ["user"]
        prompt = session.tokens
        result = session.generate(max_tokens=12)
        assert result.token_ids == lm.generate(prompt, max_tokens=12).token_ids
        assert session.messages[-1] == {"role": "assistant", "content": result.text}
        assert result.stats.cached_tokens >= before - 1, "only the new turn is read"
        rendered = lm.runtime.prompt_encoder.chat_format.template.render(session.messages[:-1])
        assert lm.tokenizer.decode_with_special(session.sequence.tokens[: len(prompt)]) == rendered
    session.append("more")
    assert session.messages[-1]["content"].endswith("more"), "a string continues the answer"


def test_an_answer_goes_on_from_a_message(session: ovspec.Session, load: Load) -> None:
    lm, chat = load(), [{"role": "user", "content": "Write a loop."}, {"role": "assistant", "content": "for i"}]
    session.append(chat)
    assert session.messages == chat and session.text.endswith("for i")
    result = session.generate(max_tokens=8)
    assert result.token_ids == lm.generate(chat, max_tokens=8).token_ids
    assert session.messages == [chat[0], {"role": "assistant", "content": f"for i{result.text}"}]
    session.append({"role": "user", "content": "Go on."})
    assert [message["role"] for message in session.messages] == ["user", "assistant", "user"]


def test_a_template_that_forgets_is_followed(session: ovspec.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates of reasoning models leave out the reasoning of earlier turns."""
    from ovspec.text.chat_format import ChatFormat
    from ovspec.text.chat_template import ChatTemplate

    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n"
        "{% endfor %}<|im_start|>assistant\n"
    )
    monkeypatch.setattr(session.runtime.prompt_encoder, "chat_format", ChatFormat(ChatTemplate(source, {})))
    session.append({"role": "user", "content": "hi"})
    question = len(session)
    session.append("thinking</think>the answer")
    session.generate(max_tokens=2, ignore_eos=True)
    session.append({"role": "user", "content": "go on"})
    assert "thinking" not in session.text
    assert "the answer" in session.text
    assert session.tokens == session.runtime.prompt_encoder.encode(session.messages).tolist()
    assert session.generate(max_tokens=2).stats.cached_tokens >= question - 1


def test_a_chat_can_be_taken_back(session: ovspec.Session) -> None:
    session.append({"role": "system", "content": "Be brief."})
    first = session.mark()
    session.append({"role": "user", "content": "hi"})
    session.generate(max_tokens=5)
    session.rewind(first)
    assert [message["role"] for message in session.messages] == ["system"]
    session.append({"role": "user", "content": "other"})
    assert [message["content"] for message in session.messages] == ["Be brief.", "other"]
    session.reset()
    assert (session.messages, session.text, len(session)) == ([], "", 0)
    session.append({"role": "user", "content": "new"})
    assert session.generate(max_tokens=3).stats.cached_tokens == 0


def test_an_answer_that_ended_keeps_its_tokens(session: ovspec.Session) -> None:
    """Also if the template ends answers with another token than the model did."""
    session.append({"role": "user", "content": "hi"})
    letters = [
        token
        for letter in "loop"
        for token in session.runtime.prompt_encoder.tokenizer.encode_continuation(letter).tolist()
    ]
    assert len(session.runtime.prompt_encoder.tokenizer.encode_continuation("loop")) < len(letters)
    begun = session.tokens
    session.append([*letters, min(session.runtime.prompt_encoder.generation_config.eos_ids)])
    session.append({"role": "user", "content": "more"})
    assert session.messages[1] == {"role": "assistant", "content": "loop"}
    assert session.tokens[: len(begun) + 4] == [*begun, *letters]
