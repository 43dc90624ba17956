"""The prefix cache in use: nothing is read twice, and a hit changes no bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import SPECIAL
from compiling import compile_once
from conftest import ROOT, USERS_CACHE
from random_pairs import PAIRS, shared_pair

import ovspec
from ovspec.cache.block_pool import BlockPool
from ovspec.cache.blocks import BlockTensors
from ovspec.text.chat_template import ChatTemplate

Load = Callable[..., ovspec.LanguageModel]
TEXT = "def first(items):\n    return items[0]\n\n\ndef second(items):\n    return items[1]\n\n\n"
PROMPT = TEXT * 3
REAL, LLAMA_CPP = ROOT / "smollm2", USERS_CACHE / "downloads" / "llama.cpp"
RELEASE = BlockPool.release_blocks
MANY = 1e-3  # gigabytes; the demo pair's blocks are small


def pool_of(lm: ovspec.LanguageModel) -> BlockPool:
    assert isinstance(lm.target.prefix_cache, BlockTensors)
    return lm.target.prefix_cache.pool


@pytest.fixture(params=[pytest.param("none", marks=pytest.mark.slow), "lookup,draft"])
def lm(request: pytest.FixtureRequest, load: Load) -> ovspec.LanguageModel:
    return load(draft=request.param, cache_memory=0.1)


def test_a_prompt_is_read_once(lm: ovspec.LanguageModel, load: Load) -> None:
    cold = load(draft="none", cache_memory=0)
    expected = cold.generate(PROMPT, max_tokens=40)
    first, again = (lm.generate(PROMPT, max_tokens=40) for _ in range(2))
    assert first.token_ids == again.token_ids == expected.token_ids
    assert again.stats.cached_tokens == again.stats.prompt_tokens - 1, "the last one is fed for its logits"
    more = PROMPT + first.text + "\n\ndef third("
    third = lm.generate(more, max_tokens=40)
    assert third.token_ids == cold.generate(more, max_tokens=40).token_ids
    assert third.stats.cached_tokens >= first.stats.prompt_tokens + 30, "the answer is known, too"
    assert lm.verify(third).ok


def test_a_changed_end_keeps_the_common_beginning(lm: ovspec.LanguageModel) -> None:
    lm.generate(PROMPT + "def third(items", max_tokens=8)
    text = lm.generate(PROMPT + "class Third", max_tokens=8)
    assert text.stats.cached_tokens >= len(lm.encode(PROMPT)) - 2


def test_samples_and_batches_read_what_they_share_once(lm: ovspec.LanguageModel, load: Load) -> None:
    cold = load(draft="none", cache_memory=0)
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5}
    found = lm.samples(PROMPT + "# ", n=4, **options)
    assert [text.token_ids for text in found] == [
        text.token_ids for text in cold.samples(PROMPT + "# ", n=4, **options)
    ]
    assert sum(text.stats.cached_tokens for text in found[1:]) >= 3 * (len(lm.encode(PROMPT)) - 2)
    prompts = [PROMPT + f"def number_{i}(" for i in range(3)]
    batch = lm.generate(prompts, max_tokens=12)
    assert [text.token_ids for text in batch] == [cold.generate(each, max_tokens=12).token_ids for each in prompts]
    assert all(text.stats.cached_tokens >= len(lm.encode(PROMPT)) - 2 for text in batch)


def test_greedy_texts_of_an_inexact_model_share_nothing_unasked(
    cache_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A u8 cache isn't exact, so that a hit could change a text: it must not depend on what was asked before."""
    compile_once(monkeypatch)
    inexact: dict[str, Any] = {"kv_precision": "u8", "precision": "f32", "cache_dir": cache_dir}
    lm = ovspec.load(ROOT / "models" / "demo" / "draft", "none", **inexact)
    assert lm.target.lacks_requested_exactness
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "not exact here" in line]
    assert "a cached prompt may change a text" in line
    greedy = [lm.generate(PROMPT, max_tokens=8) for _ in range(2)]
    together = lm.generate([PROMPT + "# ", PROMPT + "x"], max_tokens=4)
    assert [result.stats.cached_tokens for result in [*greedy, *together]] == [0] * 4
    assert pool_of(lm).idle_count == 0, "nothing is kept that nobody may find"
    sampled = [lm.generate(PROMPT, max_tokens=8, temperature=1.0, seed=1) for _ in range(2)]
    assert sampled[1].stats.cached_tokens > 0
    assert lm.generate(PROMPT, max_tokens=8).stats.cached_tokens == 0, "nor of sampled texts"
    with lm.session() as session:  # its own text is no other one's
        session.append(PROMPT)
        session.generate(max_tokens=4)
        assert session.generate(max_tokens=4).stats.cached_tokens > 0
    asked = ovspec.load(ROOT / "models" / "demo" / "draft", "none", cache_memory=0.1, **inexact)
    assert [asked.generate(PROMPT, max_tokens=8).stats.cached_tokens > 0 for _ in range(2)] == [False, True]
    exact = ovspec.load(ROOT / "models" / "demo" / "draft", "none", precision="f32", cache_dir=cache_dir)
    if exact.target.arithmetic_note == "exact":
        assert [exact.generate(PROMPT, max_tokens=8).stats.cached_tokens > 0 for _ in range(2)] == [False, True]
        assert "not exact" not in capsys.readouterr().err.replace(line, "")


def test_sessions_share_with_texts(lm: ovspec.LanguageModel) -> None:
    text = lm.generate(PROMPT + "x = ", max_tokens=10)
    with lm.session() as session:
        session.append(PROMPT + "x = " + text.text)
        found = session.generate(max_tokens=10, heal=False)
        assert found.stats.cached_tokens >= text.stats.prompt_tokens
        mark = session.mark()
        session.append(" # " + TEXT)
        session.generate(max_tokens=4, heal=False)
        session.rewind(mark)
        session.append(" # " + TEXT)
        again = session.generate(max_tokens=4, heal=False)
        assert again.stats.cached_tokens == len(session) - len(again.token_ids) - 1


def test_what_a_file_holds_is_shared_with_nobody(load: Load, tmp_path: Path) -> None:
    """A file's caches may be anything, so no other text starts from them."""
    lm = load(draft="none", cache_memory=0.13)
    with lm.session() as session:
        session.append(PROMPT)
        session.generate(max_tokens=4, heal=False)
        session.save(tmp_path / "saved")
    lm.runtime.models.free_idle_caches()
    with lm.session() as session:
        session.load(tmp_path / "saved")
        session.append(TEXT)
        assert session.generate(max_tokens=4, heal=False).stats.cached_tokens > 50
    assert not lm.generate(PROMPT, max_tokens=4).stats.cached_tokens


def test_memory_is_bounded_and_given_back(load: Load) -> None:
    lm = load(draft="none", cache_memory=MANY)
    pool = pool_of(lm)
    for i in range(40):
        lm.generate(f"# {i}\n" + PROMPT, max_tokens=4)
        assert pool.used_count <= pool.used_limit
    assert pool.evicted_count
    lm.runtime.models.free_idle_caches()
    assert not pool.used_count
    off = load(draft="none", cache_memory=0)
    assert not off.runtime.models.prefix_caches
    off.generate(PROMPT, max_tokens=4)
    assert not off.generate(PROMPT, max_tokens=4).stats.cached_tokens


@pytest.mark.skipif(not LLAMA_CPP.is_dir(), reason="llama.cpp's templates could not be fetched")
def test_a_chats_next_turn_begins_with_what_was_read() -> None:
    """With each real template that takes a plain chat, up to where the answer begins: some drop what was thought."""
    question, answer = "Explain how a bicycle stays upright. " * 20, "Its front wheel steers into a fall."
    first = [{"role": "user", "content": question}]
    more = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "And when it stands still?"}]
    found = {}
    for file in sorted(LLAMA_CPP.rglob("*.jinja")):
        template = ChatTemplate(file.read_text("utf-8"), SPECIAL)
        try:
            begin, whole = template.render(first), template.render(more)
        except ovspec.OvspecError:  # it demands tools
            continue
        read = begin + answer
        shared = next((at for at, (one, other) in enumerate(zip(read, whole, strict=False)) if one != other), len(read))
        assert shared >= len(begin) - 35, file.name
        found[file.name] = shared == len(read)
    assert len(found) > 50 and sum(found.values()) > len(found) / 2, "most find the answer, too"


# ---------------------------------------------------------------- planted faults


def differs(lm: ovspec.LanguageModel, cold: ovspec.LanguageModel) -> bool:
    """Return whether hits change a text, of prompts that end where blocks do and elsewhere."""
    ids = lm.encode(PROMPT + TEXT)
    found = False
    for length in (64, 65, 95):
        for _ in range(2):
            for end in ([], [7, 8, 9]):
                prompt = [*ids[:length].tolist(), *end]
                ours, expected = ([each.logprob for each in text_of(model, prompt)] for model in (lm, cold))
                found |= ours != expected
    return found


def text_of(lm: ovspec.LanguageModel, prompt: list[int]) -> Any:
    return lm.generate(prompt, max_tokens=24, ignore_eos=True, logprobs=0).logprobs


def test_a_write_into_a_kept_block_is_found(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = load(draft="none", cache_memory=0)
    assert not differs(load(draft="lookup", cache_memory=0.11), cold)
    monkeypatch.setattr(BlockPool, "is_shared", lambda pool, block: pool._reference_counts[block] > 1)
    assert differs(load(draft="lookup", cache_memory=0.12), cold)


@pytest.mark.slow
def test_a_block_that_is_freed_while_it_is_kept_is_found(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def release_blocks(pool: BlockPool, blocks: list[int]) -> None:
        RELEASE(pool, blocks)
        pool._free_blocks += [block for block in blocks if block in pool._idle_blocks]

    monkeypatch.setattr(BlockPool, "release_blocks", release_blocks)
    assert differs(load(draft="lookup", cache_memory=0.14), load(draft="none", cache_memory=0))


# ---------------------------------------------------------------- conversations


def converse(lm: ovspec.LanguageModel, cold: ovspec.LanguageModel, seed: int, turns: int = 4) -> int:
    """Hold a random conversation: turns, edits, batches and sessions; return how many prompt tokens were found."""
    random = np.random.default_rng(seed)
    size = min(lm.tokenizer.known_ids.size or 500, 500)
    text, cached = random.integers(5, size, int(random.integers(2, 120))).tolist(), 0
    for _ in range(turns):
        options: dict[str, Any] = {"max_tokens": int(random.integers(1, 24)), "ignore_eos": True}
        if random.random() < 0.3:
            options |= {"temperature": 1.0, "seed": int(random.integers(1000))}
        kind = random.choice(["turn", "edit", "batch", "session", "cancelled"])
        if kind == "edit":
            at = int(random.integers(1, len(text)))
            text = [*text[:at], *random.integers(5, size, 3).tolist(), *text[at:]][: max(2, len(text) - 5)]
        if kind == "batch":
            ends = [random.integers(5, size, int(random.integers(0, 40))).tolist() for _ in range(3)]
            prompts = [[*text, *end] for end in ends]
            found = lm.generate(prompts, **options)
            for each, prompt in zip(found, prompts, strict=True):
                assert each.token_ids == cold.generate(prompt, **options).token_ids
            cached += sum(each.stats.cached_tokens for each in found)
            text = prompts[0]
            continue
        if kind == "session":
            with lm.session() as session:
                session.append(text)
                found = session.generate(**options)
                mark = session.mark()
                session.append(random.integers(5, size, 20).tolist())
                session.generate(**options)
                session.rewind(mark)
                with session.fork() as fork:
                    fork.append(random.integers(5, size, 9).tolist())
                    fork.generate(**options)
        elif kind == "cancelled":
            stream = lm.stream(text, **options)
            next(iter(stream))
            stream.cancel()
            found = lm.generate(text, **options)
        else:
            found = lm.generate(text, **options)
        assert found.token_ids == cold.generate(text, **options).token_ids, kind
        assert lm.verify(found).ok
        cached += found.stats.cached_tokens
        text = [*text, *found.token_ids, *random.integers(5, size, int(random.integers(0, 30))).tolist()]
    return cached


@pytest.mark.parametrize("memory", [pytest.param(0.1, marks=pytest.mark.slow), MANY])
def test_conversations(memory: float, load: Load) -> None:
    lm, cold = load(draft="lookup,draft", cache_memory=memory), load(draft="none", cache_memory=0)
    assert sum(converse(lm, cold, seed) for seed in range(3)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PAIRS))
def test_conversations_of_random_models(name: str, tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> None:
    folder = shared_pair(name, tmp_path_factory)
    cold = ovspec.load(folder, "none", cache_dir=cache_dir, cache_memory=0)
    for memory in (0.1, MANY):
        lm = ovspec.load(folder, "lookup,draft", cache_dir=cache_dir, cache_memory=memory)
        assert sum(converse(lm, cold, seed, 3) for seed in range(25)) > 1000


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the real model could not be fetched")
def test_conversations_of_the_real_model(cache_dir: Path) -> None:
    cold = ovspec.load(REAL, "none", cache_dir=cache_dir, cache_memory=0)
    for memory in (0.2, 0.005):
        lm = ovspec.load(REAL, "lookup", cache_dir=cache_dir, cache_memory=memory)
        assert sum(converse(lm, cold, seed, 3) for seed in range(10)) > 300


@pytest.mark.soak
def test_a_thousand_conversations(load: Load) -> None:
    cold = load(draft="none", cache_memory=0)
    for draft in ("none", "lookup,draft"):
        for memory in (0.1, MANY):
            lm = load(draft=draft, cache_memory=memory)
            assert sum(converse(lm, cold, seed) for seed in range(250)) > 10_000
