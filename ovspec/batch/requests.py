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
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.base.surrogates import replace_half_surrogates
from ovspec.params.generation import GRAMMAR_OPTIONS
from ovspec.params.option import make_did_you_mean
from ovspec.protocols.bodies import SERVER_OPTIONS
from ovspec.protocols.chat.bodies import BatchLineBody, ChatBody, CompletionBody, OpenAIBody
from ovspec.protocols.chat.request import read_chat_or_completion
from ovspec.protocols.parsing import validate_body
from ovspec.protocols.requests import RequestKind, TextRequest

ENVELOPE_FIELDS = {"custom_id", "id", "method", "url", "body"}
KIND_OF_URL: dict[str, RequestKind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
BODY_OF_KIND: dict[RequestKind, type[OpenAIBody]] = {
    "batch_line": BatchLineBody,
    "completion": CompletionBody,
    "chat": ChatBody,
}
# Fields for the server alone, and options set for all lines by the command.
FIELDS_REFUSED_IN_BATCH = ("stream_options", "draft", "return_record", *SERVER_OPTIONS)


@dataclass(frozen=True)
class BatchRequest:
    """One line: a request, or its ``error``."""

    id: str
    source: str
    text_request: TextRequest
    error: str | None = None


def make_prompt_request(request_id: str, source: str, prompt: str) -> BatchRequest:
    """Return the request for a line with only a prompt."""
    return BatchRequest(request_id, source, TextRequest("batch_line", [prompt], return_record=True))


def read_requests(file: Path) -> list[BatchRequest]:
    """Return all requests of ``file``. In a ``.txt`` file each line is a prompt, in any other each line is JSON."""
    return parse_lines(read_text(file), are_prompts=file.suffix.lower() == ".txt")


def parse_row(cell: JsonValue, default_id: str) -> BatchRequest:
    """Return the request in a row of a table: a prompt, a list of messages, or an object as in batch files."""
    cell = drop_missing_fields(cell)
    if isinstance(cell, list) and cell and isinstance(cell[0], dict):
        cell = {"messages": cell}
    return parse_line(json.dumps(cell, ensure_ascii=False), default_id)


def drop_missing_fields(value: Any) -> JsonValue:
    """Return a table's value in Python's types, without fields from other rows."""
    if isinstance(value, dict):
        return {
            field_name: drop_missing_fields(field_value)
            for field_name, field_value in value.items()
            if field_value is not None
        }
    if isinstance(value, (list, np.ndarray)):
        return [drop_missing_fields(element) for element in value]
    return value.item() if isinstance(value, np.generic) else value


def parse_lines(file_text: str, are_prompts: bool = False) -> list[BatchRequest]:
    """Return a request for each nonblank line. If ``are_prompts``, each line is a prompt.

    A line without an id, or with a repeated id, is named by its number.
    """
    requests = list[BatchRequest]()
    used_ids = set[str]()
    for line_number, line in enumerate(file_text.split("\n"), 1):
        line = line.rstrip("\r")
        default_id = str(line_number)
        if line.strip():
            request = make_prompt_request(default_id, line, line) if are_prompts else parse_line(line, default_id)
            requests.append(ensure_unique_id(request, default_id, used_ids))
    return requests


def parse_rows(rows: Iterable[JsonValue]) -> list[BatchRequest]:
    """Return a request for each row of a table; a row without an id is named by its number."""
    used_ids = set[str]()
    numbered_rows = enumerate(rows, 1)
    return [
        ensure_unique_id(parse_row(row, str(row_number)), str(row_number), used_ids)
        for row_number, row in numbered_rows
    ]


def ensure_unique_id(request: BatchRequest, default_id: str, used_ids: set[str]) -> BatchRequest:
    """Return ``request``, or, if its id is among ``used_ids``, an error with another id; adds its id to them."""
    if request.id in used_ids:
        new_id = default_id
        while new_id in used_ids:  # it is the id of an earlier line
            new_id = f"line {new_id}"
        request = replace(request, id=new_id, error=f"The id {request.id!r} is used twice.")
    used_ids.add(request.id)
    return request


def parse_line(line: str, default_id: str) -> BatchRequest:
    """Parse a line of JSON; an invalid line yields a request with an ``error``."""
    request_id = default_id
    kind: RequestKind = "batch_line"
    try:
        entry = json.loads(replace_half_surrogates(line))
        json.dumps(entry, ensure_ascii=False).encode("utf-8")
        if isinstance(entry, str):
            return make_prompt_request(request_id, line, entry)
        if not isinstance(entry, dict):
            raise OvspecError(f"The line must be a JSON object or string, not {json.dumps(entry):.20}.")
        custom_id = entry.get("custom_id", entry.get("id"))
        if custom_id is not None:
            request_id = str(custom_id)
        body = {field: value for field, value in entry.items() if field not in ("id", "custom_id")}
        if "body" in entry or "url" in entry:
            kind = "completion"  # an error is then in OpenAI's format, too
            kind = openai_request_kind(entry)
            body = entry.get("body")
            if not isinstance(body, dict):
                raise OvspecError("The request has no body; put the prompt or messages and all options into body.")
        return BatchRequest(request_id, line, read_line_body(body, kind))
    except json.JSONDecodeError as error:
        error_message = f"The line is not JSON: {error.msg} at column {error.colno}."
    except UnicodeEncodeError:
        error_message = "The line has an unpaired surrogate (\\ud800 to \\udfff); remove the surrogate."
    except (ValueError, RecursionError):
        error_message = "The line is nested too deeply, or a number in it has too many digits; simplify the line."
    except OvspecError as error:
        error_message = str(error)
    return BatchRequest(request_id, line, TextRequest(kind, []), error_message)


def read_line_body(body: JsonObject, kind: RequestKind) -> TextRequest:
    """Return the request in the body of a line; raises OvspecError for options unsupported in batches."""
    for field in (*FIELDS_REFUSED_IN_BATCH, "stream"):
        if body.get(field) is not None and (field, body[field]) != ("stream", False):
            raise OvspecError(f"{field} can't be set in a batch request; leave {field} out.")
    request = read_chat_or_completion(validate_body(body, BODY_OF_KIND[kind]), kind)
    if request.only_prompts:
        raise OvspecError("max_tokens can't be 0 in a batch request; it must be at least 1, or -1 for no limit.")
    if any(field in body and body[field] is None for field in (*GRAMMAR_OPTIONS, "response_format")):
        request.overrides.values.setdefault("json_schema", None)  # disables the grammar of the whole file
    return replace(request, return_record=True)


def to_chat_request(request: BatchRequest, system: str | None) -> BatchRequest:
    """Turn plain prompts into chats with one user message; return other requests as they are."""
    prompts = request.text_request.prompts
    is_plain = request.text_request.kind == "batch_line" and all(isinstance(prompt, str) for prompt in prompts)
    if request.error or not is_plain:
        return request
    if request.text_request.echo:
        return replace(request, error="echo can't be combined with --chat; leave echo out.")
    system_messages = [{"role": "system", "content": system}] if system is not None else []
    chats: list[Any] = [[*system_messages, {"role": "user", "content": prompt}] for prompt in prompts]
    return replace(request, text_request=replace(request.text_request, prompts=chats))


def openai_request_kind(entry: JsonObject) -> RequestKind:
    """Return the kind of a request of OpenAI's batch API; raises OvspecError for an unknown url, method or field."""
    for field in entry.keys() - ENVELOPE_FIELDS:
        raise OvspecError(
            f"{field} must be inside body; {make_did_you_mean(field, ENVELOPE_FIELDS) or 'move it there.'}"
        )
    url = str(entry.get("url", "")).rstrip("/")
    if url not in KIND_OF_URL:
        raise OvspecError(f"The url is {entry.get('url')!r}; it must be one of {', '.join(KIND_OF_URL)}.")
    if entry.get("method", "POST") != "POST":
        raise OvspecError(f"The method is {entry['method']!r}; it must be POST.")
    return KIND_OF_URL[url]
