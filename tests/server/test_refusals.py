"""What a server refuses, each in a sentence of OpenAI's shape: fields, keys, hosts, bodies, and more than it can do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from click.testing import CliRunner
from commands_here import Command, commands_here
from servers import DEMO, Running, StartHere, wait_until

import ovspec
from ovspec.api.verify import result_from_json
from ovspec.base.errors import OvspecError
from ovspec.cli import cli
from ovspec.server.body_limits import MAX_BODY_BYTES
from ovspec.server.server import open_socket, read_api_keys

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "a"}
SMALL = DEMO / "draft"  # which is loaded and generates sooner
FAST = ("--arithmetic", "fast")  # needs no probing
# path, body, what the message says, and the field that it names
WRONG: list[tuple[str, Any, str, str | None]] = [
    ("/v1/completions", {}, "prompt is missing", "prompt"),
    ("/v1/completions", [], "must be a JSON object", None),
    ("/v1/completions", {"prompt": None}, "prompt is missing", "prompt"),
    ("/v1/completions", {"prompt": 5}, "prompt must be a string, a list of strings.* or a list of lists of", "prompt"),
    ("/v1/completions", {"prompt": ["a", 5]}, "prompt must be a string", "prompt"),
    ("/v1/completions", {**TEXT, "stop": 5}, "stop must be a string or a list of strings", "stop"),
    ("/v1/completions", {**TEXT, "stop": ""}, "empty string", "stop"),
    ("/v1/completions", {**TEXT, "lookahead": "x"}, 'lookahead must be a whole number or "auto"', "lookahead"),
    ("/v1/completions", {**TEXT, "messages": []}, "messages is not .* but of /v1/chat/completions", "messages"),
    ("/v1/completions", {**TEXT, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "max_tokens"),
    ("/v1/completions", {**TEXT, "stop_ids": [1], "stop_token_ids": [2]}, "`stop_token_ids`", "stop_ids"),
    ("/v1/completions", {**TEXT, "max_tokens": "5"}, "max_tokens", "max_tokens"),
    ("/v1/completions", {**TEXT, "suffix": "b", "echo": True}, "suffix can't be combined with echo", "suffix"),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "suffix": "b"},
        "suffix works only if the prompt is a single string",
        "suffix",
    ),
    (
        "/v1/completions",
        {"prompt": [65], "suffix": "b"},
        "suffix works only if the prompt is a single string",
        "suffix",
    ),
    ("/v1/chat/completions", {**CHAT, "suffix": "b"}, "suffix is not a field .*, but of /v1/completions", "suffix"),
    ("/v1/completions", {**TEXT, "max_completion_tokens": -2}, "is -2; it must be 0 or more", "max_completion_tokens"),
    ("/v1/completions", {**TEXT, "stop_token_ids": [-1]}, "`stop_token_ids`: token id -1", "stop_token_ids"),
    (
        "/v1/completions",
        {**TEXT, "logit_bias": {"5": "x"}},
        "must be an object that maps whole numbers",
        "logit_bias",
    ),
    ("/v1/completions", {**TEXT, "temperature": -1}, "temperature", "temperature"),
    ("/v1/completions", {**TEXT, "n": 200, "temperature": 1.0}, "asks for 200 texts", "n"),
    ("/v1/completions", {**TEXT, "logprobs": -1}, "logprobs", "logprobs"),
    ("/v1/completions", {**TEXT, "regex": "("}, "regex", "regex"),
    ("/v1/completions", {**TEXT, "regex": "a", "choice": ["b"]}, "can't be combined", None),
    ("/v1/completions", {**TEXT, "json_schema": "/etc/passwd"}, "isn't JSON; give the schema's text.$", "json_schema"),
    ("/v1/completions", {**TEXT, "grammar": "/etc/passwd"}, "isn't a grammar; give the grammar's text.$", "grammar"),
    ("/v1/completions", {**TEXT, "draft": "medusa"}, "this server drafts only with lookup and draft", "draft"),
    (
        "/v1/completions",
        {**TEXT, "draft": ""},
        'this server drafts only with lookup and draft; set draft to "none"',
        "draft",
    ),
    ("/v1/completions", {**TEXT, "stream_options": {"include_usage": True}}, "needs stream", "stream_options"),
    (
        "/v1/completions",
        {**TEXT, "stream_options": {"include_usage": 1}},
        "include_usage must be true",
        "stream_options",
    ),
    ("/v1/completions", {**TEXT, "logit_bias": {"a": 1}}, "logit_bias", "logit_bias"),
    ("/v1/completions", {"prompt": [-1]}, "not in the vocabulary", "prompt"),
    ("/v1/completions", {"prompt": "a " * 5000}, "the context is", "prompt"),
    ("/v1/chat/completions", {"messages": []}, "messages", "messages"),
    ("/v1/chat/completions", {"messages": ["Hi"]}, "messages must be a list of objects", "messages"),
    ("/v1/chat/completions", {**CHAT, "prompt": "a"}, "prompt is not .* but of /v1/completions", "prompt"),
    ("/v1/chat/completions", {**CHAT, "echo": True}, "echo is not a field", "echo"),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "needs `logprobs`", "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "must be", "response_format"),
    ("/tokenize", {"messages": []}, "must not be empty", "messages"),
    ("/tokenize", {"messages": CHAT["messages"], "add_special_tokens": True}, "messages", "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"x": 1}}, "needs chat messages", "chat_template_kwargs"),
    ("/tokenize", {}, "one of the fields prompt", None),
    ("/detokenize", {"tokens": [10**30]}, "beyond the vocabulary", "tokens"),
    ("/detokenize", {"tokens": [999999]}, "not in the vocabulary", "tokens"),
]


@pytest.mark.parametrize(("path", "body", "message", "field"), WRONG)
def test_wrong_fields_are_named(server: Running, path: str, body: Any, message: str, field: str | None) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert re.search(message, error["message"]) and len(error["message"]) < 400, error
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == field or (field is None and "can't be combined" in message)
    assert (error["code"] == "context_length_exceeded") == (message == "the context is")


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"content": "Hi"}, "role"),
        ({"role": "user"}, "each message needs content"),
        ({"role": "user", "content": None}, "each message needs content"),
        ({"role": "user", "content": ["Hi"]}, "each message needs content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
        ({"role": "user", "content": [{"type": "text"}]}, "must have the field text, a string"),
        ({"role": "user", "content": "Hi", "name": 5}, "the field name of a message must be a string"),
        ({"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, "each tool call must"),
        (
            {"role": "assistant", "content": "", "tool_calls": {"id": "1"}},
            "the field tool_calls of a message must be a list",
        ),
        ({"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}, "the id of a tool call to f"),
        ({"role": "assistant", "content": "", "function_call": {"name": "f"}}, "function_call is not supported"),
    ],
)
def test_messages_that_cannot_be_read(server: Running, message: Any, told: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.post(path, {"messages": [message]})
        error = answer.json()["error"]
        assert answer.status_code == 400 and told in error["message"] and error["param"] == "messages", error


FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "yes"}}}


@pytest.mark.parametrize(
    ("wanted", "more", "told"),
    [
        ({"type": "text"}, {"regex": "a"}, "`response_format` and `regex` can't be combined"),
        (FORMAT, {"json_schema": {}}, "`response_format` and `json_schema` can't be combined"),
        ({"type": "json_object", "strict": True}, {}, "strict is not a field of"),
        ({"type": "json_object", "schema": {"type": "objct"}}, {}, "`response_format`, at #/type"),
        ({**FORMAT, "schema": {}}, {}, "schema is not a field of"),
        (
            {**FORMAT, "json_schema": {**FORMAT["json_schema"], "strct": True}},
            {},
            "json_schema.strct is not a field of `response_format`; did you mean",
        ),
    ],
)
def test_response_formats_that_cannot_be_met(server: Running, wanted: Any, more: Any, told: str) -> None:
    error = server.post("/v1/completions", {**TEXT, "response_format": wanted, **more}).json()["error"]
    assert told in error["message"] and error["param"] == "response_format", error


@pytest.mark.parametrize("null", ["regex", "json_schema", "response_format", "tools", "unknown"])
def test_a_null_field_counts_as_absent(server: Running, null: str) -> None:
    body = {**TEXT, "max_tokens": 9, null: None}
    own = {"choice": ["yes"]} if null == "json_schema" else {"json_schema": {"const": "yes"}}
    expected = "yes" if null == "json_schema" else '"yes"'
    for each in ({**own, **body}, {**body, **own}):
        assert server.post("/v1/completions", each).json()["choices"][0]["text"] == expected


def test_other_spellings_that_are_met(server: Running) -> None:
    for wanted in (FORMAT, {"type": "json_object", "schema": {"const": "yes"}}):
        body = {**TEXT, "response_format": wanted, "max_tokens": 9, "max_completion_tokens": 9}
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == '"yes"'
    message = {"role": "assistant", "content": "Hi", "tool_calls": [], "function_call": None}
    message |= {"refusal": None, "annotations": [], "audio": None, "name": "Eve"}
    same = [{"role": "assistant", "content": "Hi"}]
    tokens = [server.post("/tokenize", {"messages": each}).json()["tokens"] for each in ([message], same)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"", "JSON"),
        (b"[" * 5000, "not JSON: recursion limit"),
        (b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", "not JSON: recursion limit"),
        (b'{"prompt": "\\ud800\xff"}', "not JSON: invalid unicode code point"),
        (b'{"prompt": "\\ud8"}', "not JSON: invalid escape"),
        (b'{"prompt": "\xff"}', "not JSON: invalid unicode code point at line 1 column 13"),
        (b'{"prompt": "\xed\xa0\x80"}', "not JSON: invalid unicode code point"),
        (b'{"prompt": "a", "temperature": NaN}', "not JSON: expected value at line 1 column 32"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not JSON: number out of range"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    ],
)
def test_wrong_bodies(server: Running, body: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text


def test_other_types_methods_and_paths(server: Running) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", data={"prompt": "a"})
    assert answer.status_code == 415 and "Content-Type" in answer.json()["error"]["message"]
    for path, status in (
        ("/v1/completions", 405),
        ("/v1/models/none", 404),
        ("/docs", 404),
        ("/health/", 404),
        ("/../etc/passwd", 404),
    ):
        answer = server.get(path)
        assert answer.status_code == status and answer.json()["error"]["message"]
    assert "no such path" in server.post("/v1/completions/", TEXT).json()["error"]["message"]
    head = httpx.head(f"{server.url}/health")
    assert head.status_code == 200 and not head.content
    assert 'endpoint="/v1/models/{name}",status="404"' in server.get("/metrics").text
    assert not any("access-control" in name.lower() for name in server.get("/health").headers)


def test_only_this_machines_names_are_answered_without_a_key(server: Running) -> None:
    """A web page whose own name points here could otherwise use the server."""
    answer = server.get("/v1/models", headers={"Host": "example.com"})
    assert answer.status_code == 403 and "localhost" in answer.json()["error"]["message"]
    assert server.get("/v1/models", headers={"Host": "localhost:8000"}).status_code == 200


def test_large_bodies_and_heads_are_cut_off(server: Running) -> None:
    with httpx.Client() as client:
        answer = client.post(f"{server.url}/v1/completions", json={"prompt": "a" * MAX_BODY_BYTES}, timeout=60)
        assert answer.status_code == 413
    with contextlib.suppress(httpx.HTTPError):  # it is closed before the head is whole
        assert server.get("/health", headers={"X": "a" * 200_000}).status_code in (400, 431)
    assert server.get("/health").status_code == 200


@pytest.fixture(scope="module")
def guarded(start_here: StartHere, tmp_path_factory: pytest.TempPathFactory) -> Running:
    """A server with two keys and little room, which others could reach."""
    keys = tmp_path_factory.mktemp("keys") / "keys.txt"
    keys.write_text("first-key\n\nsecond-key\n", encoding="utf-8")
    room = ("--batch-size", "1", "--queue-size", "1", "--queue-timeout", "2", "--cache-size", "0.0005")
    return start_here(
        SMALL, "--api-key-file", keys, "--host", "0.0.0.0", "--draft", "none", "--precision", "f32", *room
    )


def address(server: Running) -> str:
    return server.url.replace("0.0.0.0", "127.0.0.1")


def ask(server: Running, key: str | None = "first-key", **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{address(server)}/v1/completions", json={**TEXT, **body}, headers=headers, timeout=60)


def test_keys(guarded: Running) -> None:
    assert ask(guarded, max_tokens=1).status_code == ask(guarded, "second-key", max_tokens=1).status_code == 200
    for key in (None, "", "wrong", "first-keysecond-key"):
        answer = ask(guarded, key, max_tokens=1)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
        assert "'Authorization: Bearer KEY' or 'x-api-key: KEY'" in error["message"]
    for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 401), ("/v1/models", 401)):
        assert httpx.get(address(guarded) + path).status_code == status
    assert not re.search("first-key|second-key", guarded.log.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "second-key"}, 200),
        ({"X-API-Key": "first-key"}, 200),
        ({"x-api-key": "first-key", "Authorization": "Bearer wrong"}, 200),
        ({"x-api-key": "first-key", "Authorization": "Basic wrong"}, 200),
        ({"x-api-key": "wrong", "Authorization": "Bearer second-key"}, 200),
        ({"x-api-key": "wrong", "Authorization": "Bearer wrong"}, 401),
        ({"x-api-key": "Bearer first-key"}, 401),
        ({"x-api-key": ""}, 401),
        ({"Authorization": "first-key"}, 401),
    ],
)
def test_keys_in_either_header(guarded: Running, headers: dict[str, str], status: int) -> None:
    assert httpx.get(f"{address(guarded)}/v1/models", headers=headers).status_code == status


def test_a_text_ends_where_memory_ends(guarded: Running, cache_dir: Path) -> None:
    asked = ask(guarded, max_tokens=2000, ignore_eos=True, return_record=True)
    assert (
        ovspec.load(SMALL, "none", precision="f32", cache_dir=cache_dir)
        .verify(result_from_json(asked.json()["choices"][0]))
        .ok
    )
    room = asked.json()["usage"]["total_tokens"]
    assert asked.json()["choices"][0]["finish_reason"] == "length" and room < 2000
    answer = ask(guarded, prompt=[5] * room, max_tokens=1)
    error = answer.json()["error"]
    assert answer.status_code == 400 and f"this server's KV cache holds only {room};" in error["message"], answer.text
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_a_full_queue_and_one_that_waits_too_long(guarded: Running) -> None:
    """One runs, one waits, and the third is refused; the second gives up after its time."""

    def run(tokens: int) -> httpx.Response:
        return ask(guarded, max_tokens=tokens, ignore_eos=True)

    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        answers = [each.result() for each in [threads.submit(run, 300) for _ in range(6)]]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} <= {200, 429, 503}
    assert refused and all(int(answer.headers["Retry-After"]) > 0 for answer in refused)
    assert {answer.json()["error"]["type"] for answer in refused} == {"rate_limit_error"}
    assert {answer.json()["error"]["code"] for answer in refused} == {"rate_limit_exceeded"}
    assert any(answer.status_code == 200 for answer in answers)


@pytest.fixture(scope="module")
def limited(start_here: StartHere) -> Running:
    limits = ("--request-timeout", "0.4", "--queue-timeout", "0.2", "--batch-size", "1", "-n", "5")
    return start_here(DEMO, "--draft", "none", "--precision", "f32", *limits)


def test_time_limits(limited: Running) -> None:
    """One text runs too long, and another waits too long behind it; a default for ``max_tokens`` is used."""
    server = limited
    assert server.post("/v1/completions", TEXT).json()["usage"]["completion_tokens"] == 5
    body = {**TEXT, "max_tokens": 1900, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        answers = [each.result() for each in [threads.submit(server.post, "/v1/completions", body) for _ in range(3)]]
    assert sorted({answer.status_code for answer in answers}) == [503, 504], [answer.text for answer in answers]
    assert all(answer.json()["error"]["code"] == "timeout" for answer in answers)
    for answer in answers:  # OpenAI's client would send again what has taken too long
        assert (answer.headers.get("X-Should-Retry") == "false") == (answer.status_code == 504)
    late = 'ovspec_requests_total{endpoint="/v1/completions",status="504"}'
    before = float(server.get("/metrics").text.split(late)[1].split()[0])
    stream = server.post("/v1/completions", {**body, "stream": True})
    assert stream.status_code == 200 and "longer than 0.4 seconds" in stream.text and "[DONE]" not in stream.text
    assert float(server.get("/metrics").text.split(late)[1].split()[0]) == before + 1
    wait_until(lambda: server.metric("ovspec_texts_running") == 0)


def test_the_time_limit_counts_all_of_a_request(limited: Running) -> None:
    """Reading prompts whose log-probabilities are repeated, and trying again, too; both would take long."""
    server = limited
    echo = {"prompt": [[100 + number] * 1500 for number in range(40)], "max_tokens": 1, "echo": True, "logprobs": 1}
    never = {**TEXT, "json_schema": {"type": "array", "minItems": 100}, "json_schema_mode": "checked", "max_tokens": 9}
    never |= {"temperature": 1.0, "retries": 10_000}
    for body in (echo, {**echo, "stream": True}, never):
        began = time.monotonic()
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout", answer.text
        assert time.monotonic() - began < 5
        wait_until(lambda: server.post("/v1/completions", {**TEXT, "max_tokens": 1}).status_code == 200, 5.0)


def test_a_key_learns_nothing_of_what_another_wrote(start_here: StartHere, tmp_path: Path) -> None:
    """Prefixes are shared between texts of one key only, because a shared one is read sooner."""
    (tmp_path / "keys").write_text("first-key\nsecond-key\n", encoding="utf-8")
    server = start_here(DEMO, "--api-key-file", tmp_path / "keys", "--draft", "none", "--precision", "f32")
    prompt = [100 + number % 50 for number in range(200)]

    def cached(key: str) -> int:
        answer = ask(server, key, prompt=prompt, max_tokens=1)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    body = {"prompt": prompt, "max_tokens": 1800, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer first-key"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines)
        assert cached("second-key") == 0
        assert cached("first-key") > 150
        assert cached("second-key") > 150, "by now it has asked for that itself"
        assert any(line.startswith("data: {") for line in lines), "the text must still grow"


def test_the_log_has_no_prompts(server: Running) -> None:
    server.post("/v1/completions", {"prompt": "A very secret prompt", "max_tokens": 1})
    server.get("/v1/models?api_key=A-very-secret-key")
    time.sleep(0.2)
    log = server.log.read_text(encoding="utf-8")
    assert "/v1/completions 200" in log and "secret" not in log


def test_clients_that_go_away(server: Running) -> None:
    """Their rows leave the batch, and others don't notice."""
    body = {"prompt": "def f(", "max_tokens": 2000, "ignore_eos": True, "draft": "none"}
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    for streams in (True, False) * 2:
        before = server.metric("ovspec_generated_tokens_total")
        data = json.dumps({**body, "stream": streams}).encode()
        connection = socket.create_connection((host, int(port)))
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        wait_until(lambda: server.metric("ovspec_texts_running") == 1)
        connection.close()
        wait_until(lambda: server.metric("ovspec_texts_running") == 0)
        assert server.metric("ovspec_generated_tokens_total") - before < 1000, "the text was not generated to its end"
    assert server.metric("ovspec_cache_blocks_used") == 0
    assert server.post("/v1/completions", {**TEXT, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "--insecure"),
        (("--api-key-file", "none.txt"), "none.txt"),
        (("--host", "999.1.1.1", "--insecure"), "Can't listen on"),
        (("--port", "70000"), "65535"),
        (("--arithmetic", "fast", "--deterministic", "--port", "0"), "--deterministic"),
        (("nowhere", "--port", "0"), "nowhere"),
        (("--request-timeout", "nan", "--port", "0"), "--request-timeout is nan; it must be above 0"),
    ],
)
def test_options_that_cannot_be_met(arguments: Any, message: str) -> None:
    done = CliRunner().invoke(cli, ["serve", *arguments], standalone_mode=False)
    assert isinstance(done.exception, (OvspecError, click.ClickException)) and message in str(done.exception), done


@pytest.fixture
def command(cache_dir: Path) -> Iterator[Command]:
    yield from commands_here(cache_dir)


def test_too_small_a_cache(command: Command) -> None:
    done = command("serve", SMALL, *FAST, "--cache-size", "0.0000001", "--port", "0")
    assert done.returncode and "--cache-size" in done.stderr, done.stderr


def test_a_port_that_is_taken(server: Running, command: Command) -> None:
    done = command("serve", DEMO, "--port", server.url.rsplit(":", 1)[1])
    assert done.returncode == 1 and "Can't listen on" in done.stderr


def test_two_servers_that_start_at_the_same_time() -> None:
    with open_socket("127.0.0.1", 0) as first, pytest.raises(OvspecError, match="Can't listen on"):
        open_socket("127.0.0.1", first.getsockname()[1])


def test_a_key_that_no_client_could_send(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("plain\nschlüssel\n", encoding="utf-8")
    with pytest.raises(OvspecError, match=r"keys: .*ASCII"):
        read_api_keys(tmp_path / "keys")
    monkeypatch.setenv("OVSPEC_API_KEY", "schlüssel")
    with pytest.raises(OvspecError, match=r"OVSPEC_API_KEY: .*ASCII"):
        read_api_keys(None)


def test_several_keys_and_a_shared_index(command: Command, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\nb\n", encoding="utf-8")
    done = command("serve", DEMO, "--api-key-file", tmp_path / "keys", "--lookup-memory", "1000")
    assert done.returncode == 1 and "--lookup-memory" in done.stderr


def test_messages_do_not_tell_the_models_folder(start_here: StartHere, tmp_path: Path) -> None:
    shutil.copytree(SMALL, tmp_path / "its-folder")
    for name in ("chat_template.jinja", "ovspec.json"):
        (tmp_path / "its-folder" / name).unlink(missing_ok=True)
    server = start_here(
        tmp_path / "its-folder", "--draft", "none", "--engine", "stateful", *FAST, "--model-name", "public"
    )
    answer = server.post("/v1/chat/completions", CHAT)
    assert answer.status_code == 400 and "no chat template" in answer.text and "its-folder" not in answer.text
