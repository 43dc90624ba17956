"""The endpoints that generate texts: from the body of a request to its answer or stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from ovspec.errors import OvspecError, PromptError
from ovspec.loop.results import Piece
from ovspec.loop.row import Row
from ovspec.model import rows_again
from ovspec.openai.answers import ChunkWriter, head_of, whole
from ovspec.openai.bodies import ChatBody, CompletionBody
from ovspec.openai.logprobs import SILENT, Echo
from ovspec.openai.requests import Kind, TextRequest, read_texts, texts_asked
from ovspec.options import Params, check_samples, refuse_retries
from ovspec.serving.echo import echoes_of
from ovspec.serving.engine import Job
from ovspec.serving.errors import ApiError, about_prompt, as_api_error, error_body, too_long
from ovspec.serving.guard import OUTCOME, OWNER
from ovspec.serving.service import Service, Work, unless_gone
from ovspec.text.tokenizer import LONG

LIVES = b": waiting\n\n"  # a comment in a stream, for proxies that close silent connections
EVERY = 15.0  # seconds between two of them


@dataclass
class Texts:
    """The texts of a request that is being answered.

    params: those of all of them, complete.
    rows: those of the first prompt first, ``n`` for each prompt.
    began: when the request came.
    echoes: what is repeated of each prompt.
    """

    request: TextRequest
    params: Params
    rows: list[Row]
    began: float
    echoes: list[Echo]


class TextEndpoints:
    """The endpoints that generate texts."""

    def __init__(self, service: Service) -> None:
        self._service, self._lm = service, service.lm

    async def chat(self, body: ChatBody, http: Request) -> Response:  # type: ignore[valid-type]
        return await self._answer("chat", body, http)

    async def complete(self, body: CompletionBody, http: Request) -> Response:  # type: ignore[valid-type]
        return await self._answer("completion", body, http)

    async def _answer(self, kind: Kind, body: Any, http: Request) -> Response:
        began, service = time.monotonic(), self._service
        with ExitStack() as leaving:
            leaving.enter_context(service.counted(texts_asked(body)))
            service.check_model(body.model)
            async with service.preparing(began):
                texts = await unless_gone(http, self._prepare(kind, body, http, began))
            head = head_of(kind == "chat", service.name)
            if texts.request.stream:
                events = self._events(head, texts)
                first = await unless_gone(http, anext(events))
                return EventStream(first, events, leaving.pop_all().close)
            await unless_gone(http, self._generate(texts))
            work: Work = "texts" if texts.params.logprobs is None else "long"
            return await service.apart(self._whole, head, texts, work=work)

    async def _prepare(self, kind: Kind, body: Any, http: Request, began: float) -> Texts:
        """Return the texts that are asked for, with their rows and what is repeated of their prompts."""
        service = self._service
        request = await service.apart(read_texts, body, kind)
        work: Work = "grammars" if request.grammar else "long" if request.size > LONG else "texts"
        texts = await service.apart(self._texts, request, getattr(http.state, OWNER, None), began, work=work)
        service.check_room(request, texts.rows)
        if request.echo:
            texts.echoes = await echoes_of(service.engine, request, texts.rows, partial(service.apart, work="long"))
        return texts

    def _texts(self, request: TextRequest, owner: int | None, began: float) -> Texts:
        """Return a request's texts, which may take long: grammars are compiled."""
        params = self._service.params(request)
        check_samples(params)
        if request.stream:
            refuse_retries(params, "a stream, whose text is seen before it ends")
        limits = self._service.limits(request, params)
        try:
            with request.client_names():
                found = [self._lm.workspace.rows(prompt, params, reserved=True) for prompt in request.prompts]
        except PromptError as error:
            raise about_prompt(error, self._lm, request.prompt_field) from None
        rows = [row for each in found for row in each]
        for row in rows:
            row.limits, row.sequence.owner = limits, owner
        return Texts(request, params, rows, began, [SILENT] * len(request.prompts))

    # ------------------------------------------------------------ whole answers

    async def _generate(self, texts: Texts) -> None:
        """Generate all texts of a request; again with other seeds, where ``retries`` asks for it."""
        service, rows, params = self._service, texts.rows, texts.params
        await self._finish(texts, rows)
        for _ in range(params.retries):
            results = [row.result() for row in rows]
            asked = self._lm.workspace, texts.request.prompts, params, results, True
            async with service.preparing(texts.began):
                again: dict[int, Row] = await service.apart(rows_again, *asked, work="grammars")
            if not again:
                break
            for index, row in again.items():
                row.limits, row.sequence.owner = rows[index].limits, rows[index].sequence.owner
                rows[index] = row
            await self._finish(texts, [*again.values()])
        self._note(texts)

    async def _finish(self, texts: Texts, rows: list[Row]) -> None:
        """Generate rows whose pieces nobody waits for."""
        async with aclosing(self._pieces(texts, rows)) as pieces:
            async for _ in pieces:
                pass
        for row in rows:
            await self._judge(row)

    async def _judge(self, row: Row) -> None:
        """Judge a text that has ended in a thread, so that other requests go on; its result is then at hand."""
        if row.sampler.constraints.judge:
            await self._service.apart(row.result, work="grammars")

    def _whole(self, head: dict[str, Any], texts: Texts) -> Response:
        results = [row.result() for row in texts.rows]
        answer = whole(self._lm.workspace.tokenizer, head, texts.request, results, texts.echoes)
        return Response(answer.model_dump_json(exclude_unset=True), media_type="application/json")

    # ------------------------------------------------------------ streams

    async def _events(self, head: dict[str, Any], texts: Texts) -> AsyncGenerator[bytes]:
        writer = ChunkWriter(self._lm.workspace.tokenizer, head, texts.request, texts.rows, texts.echoes)
        begun = False
        async with aclosing(self._pieces(texts, texts.rows)) as pieces:
            async for found in pieces:
                if found is None:
                    yield LIVES
                    continue
                chunks = [] if begun else writer.first()
                begun = True
                for index, piece in found:
                    if piece.finish_reason:
                        await self._judge(texts.rows[index])
                    chunks += writer.more(index, piece)
                for chunk in chunks:
                    yield event(chunk.model_dump_json(exclude_unset=True))
        if texts.request.include_usage:
            yield event(writer.usage().model_dump_json(exclude_unset=True))
        yield event("[DONE]")
        self._note(texts)

    async def _pieces(self, texts: Texts, rows: list[Row]) -> AsyncGenerator[list[tuple[int, Piece]] | None]:
        """Generate rows; yield lists of (index of the row, piece), or None after some seconds without one."""
        if texts.request.only_prompts:
            for row in rows:
                row.finish_reason, row.stats.cached_tokens = "length", 0
            yield [(index, Piece("", [], "length")) for index in range(len(rows))]
            return
        async with aclosing(pieces_of(self._service, rows, texts.began)) as pieces:
            async for found in pieces:
                yield found

    def _note(self, texts: Texts) -> None:
        prompts = texts.rows[:: texts.params.n]
        self._service.metrics.prompt_tokens.inc(sum(row.stats.prompt_tokens for row in prompts))
        self._service.metrics.whole.observe(time.monotonic() - texts.began)


async def pieces_of(
    service: Any, rows: list[Row], began: float, every: float = EVERY
) -> AsyncGenerator[list[tuple[int, Piece]] | None]:
    """Have the engine generate rows; yield lists of (index of the row, piece), or None ``every`` so many seconds.

    ``began``: when the request came.
    """
    engine, metrics, options = service.engine, service.metrics, service.options
    loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[float, Any]]()

    def deliver(found: list[tuple[int, Piece]] | OvspecError) -> None:
        # The time is that of the engine: a client that reads slowly makes no token late.
        loop.call_soon_threadsafe(events.put_nowait, (time.monotonic(), found))

    job, last, asked, ends = Job(rows, deliver), dict[int, float](), time.monotonic(), began + options.request_timeout
    left = len(rows)
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
                async with asyncio.timeout(min(every, limit - now + 0.01)):
                    at, found = await events.get()
            except TimeoutError:
                if not engine.alive:
                    raise ApiError(500, "The server's engine has stopped; start the server again.") from None
                yield None
                continue
            if isinstance(found, OvspecError):
                raise as_api_error(found, service.lm)
            for index, piece in found:
                before = last.get(index)
                times = metrics.first if before is None else metrics.between
                times.observe(at - (began if before is None else before))
                last[index] = at
                left -= piece.finish_reason is not None
            yield found
    finally:
        if left:
            engine.cancel(job)


class EventStream(StreamingResponse):
    """Server-sent events. Starlette leaves the iterator of a stream open when its client goes away; this closes it.

    Args:
        first: the first event, which its maker has awaited, so that an error before it is an ordinary answer.
        ended: called when the stream has ended, in whichever way.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes], ended: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._first, self._events, self._ended = first, events, ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
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
            yield event(error_body(error))
        except Exception:
            state[OUTCOME] = 500
            raise


def event(data: str | bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: " + (data.encode() if isinstance(data, str) else data) + b"\n\n"
