"""What a server takes from clients that were made for others: their fields, any model's name, and either header."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from conftest import PROMPTS
from servers import DEMO, Running, StartHere

from ovspec.protocols.apis import BODY_TYPES
from ovspec.protocols.bodies import MAX_NAMED_FIELDS, ChatEndingFields, RequestError
from ovspec.protocols.chat.bodies import ChatRequest, CompletionRequest, InsideFields
from ovspec.protocols.llamacpp.infill import InfillRequest
from ovspec.protocols.parsing import validate_body
from ovspec.protocols.tokenize import TokenizeRequest
from ovspec.protocols.unsupported import (
    FIELDS_IGNORED_BY_SERVER,
    FIELDS_WITHOUT_EFFECT,
    REFUSED_PROMPT_FIELDS,
    REFUSED_TEXT_FIELDS,
    REFUSED_TOKENIZE_FIELDS,
)
from ovspec.server.access import IGNORED_HEADER, MAX_LOGGED_FIELDS

CHAT: Any = [{"role": "user", "content": "Hi"}]
OF_CHATS = ChatEndingFields.model_fields  # which take these
TEXT: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 12}
GIVEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}),
    ("/v1/completions", TEXT),
    ("/tokenize", {"prompt": "a"}),
    ("/detokenize", {"tokens": [65]}),
    ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
    ("/v1/messages/count_tokens", {"messages": CHAT}),
]
# What the web page of llama.cpp, and agents, send beside what they want.
OF_AGENTS: dict[str, Any] = {
    "store": False,
    "user": "me",
    "metadata": {"a": "b"},
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "client_metadata": {"originator": "cli"},
    "service_tier": "auto",
    "safety_identifier": "x",
    "prediction": {"type": "content", "content": "x"},
    "verbosity": "medium",
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "cache_prompt": True,
    "id_slot": -1,
    "return_progress": True,
    "timings_per_token": True,
    "reasoning_format": "auto",
    "reasoning_control": True,
    "samplers": ["top_k", "typ_p", "top_p", "min_p", "temperature"],
    "dynatemp_range": 0,
    "dynatemp_exponent": 1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "mirostat": 0,
    "priority": 3,
    "request_id": "x",
    "use_beam_search": False,
}


@pytest.fixture(scope="module")
def strict(start_here: StartHere) -> Running:
    names = ("--model-name", "its", "--model-name", "gpt-4o")
    options = ("--draft", "none", "--engine", "stateful", "--arithmetic", "fast", "--strict-fields", "--strict-model")
    return start_here(DEMO / "draft", *options, *names, OVSPEC_API_KEY="the-key")


def asked(strict: Running, path: str, body: Any) -> httpx.Response:
    return strict.post(path, body, headers={"x-api-key": "the-key"})


def test_fields_that_agents_send_change_nothing(server: Running) -> None:
    for path, body in GIVEN[:2]:
        plain, with_them = server.post(path, body), server.post(path, {**body, **OF_AGENTS})
        assert with_them.status_code == 200 and IGNORED_HEADER not in with_them.headers, with_them.text
        assert plain.json()["choices"] == with_them.json()["choices"]


@pytest.mark.parametrize("name", [*FIELDS_WITHOUT_EFFECT, *FIELDS_IGNORED_BY_SERVER])
def test_fields_without_effect_may_have_any_value(name: str) -> None:
    for value in (0, "x", [], {"a": [1]}, False):
        assert validate_body({"input_prefix": "a", "input_suffix": "b", name: value}, InfillRequest)
        if name not in InsideFields.model_fields:
            assert validate_body({"prompt": "a", name: value}, CompletionRequest)


@pytest.mark.parametrize("name", [*REFUSED_PROMPT_FIELDS, *REFUSED_TEXT_FIELDS, *REFUSED_TOKENIZE_FIELDS])
def test_what_cannot_be_had_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    values = (REFUSED_PROMPT_FIELDS | REFUSED_TEXT_FIELDS | REFUSED_TOKENIZE_FIELDS)[name]
    bodies: list[tuple[type[Any], dict[str, Any]]] = [
        (ChatRequest, {"messages": CHAT}),
        (CompletionRequest, {"prompt": "a"}),
    ]
    bodies = bodies * (name not in REFUSED_TOKENIZE_FIELDS) + [(TokenizeRequest, {"prompt": "a"})] * (
        name not in REFUSED_TEXT_FIELDS
    )
    bodies = [(body, given) for body, given in bodies if not (name in OF_CHATS and issubclass(body, ChatEndingFields))]
    for body, given in bodies:
        for value in (*values, None):
            assert validate_body({**given, name: value}, body)
        for value in ("zzz", {"a": 1}, 7, [["zzz"]]):
            with pytest.raises(
                RequestError,
                match=f"^{name} is (not supported|supported only with).*; (leave {name} out|use .*|send .*)[.]$",
            ) as found:
                validate_body({**given, name: value}, body)
            assert found.value.param == name and len(str(found.value)) < 200


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"best_of": 3}, "best_of is supported only with the value 1; leave best_of out."),
        ({"reasoning_format": "none"}, 'reasoning_format is supported only with the value "auto" or "deepseek"'),
        ({"guided_json": {}}, "guided_json is not supported; use the field `json_schema` instead."),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
    ],
)
def test_what_is_refused_is_refused_by_a_server_too(server: Running, body: dict[str, Any], told: str) -> None:
    answer = server.post("/v1/completions", {**TEXT, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(told) and error["param"] in body, error


@pytest.mark.parametrize(("path", "body"), GIVEN)
def test_unknown_fields_are_ignored_and_named(server: Running, path: str, body: dict[str, Any]) -> None:
    plain, answer = server.post(path, body), server.post(path, {**body, "zz-top": 1, "think": {"a": [2]}, "no": None})
    assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, "zz-top, think"), answer.text
    changing = ("id", "created", "usage")
    found = [{name: each.json()[name] for name in each.json() if name not in changing} for each in (plain, answer)]
    assert found[0] == found[1]
    assert IGNORED_HEADER not in plain.headers


def test_unknown_fields_of_messages_are_ignored_and_named(server: Running) -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "annotations": [], "prefix": True, "audio": None}
    body = {"messages": [message, {"role": "assistant", "content": "Ho", "prefix": 1}, *CHAT], "max_tokens": 3}
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.post(path, body | {"max_tokens": 3} if "chat" in path else {"messages": body["messages"]})
        assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, "messages.prefix, content.cache_control")


def test_streams_and_errors_name_them_too(server: Running) -> None:
    body = {**TEXT, "stream": True, "stream_options": {"include_usage": True, "chunk": 1}, "zz": 1}
    stream = server.post("/v1/completions", body)
    assert stream.headers[IGNORED_HEADER] == "zz, stream_options.chunk" and stream.text.endswith("data: [DONE]\n\n")
    assert '"usage":{' in stream.text
    for more, status in (({"temprature": 1, "temperature": -1}, 400), ({"temprature": 1, "regex": "("}, 400)):
        answer = server.post("/v1/completions", {**TEXT, **more})
        assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (status, "temprature")


def test_a_field_of_another_endpoint_is_no_unknown_one(server: Running) -> None:
    answer = server.post("/v1/chat/completions", {"messages": CHAT, "prompt": "a"})
    assert (
        answer.status_code == 400 and "but of /v1/completions" in answer.text and IGNORED_HEADER not in answer.headers
    )


def test_names_that_could_deceive(server: Running) -> None:
    names = ("a\r\nSet-Cookie: x", "ü, b", "", "x" * 1000)
    answer = server.post("/v1/completions", {**TEXT, **dict.fromkeys(names, 1)})
    assert answer.headers[IGNORED_HEADER] == f"a??Set-Cookie??x, ???b, ?, {'x' * 80}"
    assert answer.status_code == 200 and "Set-Cookie" not in answer.headers


def test_the_log_names_each_once_and_not_without_end(start_here: StartHere) -> None:
    server = start_here(DEMO / "draft", "--draft", "none", "--engine", "stateful", "--arithmetic", "fast")
    names = [f"field{number}" for number in range(MAX_LOGGED_FIELDS + 50)]
    for _ in range(2):
        for first in range(0, len(names), MAX_NAMED_FIELDS):
            fields = dict.fromkeys(names[first : first + MAX_NAMED_FIELDS], 1)
            answer = server.post("/detokenize", {"tokens": [65], **fields})
            assert answer.headers[IGNORED_HEADER].split(", ") == [*fields]
    many = server.post("/detokenize", {"tokens": [65], **dict.fromkeys(names, 1)})
    assert many.headers[IGNORED_HEADER].split(", ") == names[:MAX_NAMED_FIELDS]
    server.end()
    found = re.findall("requests have (.*), which is ignored", server.log.read_text("utf-8"))
    assert found == names[:MAX_LOGGED_FIELDS]


@pytest.mark.parametrize(
    ("path", "body", "message", "field"),
    [
        ("/v1/completions", {**TEXT, "temprature": 1}, "did you mean temperature", "temprature"),
        ("/v1/completions", {**TEXT, "x" * 1000: 1}, "^x{80} is not a field of this request; leave it out.$", "x" * 80),
        ("/v1/chat/completions", {"messages": CHAT, "tool": 1}, "tool is not a .*; did you mean tools", "tool"),
        (
            "/v1/chat/completions",
            {"messages": [{**CHAT[0], "nmae": "Eve"}]},
            "nmae is not a field of a message; did you mean name",
            "messages",
        ),
        (
            "/tokenize",
            {"messages": [{"role": "assistant", "content": "Hi", "prefix": True}]},
            "prefix is not a field of a message; leave it out",
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {}}]}]},
            "cache_control is not a field of a content part",
            "messages",
        ),
        ("/v1/completions", {**TEXT, "stream": True, "stream_options": {"x": 1}}, "x is not a field", "stream_options"),
        ("/tokenize", {"prompt": "a", "zz": 1}, "zz is not a field of this request; leave it out.", "zz"),
        ("/detokenize", {"tokens": [65], "token": 1}, "token is not a field of .*; did you mean tokens", "token"),
        ("/v1/completions", {**TEXT, "model": "gpt-9"}, "no model 'gpt-9'; this server has its and gpt-4o", "model"),
        ("/detokenize", {"tokens": [65], "model": "gpt-9"}, "There is no model", "model"),
    ],
)
def test_what_a_strict_server_refuses(strict: Running, path: str, body: Any, message: str, field: str) -> None:
    answer = asked(strict, path, body)
    error = answer.json()["error"]
    assert re.search(message, error["message"]) and error["param"] == field and IGNORED_HEADER not in answer.headers, (
        error
    )
    expected = (404, "model_not_found") if field == "model" else (400, None)
    assert (answer.status_code, error["code"]) == expected


def test_what_a_strict_server_takes(strict: Running) -> None:
    for path, body in GIVEN[:2]:
        assert asked(strict, path, {**body, **OF_AGENTS}).status_code == 200
    for model in ("its", "gpt-4o", "", None):
        answer = asked(strict, "/v1/completions", {**TEXT, "model": model})
        assert answer.status_code == 200 and answer.json()["model"] == "its"


@pytest.mark.parametrize("model", ["gpt-5", "", "claude/x:latest", "名"])
def test_any_model_is_answered_with_our_name(server: Running, model: str) -> None:
    answer = server.post("/v1/completions", {**TEXT, "model": model})
    assert answer.status_code == 200 and answer.json()["model"] == "demo"
    stream = server.post("/v1/completions", {**TEXT, "model": model, "stream": True}).text
    assert {json.loads(line[6:])["model"] for line in stream.split("\n\n") if line.startswith("data: {")} == {"demo"}
    for path, body in GIVEN[2:]:
        assert server.post(path, {**body, "model": model}).status_code == 200


def test_the_names_of_the_model(strict: Running, server: Running) -> None:
    headers = {"x-api-key": "the-key"}
    listed = strict.get("/v1/models", headers=headers).json()["data"]
    assert [each["id"] for each in listed] == ["its", "gpt-4o"]
    assert strict.get("/v1/models/gpt-4o", headers=headers).json() == listed[1]
    assert strict.get("/v1/models/gpt-9", headers=headers).status_code == 404
    assert [each["id"] for each in server.get("/v1/models").json()["data"]] == ["demo"]


def test_the_document_tells_what_is_refused(strict: Running, server: Running) -> None:
    found = strict.get("/openapi.json", headers={"x-api-key": "the-key"}), server.get("/openapi.json")
    for answer, tolerant in zip(found, (False, True), strict=True):
        schemas = answer.json()["components"]["schemas"]
        for name in (*(body.__name__ for body in BODY_TYPES.values()), "StreamOptions"):
            assert schemas[name]["additionalProperties"] is tolerant
        assert schemas["CompletionRequest"]["properties"]["best_of"]["enum"] == [1, None]
        assert schemas["ChatRequest"]["properties"]["prompt"]["type"] == "null"


def test_openais_client(server: Running, strict: Running) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options: Any = {"model": "gpt-4o", "messages": CHAT, "max_tokens": 5}
    plain = client.chat.completions.create(**options)
    raw = client.chat.completions.with_raw_response.create(**options, store=True, extra_body={"think": "high"})
    assert raw.headers[IGNORED_HEADER] == "think" and raw.parse().model == "demo"
    assert raw.parse().choices[0].message.content == plain.choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True, extra_body={"think": "high"}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="verbosity is supported only with the value"):
        client.chat.completions.create(**options, verbosity="low")

    other: Any = openai.OpenAI(base_url=f"{strict.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.AuthenticationError, match="x-api-key"):
        other.chat.completions.create(**options)
    headers = {"x-api-key": "the-key"}
    assert other.chat.completions.create(**options, extra_headers=headers).model == "its"
    with pytest.raises(openai.BadRequestError, match="think is not a field"):
        other.chat.completions.create(**options, extra_headers=headers, extra_body={"think": "high"})
    with pytest.raises(openai.NotFoundError, match="no model"):
        other.chat.completions.create(**{**options, "model": "gpt-9"}, extra_headers=headers)
