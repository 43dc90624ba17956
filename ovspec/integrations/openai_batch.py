"""Reads requests from the lines of a batch file, and makes the lines of the results.

A line is a request of OpenAI's batch API (https://platform.openai.com/docs/guides/batch), a JSON object with a prompt
or messages and options, or a JSON string.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from ovspec.errors import OvspecError
from ovspec.files import read_text
from ovspec.loop.results import Result
from ovspec.model import Prompt
from ovspec.options import GENERATE, GRAMMARS, GenerateOptions
from ovspec.options.option import check
from ovspec.verify import record_as_json

# The options that a request may set, by our names and OpenAI's, and our name for each.
REQUESTED = {
    spelling: name for name, (_, option) in GENERATE.items() if option.request for spelling in (name, *option.aliases)
}
# Fields that are accepted and ignored, because they don't affect the text.
WITHOUT_EFFECT = {"model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
URLS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
Kind = Literal["plain", "completion", "chat"]


@dataclass(frozen=True)
class BatchRequest:
    """One line: a request, or the ``error`` found in it. ``options`` win over those of the whole file."""

    id: str
    source: str
    kind: Kind = "plain"
    prompt: Prompt = ""
    options: GenerateOptions = field(default_factory=lambda: GenerateOptions())
    model: str | None = None
    error: str | None = None


# ---------------------------------------------------------------- reading requests


def read_requests(file: Path) -> list[BatchRequest]:
    """Return all requests of ``file``; blank lines are skipped.

    In a ``.txt`` file each line is a prompt, in any other file each line is JSON.
    """
    requests, seen = list[BatchRequest](), set[str]()
    for number, line in enumerate(read_text(file).split("\n"), 1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        plain = file.suffix.lower() == ".txt"
        request = BatchRequest(str(number), line, prompt=line) if plain else read_request(line, str(number))
        if request.id in seen:
            request = BatchRequest(f"line {number}", line, request.kind, error=f"The id {request.id!r} is used twice.")
        seen.add(request.id)
        requests.append(request)
    return requests


def read_request(line: str, default_id: str) -> BatchRequest:
    """Parse one line of JSON; an invalid line gives a request with an ``error``."""
    identity, kind = default_id, cast(Kind, "plain")
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode("utf-8")
        if isinstance(entry, str):
            return BatchRequest(identity, line, prompt=entry)
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
        return BatchRequest(identity, line, kind, prompt_of(body, kind), options_of(body), body.get("model"))
    except json.JSONDecodeError as error:
        wrong = f"Not JSON: {error.msg} at column {error.colno}."
    except UnicodeEncodeError:
        wrong = "The line has half of a surrogate pair (\\ud800 to \\udfff), which is not valid Unicode."
    except (ValueError, RecursionError):
        wrong = "The line is nested too deeply, or a number in it has too many digits."
    except OvspecError as error:
        wrong = str(error)
    return BatchRequest(identity, line, kind, error=wrong)


def as_chat(request: BatchRequest, system: str | None) -> BatchRequest:
    """Turn a plain prompt into a chat with one user message; return other requests as they are."""
    if request.error or request.kind != "plain" or not isinstance(request.prompt, str):
        return request
    messages = [{"role": "system", "content": system}] if system is not None else []
    prompt: Prompt = [*messages, {"role": "user", "content": request.prompt}]
    return replace(request, prompt=prompt, source=f"{system!r} {request.source}")


def kind_of(entry: dict[str, Any]) -> Kind:
    """Return the kind of a request of OpenAI's batch API; raises OvspecError for an unknown url or method."""
    url = str(entry.get("url", "")).rstrip("/")
    if url not in URLS:
        raise OvspecError(f"The url is {entry.get('url')!r}; it must be one of {', '.join(URLS)}.")
    if entry.get("method", "POST") != "POST":
        raise OvspecError(f"The method is {entry['method']!r}; it must be POST.")
    return cast(Kind, URLS[url])


def prompt_of(body: dict[str, Any], kind: Kind) -> Prompt:
    messages, prompt = body.get("messages"), body.get("prompt")
    if (messages is None) == (prompt is None):
        raise OvspecError("A request must have either a prompt or messages.")
    wanted = {"chat": "messages", "completion": "prompt"}.get(kind)
    if wanted and body.get(wanted) is None:
        raise OvspecError(f"A request to this url must have {'a prompt' if wanted == 'prompt' else 'messages'}.")
    if messages is not None:
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise OvspecError("messages must be a list of objects with role and content.")
        return messages
    ids = isinstance(prompt, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt)
    if not isinstance(prompt, str) and not ids:
        raise OvspecError("prompt must be one string or one list of token ids.")
    return cast(Prompt, prompt)


def options_of(body: dict[str, Any]) -> GenerateOptions:
    """Return the options in a request; raises OvspecError for an unknown one or a value of the wrong type."""
    options: dict[str, Any] = {}
    for name, value in body.items():
        if value is None and name in (*GRAMMARS, "response_format"):
            options["json_schema"] = None  # also lifts the grammar of the whole file
        off = value is None or (value is False and name in ("stream", "logprobs", "echo"))
        if off or name in WITHOUT_EFFECT or name in ("prompt", "messages"):
            continue
        if name == "response_format":
            options |= format_of(value)
            continue
        if name not in REQUESTED:
            raise OvspecError(f"{name} can't be set in a batch request; leave it out.")
        ours = REQUESTED[name]
        kind, option = GENERATE[ours]
        value = bias_of(value) if ours == "logit_bias" else value
        check(name, value, kind if option.request is True else option.request, replace(option, limits=None))
        options[ours] = value
    return cast(GenerateOptions, options)


def format_of(value: Any) -> dict[str, Any]:
    """Return OpenAI's ``response_format`` as options."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return {"json_schema": None}
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    schema = value.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise OvspecError(
            'response_format must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": …}}.'
        )
    return {"json_schema": schema["schema"]}


def bias_of(value: Any) -> dict[int, float]:
    """Return ``logit_bias`` with token ids as keys, which JSON can only write as strings."""
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise OvspecError("logit_bias must map token ids to numbers.") from None


# ---------------------------------------------------------------- writing results


def result_line(request: BatchRequest, results: list[Result] | str) -> dict[str, Any]:
    """Return the output line for a request, from its results or an error message."""
    if isinstance(results, str):
        if request.kind == "plain":
            return {"id": request.id, "error": results}
        error = {"code": "invalid_request", "message": results}
        return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": None, "error": error}
    if request.kind == "plain":
        texts = [
            {
                "text": result.text,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.stats.prompt_tokens,
                "generated_tokens": result.stats.generated_tokens,
                "record": batch_record(result),
            }
            for result in results
        ]
        return {"id": request.id, **texts[0]} if len(texts) == 1 else {"id": request.id, "samples": texts}
    response = {"status_code": 200, "request_id": request.id, "body": body_of(request, results)}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": response, "error": None}


def batch_record(result: Result) -> dict[str, Any]:
    """Return what ``ovspec verify`` needs to check a text of the batch."""
    made = {"token_ids": result.token_ids, "finish_reason": result.finish_reason}
    return (record_as_json(result) or {}) | made


def body_of(request: BatchRequest, results: list[Result]) -> dict[str, Any]:
    """Return the response body in the format of OpenAI's API."""
    chat = request.kind == "chat"
    choices = []
    for index, result in enumerate(results):
        text = {"message": {"role": "assistant", "content": result.text}} if chat else {"text": result.text}
        reason = "length" if result.finish_reason == "length" else "stop"
        text |= {"logprobs": None, "finish_reason": reason, "record": batch_record(result)}
        choices.append({"index": index, **text})
    prompt, generated = results[0].stats.prompt_tokens, sum(r.stats.generated_tokens for r in results)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model or "",
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }
