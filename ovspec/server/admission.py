"""Admission of requests: how many may run and wait, for how long, and the threads that prepare them."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Literal, TypeVar, get_args

from fastapi import Request

from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError, UnavailableError
from ovspec.engine.engine_thread import EngineThread
from ovspec.params.serving import ServeParams
from ovspec.protocols.bodies import RequestError
from ovspec.server.errors import ApiError, ServerEnded, message_for_clients, text_error, timeout_error
from ovspec.text.tokenizer import LONG_TEXT_CHARACTERS

T = TypeVar("T")
RETRY_SECONDS = 2  # after which a client that was refused may try again
MAX_TEXTS = 128  # of a request
# The work of threads. Checking a grammar, or a long text, holds up no request without one.
WorkKind = Literal["texts", "long", "grammars"]
THREADS_FOR_WORK = 4


class Admission:
    """Counts the requests that are being answered, and refuses further ones beyond the limits."""

    def __init__(self, lm: LanguageModel, engine: EngineThread, model_names: list[str], options: ServeParams) -> None:
        self._lm = lm
        self._engine = engine
        self._model_names = model_names
        self._strict_model = options.strict_model
        self._max_texts = options.batch_size + options.queue_size
        self._request_timeout = options.request_timeout
        self.requests = 0  # that are being answered
        self._texts = 0  # of these requests
        self.draining = False  # whether the server only finishes its requests
        self.given_up = False
        self._preparing = set[asyncio.Task[Any]]()  # requests that the engine doesn't have yet

    def check_capacity(self, texts: int = 1) -> None:
        """Raise ApiError if no further request for this many texts can be admitted."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=10)
        if not self._engine.is_alive:
            raise ApiError(503, "The server's engine has stopped; start the server again.")
        # A request for more than the limit is admitted if there is no other.
        if self._texts + min(texts, self._max_texts) > self._max_texts:
            raise ApiError(429, "Too many texts are waiting; try again later.", retry_after=RETRY_SECONDS)

    @contextmanager
    def admit(self, texts: int = 1) -> Generator[None]:
        """Count a request for this many texts while it is answered; raises ApiError if it can't be admitted."""
        texts = min(texts, MAX_TEXTS)
        self.check_capacity(texts)
        self.requests += 1
        self._texts += texts
        try:
            yield
        finally:
            self.requests -= 1
            self._texts -= texts

    def check_requested_model(self, name: str | None) -> None:
        """Raise ApiError if a request names another model, and the server is strict about it."""
        if name and self._strict_model:
            self.check_model_name(name)

    def check_model_name(self, name: str) -> None:
        """Raise ApiError for a name that the model doesn't have."""
        if name not in self._model_names:
            names = " and ".join(self._model_names)
            raise ApiError(404, f"There is no model {name!r:.80} here, only {names}.", "model", "model_not_found")

    def give_up(self) -> None:
        """End all requests, including requests in preparation."""
        self.given_up = True
        for task in [*self._preparing]:
            task.cancel()
        self._engine.fail_all(ServerEnded())

    @asynccontextmanager
    async def preparing(self, began: float) -> AsyncGenerator[None]:
        """Raise ApiError if the preparation inside takes too long, or when ``give_up`` is called."""
        task = asyncio.current_task()
        assert task
        self._preparing.add(task)
        try:
            async with asyncio.timeout(began + self._request_timeout - time.monotonic()):
                yield
        except TimeoutError:
            raise timeout_error(self._request_timeout) from None
        except asyncio.CancelledError:
            if not self.given_up:
                raise
            task.uncancel()
            raise text_error(ServerEnded(), self._lm) from None
        finally:
            self._preparing.discard(task)


async def unless_disconnected(http: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``; if the client disconnects, which stops no endpoint, cancel it; raises ApiError."""

    async def disconnect() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ApiError(499, "The client has closed the connection.")
        return work_task.result()
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


class WorkerThreads:
    """A pool of threads for each kind of work."""

    def __init__(self, lm: LanguageModel) -> None:
        self._lm = lm
        self._pools = {work: ThreadPoolExecutor(THREADS_FOR_WORK, f"ovspec {work}") for work in get_args(WorkKind)}

    async def run_in_thread(self, function: Callable[..., T], *arguments: Any, work: WorkKind = "texts") -> T:
        """Return a function's result; it runs in a thread. Raises ApiError for its OvspecErrors."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pools[work], partial(function, *arguments))
        except RequestError as error:
            raise ApiError(400, str(error), error.param) from None
        except UnavailableError as error:
            raise text_error(error, self._lm) from None
        except OvspecError as error:
            message = message_for_clients(error, self._lm)
            field = re.search(r"`([\w.]+)`", message)
            raise ApiError(400, message, field and field[1]) from None

    async def run_for_body(self, http: Request, function: Callable[..., T], *arguments: Any) -> T:
        """Return a function's result, as ``run_in_thread`` does, with the kind of work that the request's body is."""
        return await self.run_in_thread(function, *arguments, work=await work_for_body(http))


async def work_for_body(http: Request) -> WorkKind:
    """Return the kind of work for a request without a grammar."""
    return "long" if len(await http.body()) > LONG_TEXT_CHARACTERS else "texts"
