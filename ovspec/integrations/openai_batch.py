"""Reads requests from the lines of a batch file.

A line is a request of OpenAI's batch API (https://platform.openai.com/docs/guides/batch), a JSON object with a prompt
or messages and options, or a JSON string.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from ovspec.errors import OvspecError
from ovspec.files import read_text
from ovspec.grammars.wrapped import WRAPPING
from ovspec.model import Prompt, is_batch
from ovspec.options import GENERATE, GRAMMARS, GenerateOptions, check_option
from ovspec.options.option import check, hint

# The options that a request may set, by our names and OpenAI's, and our name for each.
REQUESTED = {
    spelling: name for name, (_, option) in GENERATE.items() if option.request for spelling in (name, *option.aliases)
}
# Fields that are accepted and ignored, because they don't affect the text.
WITHOUT_EFFECT = {"model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
# Fields that have a function of their own below.
READ_APART = {"prompt", "messages", "echo", "logprobs", "top_logprobs", "response_format"}
# What each response format has besides its type; the schema of a json_object is llama.cpp's way to give one.
FORMATS = {"text": set[str](), "json_object": {"schema"}, "json_schema": {"json_schema"}}
ENVELOPE = {"custom_id", "id", "method", "url", "body"}
URLS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
Kind = Literal["plain", "completion", "chat"]


@dataclass(frozen=True)
class BatchRequest:
    """One line: a request, or the ``error`` found in it. ``options`` win over those of the whole file.

    prompt: a prompt, or a list of prompts.
    echo: whether the answer repeats the prompt.
    """

    id: str
    source: str
    kind: Kind = "plain"
    prompt: Any = ""
    options: GenerateOptions = field(default_factory=lambda: GenerateOptions())
    model: str | None = None
    echo: bool = False
    error: str | None = None

    @property
    def prompts(self) -> list[Prompt]:
        return self.prompt if is_batch(self.prompt) else [self.prompt]


# ---------------------------------------------------------------- reading requests


def read_requests(file: Path) -> list[BatchRequest]:
    """Return all requests of ``file``. In a ``.txt`` file each line is a prompt, in any other each line is JSON."""
    return requests_of(read_text(file), plain=file.suffix.lower() == ".txt")


def requests_of(text: str, plain: bool = False) -> list[BatchRequest]:
    """Return a request for each line that isn't blank; ``plain``: the lines are prompts.

    A line without an id, or with one that was used before, is named by its number.
    """
    requests, seen = list[BatchRequest](), set[str]()
    for number, line in enumerate(text.split("\n"), 1):
        line, name = line.rstrip("\r"), str(number)
        if not line.strip():
            continue
        request = BatchRequest(name, line, prompt=line) if plain else read_request(line, name)
        if request.id in seen:
            while name in seen:  # a line before has it as its own id
                name = f"line {name}"
            request = BatchRequest(name, line, request.kind, error=f"The id {request.id!r} is used twice.")
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
        prompt, options = prompt_of(body, kind), options_of(body)
        return BatchRequest(identity, line, kind, prompt, options, body.get("model"), echo_of(body))
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
    """Turn plain prompts into chats with one user message; return other requests as they are."""
    if request.error or request.kind != "plain" or not all(isinstance(prompt, str) for prompt in request.prompts):
        return request
    if request.echo:
        return replace(request, error="echo can't be combined with --chat; leave it out.")
    before = [{"role": "system", "content": system}] if system is not None else []
    chats = [[*before, {"role": "user", "content": prompt}] for prompt in request.prompts]
    prompt = chats if is_batch(request.prompt) else chats[0]
    return replace(request, prompt=prompt, source=f"{system!r} {request.source}")


def kind_of(entry: dict[str, Any]) -> Kind:
    """Return the kind of a request of OpenAI's batch API; raises OvspecError for an unknown url, method or field."""
    for name in entry.keys() - ENVELOPE:
        raise OvspecError(f"{name} must be inside of body; {hint(name, ENVELOPE) or 'move it there.'}")
    url = str(entry.get("url", "")).rstrip("/")
    if url not in URLS:
        raise OvspecError(f"The url is {entry.get('url')!r}; it must be one of {', '.join(URLS)}.")
    if entry.get("method", "POST") != "POST":
        raise OvspecError(f"The method is {entry['method']!r}; it must be POST.")
    return cast(Kind, URLS[url])


def prompt_of(body: dict[str, Any], kind: Kind) -> Any:
    """Return the prompt or messages of a request, or its list of prompts."""
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
    if not (is_text(prompt) or (isinstance(prompt, list) and all(map(is_text, prompt)))):
        raise OvspecError("prompt must be one string or one list of token ids, or a list of these.")
    return prompt


def is_text(prompt: Any) -> bool:
    """Return whether ``prompt`` is a string or a list of token ids."""
    ids = isinstance(prompt, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt)
    return ids or isinstance(prompt, str)


def echo_of(body: dict[str, Any]) -> bool:
    echo = body.get("echo")
    if echo is not None and not isinstance(echo, bool):
        raise OvspecError("echo must be true or false.")
    if echo and body.get("messages") is not None:
        raise OvspecError("echo can't be combined with messages; leave it out.")
    return bool(echo)


def options_of(body: dict[str, Any], where: str = "a batch request", more: Collection[str] = ()) -> GenerateOptions:
    """Return the options in a request; raises OvspecError for an unknown one or a value of the wrong type.

    Args:
        where: what the request is called in messages.
        more: options that it may set, besides those of a batch file.
    """
    refuse_contradictions(body)
    options: dict[str, Any] = logprobs_of(body)
    if any(name in body and body[name] is None for name in (*GRAMMARS, "response_format")):
        options["json_schema"] = None  # lifts the grammar of the whole file; one in this request replaces it
    for name, value in body.items():
        if value is None or name in WITHOUT_EFFECT or (value is False and name == "stream"):
            continue
        if name == "response_format":
            options |= format_of(value)
        if name in READ_APART:
            continue
        if name not in REQUESTED and name not in more:
            meant = hint(name, {*REQUESTED, *READ_APART}) if name not in GENERATE else ""
            raise OvspecError(f"{name} can't be set in {where}; {meant or 'leave it out.'}")
        ours = REQUESTED.get(name, name)
        kind, option = GENERATE[ours]
        value = bias_of(value) if ours == "logit_bias" else value
        check(name, value, kind if option.request in (True, False) else option.request, replace(option, limits=None))
        options[ours] = value
    return cast(GenerateOptions, options)


def refuse_contradictions(body: dict[str, Any]) -> None:
    """Raise OvspecError for a grammar beside a response format, and for two values of one option under its names."""
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in GRAMMARS and "response_format" in given:
            raise OvspecError(f"`response_format` and `{name}` can't be combined; leave one of them out.")
        ours = REQUESTED.get(name, name)
        if given.get(ours, value) != value:
            raise OvspecError(f"`{ours}` and `{name}` are names of the same option, but their values differ; give one.")


def logprobs_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's ``logprobs``, a number, or true or false with ``top_logprobs`` beside it, as options."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs")
    if top is not None and wanted is not True:
        raise OvspecError("`top_logprobs` needs `logprobs` to be true.")
    if not isinstance(wanted, bool):
        check_option("logprobs", wanted)
        return {} if wanted is None else {"logprobs": wanted}
    if top is not None:
        check("top_logprobs", top, *GENERATE["logprobs"])
    return {"logprobs": (top or 0) if wanted else None}


def format_of(value: Any) -> dict[str, Any]:
    """Return OpenAI's ``response_format`` as options."""
    given = {name: each for name, each in value.items() if each is not None} if isinstance(value, dict) else {}
    kind = str(given.get("type"))
    refuse_unknown(given, {"type", *FORMATS[kind]} if kind in FORMATS else given, "")
    if kind == "text":
        return {"json_schema": None}
    if kind == "json_object" and given.get("schema", {}) == {}:
        return {"json_schema": {"type": "object"}}
    inner = {"json_object": given, "json_schema": given.get("json_schema")}.get(kind)
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise OvspecError(
            '`response_format` must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": …}}.'
        )
    if kind == "json_schema":
        refuse_unknown(inner, WRAPPING, "json_schema.")
    return {"json_schema": {"name": str(inner.get("name")), "schema": inner["schema"]}}


def refuse_unknown(given: Collection[str], known: Collection[str], where: str) -> None:
    """Raise OvspecError for a field of a response format that isn't known; ``where``: the path to it, with a dot."""
    for name in given:
        if name not in known:
            raise OvspecError(f"`response_format` has no {where}{name:.80}; {hint(name, known) or 'leave it out.'}")


def bias_of(value: Any) -> dict[int, float]:
    """Return ``logit_bias`` with token ids as keys, which JSON can only write as strings."""
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise OvspecError("`logit_bias` must map token ids to numbers.") from None
