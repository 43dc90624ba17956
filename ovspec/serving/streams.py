"""Streams of server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ovspec.serving.answers import event
from ovspec.serving.errors import ApiError, error_body
from ovspec.serving.guard import OUTCOME

T = TypeVar("T")


class Stream(Response):
    """Server-sent events. An error before the first of them becomes an ordinary answer.

    ``ended`` is called when the stream has ended, in whichever way.
    """

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        self.status_code, self.background = 200, None
        self._events, self._ended = events, ended

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        writing = asyncio.ensure_future(self._write(scope, receive, send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            else:
                scope["state"][OUTCOME] = 499
        finally:
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)
            await self._events.aclose()  # type: ignore[attr-defined]
            self._ended()

    async def _write(self, scope: Any, receive: Any, send: Any) -> None:
        begun = False
        try:
            async for part in self._events:
                if not begun:
                    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    begun = True
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except ApiError as error:
            body = error_body(error.status_code, error.detail, error.param, error.code)
            if not begun:
                return await JSONResponse(body, error.status_code, error.headers)(scope, receive, send)
            scope["state"][OUTCOME] = error.status_code
            await send({"type": "http.response.body", "body": event(body), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return None


async def disconnected(receive: Any) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; cancel it, and raise ApiError, if the client goes away first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(http.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "The client has closed the connection.")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
