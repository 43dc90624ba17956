"""A request's texts as the event loop sees them while the engine generates them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from ovspec.errors import InferenceError, OvspecError
from ovspec.loop.results import Piece
from ovspec.model import LanguageModel
from ovspec.serving.engine import Ended, Engine, Job
from ovspec.serving.errors import ApiError, for_clients
from ovspec.serving.metrics import Metrics
from ovspec.serving.requests import TextRequest


class Texts:
    """Generates the rows of a request; iterate over it once for lists of (index of the row, piece), or None.

    None comes every ``every`` seconds without a piece, so that a stream can show that it lives.

    Args:
        timeouts: seconds until the first piece, and from when the request came until the last.
        began: time at which the request came.
    """

    def __init__(
        self, engine: Engine, request: TextRequest, metrics: Metrics, timeouts: tuple[float, float], began: float
    ) -> None:
        self._engine, self._request, self._metrics = engine, request, metrics
        self._queue_timeout, self._request_timeout = timeouts
        self._began, self._ends = began, began + self._request_timeout
        self._events: asyncio.Queue[tuple[float, list[tuple[int, Piece]] | OvspecError]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._job = Job(request.rows, self._deliver)

    def _deliver(self, found: list[tuple[int, Piece]] | OvspecError) -> None:
        # The time is that of the engine: a client that reads slowly makes no token late.
        self._loop.call_soon_threadsafe(self._events.put_nowait, (time.monotonic(), found))

    async def pieces(self, every: float) -> AsyncGenerator[list[tuple[int, Piece]] | None]:
        rows, last, asked = self._request.rows, dict[int, float](), time.monotonic()
        if self._request.only_prompts:
            for row in rows:
                row.finish_reason, row.stats.cached_tokens = "length", 0
            yield [(index, Piece("", [], "length")) for index in range(len(rows))]
            return
        left = len(rows)
        self._engine.submit(self._job)
        try:
            while left:
                now = time.monotonic()
                limit = self._ends if self._job.started else min(asked + self._queue_timeout, self._ends)
                if now > limit:
                    raise self._late()
                try:
                    # Python 3.11's wait_for goes on in a task that is cancelled just when a piece comes.
                    async with asyncio.timeout(min(every, limit - now + 0.01)):
                        at, found = await self._events.get()
                except TimeoutError:
                    if not self._engine.alive:
                        raise ApiError(500, "The server's engine has stopped; start the server again.") from None
                    yield None
                    continue
                if isinstance(found, OvspecError):
                    raise as_api_error(found, self._engine.lm)
                for index, piece in found:
                    self._metrics.note_piece(at, self._began, last.get(index))
                    last[index] = at
                    left -= piece.finish_reason is not None
                yield found
        finally:
            if left:
                self._engine.cancel(self._job)

    def _late(self) -> ApiError:
        if time.monotonic() > self._ends:
            return too_long(self._request_timeout)
        waited = f"The request has waited for {self._queue_timeout:g} seconds"
        return ApiError(503, f"{waited}, and its turn has not come; try again later.", code="timeout", retry_after=5)


def too_long(seconds: float) -> ApiError:
    return ApiError(504, f"The request took longer than {seconds:g} seconds.", code="timeout")


def as_api_error(error: OvspecError, lm: LanguageModel) -> ApiError:
    """Return the answer to a request whose text has failed."""
    status = 503 if isinstance(error, Ended) else 500 if isinstance(error, InferenceError) else 422
    return ApiError(status, for_clients(error, lm))
