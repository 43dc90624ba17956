"""What holds for each API that generates text: OpenAI's three and Anthropic's."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from clients import type_of
from servers import DEMO, Running, StartHere, wait_until

QUESTION = "Write a function."
CHAT = [{"role": "user", "content": QUESTION}]


@dataclass(frozen=True)
class Api:
    """An API: its path, a body, the fields of a limit, the client's types (clients.py), and what is read of answers.

    told: an answer's text; piece: what an event adds to it; ends: what the last event has.
    """

    path: str
    body: dict[str, Any]
    limit: str
    answer: str
    event: str | None
    told: Callable[[Any], str]
    piece: Callable[[Any], str]
    ends: str
    cached: Callable[[Any], int]
    error: Callable[[Any], tuple[str, str]] = lambda body: (body["error"]["type"], body["error"]["message"])


def of_choices(chunk: Any) -> str:
    parts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in chunk["choices"]]
    return "".join(parts)


def of_items(event: Any) -> str:
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


def of_blocks(event: Any) -> str:
    return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""


APIS = {
    "chat": Api(
        "/v1/chat/completions", {"messages": CHAT}, "max_tokens",
        "openai.types.chat:ChatCompletion", "openai.types.chat:ChatCompletionChunk",
        lambda answer: answer["choices"][0]["message"]["content"], of_choices, "data: [DONE]",
        lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    "completions": Api(
        "/v1/completions", {"prompt": QUESTION}, "max_tokens", "openai.types:Completion", None,
        lambda answer: answer["choices"][0]["text"], of_choices, "data: [DONE]",
        lambda answer: answer["usage"]["prompt_tokens_details"]["cached_tokens"],
    ),
    "responses": Api(
        "/v1/responses", {"input": CHAT}, "max_output_tokens",
        "openai.types.responses:Response", "openai.types.responses:ResponseStreamEvent",
        lambda answer: answer["output"][0]["content"][0]["text"], of_items, "event: response.",
        lambda answer: answer["usage"]["input_tokens_details"]["cached_tokens"],
    ),
    "messages": Api(
        "/v1/messages", {"messages": CHAT}, "max_tokens",
        "anthropic.types:Message", "anthropic.types:RawMessageStreamEvent",
        lambda answer: answer["content"][0]["text"], of_blocks, "event: message_stop",
        lambda answer: answer["usage"]["cache_read_input_tokens"],
    ),
}  # fmt: skip
every = pytest.mark.parametrize("api", APIS.values(), ids=APIS)
SHOWN = ("chat", "messages")  # what the server does alike for all is shown of two in quick runs
either = pytest.mark.parametrize(
    "api", [pytest.param(api, id=name, marks=[] if name in SHOWN else pytest.mark.slow) for name, api in APIS.items()]
)


def ask(server: Running, api: Api, tokens: int = 24, **more: Any) -> Any:
    answer = server.post(api.path, {**api.body, api.limit: tokens, "temperature": 0.8, "seed": 3, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events_of(raw: bytes) -> Iterator[Any]:
    """Yield the data of a stream's events; each has a name if its data has a type."""
    for event in raw.decode().split("\n\n"):
        lines = [line for line in event.splitlines() if not line.startswith(":")]
        if not lines or lines == ["data: [DONE]"]:
            continue
        data = json.loads(lines[-1].removeprefix("data: "))
        assert lines[:-1] == ([f"event: {data['type']}"] if "type" in data else [])
        yield data


@every
def test_streams_and_answers_say_the_same_whatever_proposes(server: Running, api: Api) -> None:
    whole = ask(server, api)
    type_of(api.answer).validate_python(whole)
    text = api.told(whole)
    assert text
    for draft in ("none", "lookup", "draft"):
        before = server.metric("ovspec_proposed_tokens_total")
        wanted = {api.limit: 24, "temperature": 0.8, "seed": 3, "draft": draft, "stream": True}
        raw = server.post(api.path, {**api.body, **wanted})
        assert raw.headers["content-type"].startswith("text/event-stream")
        found = [*events_of(raw.content)]
        for each in found if api.event else ():
            type_of(api.event).validate_python(each)
        assert "".join(map(api.piece, found)) == text
        assert api.ends in raw.text.rstrip().rpartition("\n\n")[2]
        proposed = server.metric("ovspec_proposed_tokens_total") > before
        assert proposed if draft == "draft" else not proposed or draft == "lookup"


def test_chats_are_the_same_in_every_api(server: Running) -> None:
    texts = [api.told(ask(server, api)) for name, api in APIS.items() if name != "completions"]
    assert len({*texts}) == 1 and texts[0]


@every
def test_a_second_request_finds_its_prompt(server: Running, api: Api) -> None:
    body = json.loads(json.dumps(api.body).replace(QUESTION, "Count to ten. " * 40 + api.path))
    answers = [server.post(api.path, {**body, api.limit: 1}).json() for _ in range(2)]
    assert api.cached(answers[1]) > max(0, api.cached(answers[0]))


def test_prompts_are_counted_as_they_are_read(server: Running) -> None:
    import openai

    counts = {}
    for path, api in (("/v1/responses/input_tokens", "responses"), ("/v1/messages/count_tokens", "messages")):
        counted = server.post(path, APIS[api].body)
        assert counted.status_code == 200, counted.text
        counts[api] = counted.json()["input_tokens"]
    usage = ask(server, APIS["chat"])["usage"]
    assert counts == dict.fromkeys(counts, usage["prompt_tokens"])
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert client.responses.input_tokens.count(model="any", input=QUESTION).input_tokens == usage["prompt_tokens"]


def test_both_clients_list_the_models(server: Running) -> None:
    import anthropic
    import openai

    theirs = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0).models.list()
    ours = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).models.list()
    type_of("anthropic.types:ModelInfo").validate_python(theirs.data[0].to_dict())
    assert [model.id for model in theirs] == [model.id for model in ours] == ["demo"]
    assert theirs.data[0].display_name == "demo" and not theirs.has_more


def raw_request(server: Running, api: Api, **more: Any) -> socket.socket:
    """Return a connection on which a stream has been asked for."""
    where = urlsplit(server.url)
    client = socket.create_connection((where.hostname, where.port), 30)
    body = json.dumps({**api.body, api.limit: 400, "ignore_eos": True, "stream": True, **more}).encode()
    head = f"POST {api.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


@either
def test_streams_that_are_cut_off_anywhere_free_their_rows(server: Running, api: Api) -> None:
    chance = random.Random(5)
    for _ in range(4):
        with raw_request(server, api) as client:
            left = chance.randrange(1, 4000)
            while left > 0 and (got := client.recv(left)):
                left -= len(got)
    wait_until(lambda: server.metric("ovspec_texts_running") == 0)
    wait_until(lambda: server.metric("ovspec_cache_blocks_used") == 0)
    assert api.told(ask(server, api))


@either
def test_a_client_that_reads_slowly_gets_everything(server: Running, api: Api) -> None:
    wanted = {api.limit: 60, "temperature": 0.8, "seed": 3}
    whole = server.post(api.path, {**api.body, **wanted, "ignore_eos": True}).json()
    got = b""
    with raw_request(server, api, **wanted) as client:
        while not got.endswith(b"0\r\n\r\n"):
            got += client.recv(300)
            time.sleep(0.002)
    _, _, rest = got.partition(b"\r\n\r\n")
    raw = b""
    while rest:  # chunks of HTTP
        size, _, rest = rest.partition(b"\r\n")
        raw, rest = raw + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    assert "".join(map(api.piece, events_of(raw))) == api.told(whole)


@every
@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"temperature": -1}, "temperature"),
        ({"draft": "oracle"}, "draft"),
        ({"regex": "("}, "regex"),
        ({"stream": 3}, "stream"),
        ({"top_k": "many"}, "top_k"),
    ],
)
def test_wrong_fields_are_refused_in_the_shape_of_the_api(server: Running, api: Api, body: Any, word: str) -> None:
    answer = server.post(api.path, {**api.body, **body})
    kind, message = api.error(answer.json())
    assert answer.status_code == 400 and kind == "invalid_request_error"
    assert word in message and message.endswith(".")
    assert answer.headers.get("request-id", answer.headers.get("x-request-id", "")).startswith("req_")


@every
def test_a_wrong_base_url_is_told(server: Running, api: Api) -> None:
    for path, told in (
        (f"/v1{api.path}", "leave /v1 out of the client's base URL"),
        (api.path[3:], "end the client's base URL with /v1"),
    ):
        answer = server.post(path, api.body)
        kind, message = api.error(answer.json())
        assert (answer.status_code, kind) == (404, "not_found_error") and message.endswith(f"{told}.")


@every
def test_unknown_fields_are_named(server: Running, api: Api) -> None:
    answer = server.post(api.path, {**api.body, api.limit: 1, "no_such_field": 1})
    assert answer.status_code == 200 and "no_such_field" in answer.headers["X-Ovspec-Ignored"]


@pytest.fixture(scope="module")
def strict(start_here: StartHere, tmp_path_factory: pytest.TempPathFactory) -> Running:
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("secret\n", encoding="utf-8")
    options = ("--request-timeout", "0.4", "--strict-fields", "--strict-model", "--api-key-file", keys)
    return start_here(DEMO, "--draft", "none", "--precision", "f32", *options)


@either
def test_strictness_keys_and_time_limits(strict: Running, api: Api) -> None:
    def post(more: dict[str, Any], key: str = "secret") -> httpx.Response:
        return strict.post(api.path, {**api.body, api.limit: 1, **more}, headers={"x-api-key": key})

    def in_time(more: dict[str, Any]) -> httpx.Response:
        """Ask again while the machine is too busy for the limit, which each answer must have taken then."""
        ends = time.monotonic() + 60
        while (answer := post(more)).status_code == 504 and time.monotonic() < ends:
            assert answer.elapsed.total_seconds() >= 0.4
        return answer

    assert in_time({}).status_code == 200
    endless = {api.limit: 1900, "ignore_eos": True}
    for answer, status, kind in (
        (post({}, "wrong"), 401, "authentication_error"),
        (post({"model": "other"}), 404, "not_found_error"),
        (post({"no_such_field": 1}), 400, "invalid_request_error"),
        (post(endless), 504, None),
    ):
        assert answer.status_code == status, answer.text
        assert kind is None or api.error(answer.json())[0] == kind
    late = in_time({**endless, "stream": True})
    assert late.status_code == 200 and "longer than 0.4 seconds" in late.text
    assert list(events_of(late.content))
