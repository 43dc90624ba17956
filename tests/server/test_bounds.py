"""What one request may take of a server that others use, too, and what those that wait for it get."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from conftest import PROMPTS
from servers import DEMO, Running, StartHere

import ovspec
from ovspec.cache.paged import PagedDecoder
from ovspec.engine.engine_thread import EngineThread, Job, run_steps
from ovspec.engine.results import Piece
from ovspec.ir.memory import kv_bytes_per_token
from ovspec.protocols.logprobs import SMALL_CHUNK_TOKENS, compute_logprobs_between_rounds, compute_prompt_logprobs
from ovspec.server import endpoints
from ovspec.server.endpoints import generate_pieces

LONG = "\n".join(PROMPTS)[:1200]
ENDLESS: dict[str, Any] = {"prompt": "def f(", "max_tokens": 1900, "ignore_eos": True, "stream": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 1}


@pytest.fixture(scope="module")
def small(start_here: StartHere) -> Running:
    """A server that generates two texts at a time, and lets four wait."""
    return start_here(DEMO, "--draft", "none", "--precision", "f32", "--batch-size", "2", "--queue-size", "4")


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "a" * 3_000_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "a" * 3_000_000]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 3_000_000}]}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_not_encoded(server: Running, path: str, body: Any, field: str) -> None:
    error = server.post(path, body).json()["error"]
    assert "3000000 characters" in error["message"], error
    assert error["code"] == "context_length_exceeded" and error["param"] == field


def test_long_texts_are_encoded(server: Running) -> None:
    text = "def f(x): return x\n" * 20_000
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["content"] == text


@pytest.mark.parametrize("stops", [["x"] * 65, ["x" * 4001], ["x" * 100] * 41])
def test_stop_strings_are_bounded(server: Running, stops: list[str]) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "stop": stops})
    error = answer.json()["error"]
    assert (
        answer.status_code == 400 and "at most 64 strings with 4,000" in error["message"] and error["param"] == "stop"
    )
    many = [f"{number:02}" * 31 for number in range(64)]
    assert server.post("/v1/completions", {"prompt": "a", "stop": many, "max_tokens": 3}).status_code == 200


def test_log_probabilities_are_bounded(server: Running) -> None:
    for more in ({"n": 2, **SAMPLED, "max_tokens": -1}, {"prompt": [[65] * 1500] * 2, "echo": True}):
        answer = server.post("/v1/completions", {"prompt": "a", "logprobs": 100, "max_tokens": 1, **more})
        error = answer.json()["error"]
        assert answer.status_code == 400 and "the limit is 300,000" in error["message"] and error["param"] == "logprobs"


def test_texts_are_counted_not_requests(small: Running) -> None:
    """Those of the requests that are being answered; one for more than that is taken if there is no other."""
    with httpx.stream("POST", f"{small.url}/v1/completions", json={**ENDLESS, **SAMPLED, "n": 4}, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        until(lambda: small.metric("ovspec_texts_running") == small.metric("ovspec_texts_waiting") == 2)
        refused = small.post("/v1/completions", {"prompt": ["a", "b", "c"], "max_tokens": 1})
        assert refused.status_code == 429 and int(refused.headers["Retry-After"]) > 0
        assert small.get("/ready").status_code == small.post("/tokenize", {"prompt": "a"}).status_code == 200
        other = threading.Thread(target=small.post, args=("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1}))
        other.start()
        until(lambda: small.get("/ready").status_code == 503)
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [65]})):
            assert small.post(path, body).status_code == 429
    other.join()
    until(lambda: small.metric("ovspec_texts_running") + small.metric("ovspec_texts_waiting") == 0)
    many = small.post("/v1/completions", {"prompt": ["a"] * 9, "max_tokens": 1})
    assert many.status_code == 200 and len(many.json()["choices"]) == 9


def test_metrics_by_value(server: Running) -> None:
    names = ("prompt_tokens_total", "generated_tokens_total", "time_to_first_token_seconds_count")
    names = (*names, "time_between_tokens_seconds_count", "request_duration_seconds_count")
    before = [server.metric(f"ovspec_{name}") for name in names]
    tokens = generated = 0
    for more in ({}, {"stream": True, "stream_options": {"include_usage": True}}, {"n": 3, **SAMPLED}):
        body = {"prompt": PROMPTS[:2], "max_tokens": 3, "ignore_eos": True, "draft": "none", **more}
        answer = server.post("/v1/completions", body)
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        usage = (chunks[-1] if chunks else answer.json())["usage"]
        tokens, generated = tokens + usage["prompt_tokens"], generated + usage["completion_tokens"]
    assert tokens > 0 and generated == 30
    counted = [server.metric(f"ovspec_{name}") - old for name, old in zip(names, before, strict=True)]
    assert counted == [tokens, generated, 2 + 2 + 6, 2 * (2 + 2 + 6), 3]
    assert server.metric("ovspec_texts_waiting") == server.metric("ovspec_texts_running") == 0


class AtOnce:
    """An engine that has all pieces at once."""

    is_alive = True

    def submit(self, job: Job) -> None:
        job.deliver([(0, Piece("a", [1]))])
        job.deliver([(0, Piece("b", [2], "length"))])


def test_times_are_those_of_the_request_and_of_the_engine() -> None:
    """Not of when its rows were ready, nor of when a slow client has read."""
    firsts, betweens = list[float](), list[float]()

    async def read() -> None:
        times = [SimpleNamespace(observe=noted.append) for noted in (firsts, betweens)]
        metrics = SimpleNamespace(time_to_first_token=times[0], time_between_tokens=times[1])
        options = SimpleNamespace(queue_timeout=60.0, request_timeout=3600.0)
        service: Any = SimpleNamespace(engine=AtOnce(), metrics=metrics, options=options)
        row: Any = SimpleNamespace(finish_reason=None)
        async for _ in generate_pieces(service, [row], time.monotonic() - 100):
            time.sleep(0.2)

    asyncio.run(read())
    assert firsts[0] >= 100 and betweens[0] < 0.15


# ---------------------------------------------------------------- repeated prompts


@pytest.fixture
def engine(load: Callable[..., ovspec.LanguageModel]) -> Iterator[EngineThread]:
    made = EngineThread(load().runtime, max_rows=2)
    made.start()
    yield made
    made.stop()


def echo(engine: EngineThread, ids: list[int]) -> Any:
    return compute_logprobs_between_rounds(ovspec.LanguageModel(engine.runtime), engine, ids, 2).result()


def generating(engine: EngineThread, tokens: int = 1) -> threading.Event:
    """Let the engine generate a text; once it has ``tokens``, return an event that is set when it has ended."""
    params = engine.runtime.row_maker.make_complete_params({"max_tokens": 400, "ignore_eos": True})
    rows = engine.runtime.row_maker.make_rows(PROMPTS[0], params, memory_reserved=True)
    started, ended = threading.Event(), threading.Event()

    def deliver(pieces: Any) -> None:
        if len(rows[0].token_ids) >= tokens:
            started.set()
        if pieces[0][1].finish_reason:
            ended.set()

    engine.submit(Job(rows, deliver))
    assert started.wait(60)
    return ended


@pytest.fixture
def read(engine: EngineThread, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What is read of repeated prompts: (tokens of an inference, whether texts were generated then)."""
    feed, read = PagedDecoder.feed, list[tuple[int, bool]]()

    def noting(self: PagedDecoder, tokens: Any, positions: Any, *rest: Any) -> Any:
        if len(tokens[0]) == positions[0] > 1:
            read.append((len(tokens[0]), engine.running_row_count > 0))
        return feed(self, tokens, positions, *rest)

    monkeypatch.setattr(PagedDecoder, "feed", noting)
    return read


def test_repeated_prompts_are_read_in_small_steps(engine: EngineThread, read: list[tuple[int, bool]]) -> None:
    """While texts are generated, which wait for each step; the log-probabilities stay the same."""
    ids = engine.runtime.prompt_encoder.encode("\n".join(PROMPTS[:3])).tolist()[:300]
    expected = run_steps(compute_prompt_logprobs(ovspec.LanguageModel(engine.runtime), ids, 2))
    assert echo(engine, ids) == expected
    assert max(tokens for tokens, _ in read) > SMALL_CHUNK_TOKENS
    read.clear()
    ended = generating(engine)
    assert echo(engine, ids) == expected
    beside = [tokens for tokens, beside in read if beside]
    assert beside and max(beside) <= SMALL_CHUNK_TOKENS
    assert ended.wait(60)


def test_a_repeated_prompt_waits_for_room(engine: EngineThread, read: list[tuple[int, bool]]) -> None:
    engine._scheduler._budget.max_tokens = 420  # for the text, but not for the prompt beside it
    ended = generating(engine, 150)
    assert not ended.is_set()
    assert len(echo(engine, [100] * 40)) == 40
    assert ended.is_set() and not any(beside for _, beside in read)


def test_nothing_is_generated_after_a_prompt(server: Running) -> None:
    """As evaluations of models ask for it."""
    prompts = ["def add(a, b):", "import os"]
    body: dict[str, Any] = {"prompt": prompts, "echo": True, "logprobs": 2}
    one = server.post("/v1/completions", {**body, "max_tokens": 1}).json()["choices"]
    none = server.post("/v1/completions", {**body, "max_tokens": 0}).json()
    assert [choice["text"] for choice in none["choices"]] == prompts
    assert [choice["finish_reason"] for choice in none["choices"]] == ["length", "length"]
    assert none["usage"]["completion_tokens"] == 0 < none["usage"]["prompt_tokens"]
    for found, longer in zip(none["choices"], one, strict=True):
        assert found["logprobs"] == {name: values[:-1] for name, values in longer["logprobs"].items()}
    stream = server.post("/v1/completions", {**body, "max_tokens": 0, "stream": True}).text
    chunks = [json.loads(line[6:])["choices"][0] for line in stream.split("\n\n") if line.startswith("data: {")]
    for index, choice in enumerate(none["choices"]):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        assert mine[0]["logprobs"] == choice["logprobs"] and mine[-1]["finish_reason"] == "length"


# ---------------------------------------------------------------- room for texts


@pytest.mark.slow  # tests/engine/test_scheduler.py lets batches wait for room
def test_texts_wait_for_room_in_the_cache(
    start_here: StartHere, load: Callable[..., ovspec.LanguageModel], pair: Any
) -> None:
    """One at a time where there is room for one, and each is the text that it is alone."""
    lm = load()
    tokens = [len(lm.encode(prompt)) + 100 for prompt in PROMPTS[:3]]
    gigabytes = 1.2 * max(tokens) * kv_bytes_per_token(lm.target.ir) / 1e9
    server = start_here(pair, "--draft", "none", "--precision", "f32", "--cache-size", f"{gigabytes:.9f}")
    found, most = dict[int, str](), [0.0, 0.0]

    def ask(number: int) -> None:
        body = {"prompt": PROMPTS[number], "max_tokens": 100, "ignore_eos": True}
        found[number] = server.post("/v1/completions", body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        now = server.metric("ovspec_texts_running"), server.metric("ovspec_texts_waiting")
        most = [max(each) for each in zip(most, now, strict=True)]
    alone = [lm.generate(prompt, max_tokens=100, ignore_eos=True).text for prompt in PROMPTS[:3]]
    assert [found[number] for number in range(3)] == alone
    assert most[0] == 1 and most[1] >= 1


def test_who_waits_for_memory_is_told(
    start_here: StartHere, load: Callable[..., ovspec.LanguageModel], pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for the first text, but not for a long prompt beside it; and the budget is told in bytes.

    The first text sets no ``max_tokens``: it goes on to the end, here of the memory.
    """
    monkeypatch.setattr(endpoints, "KEEP_ALIVE_SECONDS", 0.02)
    lm = load(draft="none", cache_memory=0)
    token_bytes = kv_bytes_per_token(lm.target.ir)
    size = ("--cache-size", f"{640 * token_bytes / 1e9:.9f}")
    server = start_here(pair, "--draft", "none", "--precision", "f32", *size)
    lines = list[str]()

    def ask_long() -> None:
        body = {"prompt": LONG, "max_tokens": 200, "ignore_eos": True, "stream": True}
        lines.extend(server.post("/v1/completions", body).text.splitlines())

    asking = threading.Thread(target=ask_long)
    body = {"prompt": "def f(", "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        first_lines = stream.iter_lines()
        next(first_lines)
        asking.start()
        until(lambda: server.metric("ovspec_texts_waiting") == 1)
        cache = server.get("/ready").json()["cache"]
        assert cache["limit_bytes"] == pytest.approx(640 * token_bytes, rel=0.01)
        assert cache["limit_bytes"] >= cache["reserved_bytes"] > cache["used_bytes"] > 0 == cache["set_back_count"]
        assert server.metric("ovspec_cache_limit_bytes") == cache["limit_bytes"]
        assert server.metric("ovspec_cache_used_bytes") >= cache["used_bytes"]
        *_, last, usage = [json.loads(line[6:]) for line in first_lines if line.startswith("data: {")]
    asking.join()
    assert last["choices"][0]["finish_reason"] == "length" and 600 < usage["usage"]["total_tokens"] <= 640
    assert ": waiting for memory that other texts hold" in lines
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")]
    assert "".join(texts) == lm.generate(LONG, max_tokens=200, ignore_eos=True).text
    until(lambda: server.metric("ovspec_cache_used_bytes") == 0)
    assert 0 < server.metric("ovspec_cache_kept_bytes") <= cache["limit_bytes"]
    assert server.metric("ovspec_texts_set_back") == 0


def test_texts_are_set_back_where_memory_runs_out(
    start_here: StartHere, load: Callable[..., ovspec.LanguageModel], pair: Any
) -> None:
    """The texts run beside each other although they don't fit together, and each is the one that it is alone."""
    lm = load(draft="none", cache_memory=0)
    size = ("--cache-size", f"{18 * 32 * kv_bytes_per_token(lm.target.ir) / 1e9:.9f}")
    server = start_here(pair, "--draft", "none", "--precision", "f32", *size)
    found, prompts = dict[int, Any](), ["def f(", "class A", "import os"]

    def ask(number: int) -> None:
        body = {"prompt": prompts[number], "max_tokens": 400, "ignore_eos": True}
        found[number] = server.post("/v1/completions", body).json()["choices"][0]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.metric("ovspec_texts_set_back") > 0
    assert server.get("/ready").json()["cache"]["set_back_count"] > 0
    for number, prompt in enumerate(prompts):
        assert found[number]["text"] == lm.generate(prompt, max_tokens=400, ignore_eos=True).text


def test_streams_have_whole_characters_and_no_beginnings_of_stop_strings(server: Running) -> None:
    """Although the characters span tokens here, and the stop string spans characters."""
    regex, stop = "[\U0001f600-\U0001f64f]{3}[\u4e00-\u9fff]{3}ab\N{SNOWMAN}", "b\N{SNOWMAN}"
    for path, prompt in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        body = {**prompt, "regex": regex, "max_tokens": 60, "draft": "none"}
        answer = server.post(path, body).json()
        whole = answer["choices"][0]
        text = whole.get("text") or whole["message"]["content"]
        assert len(text) == 9 and text.endswith("ab\N{SNOWMAN}")
        assert answer["usage"]["completion_tokens"] > len(text)
        for more, expected in (({}, text), ({"stop": [stop, "ax"]}, text.removesuffix(stop))):
            lines = server.post(path, {**body, **more, "stream": True}).text.split("\n\n")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            choices = [chunk["choices"][0] for chunk in chunks]
            told = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
            assert "".join(told) == expected
            assert not any("\N{REPLACEMENT CHARACTER}" in each for each in told)
            assert len([each for each in told if each]) > 4
