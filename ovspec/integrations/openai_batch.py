"""Files of prompts: a request a line in, a result a line out, in the same order. The work behind ``ovspec batch``.

A line is a request of OpenAI's batch API (https://platform.openai.com/docs/guides/batch), an object with a prompt or
messages and options, or a string.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from ovspec.constraints.maker import GRAMMARS, grammar_of
from ovspec.decoders.sequence import Sequence
from ovspec.errors import OvspecError
from ovspec.files import read_text, write_atomically
from ovspec.ir.compile import MODEL_FILE
from ovspec.loop.results import Result
from ovspec.loop.row import Row
from ovspec.model import LanguageModel, Prompt, healable_from
from ovspec.options import GenerateOptions

# What a request may say about the text; the same names as in ``GenerateOptions``, and what OpenAI calls them.
OPTIONS = {
    **{name: name for name in ("max_tokens", "min_tokens", "stop", "stop_ids", "ignore_eos", "temperature", "top_k")},
    **{name: name for name in ("top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty")},
    **{name: name for name in ("frequency_penalty", "logit_bias", "seed", "n", "heal", "constrain_from")},
    **{name: name for name in GRAMMARS},
    "max_completion_tokens": "max_tokens",
    "stop_token_ids": "stop_ids",
}
# What changes nothing in the text, or asks for what is done anyway.
WITHOUT_EFFECT = {"model", "user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"}
URLS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
Kind = Literal["plain", "completion", "chat"]


@dataclass(frozen=True)
class BatchRequest:
    """A line: what is asked for, or why that can't be told. ``options`` win over those of the whole file."""

    id: str
    source: str
    kind: Kind = "plain"
    prompt: Prompt = ""
    options: GenerateOptions = field(default_factory=lambda: GenerateOptions())
    model: str | None = None
    error: str | None = None


@dataclass
class BatchProgress:
    """Requests and generated tokens; ``before``: requests that an earlier run has done."""

    total: int
    before: int
    done: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def left(self) -> int:
        return self.total - self.before - self.done


# ---------------------------------------------------------------- reading requests


def read_requests(file: Path) -> list[BatchRequest]:
    """All requests of ``file``; blank lines are passed over. A ``.txt`` has a prompt a line, anything else JSON.

    Raises:
        OvspecError: the file can't be read or has none.
    """
    requests, seen = list[BatchRequest](), set[str]()
    for number, line in enumerate(read_text(file).split("\n"), 1):
        line = line.rstrip("\r")
        if not line.strip():
            continue
        plain = file.suffix.lower() == ".txt"
        request = BatchRequest(str(number), line, prompt=line) if plain else read_request(line, str(number))
        if request.id in seen:
            request = BatchRequest(f"line {number}", line, request.kind, error=f"The id {request.id!r} is there twice.")
        seen.add(request.id)
        requests.append(request)
    return requests


def read_request(line: str, default_id: str) -> BatchRequest:
    """One line of JSON; a wrong one gives a request with an ``error``."""
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
        if "body" in entry or "url" in entry:
            kind = "completion"  # so that an error is written as OpenAI's API does
            kind = kind_of(entry)
            body = entry.get("body")
            if not isinstance(body, dict):
                raise OvspecError("The request has no body.")
        else:
            body = {name: value for name, value in entry.items() if name not in ("id", "custom_id")}
        return BatchRequest(identity, line, kind, prompt_of(body, kind), options_of(body), body.get("model"))
    except json.JSONDecodeError as error:
        return BatchRequest(identity, line, kind, error=f"Not JSON: {error.msg} at column {error.colno}.")
    except UnicodeEncodeError:
        return BatchRequest(
            identity, line, kind, error="It has half of a surrogate pair (\\ud800 to \\udfff), which is no text."
        )
    except OvspecError as error:
        return BatchRequest(identity, line, kind, error=str(error))


def as_chat(request: BatchRequest, system: str | None) -> BatchRequest:
    """A plain prompt as a user's message; other requests as they are."""
    if request.error or request.kind != "plain" or not isinstance(request.prompt, str):
        return request
    messages = [{"role": "system", "content": system}] if system is not None else []
    prompt: Prompt = [*messages, {"role": "user", "content": request.prompt}]
    return replace(request, prompt=prompt, source=f"{system!r} {request.source}")


def kind_of(entry: dict[str, Any]) -> Kind:
    """Of a request of OpenAI's batch API."""
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
        raise OvspecError(f"A request to its url must have {'a prompt' if wanted == 'prompt' else 'messages'}.")
    if messages is not None:
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise OvspecError("messages must be a list of objects with role and content.")
        return messages
    ids = isinstance(prompt, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in prompt)
    if not isinstance(prompt, str) and not ids:
        raise OvspecError("prompt must be one string or one list of token ids.")
    return cast(Prompt, prompt)


def options_of(body: dict[str, Any]) -> GenerateOptions:
    """The options in a request.

    Raises:
        OvspecError: one that there isn't, or a value of a wrong type.
    """
    options: dict[str, Any] = {}
    for name, value in body.items():
        if value is None and name in (*GRAMMARS, "response_format"):
            options["json_schema"] = None  # nor that of the whole file
            continue
        if value is None or name in WITHOUT_EFFECT or name in ("prompt", "messages"):
            continue
        if name in ("stream", "logprobs", "echo") and value is False:
            continue
        if name == "response_format":
            options |= format_of(value)
            continue
        if name not in OPTIONS:
            raise OvspecError(f"{name} can't be asked for in a batch; leave it out.")
        if name == "logit_bias":
            value = bias_of(value)
        elif name == "json_schema" and isinstance(value, str):
            value = schema_of(value)
        elif not isinstance(value, ALLOWED.get(OPTIONS[name], (int, float))) or (
            isinstance(value, bool) and name not in BOOLEANS
        ):
            kinds = " or ".join(KINDS[kind] for kind in ALLOWED.get(OPTIONS[name], (float,)))
            raise OvspecError(f"{name} is {value!r}, which is of a wrong type; it must be {kinds}.")
        options[OPTIONS[name]] = value
    return cast(GenerateOptions, options)


# Types of options, where they aren't any number.
ALLOWED: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "n"), (int,)),
    "stop": (str, list),
    "stop_ids": (list,),
    "ignore_eos": (bool,),
    "heal": (bool,),
    "constrain_from": (int, str),
    "json_schema": (dict, bool, str),
    "choice": (list,),
    **dict.fromkeys(("regex", "grammar", "gbnf"), (str,)),
}
KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
KINDS |= {dict: "an object"}
BOOLEANS = ("ignore_eos", "heal", "json_schema")


def format_of(value: Any) -> dict[str, Any]:
    """OpenAI's ``response_format`` as options."""
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


def schema_of(text: str) -> Any:
    """Text, never the name of a file: a request comes from elsewhere."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise OvspecError(f"json_schema is not JSON: {error.msg} at column {error.colno}.") from None


def bias_of(value: Any) -> dict[int, float]:
    """JSON has only texts for keys."""
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise OvspecError("logit_bias must map token ids to numbers.") from None


# ---------------------------------------------------------------- writing results


def result_line(request: BatchRequest, results: list[Result] | str) -> dict[str, Any]:
    """What is written for a request: its results, or the error."""
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
            }
            for result in results
        ]
        return {"id": request.id, **texts[0]} if len(texts) == 1 else {"id": request.id, "samples": texts}
    response = {"status_code": 200, "request_id": request.id, "body": body_of(request, results)}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": response, "error": None}


def body_of(request: BatchRequest, results: list[Result]) -> dict[str, Any]:
    """As OpenAI's API answers."""
    chat = request.kind == "chat"
    choices = []
    for index, result in enumerate(results):
        text = {"message": {"role": "assistant", "content": result.text}} if chat else {"text": result.text}
        reason = "length" if result.finish_reason == "length" else "stop"
        choices.append({"index": index, **text, "logprobs": None, "finish_reason": reason})
    prompt, generated = results[0].stats.prompt_tokens, sum(r.stats.generated_tokens for r in results)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request.id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": request.model or "",
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated},
    }


class Done:
    """Results so far, in a file beside the output: after a kill they needn't be generated again.

    Each is kept under a key of all that it depends on, so that a line, a model or an option that has changed
    meanwhile is done anew.
    """

    def __init__(self, output: Path, depends_on: str) -> None:
        self.file = output.with_name(output.name + ".partial")
        self._depends_on = depends_on
        self._lines = dict(self._read())
        if self._lines:  # without what a kill has cut off
            write_atomically(self.file, "".join(entry(key, line) for key, line in self._lines.items()))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._open = self.file.open("a", encoding="utf-8", newline="\n")

    def key(self, request: BatchRequest) -> str:
        text = "\0".join((self._depends_on, request.id, request.source))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]

    def has(self, request: BatchRequest) -> bool:
        return self.key(request) in self._lines

    def add(self, request: BatchRequest, line: dict[str, Any]) -> None:
        self._lines[self.key(request)] = line
        self._open.write(entry(self.key(request), line))
        self._open.flush()

    def finish(self, output: Path, requests: list[BatchRequest]) -> None:
        """Write the output, whole or not at all, in the order of the requests."""
        self.close()
        lines = [json.dumps(self._lines[self.key(request)], ensure_ascii=False) for request in requests]
        write_atomically(output, "".join(f"{line}\n" for line in lines))
        self.file.unlink()

    def close(self) -> None:
        self._open.close()

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self.file.is_file():
            return
        for line in self.file.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                found = json.loads(line)
                yield found["key"], found["line"]
            except (ValueError, TypeError, KeyError):  # cut off
                continue


def entry(key: str, line: dict[str, Any]) -> str:
    return json.dumps({"key": key, "line": line}, ensure_ascii=False) + "\n"


# ---------------------------------------------------------------- running


def run_file(
    lm: LanguageModel,
    requests: list[BatchRequest],
    output: Path,
    options: GenerateOptions,
    note: Callable[[BatchProgress], None] | None = None,
) -> BatchProgress:
    """Generate what ``requests`` ask for and write ``output``; goes on where an earlier run was interrupted.

    Args:
        options: for all requests that don't say otherwise.
        note: called after each round.

    Raises:
        OvspecError: the inference fails. What is done is kept, as after a kill, for the same call to go on with.
    """
    lm.check_grammar(options)
    done = Done(output, what_matters(lm, options))
    todo = [request for request in requests if not done.has(request)]
    progress = BatchProgress(len(requests), len(requests) - len(todo))
    started: dict[int, tuple[BatchRequest, list[Row]]] = {}  # by the number of a row, what it belongs to
    numbers = itertools.count()

    def rows() -> Iterator[Row]:
        for request in todo:
            try:
                made = rows_of(lm, request, options)
            except OvspecError as error:
                done.add(request, result_line(request, str(error)))
                progress.done, progress.failed = progress.done + 1, progress.failed + 1
                continue
            for row in made:
                started[next(numbers)] = request, made
                yield row

    try:
        for pieces in lm.run(rows(), options, sampled=bool(options.get("temperature"))):
            for number, piece in pieces:
                progress.tokens += len(piece.token_ids)
                if piece.finish_reason in (None, "cancelled"):
                    continue
                request, siblings = started.pop(number)
                if all(row.finish_reason for row in siblings) and not done.has(request):
                    done.add(request, result_line(request, [row.result() for row in siblings]))
                    progress.done += 1
            if note:
                note(progress)
        done.finish(output, requests)
    finally:
        done.close()
    return progress


def what_matters(lm: LanguageModel, options: GenerateOptions) -> str:
    """The model, and the options that results depend on: not what only makes them come faster."""
    weights = (lm.folder / MODEL_FILE).with_suffix(".bin").stat().st_size
    faster = ("batch_size",) if options.get("accept") == "rejection" else ("batch_size", "lookahead")
    texts = {name: options[name] for name in sorted(options) if name not in (*faster, *GRAMMARS)}
    return f"{lm.folder.resolve()} {weights} {texts} {grammar_of(options)[0]}"


def rows_of(lm: LanguageModel, request: BatchRequest, options: GenerateOptions) -> list[Row]:
    """A row for each text that is asked for; raises OvspecError where that can't be had."""
    if request.error:
        raise OvspecError(request.error)
    own = any(name in request.options for name in GRAMMARS)
    ours = {name: value for name, value in options.items() if not (own and name in (*GRAMMARS, "constrain_from"))}
    merged = cast(GenerateOptions, {**ours, **request.options})
    n, ids = merged.get("n", 1), lm.encode(request.prompt)
    if not isinstance(n, int) or n < 1:
        raise OvspecError(f"n is {n}; it must be at least 1.")
    seed = secrets.randbits(32)
    healable = healable_from(request.prompt, ids)
    return [lm.row(Sequence(ids), merged, seed=seed, sample=i, n=n, healable=healable) for i in range(n)]
