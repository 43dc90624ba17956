"""Reads the requests of batch files.

A line is a request of OpenAI's batch API (https://platform.openai.com/docs/guides/batch), a JSON object with a prompt
or messages and options, or a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.surrogates import replace_half_surrogates
from ovspec.params.generation import GRAMMAR_OPTIONS
from ovspec.params.option import suggest_name
from ovspec.protocols.bodies import OF_SERVER, ChatBody, CompletionBody, OwnBody, read_body
from ovspec.protocols.requests import Kind, TextRequest, read_texts

ENVELOPE = {"custom_id", "id", "method", "url", "body"}
URLS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
BODIES: dict[Kind, Any] = {"own": OwnBody, "completion": CompletionBody, "chat": ChatBody}
# Fields that only the server knows, and those that the command sets for all lines.
NOT_HERE = ("stream_options", "draft", "return_record", *OF_SERVER)


@dataclass(frozen=True)
class BatchRequest:
    """One line: a request, or the ``error`` found in it."""

    id: str
    source: str
    asked: TextRequest
    error: str | None = None


def prompt_request(id: str, source: str, prompt: str) -> BatchRequest:
    """Return the request in a line that has only a prompt."""
    return BatchRequest(id, source, TextRequest("own", [prompt], return_record=True))


def read_requests(file: Path) -> list[BatchRequest]:
    """Return all requests of ``file``. In a ``.txt`` file each line is a prompt, in any other each line is JSON."""
    return requests_of(read_text(file), prompts=file.suffix.lower() == ".txt")


def request_in(value: Any, default_id: str) -> BatchRequest:
    """Return the request in a value of a table: a prompt, a list of messages, or an object as in batch files."""
    value = without_gaps(value)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {"messages": value}
    return read_request(json.dumps(value, ensure_ascii=False), default_id)


def without_gaps(value: Any) -> Any:
    """Return a value of a table in Python's types, without the fields that only other rows have."""
    if isinstance(value, dict):
        return {name: without_gaps(each) for name, each in value.items() if each is not None}
    if isinstance(value, (list, np.ndarray)):
        return [without_gaps(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def requests_of(text: str, prompts: bool = False) -> list[BatchRequest]:
    """Return a request for each line that isn't blank. If ``prompts``, each line is a prompt.

    A line without an id, or with one that was used before, is named by its number.
    """
    requests, seen = list[BatchRequest](), set[str]()
    for number, line in enumerate(text.split("\n"), 1):
        line, name = line.rstrip("\r"), str(number)
        if not line.strip():
            continue
        request = prompt_request(name, line, line) if prompts else read_request(line, name)
        requests.append(with_own_id(request, name, seen))
    return requests


def requests_of_rows(rows: Iterable[Any]) -> list[BatchRequest]:
    """Return a request for each row of a table; one without an id is named by its number."""
    seen = set[str]()
    return [with_own_id(request_in(row, str(number)), str(number), seen) for number, row in enumerate(rows, 1)]


def with_own_id(request: BatchRequest, name: str, seen: set[str]) -> BatchRequest:
    """Return ``request``, or an error called ``name`` if its id is in ``seen``, to which its id is added."""
    if request.id in seen:
        while name in seen:  # a line before has it as its own id
            name = f"line {name}"
        request = replace(request, id=name, error=f"The id {request.id!r} is used twice.")
    seen.add(request.id)
    return request


def read_request(line: str, default_id: str) -> BatchRequest:
    """Parse one line of JSON; an invalid line gives a request with an ``error``."""
    identity, kind = default_id, "own"
    try:
        entry = json.loads(replace_half_surrogates(line))
        json.dumps(entry, ensure_ascii=False).encode("utf-8")
        if isinstance(entry, str):
            return prompt_request(identity, line, entry)
        if not isinstance(entry, dict):
            raise OvspecError("A line must be a JSON object or string.")
        given = entry.get("custom_id", entry.get("id"))
        identity = default_id if given is None else str(given)
        body = {name: value for name, value in entry.items() if name not in ("id", "custom_id")}
        if "body" in entry or "url" in entry:
            kind = "completion"  # so that an error is written in OpenAI's format, too
            kind, body = kind_of(entry), entry.get("body")
            if not isinstance(body, dict):
                raise OvspecError("The request has no body.")
        return BatchRequest(identity, line, asked_in(body, kind))
    except json.JSONDecodeError as error:
        wrong = f"Not JSON: {error.msg} at column {error.colno}."
    except UnicodeEncodeError:
        wrong = "The line has half of a surrogate pair (\\ud800 to \\udfff), which is not valid Unicode."
    except (ValueError, RecursionError):
        wrong = "The line is nested too deeply, or a number in it has too many digits."
    except OvspecError as error:
        wrong = str(error)
    return BatchRequest(identity, line, TextRequest(kind, []), wrong)


def asked_in(body: dict[str, Any], kind: Kind) -> TextRequest:
    """Return what a body asks for; raises OvspecError for what a batch can't do."""
    for name in (*NOT_HERE, "stream"):
        if body.get(name) is not None and (name, body[name]) != ("stream", False):
            raise OvspecError(f"{name} can't be set in a batch request; leave it out.")
    asked = replace(read_texts(read_body(body, BODIES[kind]), kind), return_record=True)
    if asked.only_prompts:
        raise OvspecError("max_tokens can't be 0 in a batch request; it must be at least 1, or -1.")
    if any(name in body and body[name] is None for name in (*GRAMMAR_OPTIONS, "response_format")):
        asked.overrides.values.setdefault("json_schema", None)  # lifts the grammar of the whole file
    return asked


def as_chat(request: BatchRequest, system: str | None) -> BatchRequest:
    """Turn plain prompts into chats with one user message; return other requests as they are."""
    asked = request.asked
    if request.error or asked.kind != "own" or not all(isinstance(prompt, str) for prompt in asked.prompts):
        return request
    if asked.echo:
        return replace(request, error="echo can't be combined with --chat; leave it out.")
    before = [{"role": "system", "content": system}] if system is not None else []
    chats: list[Any] = [[*before, {"role": "user", "content": prompt}] for prompt in asked.prompts]
    return replace(request, asked=replace(asked, prompts=chats))


def kind_of(entry: dict[str, Any]) -> Kind:
    """Return the kind of a request of OpenAI's batch API; raises OvspecError for an unknown url, method or field."""
    for name in entry.keys() - ENVELOPE:
        raise OvspecError(f"{name} must be inside of body; {suggest_name(name, ENVELOPE) or 'move it there.'}")
    url = str(entry.get("url", "")).rstrip("/")
    if url not in URLS:
        raise OvspecError(f"The url is {entry.get('url')!r}; it must be one of {', '.join(URLS)}.")
    if entry.get("method", "POST") != "POST":
        raise OvspecError(f"The method is {entry['method']!r}; it must be POST.")
    return URLS[url]
