"""Admission of requests: limits on their number and time, and threads for preparing them."""

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
from ovspec.server.errors import ApiError, ServerEndedError, make_text_error, make_timeout_error, message_for_clients
from ovspec.text.tokenizer import LONG_TEXT_CHARACTERS

T = TypeVar("T")
RETRY_SECONDS = 2  # Retry-After for refused clients
MAX_TEXTS = 128  # of a request
# Kinds of work with separate threads: a grammar or a long text doesn't delay other requests.
WorkKind = Literal["texts", "long", "grammars"]
THREADS_PER_WORK_KIND = 4


class Admission:
    """Counts running requests, and refuses requests beyond the limits."""

    def __init__(self, lm: LanguageModel, engine: EngineThread, model_names: list[str], options: ServeParams) -> None:
        self._lm = lm
        self._engine = engine
        self._model_names = model_names
        self._strict_model = options.strict_model
        self._max_texts = options.batch_size + options.queue_size
        self._request_timeout = options.request_timeout
        self.request_count = 0  # running requests
        self._text_count = 0  # texts of running requests
        self.draining = False  # whether the server only finishes its requests
        self.has_ended_requests = False
        self._preparation_tasks = set[asyncio.Task[Any]]()  # requests before their engine job

    def check_capacity(self, text_count: int = 1) -> None:
        """Raise ApiError unless a request for this many texts can be admitted."""
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=10)
        if not self._engine.is_alive:
            raise ApiError(503, "The server's engine has stopped; start the server again.")
        # A request for more texts than the limit is admitted alone.
        if self._text_count + min(text_count, self._max_texts) > self._max_texts:
            raise ApiError(429, "Too many texts are waiting; try again later.", retry_after=RETRY_SECONDS)

    @contextmanager
    def admit(self, text_count: int = 1) -> Generator[None]:
        """Count a request for this many texts while it runs; raises ApiError if it can't be admitted."""
        text_count = min(text_count, MAX_TEXTS)
        self.check_capacity(text_count)
        self.request_count += 1
        self._text_count += text_count
        try:
            yield
        finally:
            self.request_count -= 1
            self._text_count -= text_count

    def check_requested_model(self, model_name: str | None) -> None:
        """Raise ApiError if a request names another model and the server is strict."""
        if model_name and self._strict_model:
            self.check_model_name(model_name)

    def check_model_name(self, model_name: str) -> None:
        """Raise ApiError for any other name than the model's."""
        if model_name not in self._model_names:
            quoted_names = " and ".join(self._model_names)
            raise ApiError(
                404,
                f"There is no model {model_name!r:.80}; this server has {quoted_names}.",
                "model",
                "model_not_found",
            )

    def end_all_requests(self) -> None:
        """End all requests, including requests in preparation."""
        self.has_ended_requests = True
        for task in [*self._preparation_tasks]:
            task.cancel()
        self._engine.fail_all_requests(ServerEndedError())

    @asynccontextmanager
    async def limit_preparation_time(self, arrival_time: float) -> AsyncGenerator[None]:
        """Raise ApiError if the preparation inside takes too long, or when ``end_all_requests`` is called."""
        preparation_task = asyncio.current_task()
        assert preparation_task
        self._preparation_tasks.add(preparation_task)
        try:
            async with asyncio.timeout(arrival_time + self._request_timeout - time.monotonic()):
                yield
        except TimeoutError:
            raise make_timeout_error(self._request_timeout) from None
        except asyncio.CancelledError:
            if not self.has_ended_requests:
                raise
            preparation_task.uncancel()
            raise make_text_error(ServerEndedError(), self._lm) from None
        finally:
            self._preparation_tasks.discard(preparation_task)


async def run_unless_disconnected(http_request: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``; cancel it and raise ApiError if the client disconnects."""

    async def wait_for_disconnect() -> None:
        while (await http_request.receive())["type"] != "http.disconnect":
            pass

    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(wait_for_disconnect())
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
        self._pools = {work: ThreadPoolExecutor(THREADS_PER_WORK_KIND, f"ovspec {work}") for work in get_args(WorkKind)}

    async def run_in_thread(self, function: Callable[..., T], *arguments: Any, work_kind: WorkKind = "texts") -> T:
        """Return a function's result; it runs in a thread. Raises ApiError for its OvspecErrors."""
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._pools[work_kind], partial(function, *arguments)
            )
        except RequestError as error:
            raise ApiError(400, str(error), error.param) from None
        except UnavailableError as error:
            raise make_text_error(error, self._lm) from None
        except OvspecError as error:
            message = message_for_clients(error, self._lm)
            param_match = re.search(r"`([\w.]+)`", message)
            raise ApiError(400, message, param_match and param_match[1]) from None

    async def run_in_thread_for_body(self, http_request: Request, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function like ``run_in_thread``, with the kind of work for the request's body."""
        return await self.run_in_thread(function, *arguments, work_kind=await choose_work_kind(http_request))


async def choose_work_kind(http_request: Request) -> WorkKind:
    """Return the kind of work for a request without a grammar."""
    return "long" if len(await http_request.body()) > LONG_TEXT_CHARACTERS else "texts"
