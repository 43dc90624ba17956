"""``agenerate`` and ``astream``: the texts of ``generate``, together in one batch, which calls join and leave."""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import PROMPTS

import ovspec
from ovspec.base.errors import InferenceError
from ovspec.cache.paged import PagedDecoder
from ovspec.engine.engine_thread import EngineThread, Job

Load = Callable[..., ovspec.LanguageModel]
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 5}}
SHORT: Any = {"max_tokens": 24, "ignore_eos": True}
LONG: Any = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def lm(load: Load) -> ovspec.LanguageModel:
    return load(draft="lookup,draft", lookahead=3)


@pytest.fixture
def loaded(pair: Path, cache_dir: Path) -> ovspec.LanguageModel:
    """A model that a test may close."""
    return ovspec.load(pair, "lookup,draft", precision="f32", cache_dir=cache_dir)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(limited())


async def engine_of(lm: ovspec.LanguageModel) -> EngineThread:
    await lm.agenerate([1], max_tokens=1)
    assert lm._engine
    return lm._engine


async def until(done: Callable[[], Any]) -> None:
    while not done():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_generate_and_share_rounds(lm: ovspec.LanguageModel, way: str) -> None:
    options = SHORT | WAYS[way]
    alone = [lm.generate(prompt, **options) for prompt in PROMPTS[:5]]

    async def together() -> tuple[list[ovspec.Result], list[ovspec.Result], int]:
        engine, rounds = await engine_of(lm), itertools.count()
        engine.on_round = lambda *_: next(rounds)
        one_by_one = asyncio.gather(*(lm.agenerate(prompt, **options) for prompt in PROMPTS[:3]))
        return await one_by_one, await lm.agenerate(PROMPTS[3:5], **options), next(rounds)

    first, last, rounds = run(together())
    assert [each.token_ids for each in first + last] == [each.token_ids for each in alone]
    assert [each.text for each in first + last] == [each.text for each in alone]
    assert 0 < rounds < 0.7 * sum(each.stats.rounds for each in first + last)
    assert sum(each.stats.accepted for each in first + last) > 0
    assert all(lm.verify(each).ok for each in first)


def test_broken_texts_are_generated_again(lm: ovspec.LanguageModel) -> None:
    schema = {"type": "integer", "minimum": 0, "maximum": 9, "not": {"multipleOf": 2}}
    options: Any = {"json_schema": schema, "json_schema_mode": "checked", "temperature": 2.0}
    prompts = ["= ", "a = ", "b == "]
    options["seed"] = next(n for n in range(12) if lm.generate(prompts[0], **options, seed=n).schema_errors)
    expected = [lm.generate(prompt, **options, retries=20) for prompt in prompts]

    async def together() -> list[ovspec.Result]:
        alone = lm.agenerate(prompts[0], **options, retries=20)
        return [await alone, *await lm.agenerate(prompts, **options, retries=10**9)]

    found = run(together())
    assert [each.text for each in found] == [each.text for each in [expected[0], *expected]]
    assert all(int(each.text) % 2 for each in found)


def test_streams_have_the_pieces_of_the_text(lm: ovspec.LanguageModel) -> None:
    async def streamed(prompt: str) -> tuple[str, int, ovspec.Result]:
        stream, pieces = lm.astream(prompt, **SHORT), list[ovspec.Piece]()
        async for piece in stream:
            pieces.append(piece)
        return "".join(piece.text for piece in pieces), len(pieces), await stream.result()

    async def together() -> list[tuple[str, int, ovspec.Result]]:
        return await asyncio.gather(*map(streamed, PROMPTS[:2]), streamed(PROMPTS[2]))

    for (text, count, result), prompt in zip(run(together()), PROMPTS, strict=False):
        assert text == result.text == lm.generate(prompt, **SHORT).text
        assert count > 1 and result.finish_reason == "length"
    assert run(lm.astream(PROMPTS[3], **SHORT).result()).text == lm.generate(PROMPTS[3], **SHORT).text


@pytest.mark.parametrize("way", ["cancelled", "timed out", "left", "closed"])
def test_who_leaves_frees_the_row(lm: ovspec.LanguageModel, way: str) -> None:
    async def leave() -> str:
        engine, jobs = await engine_of(lm), set[Job]()
        engine.on_round = lambda *_: jobs.update(job for job, _ in engine._jobs.values())
        other = asyncio.create_task(lm.agenerate(PROMPTS[1], **SHORT))
        stream = lm.astream(PROMPTS[0], **LONG)
        if way == "left":
            async for _ in lm.astream(PROMPTS[0], **LONG):
                break
        elif way == "closed":
            async with aclosing(stream):
                async for _ in stream:
                    break
            with pytest.raises(ovspec.OvspecError, match="ended before the text was finished"):
                await stream.result()
        elif way == "timed out":
            asking = lm.agenerate([PROMPTS[0], PROMPTS[2]], **LONG)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asking, 0.2)
        else:
            task = asyncio.create_task(lm.agenerate(PROMPTS[0], **LONG))
            await until(lambda: engine.running_row_count == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        found = await other
        await until(lambda: not engine._jobs and not engine.count_cache_blocks()[0])
        reasons = sorted(row.finish_reason or "" for job in jobs for row in job.rows)
        engine.on_round = lambda *_: None
        assert reasons == ["cancelled"] * (2 if way == "timed out" else 1) + ["length"]
        return found.text

    assert run(leave()) == lm.generate(PROMPTS[1], **SHORT).text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # which Python gives for such a loop
def test_a_loop_that_is_closed_leaves_no_row_behind(lm: ovspec.LanguageModel) -> None:
    loop = asyncio.new_event_loop()
    engine = loop.run_until_complete(engine_of(lm))
    task = loop.create_task(lm.agenerate(PROMPTS[0], **LONG))
    loop.run_until_complete(until(lambda: engine.running_row_count))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    ends = time.monotonic() + 30
    while engine._jobs:
        assert time.monotonic() < ends
        time.sleep(0.005)
    assert run(lm.agenerate(PROMPTS[1], **SHORT)).text == lm.generate(PROMPTS[1], **SHORT).text
    del task
    gc.collect()


def test_what_fails_fails_alone(lm: ovspec.LanguageModel) -> None:
    """A function of one caller, also when it is a draft's guess that goes too far."""
    start = len(lm.encode(PROMPTS[0]))

    def fail(tokens: Any, logits: Any) -> Any:
        if len(tokens) > start + 9:
            raise ValueError("planted")
        return logits

    async def together() -> list[Any]:
        failing = lm.agenerate(PROMPTS[0], logits_processors=[fail], **SHORT)
        others = [lm.agenerate(prompt, **SHORT) for prompt in PROMPTS[1:3]]
        return await asyncio.gather(failing, *others, return_exceptions=True)

    failed, *others = run(together())
    assert isinstance(failed, InferenceError) and "ValueError: planted" in str(failed)
    assert isinstance(failed.__cause__, ValueError)
    assert [each.text for each in others] == [lm.generate(prompt, **SHORT).text for prompt in PROMPTS[1:3]]
    with pytest.raises(ValueError, match="planted"):
        lm.generate(PROMPTS[0], logits_processors=[fail], **SHORT)


@pytest.mark.parametrize(
    ("prompt", "options", "told"),
    [
        ("a", {"n": 2}, "`n` is 2"),
        ("a", {"batch_size": 4}, "`batch_size` can't be set"),
        ("a", {"temperature": -1}, "`temperature` is -1"),
        ([10**9], {}, "not in the vocabulary"),
        ("a" * 200_000, {}, "the context is"),
        ("a", {"regex": "("}, "regex"),
    ],
)
def test_mistakes_are_those_of_generate(lm: ovspec.LanguageModel, prompt: Any, options: Any, told: str) -> None:
    async def first_piece() -> Any:
        return await anext(aiter(lm.astream(prompt, **options)))

    async def whole() -> Any:
        return await lm.agenerate(prompt, **options)

    for ask in (first_piece, whole):
        with pytest.raises(ovspec.OvspecError, match=told):
            run(ask())
    with pytest.raises(TypeError, match="max_token"):
        lm.astream("a", max_token=1)  # type: ignore[call-arg]


@contextmanager
def watched() -> Iterator[set[int]]:
    """Yield the threads that compute; fail if two of them drive one decoder."""
    feed, feeding, threads = PagedDecoder.feed, set[int](), set[int]()

    def watch(self: PagedDecoder, *arguments: Any) -> Any:
        assert id(self) not in feeding
        feeding.add(id(self))
        threads.add(threading.get_ident())
        try:
            return feed(self, *arguments)
        finally:
            feeding.discard(id(self))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PagedDecoder, "feed", watch)
        yield threads


def test_generate_beside_them_is_right(lm: ovspec.LanguageModel) -> None:
    alone = [lm.generate(prompt, **SHORT).text for prompt in PROMPTS[:4]]

    async def together() -> list[str]:
        there = [asyncio.to_thread(functools.partial(lm.generate, prompt, **SHORT)) for prompt in PROMPTS[2:4]]
        found: list[Any] = await asyncio.gather(*(lm.agenerate(prompt, **SHORT) for prompt in PROMPTS[:2]), *there)
        return [each.text for each in [*found, lm.generate(PROMPTS[0], **SHORT)]]

    with watched() as threads:
        assert run(together()) == [*alone, alone[0]]
    assert len(threads) > 2


def test_closing_ends_what_runs(loaded: ovspec.LanguageModel) -> None:
    told, sync = "the model was closed; load it again", list[Exception]()
    stream, session = loaded.stream(PROMPTS[3], **LONG), loaded.session()
    next(iter(stream))
    session.append(PROMPTS[0])

    def generate() -> None:
        try:
            loaded.generate(PROMPTS[2], **LONG)
        except ovspec.OvspecError as error:
            sync.append(error)

    async def close() -> list[Any]:
        engine, thread = await engine_of(loaded), threading.Thread(target=generate)
        thread.start()
        asked = [asyncio.create_task(loaded.agenerate(prompt, **LONG)) for prompt in PROMPTS[:3]]
        await until(lambda: engine.running_row_count)
        with loaded:
            pass
        thread.join(60)
        assert not engine.is_alive
        return await asyncio.gather(*asked, loaded.agenerate("a"), return_exceptions=True)

    ended = [*run(close()), *sync]
    assert len(ended) == 5 and all(isinstance(each, ovspec.OvspecError) and told in str(each) for each in ended)
    uses: list[Callable[[], Any]] = [
        *(lambda: loaded.generate("a"), lambda: loaded.samples("a", n=2), lambda: loaded.stream("a").result()),
        *(lambda: next(iter(stream)), lambda: run(loaded.astream("a").result()), loaded.session, session.generate),
        *(lambda: loaded.next_logits("a"), lambda: loaded.perplexity("a b c")),
        *(lambda: loaded.with_drafters(None).generate("a"), lambda: session.score("a")),
    ]
    for use in uses:
        with pytest.raises(ovspec.OvspecError, match=told):
            use()
    session.close()
    loaded.close()
    assert "closed" in repr(loaded)


@pytest.mark.usefixtures("compiled_anew")
def test_closing_frees_the_model(loaded: ovspec.LanguageModel, load: Load) -> None:
    """What it has generated stays: it can be pickled, and verified by another model."""
    with loaded as lm:
        result = lm.generate("a", max_tokens=2)
        engine = weakref.ref(run(engine_of(lm)))
        irs = [(weakref.ref(ir), weakref.ref(ir.compiled_model)) for ir in lm.runtime.models.compiled_irs()]
    gc.collect()
    assert [compiled() for _, compiled in irs] == [None, None]
    assert all(ir() for ir, _ in irs) and engine() is None
    assert load(draft="lookup,draft", lookahead=3).verify(pickle.loads(pickle.dumps(result))).ok


def test_a_model_that_is_dropped_ends_its_thread(load: Load) -> None:
    lm = ovspec.LanguageModel(load(draft="lookup,draft", lookahead=3).runtime)
    engine = run(engine_of(lm))
    assert engine.is_alive
    del lm
    gc.collect()
    assert not engine.is_alive


def test_no_prompts_have_no_texts(lm: ovspec.LanguageModel) -> None:
    assert lm.generate([]) == lm.samples([], n=2, temperature=1.0) == run(lm.agenerate([])) == []
