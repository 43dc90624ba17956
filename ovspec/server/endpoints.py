"""The endpoints that generate texts: from the body of a request to its answer or stream."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ovspec.api.model import make_retry_rows
from ovspec.base.errors import OvspecError, PromptError
from ovspec.engine.engine_thread import Job
from ovspec.engine.results import Piece
from ovspec.engine.row import Row
from ovspec.params import Params, refuse_retries_in_stream
from ovspec.protocols.apis import TextApi, TokenCount
from ovspec.protocols.errors import Failure
from ovspec.protocols.logprobs import SILENT, Echo, between_rounds, echo_of
from ovspec.protocols.reply import Events, Writer
from ovspec.protocols.requests import TextRequest, may_constrain, texts_asked
from ovspec.server.admission import Service, Work, unless_gone
from ovspec.server.errors import ApiError, about_prompt, as_api_error, failure_of, too_long
from ovspec.server.guard import OUTCOME, OWNER
from ovspec.text.tokenizer import LONG_TEXT_CHARACTERS

T = TypeVar("T")
EVERY = 15.0  # seconds after which a silent stream tells that it is alive


@dataclass
class PieceStream:
    """The texts of a request that is being answered."""

    api: TextApi
    head: dict[str, Any]  # of the answer
    request: TextRequest
    params: Params
    rows: list[Row]  # those of the first prompt first, ``n`` for each prompt
    began: float  # when the request came
    echoes: list[Echo]  # what is repeated of each prompt


class TextEndpoints:
    def __init__(self, service: Service) -> None:
        self._service, self._lm = service, service.lm

    async def answer(self, api: TextApi, body: Any, http: Request) -> Response:
        """Answer a request with texts."""
        began, service = time.monotonic(), self._service
        with ExitStack() as leaving:
            leaving.enter_context(service.counted(texts_asked(body)))
            service.check_model(body.model)
            async with service.preparing(began):
                texts = await unless_gone(http, self._prepare(api, body, http, began))
            if texts.request.stream:
                writer = api.writer(*self._parts(texts), texts.rows, texts.echoes)
                events = self._events(writer, texts)
                first = await unless_gone(http, anext(events))
                return EventStream(first, events, writer.failed, leaving.pop_all().close)
            await unless_gone(http, self._generate(texts))
            work: Work = "texts" if texts.params.logprobs is None else "long"
            return await service.apart(self._whole, texts, work=work)

    async def count(self, api: TextApi, body: Any, http: Request) -> TokenCount:
        """Count the tokens of a request's prompt."""
        service = self._service
        service.check_model(body.model)
        with service.counted():
            async with service.preparing(time.monotonic()):
                return await unless_gone(http, self._count(api, body, http))

    async def _count(self, api: TextApi, body: Any, http: Request) -> TokenCount:
        count = await self._service.apart(self._tokens, api, body, http, work=await work_for(http))
        return TokenCount(input_tokens=count, **api.counts)

    def _tokens(self, api: TextApi, body: Any, http: Request) -> int:
        request = self._service.read(api, body, http)
        params = self._service.params(request)
        try:
            return sum(len(self._lm.runtime.prompts.encode_prompt(prompt, params).ids) for prompt in request.prompts)
        except PromptError as error:
            raise about_prompt(error, self._lm, request.prompt_field) from None

    async def _prepare(self, api: TextApi, body: Any, http: Request, began: float) -> PieceStream:
        """Return the texts that are asked for, with their rows and what is repeated of their prompts."""
        work: Work = "grammars" if may_constrain(body) else await work_for(http)
        texts = await self._service.apart(self._texts, api, body, http, began, work=work)
        if texts.request.echo:
            texts.echoes = await self._echoes(texts)
        return texts

    def _texts(self, api: TextApi, body: Any, http: Request, began: float) -> PieceStream:
        """Return a request's texts. May take long: grammars are compiled."""
        request, owner = self._service.read(api, body, http), getattr(http.state, OWNER, None)
        params = self._service.params(request)
        if request.stream:
            refuse_retries_in_stream(params)
        limits = self._service.limits(request, params)
        try:
            with request.overrides.client_names():
                found = [
                    self._lm.runtime.row_maker.make_rows(prompt, params, memory_reserved=True)
                    for prompt in request.prompts
                ]
        except PromptError as error:
            raise about_prompt(error, self._lm, request.prompt_field) from None
        rows = [row for each in found for row in each]
        for row in rows:
            row.draft_limits = limits
            if row.sequence.owner is None and not self._service.options.share_prefixes:
                row.sequence.owner = owner
            if request.echo and request.only_prompts:
                row.finish_reason, row.stats.cached_tokens = "length", 0
        self._service.check_room(request, rows)
        head, echoes = api.head(self._service.names[0]), [SILENT] * len(request.prompts)
        return PieceStream(api, head, request, params, rows, began, echoes)

    def _parts(self, texts: PieceStream) -> tuple[Any, ...]:
        """Return what answers and streams are made from, besides their texts."""
        return self._lm.tokenizer, texts.head, texts.request

    async def _echoes(self, texts: PieceStream) -> list[Echo]:
        """Return what is repeated of each prompt."""
        echoes = list[Echo]()
        for prompt, row in zip(texts.request.prompts, texts.rows[:: texts.params.n], strict=True):
            ids = row.record.prompt_ids.tolist() if row.record else []
            tops = texts.params.logprobs
            logprobs = None
            if tops is not None:
                logprobs = await self._result_of(between_rounds(self._lm, self._service.engine, ids, tops))
            echoes.append(await self._service.apart(echo_of, self._lm.tokenizer, prompt, ids, logprobs, work="long"))
        return echoes

    async def _result_of(self, future: Future[T]) -> T:
        """Return the result of work in the engine's thread; raises ApiError if it fails."""
        try:
            return await asyncio.wrap_future(future)
        except OvspecError as error:
            raise as_api_error(error, self._lm) from None

    # ------------------------------------------------------------ whole answers

    async def _generate(self, texts: PieceStream) -> None:
        """Generate all texts of a request; again with other seeds, where ``retries`` asks for it."""
        service, rows = self._service, texts.rows
        await self._finish(rows, texts.began)
        for _ in range(0 if texts.request.only_prompts else texts.params.retries):
            results = [row.result() for row in rows]
            asked = self._lm.runtime, texts.request.prompts, texts.params, results, True
            async with service.preparing(texts.began):
                again: dict[int, Row] = await service.apart(make_retry_rows, *asked, work="grammars")
            if not again:
                break
            for index, row in again.items():
                row.draft_limits, row.sequence.owner = rows[index].draft_limits, rows[index].sequence.owner
                rows[index] = row
            await self._finish([*again.values()], texts.began)
        self._note(texts)

    async def _finish(self, rows: list[Row], began: float) -> None:
        """Generate rows whose pieces nobody waits for."""
        async with aclosing(pieces_of(self._service, rows, began)) as pieces:
            async for _ in pieces:
                pass
        for row in rows:
            await self._judge(row)

    async def _judge(self, row: Row) -> None:
        """Judge an ended text in a thread, so that other requests go on; ``row.result`` is quick after it."""
        if row.sampler.constraints.find_errors:
            await self._service.apart(row.result, work="grammars")

    def _whole(self, texts: PieceStream) -> Response:
        results = [row.result() for row in texts.rows]
        answer = texts.api.whole(*self._parts(texts), results, texts.echoes)
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    # ------------------------------------------------------------ streams

    async def _events(self, writer: Writer, texts: PieceStream) -> AsyncGenerator[bytes]:
        events = [*writer.first()]
        async with aclosing(pieces_of(self._service, texts.rows, texts.began)) as pieces:
            async for found in pieces:
                if not found:
                    events += writer.waiting()
                for index, piece in found:
                    if piece.finish_reason:
                        await self._judge(texts.rows[index])
                    events += writer.more(index, piece)
                for each in events:
                    yield event(each)
                events = []
        for each in writer.last():
            yield event(each)
        self._note(texts)

    def _note(self, texts: PieceStream) -> None:
        metrics, prompts = self._service.metrics, [row.stats for row in texts.rows[:: texts.params.n]]
        metrics.prompt_tokens.inc(sum(stats.prompt_tokens for stats in prompts))
        metrics.cached_tokens.inc(sum(stats.cached_tokens for stats in prompts))
        metrics.new_prompts.inc(sum(not stats.cached_tokens for stats in prompts))
        metrics.whole.observe(time.monotonic() - texts.began)


async def work_for(http: Request) -> Work:
    """Return the work that a request without a grammar is."""
    return "long" if len(await http.body()) > LONG_TEXT_CHARACTERS else "texts"


async def pieces_of(service: Service, rows: list[Row], began: float) -> AsyncGenerator[list[tuple[int, Piece]]]:
    """Have the engine generate rows; yield lists of (index of the row, piece), an empty one after ``EVERY`` seconds."""
    if rows[0].finish_reason:  # only the prompts are wanted
        yield [(index, Piece("", [], row.finish_reason)) for index, row in enumerate(rows)]
        return
    engine, metrics, options = service.engine, service.metrics, service.options
    loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[float, Any]]()

    def deliver(found: list[tuple[int, Piece]] | OvspecError) -> None:
        # The time is that of the engine: a client that reads slowly makes no token late.
        loop.call_soon_threadsafe(events.put_nowait, (time.monotonic(), found))

    job, left = Job(rows, deliver), len(rows)
    before = dict[int, float]()  # index of a row -> time of its last piece
    asked, ends = time.monotonic(), began + options.request_timeout
    engine.submit(job)
    try:
        while left:
            now = time.monotonic()
            limit = ends if job.started else min(asked + options.queue_timeout, ends)
            if now > limit:
                if now > ends:
                    raise too_long(options.request_timeout)
                waited = f"The request has waited for {options.queue_timeout:g} seconds, and its turn has not come"
                raise ApiError(503, f"{waited}; try again later.", code="timeout", retry_after=5)
            try:
                # Python 3.11's wait_for goes on in a task that is cancelled just when a piece comes.
                async with asyncio.timeout(min(EVERY, limit - now + 0.01)):
                    at, found = await events.get()
            except TimeoutError:
                if not engine.is_alive:
                    raise ApiError(500, "The server's engine has stopped; start the server again.") from None
                yield []
                continue
            if isinstance(found, OvspecError):
                raise as_api_error(found, service.lm)
            for index, piece in found:
                times = metrics.between if index in before else metrics.first
                times.observe(at - before.get(index, began))
                before[index] = at
                left -= piece.finish_reason is not None
            yield found
    finally:
        if left:
            engine.cancel_job(job)


class EventStream(StreamingResponse):
    """Server-sent events. Starlette leaves the iterator of a stream open when its client goes away; this closes it.

    Args:
        first: the first event, which its maker has awaited, so that an error before it is an ordinary answer.
        failed: makes the events of an error.
        ended: called when the stream has ended, in whichever way.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes],
        failed: Callable[[Failure], Events],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._first, self._events, self._failed, self._ended = first, events, failed, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        state[OUTCOME] = 499  # unless it comes to its end
        self.body_iterator = self._told(state)
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._ended()

    async def _told(self, state: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the events, and an error as the last one; note in ``state`` how they have ended."""
        yield self._first
        try:
            async for part in self._events:
                yield part
            state[OUTCOME] = 200
        except ApiError as error:
            state[OUTCOME] = error.status_code
            for each in self._failed(failure_of(error)):
                yield event(each)
        except Exception:
            state[OUTCOME] = 500
            raise


def event(data: Any) -> bytes:
    """Return a server-sent event, which is named if its data has a type."""
    if isinstance(data, bytes):
        return data
    head = f"event: {data.type}\n".encode() if "type" in type(data).model_fields else b""
    return head + b"data: " + data.model_dump_json(exclude_unset=True).encode() + b"\n\n"
