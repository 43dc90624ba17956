"""The HTTP connections of clients in uvicorn, with limits on their number and slowness.

uvicorn itself has no time limit for a request's head or for a client's reading.
"""

import asyncio
import sys
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ovspec.server.access import ACCESS_LOG
from ovspec.server.errors import ApiError, make_error_body

HEAD_SECONDS = 20.0  # until a request's head has arrived
IDLE_SECONDS = 75  # between two requests; proxies keep connections for 60
WRITE_SECONDS = 30.0  # until a client must read on
MAX_HEAD_BYTES = 65_536  # bytes
SLICE_BYTES = 16_384  # bytes per write
MAX_CONNECTIONS = 2_000
MAX_OTHER_FILES = 200  # other open files of the process


class ClientConnection(H11Protocol):
    """A connection, closed if a request's head doesn't arrive in time or the client stops reading."""

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # pauses writing until the client has read everything
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        if self._unread_timer:
            self._unread_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
        elif not self._head_timer:
            self._start_head_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread(sys.maxsize)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_timer:
            self._unread_timer.cancel()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse data that isn't HTTP with an error in the API's shape."""
        ACCESS_LOG.info("%s - - 400", (self.client or ("-",))[0])
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun
            return self.transport.abort()
        message = (
            f"The request is not HTTP/1.1, or its headers have more than {MAX_HEAD_BYTES} bytes; shorten the headers."
        )
        body = make_error_body(ApiError(400, message))
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for h11_event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(h11_event) or b"")
        return self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_unread(self, unread_bytes_before: int) -> None:
        """Abort the connection if the client has read nothing since a backlog of ``unread_bytes_before``; repeat."""
        unread_bytes = self.transport.get_write_buffer_size()
        if unread_bytes >= unread_bytes_before:
            return self.transport.abort()
        self._unread_timer = self.loop.call_later(WRITE_SECONDS, self._watch_unread, unread_bytes)
        return None


def make_slicing_app(app: ASGIApp) -> ASGIApp:
    """Return ``app`` with its response bodies cut into slices, written one after the other.

    For Windows: there a write counts as unread until its last byte is read, so a slow client would look like a stopped
    client.
    """

    async def app_in_slices(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_slices(message: Message) -> None:
            body = message.get("body", b"")
            slice_start = 0
            while len(body) - slice_start > SLICE_BYTES:
                await send({**message, "body": body[slice_start : slice_start + SLICE_BYTES], "more_body": True})
                slice_start += SLICE_BYTES
            await send({**message, "body": body[slice_start:]} if slice_start else message)

        await app(scope, receive, send_slices)

    return app_in_slices


def raise_open_file_limit() -> None:
    """Let this process open a file for each connection, if the system allows it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    file_limit = MAX_CONNECTIONS + MAX_OTHER_FILES
    if hard_limit != resource.RLIM_INFINITY:
        file_limit = min(file_limit, hard_limit)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < file_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit, hard_limit))


def make_uvicorn_config(app: ASGIApp) -> uvicorn.Config:
    """Return the configuration of uvicorn for ``app``."""
    return uvicorn.Config(
        make_slicing_app(app) if sys.platform == "win32" else app,
        http=ClientConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=5,
    )
