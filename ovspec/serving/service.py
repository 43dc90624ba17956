"""What the endpoints share: who is let in, and how a request for texts is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

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
from ovspec.serving.engine import ENDED, Ended, Engine
from ovspec.serving.errors import ApiError, for_clients
from ovspec.serving.guard import OWNER
from ovspec.serving.metrics import Metrics
from ovspec.serving.requests import Kind, TextRequest, check_logprobs, make_rows, read_request, texts_asked
from ovspec.serving.streams import Stream, unless_gone
from ovspec.serving.texts import Texts, as_api_error, too_long
from ovspec.text.tokenizer import LONG

# What threads do. Checking a grammar, or a long text, holds up no request without one.
Work = Literal["texts", "long", "grammars"]
LIVES = b": waiting\n\n"  # a comment in a stream, for proxies that close silent connections
EVERY = 15.0  # seconds between two of them
AGAIN = 2  # seconds after which a client that was refused may try again


class Service:
    """What the endpoints share: the model, the engine, and how many requests there are, and texts in them.

    Args:
        name: the model's name in requests and answers.
        options: those of ``ovspec serve``.
    """

    def __init__(self, lm: LanguageModel, engine: Engine, name: str, options: Any) -> None:
        self.lm, self.engine, self.name, self.options = lm, engine, name, options
        self.metrics = Metrics(engine)
        self.requests = self._texts = 0  # that are being answered
        self.draining = self.given_up = False
        self._preparations = set[asyncio.Task[Any]]()  # those whose requests the engine doesn't have yet
        self.began = int(time.time())
        self._threads = {work: ThreadPoolExecutor(4, f"ovspec {work}") for work in get_args(Work)}

    @property
    def defaults(self) -> GenerateOptions:
        return {} if self.options.max_tokens is None else {"max_tokens": self.options.max_tokens}

    def check_open(self, texts: int = 1) -> None:
        """Raise ApiError if no further request for this many texts can be taken."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=10)
        if not self.engine.alive:
            raise ApiError(503, "The server's engine has stopped; start the server again.")
        most = self.options.batch_size + self.options.queue_size
        if self._texts + min(texts, most) > most:  # a request for more than that is taken if there is no other
            raise ApiError(429, "Too many texts are waiting; try again later.", retry_after=AGAIN)

    @contextmanager
    def counted(self, texts: int = 1) -> Generator[None]:
        """Count a request for this many texts while it is answered; raises ApiError if it can't be taken."""
        self.check_open(texts)
        self.requests, self._texts = self.requests + 1, self._texts + texts
        try:
            yield
        finally:
            self.requests, self._texts = self.requests - 1, self._texts - texts

    def give_up(self) -> None:
        """End all requests, those that are being prepared, too."""
        self.given_up = True
        for task in [*self._preparations]:
            task.cancel()
        self.engine.give_up()

    def check_model(self, name: str | None) -> None:
        if name not in (None, "", self.name):
            raise ApiError(404, f"There is no model {name!r:.80} here, only {self.name}.", "model", "model_not_found")

    async def apart(self, function: Callable[..., Any], *arguments: Any, work: Work = "texts") -> Any:
        """Return what a function returns, run in a thread, so that other requests go on; OvspecErrors become 400s."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[work], partial(function, *arguments))
        except OvspecError as error:
            message = for_clients(error, self.lm)
            raise ApiError(400, message, field_in(message)) from None

    async def translate(self, http: Request, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function makes of a text or of tokens."""
        with self.counted():
            return await self.apart(function, *arguments, work="long" if len(await http.body()) > LONG else "texts")

    async def answer(self, kind: Kind, body: Any, http: Request) -> Response:
        """Generate what a request asks for, and return the answer or the stream."""
        began = time.monotonic()
        fields = body.given()
        with ExitStack() as leaving:
            leaving.enter_context(self.counted(texts_asked(fields)))
            self.check_model(fields.get("model"))
            async with self._preparing(began):
                request, echoes = await unless_gone(http, self._prepare(kind, fields, http))
            head = Head(self.name, kind == "chat")
            if request.stream:
                return Stream(self._stream(head, request, echoes, began), leaving.pop_all().close)
            await unless_gone(http, self._generate(request, began))
            large: Work = "texts" if request.options.get("logprobs") is None else "long"
            return await self.apart(lambda: JSONResponse(whole(self.lm.tokenizer, head, request, echoes)), work=large)

    @asynccontextmanager
    async def _preparing(self, began: float) -> AsyncGenerator[None]:
        """Raise ApiError if what is done inside takes too long, or when ``give_up`` is called."""
        task, left = asyncio.current_task(), began + self.options.request_timeout - time.monotonic()
        assert task
        self._preparations.add(task)
        try:
            async with asyncio.timeout(left):
                yield
        except TimeoutError:
            raise too_long(self.options.request_timeout) from None
        except asyncio.CancelledError:
            if not self.given_up:
                raise
            task.uncancel()
            raise as_api_error(Ended(ENDED), self.lm) from None
        finally:
            self._preparations.discard(task)

    async def _prepare(self, kind: Kind, fields: dict[str, Any], http: Request) -> tuple[TextRequest, list[Echo]]:
        """Return what is asked for, with its rows, and what is repeated of each prompt."""
        work: Work = "long" if len(await http.body()) > LONG else "texts"
        if grammar_asked(fields) or fields.get("response_format") is not None:
            work = "grammars"
        request = await self.apart(read_request, self.lm, kind, fields, self.defaults, work=work)
        request.rows = await self.apart(make_rows, self.lm, request, work=work)
        check_logprobs(request)
        try:
            self.engine.check_room(request.rows)
        except OvspecError as error:
            raise ApiError(400, str(error), "max_tokens") from None
        request.owner = getattr(http.state, OWNER, None)
        for row in request.rows:
            row.sequence.owner = request.owner
        return request, await echoes_of(self.engine, request, partial(self.apart, work="long"))

    def _texts_of(self, request: TextRequest, began: float) -> Texts:
        timeouts = self.options.queue_timeout, self.options.request_timeout
        return Texts(self.engine, request, self.metrics, timeouts, began)

    async def _generate(self, request: TextRequest, began: float) -> None:
        """Generate all texts of a request; again with other seeds, where ``retries`` asks for it."""
        await self._finish(request, began)
        for _ in range(request.options.get("retries") or 0):
            results = [row.result() for row in request.rows]
            asked = self.lm.workspace, request.prompts, request.options, results, True
            async with self._preparing(began):
                again: dict[int, Row] = await self.apart(rows_again, *asked, work="grammars")
            if not again:
                break
            for index, row in again.items():
                request.rows[index], row.limits, row.sequence.owner = row, request.limits, request.owner
            await self._finish(replace(request, rows=[*again.values()]), began)
        self._note(request, began)

    async def _finish(self, request: TextRequest, began: float) -> None:
        """Generate the texts of a request, whose pieces nobody waits for."""
        async with aclosing(self._texts_of(request, began).pieces(EVERY)) as pieces:
            async for _ in pieces:
                pass
        for row in request.rows:
            await self._judge(row)

    async def _judge(self, row: Row) -> None:
        """Judge a text that has ended in a thread, so that other requests go on; its result is then at hand."""
        if row.sampler.constraints.judge:
            await self.apart(row.result, work="grammars")

    async def _stream(self, head: Head, request: TextRequest, echoes: list[Echo], began: float) -> AsyncIterator[bytes]:
        tokenizer, part = self.lm.tokenizer, head.body(part=True)
        with_usage: dict[str, Any] = {"usage": None} if request.include_usage else {}
        told = [Told(tokenizer, request, i, echoes[i // request.n][0]) for i in range(len(request.rows))]
        begun, left = False, len(told)
        async with aclosing(self._texts_of(request, began).pieces(EVERY)) as pieces:
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
