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
from ovspec.engine.engine_thread import run_steps
from ovspec.engine.prompts import Prompt
from ovspec.engine.results import Result, answer_extras_json
from ovspec.engine.row import Row
from ovspec.params import Params
from ovspec.protocols.chat.logprobs import requested_top_count
from ovspec.protocols.chat.reply import ChatReplyMaker, make_verification_record, new_reply_identity
from ovspec.protocols.logprobs import NO_ECHO, Echo, compute_prompt_logprobs, make_echo
from ovspec.protocols.reply import ReplyInputs

# Fields left out of the output, because they depend on more than the request.
FIELDS_NOT_WRITTEN: Any = {"usage": {"completion_tokens_details"}}


@dataclass
class RunningRequest:
    """A request with texts in progress."""

    request: BatchRequest
    params: Params
    rows: list[Row]
    has_output_line: bool = False


class BatchRun(Iterator[Row]):
    """Makes rows of ``requests``, and calls ``report_line`` with each request and its complete output line.

    ``params`` are the defaults for requests. ``requests`` may have none for now, and more later while rows run.
    """

    def __init__(
        self,
        lm: LanguageModel,
        params: Params,
        requests: Iterable[BatchRequest],
        report_line: Callable[[BatchRequest, JsonObject], None],
    ) -> None:
        self._lm = lm
        self._params = lm.runtime.row_maker.with_long_texts(params)
        self._requests = iter(requests)
        self._report_line = report_line
        self._row_numbers = itertools.count()  # as counted by the scheduler
        self._waiting_rows = deque[tuple[Row, RunningRequest]]()
        self._running_requests: dict[int, RunningRequest] = {}  # by row number

    def run_rounds(self) -> Iterator[int]:
        """Run all requests together; yield the number of tokens after each round."""
        params = self._lm.runtime.row_maker.complete_params(self._params)
        for pieces in self._lm.runtime.decoder_pool.run_batch(self, params, isolate_errors=True):
            for row_number, piece in pieces:
                if piece.finish_reason:
                    self._finish_row(row_number)
            yield sum(len(piece.token_ids) for _, piece in pieces)

    def __next__(self) -> Row:
        """Return the next row of a request, or of the next request without an error."""
        while not self._waiting_rows:
            request = next(self._requests)
            try:
                running_request = self._make_running_request(request)
            except OvspecError as error:
                self._report_line(request, make_error_line(request, str(error)))
            else:
                self._waiting_rows.extend((row, running_request) for row in running_request.rows)
        row, running_request = self._waiting_rows.popleft()
        self._running_requests[next(self._row_numbers)] = running_request
        return row

    def _make_running_request(self, request: BatchRequest) -> RunningRequest:
        """Make a row for each text of a request; raises OvspecError if it is invalid or unsupported."""
        if request.error:
            raise OvspecError(request.error)
        row_maker = self._lm.runtime.row_maker
        text_request = request.text_request
        params = row_maker.complete_params(text_request.overrides.apply_to(self._params, text_request.kind))
        made_rows = [
            row for prompt in text_request.prompts for row in row_maker.make_rows(prompt, params, can_wait=True)
        ]
        return RunningRequest(request, params, made_rows)

    def _finish_row(self, row_number: int) -> None:
        """Report the output line of a row's request if the row was its last, or has failed."""
        running_request = self._running_requests.pop(row_number)
        if running_request.has_output_line:  # its texts ended in the same round, or another text has failed
            return
        if error := next((row.error for row in running_request.rows if row.error), None):
            running_request.has_output_line = True
            self._report_line(running_request.request, make_error_line(running_request.request, str(error)))
        elif all(row.finish_reason not in (None, "cancelled") for row in running_request.rows):
            running_request.has_output_line = True
            self._report_line(running_request.request, self._make_output_line(running_request))

    def _make_output_line(self, running_request: RunningRequest) -> JsonObject:
        request = running_request.request
        try:
            results = [row.result() for row in running_request.rows]
            retry_invalid_results(self._lm.runtime, request.text_request.prompts, running_request.params, results)
            return make_result_line(self._lm, request, running_request.rows, results)
        except InferenceError:  # not the request's fault
            raise
        except OvspecError as error:
            return make_error_line(request, str(error))


class BatchThread(Iterator[BatchRequest]):
    """A thread to run the requests of several callers together, by continuous batching.

    ``params`` apply to requests without their own; raises OvspecError if they are invalid.
    """

    def __init__(self, lm: LanguageModel, params: Params) -> None:
        self._lm = lm
        self._params = params
        lm.runtime.row_maker.constraint_maker.check_requested_grammar(lm.runtime.row_maker.complete_params(params))
        self._waiting_requests = deque[tuple[BatchRequest, PendingCall]]()
        self._running_calls = dict[int, PendingCall]()  # by the identity of their requests
        self._request_added = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def run_requests(self, requests: list[BatchRequest]) -> list[JsonObject]:
        """Return the output line of each request; raises InferenceError, even for another caller's request."""
        requests = [replace(request) for request in requests]  # each with a separate identity
        pending_call = PendingCall(len(requests))
        with self._request_added:
            self._waiting_requests.extend((request, pending_call) for request in requests)
            self._request_added.notify()
        if requests:
            pending_call.ended.wait()
        if pending_call.error:
            raise pending_call.error
        return [pending_call.lines[id(request)] for request in requests]

    def _run(self) -> None:
        while True:
            with self._request_added:
                self._request_added.wait_for(lambda: self._waiting_requests)
            try:
                for _ in BatchRun(self._lm, self._params, self, self._add_output_line).run_rounds():
                    pass
            except Exception as error:
                with self._request_added:  # no request may arrive in between and be forgotten
                    for pending_call in (
                        *self._running_calls.values(),
                        *(pending_call for _, pending_call in self._waiting_requests),
                    ):
                        pending_call.error = error
                        pending_call.ended.set()
                    self._running_calls.clear()
                    self._waiting_requests.clear()

    def __next__(self) -> BatchRequest:
        if not self._waiting_requests:
            raise StopIteration
        request, pending_call = self._waiting_requests.popleft()
        self._running_calls[id(request)] = pending_call
        return request

    def _add_output_line(self, request: BatchRequest, line: JsonObject) -> None:
        pending_call = self._running_calls.pop(id(request))
        pending_call.lines[id(request)] = line
        if len(pending_call.lines) == pending_call.request_count:
            pending_call.ended.set()


@dataclass
class PendingCall:
    """A caller's number of requests, and their output lines so far, by the request's identity."""

    request_count: int
    lines: dict[int, JsonObject] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


# ---------------------------------------------------------------- lines of the output


def make_error_line(request: BatchRequest, message: str) -> JsonObject:
    """Return the output line for a failed request."""
    if request.text_request.kind == "batch_line":
        return {"id": request.id, "error": message}
    error = {"code": "invalid_request", "message": message}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": None, "error": error}


OUTPUT_COLUMNS = ("id", "text", "finish_reason", "error", "result")


def lines_to_columns(lines: list[JsonObject]) -> dict[str, list[str | None]]:
    """Return output lines as ``OUTPUT_COLUMNS``: the first of several texts, and as the result the line in JSON."""
    rows = [line_to_row(line) for line in lines]
    return {column: [row[column] for row in rows] for column in OUTPUT_COLUMNS}


def line_to_row(line: JsonObject) -> dict[str, str | None]:
    response_body = (line.get("response") or {}).get("body") or line
    texts = response_body.get("choices") or response_body.get("samples") or [response_body]
    first_text = texts[0]
    error = line.get("error")
    return {
        "id": line.get("custom_id", line["id"]),
        "text": first_text.get("text", first_text.get("message", {}).get("content")),
        "finish_reason": first_text.get("finish_reason"),
        "error": error["message"] if isinstance(error, dict) else error,
        "result": json.dumps(line, ensure_ascii=False),
    }


def count_generated_tokens(line: JsonObject) -> int:
    """Return the number of generated tokens in an output line."""
    response_body = (line.get("response") or {}).get("body", {})
    texts = line.get("samples", [line])
    return response_body.get("usage", {}).get("completion_tokens", 0) + sum(
        text.get("generated_tokens", 0) for text in texts
    )


def make_result_line(lm: LanguageModel, request: BatchRequest, rows: list[Row], results: list[Result]) -> JsonObject:
    """Return the output line for a request from its results, in the order of the prompts."""
    text_request = request.text_request
    texts_per_prompt = len(results) // len(text_request.prompts)
    ignored: JsonObject = {"ignored": [*text_request.ignored]} if text_request.ignored else {}
    if text_request.kind == "batch_line":
        prompts = [prompt for prompt in text_request.prompts for _ in range(texts_per_prompt)]
        texts = [
            make_text_entry(lm, result, prompt, text_request.echo)
            for result, prompt in zip(results, prompts, strict=True)
        ]
        text_fields = texts[0] if len(texts) == 1 else {"samples": texts}
        return {"id": request.id, **text_fields, **ignored}
    echoes = [NO_ECHO] * len(text_request.prompts)
    if text_request.echo:
        prompt_results = zip(text_request.prompts, results[::texts_per_prompt], strict=True)
        echoes = [make_prompt_echo(lm, prompt, result) for prompt, result in prompt_results]
    id_prefix = "chatcmpl-" if text_request.kind == "chat" else "cmpl-"
    reply_identity = new_reply_identity(id_prefix, text_request.model or "", request.id)
    reply = ChatReplyMaker(ReplyInputs(lm.tokenizer, reply_identity, text_request, rows, echoes)).whole_reply(results)
    body = reply.model_dump(exclude_unset=True, exclude=FIELDS_NOT_WRITTEN)
    response = {"status_code": 200, "request_id": request.id, "body": body}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": response, "error": None, **ignored}


def make_prompt_echo(lm: LanguageModel, prompt: Prompt, result: Result, with_logprobs: bool = True) -> Echo:
    """Return the echo of the prompt of ``result``."""
    prompt_ids = result.record.prompt_ids.tolist() if result.record else []
    if not (with_logprobs and result.logprobs is not None and prompt_ids):
        return make_echo(lm.tokenizer, prompt, prompt_ids, None)
    logprobs = run_steps(compute_prompt_logprobs(lm, prompt_ids, requested_top_count(result)))
    return make_echo(lm.tokenizer, prompt, prompt_ids, logprobs)


def make_text_entry(lm: LanguageModel, result: Result, prompt: Prompt, with_echo: bool) -> JsonObject:
    """Return one text of a request in ovspec's own format."""
    echo_text = make_prompt_echo(lm, prompt, result, with_logprobs=False).text if with_echo else ""
    entry_fields: JsonObject = {"text": echo_text + result.text, "finish_reason": result.finish_reason}
    entry_fields |= answer_extras_json(result)
    if result.logprobs is not None:
        entry_fields["logprobs"] = [token.as_json(lm.tokenizer.token_text) for token in result.logprobs]
    if result.schema_errors is not None:
        entry_fields["schema_errors"] = result.schema_errors
    entry_fields["prompt_tokens"] = result.stats.prompt_tokens
    entry_fields["generated_tokens"] = result.stats.generated_tokens
    entry_fields["record"] = make_verification_record(result, echo_text)
    return entry_fields
