"""Runs the requests of a batch, and makes the lines of its output."""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ovspec.api.model import LanguageModel, retry_invalid_results
from ovspec.base.errors import InferenceError, OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.batch.requests import BatchRequest
from ovspec.engine.prompts import Prompt
from ovspec.engine.results import Result, answer_extras_json
from ovspec.engine.row import Row
from ovspec.params import Params
from ovspec.protocols.chat.logprobs import count_top_logprobs
from ovspec.protocols.chat.reply import ChatReply, new_reply_identity, verification_record
from ovspec.protocols.logprobs import NO_ECHO, Echo, compute_prompt_logprobs, make_echo, run_generator
from ovspec.protocols.reply import Generation

# Not written, because they depend on more than the request.
FIELDS_NOT_WRITTEN: Any = {"usage": {"completion_tokens_details"}}


@dataclass
class RunningRequest:
    """A request whose texts are being generated."""

    request: BatchRequest
    params: Params
    rows: list[Row]
    has_line: bool = False


class BatchRun(Iterator[Row]):
    """Makes rows of ``requests``, and calls ``report_line`` with each request and its complete output line.

    ``params`` are the options that requests don't set. ``requests`` may have no more for now, and some later while
    others run.
    """

    def __init__(
        self,
        lm: LanguageModel,
        params: Params,
        requests: Iterable[BatchRequest],
        report_line: Callable[[BatchRequest, JsonObject], None],
    ) -> None:
        self._lm = lm
        self._params = params
        self._requests = iter(requests)
        self._report_line = report_line
        self._row_numbers = itertools.count()  # as the scheduler counts rows
        self._waiting_rows = deque[tuple[Row, RunningRequest]]()
        self._running: dict[int, RunningRequest] = {}  # by row number

    def run_rounds(self) -> Iterator[int]:
        """Run all requests together; yield the number of tokens after each round."""
        params = self._lm.runtime.row_maker.complete_params(self._params)
        for pieces in self._lm.runtime.decoder_pool.run_batch(self, params, isolate_errors=True):
            for row_number, piece in pieces:
                if piece.finish_reason:
                    self._finish_row(row_number)
            yield sum(len(piece.token_ids) for _, piece in pieces)

    def __next__(self) -> Row:
        """Return the next row of a request, or of the next request that has no error."""
        while not self._waiting_rows:
            request = next(self._requests)
            try:
                running = self._make_running_request(request)
            except OvspecError as error:
                self._report_line(request, error_line(request, str(error)))
            else:
                self._waiting_rows.extend((row, running) for row in running.rows)
        row, running = self._waiting_rows.popleft()
        self._running[next(self._row_numbers)] = running
        return row

    def _make_running_request(self, request: BatchRequest) -> RunningRequest:
        """Make a row for each text of a request; raises OvspecError if it is invalid or can't be met."""
        if request.error:
            raise OvspecError(request.error)
        rows = self._lm.runtime.row_maker
        text_request = request.text_request
        params = rows.complete_params(text_request.overrides.apply_to(self._params, text_request.kind))
        made_rows = [row for prompt in text_request.prompts for row in rows.make_rows(prompt, params)]
        return RunningRequest(request, params, made_rows)

    def _finish_row(self, row_number: int) -> None:
        """Add the line of a row's request if it was the last one, or has failed."""
        running = self._running.pop(row_number)
        if running.has_line:  # its texts ended in the same round, or another one failed
            return
        if error := next((row.error for row in running.rows if row.error), None):
            running.has_line = True
            self._report_line(running.request, error_line(running.request, str(error)))
        elif all(row.finish_reason not in (None, "cancelled") for row in running.rows):
            running.has_line = True
            self._report_line(running.request, self._make_line(running))

    def _make_line(self, running: RunningRequest) -> JsonObject:
        request = running.request
        try:
            results = [row.result() for row in running.rows]
            retry_invalid_results(self._lm.runtime, request.text_request.prompts, running.params, results)
            return result_line(self._lm, request, running.rows, results)
        except InferenceError:  # not the request's fault
            raise
        except OvspecError as error:
            return error_line(request, str(error))


class BatchThread(Iterator[BatchRequest]):
    """A thread that runs the requests of several callers together, in one batch that they join and leave.

    ``params`` apply to all requests that don't set their own; raises OvspecError if they are invalid.
    """

    def __init__(self, lm: LanguageModel, params: Params) -> None:
        self._lm = lm
        self._params = params
        lm.runtime.row_maker.constraint_maker.check_requested_grammar(lm.runtime.row_maker.complete_params(params))
        self._waiting = deque[tuple[BatchRequest, PendingCall]]()
        self._running_calls = dict[int, PendingCall]()  # by the identity of their requests
        self._request_came = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def run_requests(self, requests: list[BatchRequest]) -> list[JsonObject]:
        """Return the output line of each request; raises InferenceError, also of another caller's request."""
        requests = [replace(request) for request in requests]  # each with an identity of its own
        call = PendingCall(len(requests))
        with self._request_came:
            self._waiting.extend((request, call) for request in requests)
            self._request_came.notify()
        if requests:
            call.ended.wait()
        if call.error:
            raise call.error
        return [call.lines[id(request)] for request in requests]

    def _run(self) -> None:
        while True:
            with self._request_came:
                self._request_came.wait_for(lambda: self._waiting)
            try:
                for _ in BatchRun(self._lm, self._params, self, self._add_line).run_rounds():
                    pass
            except Exception as error:
                with self._request_came:  # so that no request comes meanwhile and is forgotten
                    for call in (*self._running_calls.values(), *(call for _, call in self._waiting)):
                        call.error = error
                        call.ended.set()
                    self._running_calls.clear()
                    self._waiting.clear()

    def __next__(self) -> BatchRequest:
        if not self._waiting:
            raise StopIteration
        request, call = self._waiting.popleft()
        self._running_calls[id(request)] = call
        return request

    def _add_line(self, request: BatchRequest, line: JsonObject) -> None:
        call = self._running_calls.pop(id(request))
        call.lines[id(request)] = line
        if len(call.lines) == call.count:
            call.ended.set()


@dataclass
class PendingCall:
    """A caller's number of requests, and their output lines so far, by the request's identity."""

    count: int
    lines: dict[int, JsonObject] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


# ---------------------------------------------------------------- lines of the output


def error_line(request: BatchRequest, message: str) -> JsonObject:
    """Return the output line for a request that failed."""
    if request.text_request.kind == "own":
        return {"id": request.id, "error": message}
    error = {"code": "invalid_request", "message": message}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": None, "error": error}


OUTPUT_COLUMNS = ("id", "text", "finish_reason", "error", "result")


def lines_to_columns(lines: list[JsonObject]) -> dict[str, list[str | None]]:
    """Return output lines as ``OUTPUT_COLUMNS``: of several texts the first, and as the result the line in JSON."""
    rows = [line_to_row(line) for line in lines]
    return {name: [row[name] for row in rows] for name in OUTPUT_COLUMNS}


def line_to_row(line: JsonObject) -> dict[str, str | None]:
    body = (line.get("response") or {}).get("body") or line
    texts = body.get("choices") or body.get("samples") or [body]
    first = texts[0]
    error = line.get("error")
    return {
        "id": line.get("custom_id", line["id"]),
        "text": first.get("text", first.get("message", {}).get("content")),
        "finish_reason": first.get("finish_reason"),
        "error": error["message"] if isinstance(error, dict) else error,
        "result": json.dumps(line, ensure_ascii=False),
    }


def count_generated_tokens(line: JsonObject) -> int:
    """Return the number of generated tokens in an output line."""
    body = (line.get("response") or {}).get("body", {})
    texts = line.get("samples", [line])
    return body.get("usage", {}).get("completion_tokens", 0) + sum(text.get("generated_tokens", 0) for text in texts)


def result_line(lm: LanguageModel, request: BatchRequest, rows: list[Row], results: list[Result]) -> JsonObject:
    """Return the output line for a request from its results, in the order of the prompts."""
    text_request = request.text_request
    n = len(results) // len(text_request.prompts)
    ignored: JsonObject = {"ignored": [*text_request.ignored]} if text_request.ignored else {}
    if text_request.kind == "own":
        prompts = [prompt for prompt in text_request.prompts for _ in range(n)]
        texts = [
            make_text_entry(lm, result, prompt, text_request.echo)
            for result, prompt in zip(results, prompts, strict=True)
        ]
        fields = texts[0] if len(texts) == 1 else {"samples": texts}
        return {"id": request.id, **fields, **ignored}
    echoes = [NO_ECHO] * len(text_request.prompts)
    if text_request.echo:
        pairs = zip(text_request.prompts, results[::n], strict=True)
        echoes = [prompt_echo(lm, prompt, result) for prompt, result in pairs]
    id_prefix = "chatcmpl-" if text_request.kind == "chat" else "cmpl-"
    identity = new_reply_identity(id_prefix, text_request.model or "", request.id)
    reply = ChatReply(Generation(lm.tokenizer, identity, text_request, rows, echoes)).whole_reply(results)
    body = reply.model_dump(exclude_unset=True, exclude=FIELDS_NOT_WRITTEN)
    response = {"status_code": 200, "request_id": request.id, "body": body}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": response, "error": None, **ignored}


def prompt_echo(lm: LanguageModel, prompt: Prompt, result: Result, with_logprobs: bool = True) -> Echo:
    """Return the echo of the prompt of ``result``."""
    ids = result.record.prompt_ids.tolist() if result.record else []
    if not (with_logprobs and result.logprobs is not None and ids):
        return make_echo(lm.tokenizer, prompt, ids, None)
    logprobs = run_generator(compute_prompt_logprobs(lm, ids, count_top_logprobs(result)))
    return make_echo(lm.tokenizer, prompt, ids, logprobs)


def make_text_entry(lm: LanguageModel, result: Result, prompt: Prompt, with_echo: bool) -> JsonObject:
    """Return one text of a request in ovspec's own format."""
    echo = prompt_echo(lm, prompt, result, with_logprobs=False).text if with_echo else ""
    fields: JsonObject = {"text": echo + result.text, "finish_reason": result.finish_reason}
    fields |= answer_extras_json(result)
    if result.logprobs is not None:
        fields["logprobs"] = [token.as_json(lm.tokenizer.token_text) for token in result.logprobs]
    if result.schema_errors is not None:
        fields["schema_errors"] = result.schema_errors
    fields["prompt_tokens"] = result.stats.prompt_tokens
    fields["generated_tokens"] = result.stats.generated_tokens
    fields["record"] = verification_record(result, echo)
    return fields
