"""Many threads and many calls: the texts stay the same; decoders, threads, handles and memory don't grow."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

import ovspec
from ovspec.engine import decoders
from ovspec.ir.memory import trim_heap

Load = Callable[..., ovspec.LanguageModel]

REFUSED: list[tuple[Any, dict[str, Any]]] = [
    ([10**6], {}),
    ("half of a pair \ud800", {}),
    ("ends with NUL\0", {}),
    ("def f(" * 100_000, {}),
    ("def f(", {"json_schema": {"type": 5}}),
    ("def f(", {"json_schema": {"type": "integer", "not": {"multipleOf": 2}}}),
    ("def f(", {"regex": "("}),
    ("def f(", {"temperature": -1.0}),
    ("def f(", {"stop_ids": [10**6]}),
    ([{"role": "user", "content": object()}], {}),
]


def schema(number: int) -> dict[str, Any]:
    """Return a JSON schema that differs from those of other numbers."""
    kinds = [
        {"type": "integer", "minimum": number, "maximum": 2 * number + 5},
        {"enum": [f"choice {number}", number, None]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1 + number % 3},
        {"type": "object", "properties": {(key := f"key{number}"): {"type": "boolean"}}, "required": [key]},
    ]
    return kinds[number % len(kinds)]


def ask(lm: ovspec.LanguageModel, number: int) -> list[int]:
    """Return the text of schema ``number``, after a call that is refused."""
    prompt, options = REFUSED[number % len(REFUSED)]
    with pytest.raises(ovspec.OvspecError):
        lm.generate(prompt, **options)
    sampled = {"temperature": 1.0, "seed": number} if number % 2 else {}
    return lm.generate(f"# {number}\nx = ", max_tokens=8, json_schema=schema(number), **sampled).token_ids


@pytest.fixture
def lm(load: Load, monkeypatch: pytest.MonkeyPatch) -> ovspec.LanguageModel:
    lm = load(draft=True, cache_memory=0.005)  # soon full
    monkeypatch.setattr(lm.runtime.decoder_pool, "_idle_sets", [])
    lm.use_large_pages()  # or a thread moves the weights at some moment
    return lm


@pytest.fixture
def made(lm: ovspec.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Any]:
    """Return the target's decoders that exist."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    make = lm.target.make_decoder

    def decoder(*arguments: Any, **named: Any) -> Any:
        alive.add(new := make(*arguments, **named))
        return new

    monkeypatch.setattr(lm.target, "make_decoder", decoder)
    return alive


class Held:
    """What this process held when this was made."""

    def __init__(self) -> None:
        gc.collect()
        trim_heap()
        process = psutil.Process()
        self.memory = process.memory_full_info().uss
        self.handles, self.threads = process.num_fds(), threading.active_count()
        self.children = len(process.children(recursive=True))


@pytest.mark.skipif(not hasattr(psutil.Process, "num_fds"), reason="counts file descriptors")
@pytest.mark.parametrize(
    ("threads", "each"),
    [(2, 7), pytest.param(32, 40, marks=pytest.mark.slow), pytest.param(32, 500, marks=pytest.mark.soak)],
)
def test_threads_with_grammars_and_refused_prompts(
    lm: ovspec.LanguageModel, made: weakref.WeakSet[Any], threads: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [ask(lm, number) for number in range(each)]
    single = Held()

    def work(thread: int) -> list[tuple[int, list[int]]]:
        order = random.Random(thread).sample(range(each), each)
        return [(number, ask(lm, number)) for number in order]

    def work_in_threads() -> Held:
        with ThreadPoolExecutor(threads) as executor:
            for results in executor.map(work, range(threads)):
                assert all(tokens == expected[number] for number, tokens in results)
        return Held()

    before = work_in_threads()  # what is made once is there: a decoder for each thread, caches, the allocator's heaps
    after = work_in_threads()
    print("memory in MB:", [round(held.memory / 1e6, 1) for held in (single, before, after)])
    assert len(made) <= threads
    assert len(lm.runtime.decoder_pool) == len(made), "decoders were thrown away"
    assert after.children - single.children <= 3, "at most four convert grammars"
    assert after.handles <= before.handles + 2 * (after.children - before.children)
    assert after.threads <= before.threads
    assert after.memory < before.memory + 50e6
    monkeypatch.setattr(decoders, "MAX_IDLE_SECONDS", 0.0)
    ask(lm, 0)
    gc.collect()
    assert len(lm.runtime.decoder_pool) == len(made) == 1, "idle decoders are dropped"


def calls_of(lm: ovspec.LanguageModel, session: ovspec.Session) -> list[Callable[[int], Any]]:
    """Return every kind of call, as functions of the call's number."""

    def turn(number: int) -> None:
        mark = session.mark()
        session.append(f"text {number}")
        session.generate(max_tokens=2)
        session.rewind(mark)

    def refused(number: int) -> None:
        prompt, options = REFUSED[number % len(REFUSED)]
        with pytest.raises(ovspec.OvspecError):
            lm.generate(prompt, **options)

    return [
        lambda number: lm.generate(f"def f{number}(", max_tokens=2),
        lambda number: lm.generate("def f(", max_tokens=2, temperature=1.0, seed=number),
        lambda number: lm.generate([f"a{number}", "b"], max_tokens=2),
        lambda number: next(iter(lm.stream(f"def f{number}(", max_tokens=3))),
        lambda number: lm.generate("x = ", max_tokens=3, regex=f"[0-9]{{1,{number % 50 + 1}}}"),
        lambda _: session.fork().close(),
        lambda _: lm.session().close(),
        turn,
        refused,
    ]


@pytest.mark.parametrize(
    "count", [60, pytest.param(3000, marks=pytest.mark.slow), pytest.param(20_000, marks=pytest.mark.soak)]
)
def test_calls(lm: ovspec.LanguageModel, made: weakref.WeakSet[Any], count: int) -> None:
    """The second half of the calls needs no more than the first, whose beginning fills the caches."""
    held: list[Held] = []
    with lm.session() as session:
        calls = calls_of(lm, session)
        for number in range(count):
            calls[number % len(calls)](number // len(calls))
            if (number + 1) % (count // 10) == 0:
                held.append(Held())
    print("memory in MB:", [round(h.memory / 1e6) for h in held])
    first, second = held[2:5], held[5:]
    assert max(h.memory for h in second) < max(h.memory for h in first) + 8e6
    assert max(h.handles for h in second) <= max(h.handles for h in first)
    assert max(h.threads for h in second) <= max(h.threads for h in first)
    assert len(made) <= 4
