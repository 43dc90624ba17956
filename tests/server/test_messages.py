"""Anthropic's messages, asked for with the client anthropic: of the demo pair, and in slow runs of the real model."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from clients import type_of
from commands_here import Command, commands_here
from pydantic import BaseModel, Field
from servers import DEMO, REAL, Running, StartHere

import ovspec
from ovspec.engine.engine_thread import EngineThread
from ovspec.params.serving import ServeParams
from ovspec.protocols.messages.request import BILLING_HEADER
from ovspec.server import endpoints
from ovspec.server.access import IGNORED_HEADER, AccessMiddleware
from ovspec.server.app import make_app
from ovspec.server.body_limits import MAX_BODY_BYTES
from ovspec.server.context import ServerContext

slow_real = [pytest.mark.slow, pytest.mark.skipif(not REAL.is_dir(), reason="the real model could not be fetched")]
EVENT = "anthropic.types:RawMessageStreamEvent"
ASK: list[Any] = [{"role": "user", "content": "Repeat three times: The train to Bern leaves at noon."}]
SAMPLED: dict[str, Any] = {"extra_body": {"temperature": 0.8, "top_p": 0.95, "seed": 5}}
STEPS = 5


class TakeStep(BaseModel, extra="forbid"):
    """Take a step of the recipe."""

    number: int = Field(ge=1, le=9)
    pace: Literal["slow", "fast"]


TOOL: Any = {"name": "take_step", "description": "Take a step.", "input_schema": TakeStep.model_json_schema()}
WEB: Any = {"type": "web_search_20250305", "name": "web_search"}


@pytest.fixture(params=["server", pytest.param("real_server", marks=slow_real)])
def asked(request: pytest.FixtureRequest) -> Iterator[Running]:
    """A server that answers all that a test asks for."""
    server: Running = request.getfixturevalue(request.param)
    before = len(server.log.read_text("utf-8"))
    yield server
    log = server.log.read_text("utf-8")[before:]
    assert set(re.findall(r" /v1/\S+ (\d+) ", log)) <= {"200", "499"} and "Error" not in log, log


def client_of(server: Running, key: str = "none") -> Any:
    import anthropic

    url = server.url.replace("0.0.0.0", "127.0.0.1")
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=120)


def whole(client: Any, **body: Any) -> Any:
    """Return an answer, which is one of the client's down to its last field."""
    raw = client.messages.with_raw_response.create(model="any", **body)
    return type_of("anthropic.types:Message").validate_json(raw.text(), strict=True)


def streamed(client: Any, **body: Any) -> Any:
    with client.messages.stream(model="any", **body) as stream:
        events = list(stream)
        message = stream.get_final_message()
    said = "".join(event.text for event in events if event.type == "text")
    assert said == "".join(block.text for block in message.content if block.type == "text")
    return message


def without_usage(message: Any) -> dict[str, Any]:
    """Return what two answers to the same request have in common."""
    return {name: value for name, value in message.to_dict().items() if name not in ("id", "usage") and value}


def prompt_tokens(usage: Any) -> int:
    assert usage.cache_creation_input_tokens == 0
    return usage.input_tokens + usage.cache_read_input_tokens


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("more", [{}, SAMPLED])
def test_streams_equal_whole_answers(asked: Running, more: dict[str, Any]) -> None:
    client, body = client_of(asked), {"max_tokens": 40, "system": "You repeat.", "messages": ASK, **more}
    expected = whole(client, **body)
    assert expected.content[0].text.strip() and expected.role == "assistant"
    assert expected.model == client.models.list().data[0].id
    assert (expected.stop_reason == "max_tokens") == (expected.usage.output_tokens == 40)
    assert without_usage(streamed(client, **body)) == without_usage(expected)
    with client.messages.stream(model="any", **body) as stream:
        assert "".join(stream.text_stream) == expected.content[0].text


def test_every_event_is_one_of_the_clients(asked: Running) -> None:
    body = {"max_tokens": 30, "messages": ASK, "tools": [TOOL], "stream": True}
    for choice, kinds in (("any", {"tool_use"}), ("none", {"text"})):
        answer = asked.post("/v1/messages", {**body, "tool_choice": {"type": choice}})
        assert answer.headers["request-id"].startswith("req_") and "x-request-id" not in answer.headers
        parts = [part.split("\n") for part in answer.text.removesuffix("\n\n").split("\n\n")]
        events = [type_of(EVENT).validate_json(data.removeprefix("data: "), strict=True) for _, data in parts]
        assert [name for name, _ in parts] == [f"event: {event.type}" for event in events]
        assert {event.content_block.type for event in events if event.type == "content_block_start"} == kinds


def test_proposals_and_the_cache_change_no_text(asked: Running) -> None:
    system = "You repeat what you are asked to repeat. " * 6  # more than a block of the cache
    client, body = client_of(asked), {"max_tokens": 60, "system": system, "messages": ASK}
    accepted = asked.metric("ovspec_accepted_tokens_total")
    first = whole(client, **body)
    assert asked.metric("ovspec_accepted_tokens_total") > accepted
    plain = whole(client, **body, extra_body={"draft": "none"})
    assert without_usage(plain) == without_usage(first)
    assert plain.usage.cache_read_input_tokens > 0 and prompt_tokens(plain.usage) == prompt_tokens(first.usage)
    start, *_, end, _ = client.messages.create(model="any", **body, stream=True)
    assert start.message.usage.cache_read_input_tokens == end.usage.cache_read_input_tokens > 0


@pytest.mark.parametrize(
    ("asked", "way"),
    [("server", "one"), *(pytest.param("real_server", way, marks=slow_real) for way in ("any", "auto"))],
    indirect=["asked"],
)
@pytest.mark.parametrize("ask", [streamed, pytest.param(whole, marks=pytest.mark.slow)])
def test_a_tool_is_called_five_times(asked: Running, ask: Callable[..., Any], way: str) -> None:
    client, taken, cached = client_of(asked), list[str](), list[int]()
    [opening] = asked.post("/tokenize", {"content": "<", "add_special_tokens": False}).json()["tokens"]
    messages: list[Any] = [{"role": "user", "content": "Bake bread."}]
    while True:
        done = len(taken) == STEPS
        settings: dict[str, Any] = {"tool_choice": {"type": "none" if done else "any"}}
        if way == "one" and not done:  # a model that has seen no chats calls without end
            settings["tool_choice"]["disable_parallel_tool_use"] = True
        if way == "auto":  # a small model hardly calls by itself
            bias = {"logit_bias": {str(opening): -100 if done else 6}}
            settings = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "extra_body": bias}
        body = {
            "system": "You follow a recipe. Call take_step for each step.",
            "messages": messages,
            "tools": [TOOL, WEB],
        }
        message = ask(client, max_tokens=160, **body, **settings)
        cached.append(message.usage.cache_read_input_tokens)
        calls = [block for block in message.content if block.type == "tool_use"]
        messages.append({"role": "assistant", "content": message.content})
        if not calls:
            break
        assert message.stop_reason == "tool_use" and not done
        results: list[Any] = []
        for call in calls[: STEPS - len(taken)]:
            TakeStep.model_validate(call.input)
            taken.append(call.id)
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": f"Step {len(taken)} is done."})
        for call in calls[len(results) :]:
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": "No more.", "is_error": True})
        said: list[Any] = [{"type": "text", "text": "Go on."}] if way != "auto" else []
        messages.append({"role": "user", "content": [*said, *results]})
    assert done and message.stop_reason in ("end_turn", "max_tokens") and message.content[0].text.strip()
    assert len(set(taken)) == STEPS and all(cached[1:])


def test_stop_sequences(asked: Running) -> None:
    client, body = client_of(asked), {"max_tokens": 40, "messages": ASK}
    text = whole(client, **body).content[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    for ask in (whole, streamed):
        message = ask(client, **body, stop_sequences=[stop, "\N{SNOWMAN}"])
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert "".join(block.text for block in message.content) == text[: text.find(stop)]


def test_answers_are_parsed_as_pydantic_models(asked: Running) -> None:
    client = client_of(asked)
    made = client.messages.parse(model="any", max_tokens=80, messages=ASK, output_format=TakeStep)
    assert isinstance(made.parsed_output, TakeStep)
    old = whole(client, max_tokens=80, messages=ASK, extra_body={"output_format": OUTPUT})
    TakeStep.model_validate_json(old.content[0].text)


OUTPUT = {"type": "json_schema", "schema": TakeStep.model_json_schema()}
COUNTED: list[dict[str, Any]] = [
    {},
    {"system": "Be brief."},
    {"system": [{"type": "text", "text": f"{BILLING_HEADER}: cc=1;"}, {"type": "text", "text": "Be brief."}]},
    {"tools": [TOOL, WEB]},
    {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "take_step"}, "thinking": {"type": "adaptive"}},
    {
        "messages": [
            *ASK,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "take_step", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
            {"role": "system", "content": "The bread is ready."},
        ]
    },
]


@pytest.mark.parametrize("body", COUNTED)
def test_tokens_are_counted_as_answers_report_them(asked: Running, body: dict[str, Any]) -> None:
    client, body = client_of(asked), {"messages": ASK, **body}
    raw = client.messages.with_raw_response.count_tokens(model="any", **body)
    counted = type_of("anthropic.types:MessageTokensCount").validate_json(raw.text(), strict=True).input_tokens
    assert counted == prompt_tokens(whole(client, max_tokens=1, **body).usage) > 0
    assert (IGNORED_HEADER in raw.headers) == (WEB in body.get("tools", ()) or BILLING_HEADER in str(body))


@pytest.fixture
def command(cache_dir: Path) -> Iterator[Command]:
    yield from commands_here(cache_dir)


@pytest.mark.slow  # test_promise.py verifies such answers in process, test_openai_client.py others with the command
def test_answers_are_verified(server: Running, tmp_path: Path, command: Command) -> None:
    """A whole answer is a file that 'ovspec verify' reads."""
    body = {"messages": ASK, "max_tokens": 20, "temperature": 0.7, "seed": 2, "return_record": True}
    for more in ({}, {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 80}):
        (tmp_path / "answer.json").write_bytes(server.post("/v1/messages", {**body, **more}).content)
        done = command("verify", tmp_path / "answer.json")
        assert not done.returncode and re.search(r"(?m)^exact: (\d+) of \1$", done.stdout), done.stdout + done.stderr


def test_a_request_of_claude_code(asked: Running) -> None:
    """Its shape, not its texts."""
    block = {"type": "text", "cache_control": {"type": "ephemeral"}}
    headers = {"Authorization": "Bearer none", "anthropic-version": "2023-06-01", "anthropic-beta": "effort-2025-11-24"}
    cached = list[int]()
    for turn in range(2):
        body = {
            "model": "claude",
            "system": [
                {"type": "text", "text": f"{BILLING_HEADER}: cc_version={turn};"},
                {**block, "text": "You are an agent."},
                {**block, "text": "You help."},
            ],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Today."}, {**block, "text": "Say hello"}]},
                {"role": "system", "content": "Agents are there."},
            ],
            "tools": [{**TOOL, "input_schema": {"$schema": "https://json-schema.org/draft/2020-12/schema", **SCHEMA}}],
            "metadata": {"user_id": "{}"},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": True,
        }
        with httpx.stream(
            "POST", f"{asked.url}/v1/messages?beta=true", json=body, headers=headers, timeout=60
        ) as answer:
            assert answer.status_code == 200
            assert answer.headers[IGNORED_HEADER] == f"context_management, system.{BILLING_HEADER}"
            lines = answer.iter_lines()
            start = next(json.loads(line[6:]) for line in lines if line.startswith("data: "))
            cached.append(start["message"]["usage"]["cache_read_input_tokens"])
        until(lambda: asked.metric("ovspec_texts_running") == 0)  # a client that goes away ends its text
    assert cached[1] > cached[0]


SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


# ---------------------------------------------------------------- thinking

# Thinks unless it is told not to.
THINKS = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content or '' }}{{ m.content }}\n{% endfor %}assistant: "
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}{# </think> #}"
)


@pytest.fixture(scope="module")
def thinker(start_here: StartHere, tmp_path_factory: pytest.TempPathFactory) -> Running:
    folder = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(DEMO / "draft", folder)
    (folder / "chat_template.jinja").write_text(THINKS, encoding="utf-8")
    return start_here(folder, "--draft", "none", "--engine", "stateful", "--arithmetic", "fast")


def check_thinking(client: Any, **more: Any) -> None:
    """Check answers of a model that thinks, whose thinking is sent back."""
    body = {"max_tokens": 40, "messages": ASK, "thinking": {"type": "enabled", "budget_tokens": 8}, **more}
    message = whole(client, **body)
    thinking, text = message.content
    assert (thinking.type, thinking.signature, text.type) == ("thinking", "ovspec", "text")
    assert thinking.thinking and text.text
    assert without_usage(streamed(client, **body)) == without_usage(message)
    events = client.messages.create(model="any", stream=True, **body)
    kinds = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert kinds.index("thinking_delta") < kinds.index("signature_delta") < kinds.index("text_delta")
    endless = whole(client, **{**body, "thinking": {"type": "enabled", "budget_tokens": 1000}})
    assert endless.stop_reason == "max_tokens"
    none = whole(client, **{**body, "thinking": {"type": "disabled"}})
    assert {block.type for block in none.content} == {"text"}
    history = [*ASK, {"role": "assistant", "content": message.content}, *ASK]
    counted = client.messages.count_tokens(model="any", messages=history).input_tokens
    assert counted == prompt_tokens(whole(client, **{**body, "messages": history, "max_tokens": 1}).usage)


def test_thinking(thinker: Running) -> None:
    client = client_of(thinker)
    check_thinking(client)
    block = {"type": "thinking", "thinking": "Hm. " * 9, "signature": "x"}
    answer = {"type": "text", "text": "So."}
    counted = [
        client.messages.count_tokens(
            model="any", messages=[*ASK, {"role": "assistant", "content": content}, *ASK]
        ).input_tokens
        for content in ([block, answer], [answer], [{"type": "redacted_thinking", "data": "x"}, answer])
    ]
    assert counted[0] > counted[1] == counted[2]


# ---------------------------------------------------------------- what is refused

HI: dict[str, Any] = {"role": "user", "content": "Hi"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages must not be empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "type image is not supported; send text"),
    ({"max_tokens": 0}, "`max_tokens` is 0"),
    ({"temperature": 2, "top_p": 7}, "top_p is 7"),
    ({"stop_sequences": [""]}, "`stop_sequences` has an empty string"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences has 65 strings"),
    ({"stop": "a"}, "stop is not a field of this request, but of /v1/completions"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "`tools`: the name 'a b' is invalid"),
    ({"tools": [{"name": "f", "input_schema": {"type": "objct"}}]}, "`tools`.* f"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "names 'g', but the tools are take_step"),
    ({"tools": [WEB], "tool_choice": {"type": "any"}}, "but `tools` has no custom tool"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "objct"}}}}, "`output_config`"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
    ({"messages": [{"role": "user", "content": "a " * 5000}]}, "Prompt is too long: The prompt has"),
    ({"messages": [{"role": "user", "content": "a" * 3_000_000}]}, "Prompt is too long: The prompt has 3000000 char"),
    ({"draft": "medusa"}, "draft is 'medusa', but this server drafts only with lookup and draft"),
    ({"stream": True, "json_schema": {}, "json_schema_mode": "checked", "retries": 2, "temperature": 1.0}, "retries"),
]


@pytest.mark.parametrize(("body", "message"), WRONG)
def test_wrong_bodies(server: Running, body: dict[str, Any], message: str) -> None:
    answer = server.post("/v1/messages", {"max_tokens": 5, "messages": [HI], **body})
    found = answer.json()
    assert answer.status_code == 400 and found.keys() == {"type", "error", "request_id"}, found
    assert found["type"] == "error" and found["error"].keys() == {"type", "message"}
    assert found["error"]["type"] == "invalid_request_error"
    assert re.search(message, found["error"]["message"]) and len(found["error"]["message"]) < 400, found
    assert found["request_id"] == answer.headers["request-id"]


def test_the_client_raises_its_errors(server: Running) -> None:
    import anthropic

    client = client_of(server)
    for ask in (client.messages.create, client.messages.count_tokens):
        with pytest.raises(anthropic.BadRequestError, match="must not be empty") as found:
            ask(model="any", messages=[], **({"max_tokens": 5} if ask == client.messages.create else {}))
        assert str(found.value.request_id).startswith("req_") and found.value.type == "invalid_request_error"
    for content, status in ((b"{", 400), (b"[]", 400), (b"", 400)):
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/messages", content=content, headers=headers)
        assert answer.status_code == status and answer.json()["error"]["type"] == "invalid_request_error"
    for path, status, kind in (
        ("/v1/messages", 405, "invalid_request_error"),
        ("/v1/messages/batches", 404, "not_found_error"),
    ):
        answer = server.get(path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    answer = httpx.post(f"{server.url}/v1/messages", data={"a": "b"})
    assert (answer.status_code, answer.json()["type"]) == (415, "error")
    answer = server.get("/v1/messages", headers={"Host": "example.com"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")


def test_what_is_ignored_is_named(server: Running) -> None:
    body = {"messages": [{**HI, "mood": 1}], "max_tokens": 3, "tools": [WEB], "container": "x", "speed": "fast"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = server.post(path, body)
        assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (
            200,
            "container, tools.web_search_20250305, messages.mood",
        )


@pytest.fixture(scope="module")
def strict(start_here: StartHere) -> Running:
    """A server with a key and little room, which is strict."""
    room = ("--batch-size", "1", "--queue-size", "1", "--queue-timeout", "0.3", "--request-timeout", "1.2")
    options = ("--draft", "none", "--precision", "f32", "--strict-fields", "--strict-model", "--model-name", "its")
    return start_here(DEMO, *options, *room, OVSPEC_API_KEY="the-key")


def test_what_a_strict_server_refuses(strict: Running) -> None:
    import anthropic

    client, body = client_of(strict, "the-key"), {"model": "its", "max_tokens": 3, "messages": [HI]}
    assert client.messages.create(**body, metadata={"user_id": "me"}).model == "its"
    bearer: Any = anthropic.Anthropic(base_url=strict.url, auth_token="the-key", api_key=None, max_retries=0)
    assert bearer.messages.create(**body).content
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key") as refused:
        client_of(strict, "wrong").messages.create(**body)
    assert refused.value.type == "authentication_error" and refused.value.request_id
    for ask in (client.messages.create, client.messages.count_tokens):
        given = {name: value for name, value in body.items() if ask == client.messages.create or name != "max_tokens"}
        with pytest.raises(anthropic.NotFoundError, match="no model 'gpt-9'; this server has") as missing:
            ask(**{**given, "model": "gpt-9"})
        assert missing.value.type == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="web_search_20250305 is not supported; leave"):
            ask(**given, tools=[WEB])
        with pytest.raises(anthropic.BadRequestError, match="container is not a field of this request"):
            ask(**given, extra_body={"container": "x"})
    headers = {"x-api-key": "the-key"}
    answer = strict.post("/v1/messages", {**body, "system": "a" * MAX_BODY_BYTES}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


def test_a_server_that_is_full(strict: Running) -> None:
    """One text runs until its time is over, one waits in vain, and others are refused at once."""
    body = {"model": "its", "max_tokens": 1900, "messages": [HI], "ignore_eos": True}
    headers = {"x-api-key": "the-key"}

    def ask(stream: bool) -> httpx.Response:
        return strict.post("/v1/messages", {**body, "stream": stream}, headers=headers)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        first = threads.submit(ask, True)
        until(lambda: "ovspec_texts_running 1.0" in strict.get("/metrics", headers=headers).text)
        others = [each.result() for each in [threads.submit(ask, False) for _ in range(3)]]
    kinds = {(answer.status_code, answer.json()["error"]["type"]) for answer in others}
    assert kinds == {(429, "rate_limit_error"), (503, "overloaded_error")}
    assert all(int(answer.headers["retry-after"]) > 0 for answer in others)
    stream = first.result()
    assert stream.status_code == 200
    name, data = stream.text.strip().split("\n\n")[-1].split("\n")
    assert name == "event: error" and json.loads(data[6:])["error"]["type"] == "timeout_error"
    assert "event: message_stop" not in stream.text


@pytest.mark.slow  # test_every_api.py waits for such answers and streams
def test_a_text_that_takes_too_long(strict: Running) -> None:
    import anthropic

    body = {"model": "its", "max_tokens": 1900, "messages": [HI], "ignore_eos": True}
    late = strict.post("/v1/messages", body, headers={"x-api-key": "the-key"})
    assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
    endless = {"extra_body": {"ignore_eos": body.pop("ignore_eos")}}
    with pytest.raises(anthropic.APIStatusError, match="took longer than"):
        list(client_of(strict, "the-key").messages.create(**body, **endless, stream=True))


def test_pings_while_a_prompt_is_read(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "KEEP_ALIVE_SECONDS", 0.002)
    lm = ovspec.load(DEMO / "draft", "none", engine="paged", precision="f32", cache_dir=cache_dir)
    engine = EngineThread(lm.runtime, max_rows=2)
    engine.start()
    app: Any = AccessMiddleware(make_app(ServerContext(lm, engine, ["demo"], ServeParams())), [], True, lambda *_: None)
    body = {"messages": [{"role": "user", "content": "def f(x): " * 150}], "max_tokens": 2, "stream": True}

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return (await client.post("/v1/messages", json=body)).text

    events = re.findall("(?m)^event: (.*)$", asyncio.run(ask()))
    engine.stop()
    assert events[:2] == ["message_start", "ping"] and events[-1] == "message_stop"
    assert events.count("message_start") == 1
