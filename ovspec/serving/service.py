"""What the endpoints share: who is let in, and how a request for texts is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from ovspec.constraints.maker import grammar_asked
from ovspec.errors import OvspecError
from ovspec.loop.row import Row
from ovspec.model import LanguageModel, rows_again
from ovspec.options import GenerateOptions
from ovspec.serving.answers import DONE, Head, Told, counted, event, whole
from ovspec.serving.echo import Echo, echoes_of
from ovspec.serving.engine import Engine
from ovspec.serving.errors import ApiError, for_clients
from ovspec.serving.guard import OWNER
from ovspec.serving.metrics import Metrics
from ovspec.serving.requests import Kind, TextRequest, make_rows, read_request
from ovspec.serving.streams import Stream, unless_gone
from ovspec.serving.texts import Texts, too_long

LIVES = b": waiting\n\n"  # a comment in a stream, for proxies that close silent connections
EVERY = 15.0  # seconds between two of them
AGAIN = 2  # seconds after which a client that was refused may try again


class Service:
    """What the endpoints share: the model, the engine, and how many requests there are.

    Args:
        name: the model's name in requests and answers.
        options: those of ``ovspec serve``.
    """

    def __init__(self, lm: LanguageModel, engine: Engine, name: str, options: Any) -> None:
        self.lm, self.engine, self.name, self.options = lm, engine, name, options
        self.metrics = Metrics(engine)
        self.requests = 0  # that are being answered
        self.draining = False
        self.began = int(time.time())
        # Grammars have threads of their own, so that checking one holds up no request without any.
        self._threads = {kind: ThreadPoolExecutor(4, f"ovspec {kind}") for kind in ("texts", "grammars")}

    @property
    def defaults(self) -> GenerateOptions:
        return {} if self.options.max_tokens is None else {"max_tokens": self.options.max_tokens}

    @property
    def most_requests(self) -> int:
        return self.options.batch_size + self.options.queue_size

    def check_open(self) -> None:
        """Raise ApiError if no further request can be taken."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=10)
        if not self.engine.alive:
            raise ApiError(503, "The server's engine has stopped; start the server again.")
        if self.requests >= self.most_requests:
            raise ApiError(429, "Too many requests are waiting; try again later.", retry_after=AGAIN)

    def check_model(self, name: str | None) -> None:
        if name not in (None, "", self.name):
            raise ApiError(404, f"There is no model {name!r:.80} here, only {self.name}.", "model", "model_not_found")

    async def apart(self, work: Callable[..., Any], *arguments: Any, grammar: bool = False) -> Any:
        """Return what ``work`` returns, run in a thread, so that other requests go on; its OvspecErrors become 400s."""
        threads = self._threads["grammars" if grammar else "texts"]
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, partial(work, *arguments))
        except OvspecError as error:
            message = for_clients(error, self.lm)
            raise ApiError(400, message, field_in(message)) from None

    async def answer(self, kind: Kind, body: Any, http: Request) -> Response:
        """Generate what a request asks for, and return the answer or the stream."""
        self.check_open()
        fields = body.given()
        self.check_model(fields.get("model"))
        self.requests += 1
        began = time.monotonic()
        handed_over = False
        try:
            try:
                async with asyncio.timeout(self.options.request_timeout):
                    request, echoes = await unless_gone(http, self._prepared(kind, fields, http))
            except TimeoutError:
                raise too_long(self.options.request_timeout) from None
            head = Head(self.name, kind == "chat")
            if request.stream:
                handed_over = True
                return Stream(self._stream(head, request, echoes, began), self._leave)
            await unless_gone(http, self._generate(request, began))
            return JSONResponse(await self.apart(whole, self.lm.tokenizer, head, request, echoes))
        finally:
            if not handed_over:
                self._leave()

    async def _prepared(self, kind: Kind, fields: dict[str, Any], http: Request) -> tuple[TextRequest, list[Echo]]:
        """Return what is asked for, with its rows, and what is repeated of each prompt."""
        grammar = grammar_asked(fields) or fields.get("response_format") is not None
        request = await self.apart(read_request, self.lm, kind, fields, self.defaults, grammar=grammar)
        request.rows = await self.apart(make_rows, self.lm, request, grammar=grammar)
        try:
            self.engine.check_room(request.rows)
        except OvspecError as error:
            raise ApiError(400, str(error), "max_tokens") from None
        request.owner = getattr(http.state, OWNER, None)
        for row in request.rows:
            row.sequence.owner = request.owner
        return request, await echoes_of(self.engine, request)

    def _leave(self) -> None:
        self.requests -= 1

    def _texts(self, request: TextRequest, began: float) -> Texts:
        timeouts = self.options.queue_timeout, self.options.request_timeout
        return Texts(self.engine, request, self.metrics, timeouts, began)

    async def _generate(self, request: TextRequest, began: float) -> None:
        """Generate all texts of a request; again with other seeds, where ``retries`` asks for it."""
        await self._finish(request, began)
        for _ in range(request.options.get("retries") or 0):
            results = [row.result() for row in request.rows]
            asked = self.lm.workspace, request.prompts, request.options, results, True
            again: dict[int, Row] = await self.apart(rows_again, *asked, grammar=True)
            if not again:
                break
            for index, row in again.items():
                request.rows[index], row.limits, row.sequence.owner = row, request.limits, request.owner
            await self._finish(replace(request, rows=[*again.values()]), began)
        self._note(request, began)

    async def _finish(self, request: TextRequest, began: float) -> None:
        """Generate the texts of a request, whose pieces nobody waits for."""
        async with aclosing(self._texts(request, began).pieces(EVERY)) as pieces:
            async for _ in pieces:
                pass
        for row in request.rows:
            await self._judge(row)

    async def _judge(self, row: Row) -> None:
        """Judge a text that has ended in a thread, so that other requests go on; its result is then at hand."""
        if row.sampler.constraints.judge:
            await self.apart(row.result, grammar=True)

    async def _stream(self, head: Head, request: TextRequest, echoes: list[Echo], began: float) -> AsyncIterator[bytes]:
        tokenizer, part = self.lm.tokenizer, head.body(part=True)
        with_usage: dict[str, Any] = {"usage": None} if request.include_usage else {}
        told = [Told(tokenizer, request, i, echoes[i // request.n][0]) for i in range(len(request.rows))]
        begun, left = False, len(told)
        async with aclosing(self._texts(request, began).pieces(EVERY)) as pieces:
            async for found in pieces:
                if found is None:
                    yield LIVES
                    continue
                choices = []
                if not begun:
                    begun = True
                    choices = [c for i, text in enumerate(told) for c in text.first(*echoes[i // request.n])]
                for index, piece in found:
                    if piece.finish_reason:
                        await self._judge(request.rows[index])
                    choices += told[index].more(piece)
                for choice in choices:
                    left -= choice["finish_reason"] is not None
                    last = {} if left else {"timings": counted(request)["timings"]}
                    yield event(part | {"choices": [choice]} | with_usage | last)
        if request.include_usage:
            yield event(part | {"choices": []} | counted(request))
        yield DONE
        self._note(request, began)

    def _note(self, request: TextRequest, began: float) -> None:
        prompts = sum(row.stats.prompt_tokens for row in request.rows[:: request.n])
        self.metrics.note_texts(prompts, time.monotonic() - began)


def field_in(message: str) -> str | None:
    """Return the field that an error message names first in backticks, or begins with."""
    parts = message.split("`")
    return parts[1] if len(parts) > 2 and parts[1].isidentifier() else None
