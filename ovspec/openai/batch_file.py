"""Batch files: reads their requests, runs them, and resumes after an interruption. The work behind ``ovspec batch``.

A line is a request of OpenAI's batch API (https://platform.openai.com/docs/guides/batch), a JSON object with a prompt
or messages and options, or a JSON string.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ovspec.api.model import LanguageModel, retried
from ovspec.api.verify import option_as_json
from ovspec.base.errors import InferenceError, OvspecError
from ovspec.base.files import read_text, write_atomically
from ovspec.engine.results import Piece, Result, said_as_json
from ovspec.engine.row import Row
from ovspec.openai.answers import head_of, record_of, tops_of, whole
from ovspec.openai.bodies import OF_SERVER, ChatBody, CompletionBody, OwnBody, read_body
from ovspec.openai.logprobs import SILENT, Echo, at_once, echo_of, prompt_logprobs
from ovspec.openai.requests import Kind, TextRequest, read_texts
from ovspec.params import GRAMMARS, GenerateOptions, Params, check_samples
from ovspec.params.option import hint
from ovspec.sampling.constraint_maker import grammar_of
from ovspec.setup.identity import cache_setting, model_identity, prompt_identity

ENVELOPE = {"custom_id", "id", "method", "url", "body"}
URLS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
BODIES: dict[Kind, Any] = {"own": OwnBody, "completion": CompletionBody, "chat": ChatBody}
# Fields that only the server knows, and those that the command sets for all lines.
NOT_HERE = ("stream_options", "draft", "return_record", *OF_SERVER)
# Of an answer, because they depend on more than the request.
NOT_KEPT: Any = {"usage": {"completion_tokens_details"}}


# ---------------------------------------------------------------- reading


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
        if request.id in seen:
            while name in seen:  # a line before has it as its own id
                name = f"line {name}"
            request = replace(request, id=name, error=f"The id {request.id!r} is used twice.")
        seen.add(request.id)
        requests.append(request)
    return requests


def read_request(line: str, default_id: str) -> BatchRequest:
    """Parse one line of JSON; an invalid line gives a request with an ``error``."""
    identity, kind = default_id, "own"
    try:
        entry = json.loads(line)
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
    if any(name in body and body[name] is None for name in (*GRAMMARS, "response_format")):
        return replace(asked, own={"json_schema": None} | asked.own)  # lifts the grammar of the whole file
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
    return replace(request, asked=replace(asked, prompts=chats), source=f"{system!r} {request.source}")


def kind_of(entry: dict[str, Any]) -> Kind:
    """Return the kind of a request of OpenAI's batch API; raises OvspecError for an unknown url, method or field."""
    for name in entry.keys() - ENVELOPE:
        raise OvspecError(f"{name} must be inside of body; {hint(name, ENVELOPE) or 'move it there.'}")
    url = str(entry.get("url", "")).rstrip("/")
    if url not in URLS:
        raise OvspecError(f"The url is {entry.get('url')!r}; it must be one of {', '.join(URLS)}.")
    if entry.get("method", "POST") != "POST":
        raise OvspecError(f"The method is {entry['method']!r}; it must be POST.")
    return URLS[url]


# ---------------------------------------------------------------- running


@dataclass
class BatchProgress:
    """Counts of requests and generated tokens.

    ``before`` counts what earlier runs completed, ``done`` what this run has, ``failed`` requests included.
    """

    total: int
    before: int
    done: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def left(self) -> int:
        return self.total - self.before - self.done


class Done:
    """The results so far, in a file beside the output, so that an interrupted run needn't generate them again.

    Each result is stored under a key made from everything it depends on. If the line, the model or an option has
    changed since, the result is generated again.
    """

    def __init__(self, output: Path, depends_on: str) -> None:
        self.file = output.with_name(output.name + ".partial")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(output.with_name(f".{output.name}.lock"))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise OvspecError(f"{output}: another batch is writing it; wait for it, or name another output.") from None
        self._depends_on = depends_on
        self._lines = dict[str, dict[str, Any]]()
        self._open = self.file.open("a", encoding="utf-8", newline="\n")
        *lines, cut_off = self.file.read_text(encoding="utf-8", errors="replace").split("\n")
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that was cut off earlier
                found = json.loads(line)
                self._lines[found["key"]] = found["line"]
        if cut_off:
            self._open.write("\n")

    def key(self, request: BatchRequest) -> str:
        text = "\0".join((self._depends_on, request.id, request.source))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]

    def has(self, request: BatchRequest) -> bool:
        return self.key(request) in self._lines

    def add(self, request: BatchRequest, line: dict[str, Any]) -> None:
        self._lines[key := self.key(request)] = line
        self._open.write(json.dumps({"key": key, "line": line}, ensure_ascii=False) + "\n")
        self._open.flush()

    def finish(self, output: Path, requests: list[BatchRequest]) -> None:
        """Write the output atomically, in the order of the requests, and delete the partial file."""
        self._open.close()
        lines = [json.dumps(self._lines[self.key(request)], ensure_ascii=False) for request in requests]
        write_atomically(output, "".join(f"{line}\n" for line in lines))
        self.file.unlink()

    def close(self) -> None:
        self._open.close()
        with contextlib.suppress(OSError):  # Windows can't delete an open file
            Path(self._lock.lock_file).unlink()
        self._lock.release()


def run_file(
    lm: LanguageModel,
    requests: list[BatchRequest],
    output: Path,
    options: GenerateOptions,
    note: Callable[[BatchProgress], None] | None = None,
) -> BatchProgress:
    """Generate a result for each of ``requests`` and write ``output``, continuing an earlier run that was interrupted.

    ``options`` apply to all requests that don't set their own; ``note`` is called after each round. If the inference
    fails, the results so far are kept, and the same call continues from them.
    """
    defaults = lm.runtime.params(options)
    lm.runtime.constraints.check(defaults)  # once, not for each text
    done = Done(output, what_matters(lm, defaults))
    try:
        run = FileRun(lm, defaults, done, requests)
        for pieces in lm.runtime.run(run.rows(), defaults, fail_alone=True):
            for number, piece in pieces:
                run.take(number, piece)
            if note:
                note(run.progress)
        done.finish(output, requests)
    finally:
        done.close()
    return run.progress


class FileRun:
    """Makes rows of the requests that aren't done yet, and adds each request's output line to ``done``."""

    def __init__(self, lm: LanguageModel, defaults: Params, done: Done, requests: list[BatchRequest]) -> None:
        self._lm, self._defaults, self._done = lm, defaults, done
        self._todo = [request for request in requests if not done.has(request)]
        self.progress = BatchProgress(len(requests), len(requests) - len(self._todo))
        self._started: dict[int, tuple[BatchRequest, list[Row]]] = {}  # row number -> its request, and all its rows

    def rows(self) -> Iterator[Row]:
        """Yield the rows of one request after the other; the scheduler numbers them in this order."""
        numbers = itertools.count()
        for request in self._todo:
            try:
                rows = self._rows_of(request)
            except OvspecError as error:
                self._fail(request, error)
                continue
            for row in rows:
                self._started[next(numbers)] = request, rows
                yield row

    def _rows_of(self, request: BatchRequest) -> list[Row]:
        """Return a row for each text of a request; raises OvspecError if it is invalid or can't be met."""
        if request.error:
            raise OvspecError(request.error)
        params = self._params(request)
        check_samples(params)
        return [row for prompt in request.asked.prompts for row in self._lm.runtime.rows(prompt, params)]

    def _params(self, request: BatchRequest) -> Params:
        return self._lm.runtime.complete(request.asked.params(self._defaults))

    def take(self, number: int, piece: Piece) -> None:
        """Count the tokens of a piece; if it ends the last text of its request, add the request's line."""
        self.progress.tokens += len(piece.token_ids)
        if not piece.finish_reason:
            return
        request, rows = self._started.pop(number)
        if self._done.has(request):  # its texts ended in the same round, or another one failed
            return
        if error := next((row.error for row in rows if row.error), None):
            self._fail(request, error)
        elif all(row.finish_reason not in (None, "cancelled") for row in rows):
            self._complete(request, rows)

    def _complete(self, request: BatchRequest, rows: list[Row]) -> None:
        try:
            results = [row.result() for row in rows]
            retried(self._lm.runtime, request.asked.prompts, self._params(request), results)
            line = result_line(self._lm, request, results)
        except InferenceError:  # not the request's fault
            raise
        except OvspecError as error:
            self._fail(request, error)
            return
        self._done.add(request, line)
        self.progress.done += 1

    def _fail(self, request: BatchRequest, error: OvspecError) -> None:
        self._done.add(request, error_line(request, str(error)))
        self.progress.done += 1
        self.progress.failed += 1


def what_matters(lm: LanguageModel, params: Params) -> str:
    """Return a text that identifies the model and all options that change results, not only their speed."""
    rejection = params.accept == "rejection"  # there, sampled tokens depend on what was proposed
    models = [lm.target, *([lm.draft] if rejection and lm.draft else [])]
    identities = [(model_identity(model.ir.folder), cache_setting(model)) for model in models]
    recorded = params.recorded()
    texts = {name: option_as_json(name, recorded[name]) for name in sorted(recorded) if name not in GRAMMARS}
    texts |= {"lookahead": params.lookahead} if rejection else {}
    return repr((identities, prompt_identity(lm.folder), texts, grammar_of(params)[0]))


# ---------------------------------------------------------------- lines of the output


def error_line(request: BatchRequest, message: str) -> dict[str, Any]:
    """Return the output line for a request that failed."""
    if request.asked.kind == "own":
        return {"id": request.id, "error": message}
    error = {"code": "invalid_request", "message": message}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": None, "error": error}


def result_line(lm: LanguageModel, request: BatchRequest, results: list[Result]) -> dict[str, Any]:
    """Return the output line for a request from its results, those of the first prompt first."""
    asked, n = request.asked, len(results) // len(request.asked.prompts)
    if asked.kind == "own":
        choices = [own_choice(lm, result, asked.prompts[i // n], asked.echo) for i, result in enumerate(results)]
        return {"id": request.id, **choices[0]} if len(choices) == 1 else {"id": request.id, "samples": choices}
    echoes = [echo_in(lm, prompt, results[i * n]) if asked.echo else SILENT for i, prompt in enumerate(asked.prompts)]
    head = head_of("chatcmpl-" if asked.kind == "chat" else "cmpl-", asked.model or "", request.id)
    answer = whole(lm.tokenizer, head, asked, results, echoes)
    body = answer.model_dump(exclude_unset=True, exclude=NOT_KEPT)
    response = {"status_code": 200, "request_id": request.id, "body": body}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": response, "error": None}


def echo_in(lm: LanguageModel, prompt: Any, result: Result, logprobs: bool = True) -> Echo:
    """Return what is repeated of the prompt of ``result``."""
    ids = result.record.prompt_ids.tolist() if result.record else []
    wanted = logprobs and result.logprobs is not None and ids
    return echo_of(lm.tokenizer, prompt, ids, at_once(prompt_logprobs(lm, ids, tops_of(result))) if wanted else None)


def own_choice(lm: LanguageModel, result: Result, prompt: Any, echo: bool) -> dict[str, Any]:
    """Return one text of a request in ovspec's own format."""
    before = echo_in(lm, prompt, result, logprobs=False).text if echo else ""
    found: dict[str, Any] = {"text": before + result.text, "finish_reason": result.finish_reason}
    found |= said_as_json(result)
    if result.logprobs is not None:
        found["logprobs"] = [each.as_json(lm.tokenizer.token_text) for each in result.logprobs]
    if result.schema_errors is not None:
        found["schema_errors"] = result.schema_errors
    counts = {"prompt_tokens": result.stats.prompt_tokens, "generated_tokens": result.stats.generated_tokens}
    return found | counts | {"record": record_of(result, before)}
