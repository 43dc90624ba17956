"""The endpoints for texts: from the body of a request to its reply, whole or streamed."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import ExitStack, aclosing
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ovspec.api.model import make_retry_rows
from ovspec.base.errors import OvspecError
from ovspec.engine.engine_thread import Job
from ovspec.engine.results import Piece
from ovspec.engine.row import Row
from ovspec.protocols.apis import TextApi, TokenCount
from ovspec.protocols.bodies import TextRequestBody
from ovspec.protocols.logprobs import Echo, compute_logprobs_between_rounds, make_echo
from ovspec.protocols.reply import ReplyMaker
from ovspec.protocols.requests import count_texts, may_compile_grammar
from ovspec.server.access import STREAM_STATUS
from ovspec.server.admission import WorkKind, choose_work_kind, run_unless_disconnected
from ovspec.server.context import ServerContext
from ovspec.server.errors import ApiError, make_text_error, make_timeout_error, to_request_failure
from ovspec.server.preparation import PreparedRequest

T = TypeVar("T")
KEEP_ALIVE_SECONDS = 15.0  # keep-alive interval of a silent stream
MEMORY_WAIT_EVENT = b": waiting for memory that other texts hold\n\n"  # a comment, which clients skip
IndexedPieces = list[tuple[int, Piece]]  # with the indices of their rows


class TextEndpoints:
    """The text endpoints of all APIs."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._lm = context.lm

    async def answer_request(self, api: TextApi, body: TextRequestBody, http_request: Request) -> Response:
        """Answer a request with texts."""
        arrival_time = time.monotonic()
        admission = self._context.admission
        with ExitStack() as cleanup_stack:
            cleanup_stack.enter_context(admission.admit(count_texts(body)))
            admission.check_requested_model(body.model)
            async with admission.limit_preparation_time(arrival_time):
                prepared = await run_unless_disconnected(
                    http_request, self._prepare_request(api, body, http_request, arrival_time)
                )
            if prepared.reply_inputs.request.stream:
                reply_maker = api.reply_maker(prepared.reply_inputs)
                events = self._stream_events(reply_maker, prepared)
                first_event = await run_unless_disconnected(http_request, anext(events))
                return EventStream(first_event, events, reply_maker, cleanup_stack.pop_all().close)
            await run_unless_disconnected(http_request, self._generate_texts(prepared))
            work_kind: WorkKind = "texts" if prepared.params.logprobs is None else "long"
            return await self._context.threads.run_in_thread(self._make_whole_response, prepared, work_kind=work_kind)

    async def count_tokens(self, api: TextApi, body: TextRequestBody, http_request: Request) -> TokenCount:
        """Count the tokens of a request's prompt."""
        admission = self._context.admission
        admission.check_requested_model(body.model)
        with admission.admit():
            async with admission.limit_preparation_time(time.monotonic()):
                count_tokens = self._context.preparer.count_tokens
                counting_work = self._context.threads.run_in_thread_for_body(
                    http_request, count_tokens, api, body, http_request
                )
                token_count = await run_unless_disconnected(http_request, counting_work)
        return TokenCount(input_tokens=token_count, **api.count_fields)

    async def _prepare_request(
        self, api: TextApi, body: TextRequestBody, http_request: Request, arrival_time: float
    ) -> PreparedRequest:
        """Return a request with its rows and the echoes of its prompts."""
        work_kind: WorkKind = "grammars" if may_compile_grammar(body) else await choose_work_kind(http_request)
        prepare = self._context.preparer.prepare_request
        prepared = await self._context.threads.run_in_thread(
            prepare, api, body, http_request, arrival_time, work_kind=work_kind
        )
        if prepared.reply_inputs.request.echo:
            prepared.reply_inputs.echoes = await self._make_echoes(prepared)
        return prepared

    async def _make_echoes(self, prepared: PreparedRequest) -> list[Echo]:
        """Return the echo of each prompt."""
        echoes = list[Echo]()
        reply_inputs = prepared.reply_inputs
        top_logprobs = prepared.params.logprobs
        for prompt, row in zip(
            reply_inputs.request.prompts, reply_inputs.rows[:: reply_inputs.texts_per_prompt], strict=True
        ):
            prompt_ids = row.record.prompt_ids.tolist() if row.record else []
            logprobs = None
            if top_logprobs is not None:
                logprobs_future = compute_logprobs_between_rounds(
                    self._lm, self._context.engine, prompt_ids, top_logprobs
                )
                logprobs = await self._await_engine_result(logprobs_future)
            run_in_thread = self._context.threads.run_in_thread
            echoes.append(
                await run_in_thread(make_echo, self._lm.tokenizer, prompt, prompt_ids, logprobs, work_kind="long")
            )
        return echoes

    async def _await_engine_result(self, future: Future[T]) -> T:
        """Return the result of work in the engine's thread; raises ApiError if it fails."""
        try:
            return await asyncio.wrap_future(future)
        except OvspecError as error:
            raise make_text_error(error, self._lm) from None

    # ------------------------------------------------------------ whole replies

    async def _generate_texts(self, prepared: PreparedRequest) -> None:
        """Generate all texts of a request, with retries under other seeds if requested."""
        reply_inputs = prepared.reply_inputs
        rows = reply_inputs.rows
        await self._generate_rows(rows, prepared.arrival_time)
        retries = prepared.params.retries
        if reply_inputs.request.only_prompts:
            retries = 0
        for _ in range(retries):
            retry_rows = await self._make_retry_rows(prepared)
            if not retry_rows:
                break
            for index, row in retry_rows.items():
                row.draft_limits = rows[index].draft_limits
                row.sequence.owner = rows[index].sequence.owner
                rows[index] = row
            await self._generate_rows([*retry_rows.values()], prepared.arrival_time)
        self._record_metrics(prepared)

    async def _make_retry_rows(self, prepared: PreparedRequest) -> dict[int, Row]:
        """Return new rows for texts in violation of their schema, by index."""
        reply_inputs = prepared.reply_inputs
        results = [row.result() for row in reply_inputs.rows]
        retry_arguments = self._lm.runtime, reply_inputs.request.prompts, prepared.params, results, True
        async with self._context.admission.limit_preparation_time(prepared.arrival_time):
            return await self._context.threads.run_in_thread(make_retry_rows, *retry_arguments, work_kind="grammars")

    async def _generate_rows(self, rows: list[Row], arrival_time: float) -> None:
        """Generate rows without streaming."""
        async with aclosing(generate_pieces(self._context, rows, arrival_time)) as piece_batches:
            async for _ in piece_batches:
                pass
        for row in rows:
            await self._validate_row_in_thread(row)

    async def _validate_row_in_thread(self, row: Row) -> None:
        """Check a finished text's schema in a thread, without blocking other requests; ``row.result`` is quick then."""
        if row.sampler.constraints.find_errors:
            await self._context.threads.run_in_thread(row.result, work_kind="grammars")

    def _make_whole_response(self, prepared: PreparedRequest) -> Response:
        results = [row.result() for row in prepared.reply_inputs.rows]
        reply = prepared.api.reply_maker(prepared.reply_inputs).whole_reply(results)
        return Response(reply.model_dump_json(exclude_unset=True), media_type="application/json")

    # ------------------------------------------------------------ streams

    async def _stream_events(self, reply_maker: ReplyMaker, prepared: PreparedRequest) -> AsyncGenerator[bytes]:
        unsent_events = [*reply_maker.first_events()]
        rows = prepared.reply_inputs.rows
        async with aclosing(generate_pieces(self._context, rows, prepared.arrival_time)) as piece_batches:
            async for pieces in piece_batches:
                if not pieces:
                    unsent_events += reply_maker.keep_alive_events()
                    if any(row.waits_for_memory for row in rows):
                        unsent_events.append(MEMORY_WAIT_EVENT)
                for index, piece in pieces:
                    if piece.finish_reason:
                        await self._validate_row_in_thread(rows[index])
                    unsent_events += reply_maker.piece_events(index, piece)
                for event in unsent_events:
                    yield format_event(event)
                unsent_events = []
        for event in reply_maker.last_events():
            yield format_event(event)
        self._record_metrics(prepared)

    def _record_metrics(self, prepared: PreparedRequest) -> None:
        metrics = self._context.metrics
        reply_inputs = prepared.reply_inputs
        prompt_stats = [row.stats for row in reply_inputs.rows[:: reply_inputs.texts_per_prompt]]
        metrics.prompt_tokens.inc(sum(stats.prompt_tokens for stats in prompt_stats))
        metrics.cached_tokens.inc(sum(stats.cached_tokens for stats in prompt_stats))
        metrics.new_prompts.inc(sum(not stats.cached_tokens for stats in prompt_stats))
        metrics.request_seconds.observe(time.monotonic() - prepared.arrival_time)


class EventStream(StreamingResponse):
    """Server-sent events. Closes the iterator of a stream after a disconnect; Starlette leaves it open.

    Args:
        first_event: the first event, awaited by the caller, so that an earlier error is an ordinary reply.
        reply_maker: makes the events of an error.
        on_end: called at the end of the stream, in all cases.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first_event: bytes, events: AsyncGenerator[bytes], reply_maker: ReplyMaker, on_end: Callable[[], None]
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._first_event = first_event
        self._events = events
        self._reply_maker = reply_maker
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_state = scope["state"]
        request_state[STREAM_STATUS] = 499  # unless the stream is sent completely
        self.body_iterator = self._iterate_events(request_state)
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._on_end()

    async def _iterate_events(self, request_state: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the events, and an error as the last one; record the status in ``request_state``."""
        yield self._first_event
        try:
            async for event in self._events:
                yield event
            request_state[STREAM_STATUS] = 200
        except ApiError as error:
            request_state[STREAM_STATUS] = error.status_code
            for event in self._reply_maker.failure_events(to_request_failure(error)):
                yield format_event(event)
        except Exception:
            request_state[STREAM_STATUS] = 500
            raise


def format_event(event: BaseModel | bytes) -> bytes:
    """Return a server-sent event, named by its type, if any."""
    if isinstance(event, bytes):
        return event
    event_type: Any = getattr(event, "type", None)
    name_line = f"event: {event_type}\n".encode() if "type" in type(event).model_fields else b""
    return name_line + b"data: " + event.model_dump_json(exclude_unset=True).encode() + b"\n\n"


async def generate_pieces(
    context: ServerContext, rows: list[Row], arrival_time: float
) -> AsyncGenerator[IndexedPieces]:
    """Generate rows in the engine; yield their pieces, or an empty list after a silent ``KEEP_ALIVE_SECONDS``."""
    if rows[0].finish_reason:  # only the prompts were requested
        yield [(index, Piece("", [], row.finish_reason)) for index, row in enumerate(rows)]
        return
    engine = context.engine
    event_loop = asyncio.get_running_loop()
    deliveries = asyncio.Queue[tuple[float, IndexedPieces | OvspecError]]()

    def deliver_pieces(pieces: IndexedPieces | OvspecError) -> None:
        # The engine's time: a slow client doesn't delay tokens.
        event_loop.call_soon_threadsafe(deliveries.put_nowait, (time.monotonic(), pieces))

    job = Job(rows, deliver_pieces)
    unfinished_rows = len(rows)
    last_piece_times = dict[int, float]()  # by index of the row
    deadlines = RequestDeadlines(context, arrival_time)
    engine.submit(job)
    try:
        while unfinished_rows:
            try:
                # Python 3.11's wait_for can swallow a cancellation at the moment of a piece.
                async with asyncio.timeout(min(KEEP_ALIVE_SECONDS, deadlines.seconds_left(job.started))):
                    delivered_at, pieces = await deliveries.get()
            except TimeoutError:
                if not engine.is_alive:
                    raise ApiError(500, "The server's engine has stopped; start the server again.") from None
                yield []
                continue
            if isinstance(pieces, OvspecError):
                raise make_text_error(pieces, context.lm)
            for index, piece in pieces:
                record_piece_time(context, delivered_at, last_piece_times.get(index), arrival_time)
                last_piece_times[index] = delivered_at
                unfinished_rows -= piece.finish_reason is not None
            yield pieces
    finally:
        if unfinished_rows:
            engine.cancel_job(job)


class RequestDeadlines:
    """The deadlines for a request's start and end; ``arrival_time``: the time of its arrival."""

    def __init__(self, context: ServerContext, arrival_time: float) -> None:
        self._options = context.options
        self._end_deadline = arrival_time + context.options.request_timeout
        self._start_deadline = min(time.monotonic() + context.options.queue_timeout, self._end_deadline)

    def seconds_left(self, has_started: bool) -> float:
        """Return the seconds until the next deadline, and a little more; raises ApiError after it."""
        now = time.monotonic()
        if now > self._end_deadline:
            raise make_timeout_error(self._options.request_timeout)
        if not has_started and now > self._start_deadline:
            waited_sentence = f"The request timed out after {self._options.queue_timeout:g} seconds in the queue"
            raise ApiError(503, f"{waited_sentence}; try again later.", code="timeout", retry_after=5)
        deadline = self._end_deadline if has_started else self._start_deadline
        return deadline - now + 0.01


def record_piece_time(
    context: ServerContext, delivered_at: float, last_piece_time: float | None, arrival_time: float
) -> None:
    """Record the time to a row's first piece, or between two of its pieces."""
    if last_piece_time is None:
        context.metrics.time_to_first_token.observe(delivered_at - arrival_time)
    else:
        context.metrics.time_between_tokens.observe(delivered_at - last_piece_time)
