"""Answers the requests of a batch, and makes the lines of its output."""

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
from ovspec.batch.requests import BatchRequest
from ovspec.engine.results import Piece, Result, answer_extras_json
from ovspec.engine.row import Row
from ovspec.params import Params
from ovspec.protocols.chat.reply import head_of, record_of, tops_of, whole
from ovspec.protocols.logprobs import SILENT, Echo, at_once, echo_of, prompt_logprobs

# Of an answer, because they depend on more than the request.
NOT_KEPT: Any = {"usage": {"completion_tokens_details"}}


@dataclass
class Started:
    """A request whose texts are being generated."""

    request: BatchRequest
    params: Params
    rows: list[Row]
    ended: bool = False  # whether it has its line


class BatchRun(Iterator[Row]):
    """Makes rows of ``requests``, and calls ``add`` with each request and its output line once that is complete.

    ``params`` are for what requests don't set. ``requests`` may have no more for now, and some later while others are
    answered.
    """

    def __init__(
        self,
        lm: LanguageModel,
        params: Params,
        requests: Iterable[BatchRequest],
        add: Callable[[BatchRequest, dict[str, Any]], None],
    ) -> None:
        self._lm, self._params, self._requests, self._add = lm, params, iter(requests), add
        self._numbers = itertools.count()  # the scheduler's numbers of the rows
        self._waiting = deque[tuple[Row, Started]]()
        self._started: dict[int, Started] = {}  # by row number

    def rounds(self) -> Iterator[int]:
        """Run all requests together; yield the number of tokens after each round."""
        params = self._lm.runtime.row_maker.complete_params(self._params)
        for pieces in self._lm.runtime.decoder_pool.run_batch(self, params, isolate_errors=True):
            for number, piece in pieces:
                self._take(number, piece)
            yield sum(len(piece.token_ids) for _, piece in pieces)

    def __next__(self) -> Row:
        """Return the next row of a request, or of the next request that isn't answered with an error."""
        while not self._waiting:
            request = next(self._requests)
            try:
                started = self._start(request)
            except OvspecError as error:
                self._add(request, error_line(request, str(error)))
            else:
                self._waiting.extend((row, started) for row in started.rows)
        row, self._started[next(self._numbers)] = self._waiting.popleft()
        return row

    def _start(self, request: BatchRequest) -> Started:
        """Make a row for each text of a request; raises OvspecError if it is invalid or can't be met."""
        if request.error:
            raise OvspecError(request.error)
        asked, rows = request.asked, self._lm.runtime.row_maker
        params = rows.complete_params(asked.overrides.params(self._params, asked.kind))
        return Started(request, params, [row for prompt in asked.prompts for row in rows.make_rows(prompt, params)])

    def _take(self, number: int, piece: Piece) -> None:
        """If a piece ends the last text of its request, add the request's line."""
        if not piece.finish_reason:
            return
        started = self._started.pop(number)
        if started.ended:  # its texts ended in the same round, or another one failed
            return
        if error := next((row.error for row in started.rows if row.error), None):
            started.ended = True
            self._add(started.request, error_line(started.request, str(error)))
        elif all(row.finish_reason not in (None, "cancelled") for row in started.rows):
            started.ended = True
            self._add(started.request, self._line(started))

    def _line(self, started: Started) -> dict[str, Any]:
        request = started.request
        try:
            results = [row.result() for row in started.rows]
            retry_invalid_results(self._lm.runtime, request.asked.prompts, started.params, results)
            return result_line(self._lm, request, results)
        except InferenceError:  # not the request's fault
            raise
        except OvspecError as error:
            return error_line(request, str(error))


class BatchThread(Iterator[BatchRequest]):
    """A thread that answers what several others ask at a time, together, in one batch that they join and leave.

    ``params`` apply to all requests that don't set their own; raises OvspecError if they are invalid.
    """

    def __init__(self, lm: LanguageModel, params: Params) -> None:
        self._lm, self._params = lm, params
        lm.runtime.row_maker.constraints.check_requested_grammar(lm.runtime.row_maker.complete_params(params))
        self._asked = deque[tuple[BatchRequest, Call]]()
        self._calls = dict[int, Call]()  # of the requests that are being answered, by identity
        self._came = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def answer(self, requests: list[BatchRequest]) -> list[dict[str, Any]]:
        """Return the output line of each request; raises InferenceError, also for what another thread asked."""
        requests = [replace(request) for request in requests]  # each with an identity of its own
        call = Call(len(requests))
        with self._came:
            self._asked.extend((request, call) for request in requests)
            self._came.notify()
        if requests:
            call.ended.wait()
        if call.error:
            raise call.error
        return [call.lines[id(request)] for request in requests]

    def _run(self) -> None:
        while True:
            with self._came:
                self._came.wait_for(lambda: self._asked)
            try:
                for _ in BatchRun(self._lm, self._params, self, self._give).rounds():
                    pass
            except Exception as error:
                with self._came:  # so that nothing is asked meanwhile, and then forgotten
                    for call in (*self._calls.values(), *(call for _, call in self._asked)):
                        call.error = error
                        call.ended.set()
                    self._calls.clear()
                    self._asked.clear()

    def __next__(self) -> BatchRequest:
        if not self._asked:
            raise StopIteration
        request, call = self._asked.popleft()
        self._calls[id(request)] = call
        return request

    def _give(self, request: BatchRequest, line: dict[str, Any]) -> None:
        call = self._calls.pop(id(request))
        call.lines[id(request)] = line
        if len(call.lines) == call.count:
            call.ended.set()


@dataclass
class Call:
    """What a thread asked: a number of requests, and their output lines so far, by the request's identity."""

    count: int
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    ended: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None


# ---------------------------------------------------------------- lines of the output


def error_line(request: BatchRequest, message: str) -> dict[str, Any]:
    """Return the output line for a request that failed."""
    if request.asked.kind == "own":
        return {"id": request.id, "error": message}
    error = {"code": "invalid_request", "message": message}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": None, "error": error}


COLUMNS = ("id", "text", "finish_reason", "error", "result")


def columns_of(lines: list[dict[str, Any]]) -> dict[str, list[str | None]]:
    """Return output lines as ``COLUMNS``: of several texts the first one, and as the result the line in JSON."""
    rows = [row_of(line) for line in lines]
    return {name: [row[name] for row in rows] for name in COLUMNS}


def row_of(line: dict[str, Any]) -> dict[str, str | None]:
    body = (line.get("response") or {}).get("body") or line
    first = (body.get("choices") or body.get("samples") or [body])[0]
    error, text = line.get("error"), first.get("text", first.get("message", {}).get("content"))
    message = error["message"] if isinstance(error, dict) else error
    result = json.dumps(line, ensure_ascii=False)
    values = (line.get("custom_id", line["id"]), text, first.get("finish_reason"), message, result)
    return dict(zip(COLUMNS, values, strict=True))


def tokens_of(line: dict[str, Any]) -> int:
    """Return the number of generated tokens in an output line."""
    body = (line.get("response") or {}).get("body", {})
    counts = [body.get("usage", {}).get("completion_tokens", 0)]
    return sum(counts + [each.get("generated_tokens", 0) for each in line.get("samples", [line])])


def result_line(lm: LanguageModel, request: BatchRequest, results: list[Result]) -> dict[str, Any]:
    """Return the output line for a request from its results, those of the first prompt first."""
    asked, n = request.asked, len(results) // len(request.asked.prompts)
    more = {"ignored": [*asked.ignored]} if asked.ignored else {}
    if asked.kind == "own":
        choices = [own_choice(lm, result, asked.prompts[i // n], asked.echo) for i, result in enumerate(results)]
        said = choices[0] if len(choices) == 1 else {"samples": choices}
        return {"id": request.id, **said, **more}
    echoes = [echo_in(lm, prompt, results[i * n]) if asked.echo else SILENT for i, prompt in enumerate(asked.prompts)]
    head = head_of("chatcmpl-" if asked.kind == "chat" else "cmpl-", asked.model or "", request.id)
    answer = whole(lm.tokenizer, head, asked, results, echoes)
    body = answer.model_dump(exclude_unset=True, exclude=NOT_KEPT)
    response = {"status_code": 200, "request_id": request.id, "body": body}
    return {"id": f"batch_req_{request.id}", "custom_id": request.id, "response": response, "error": None, **more}


def echo_in(lm: LanguageModel, prompt: Any, result: Result, logprobs: bool = True) -> Echo:
    """Return what is repeated of the prompt of ``result``."""
    ids = result.record.prompt_ids.tolist() if result.record else []
    wanted = logprobs and result.logprobs is not None and ids
    return echo_of(lm.tokenizer, prompt, ids, at_once(prompt_logprobs(lm, ids, tops_of(result))) if wanted else None)


def own_choice(lm: LanguageModel, result: Result, prompt: Any, echo: bool) -> dict[str, Any]:
    """Return one text of a request in ovspec's own format."""
    before = echo_in(lm, prompt, result, logprobs=False).text if echo else ""
    found: dict[str, Any] = {"text": before + result.text, "finish_reason": result.finish_reason}
    found |= answer_extras_json(result)
    if result.logprobs is not None:
        found["logprobs"] = [each.as_json(lm.tokenizer.token_text) for each in result.logprobs]
    if result.schema_errors is not None:
        found["schema_errors"] = result.schema_errors
    counts = {"prompt_tokens": result.stats.prompt_tokens, "generated_tokens": result.stats.generated_tokens}
    return found | counts | {"record": record_of(result, before)}
