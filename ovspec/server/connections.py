"""The connections of clients: how many, how long they may be slow, and how uvicorn serves them.

uvicorn has no limit on the time that a head takes, nor on a client that doesn't read.
"""

import asyncio
import sys
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ovspec.server.errors import ApiError, error_body
from ovspec.server.guard import LOG

HEAD_SECONDS = 20.0  # until a request's head has arrived
IDLE_SECONDS = 75  # between two requests; proxies keep connections for 60
WRITE_SECONDS = 30.0  # that a client may take before it reads on
LARGEST_HEAD = 65_536  # bytes
SLICE = 16_384  # bytes that are written at once
MOST_CONNECTIONS, OTHER_FILES = 2_000, 200


class Connection(H11Protocol):
    """A connection that is closed if a request's head doesn't arrive in time, or if the client doesn't read on."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # so that writing is paused whenever the client has to read first
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._unread:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif not self._late:
            self._wait()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch(sys.maxsize)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread:
            self._unread.cancel()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse what isn't HTTP as everything else is refused."""
        LOG.info("%s - - 400", (self.client or ("-",))[0])
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer has begun
            return self.transport.abort()
        told = f"This is not HTTP/1.1, or its head has more than {LARGEST_HEAD} bytes."
        body = error_body(ApiError(400, told))
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        return self.transport.close()

    def _wait(self) -> None:
        self._late = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._late:
            self._late.cancel()
            self._late = None

    def _watch(self, before: int) -> None:
        """Abort the connection if no more has been read than there was left ``before``; look again later."""
        left = self.transport.get_write_buffer_size()
        if left >= before:
            return self.transport.abort()
        self._unread = self.loop.call_later(WRITE_SECONDS, self._watch, left)
        return None


def in_slices(app: ASGIApp) -> ASGIApp:
    """Return ``app`` with the bodies that it sends cut into slices, each written when the one before is.

    For Windows, where a write counts as unread until its last byte is read: a slow client would look like one that has
    stopped.
    """

    async def sliced(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_slices(message: Message) -> None:
            body, begin = message.get("body", b""), 0
            while len(body) - begin > SLICE:
                await send({**message, "body": body[begin : begin + SLICE], "more_body": True})
                begin += SLICE
            await send({**message, "body": body[begin:]} if begin else message)

        await app(scope, receive, send_slices)

    return sliced


def allow_files() -> None:
    """Let this process open a file for each connection, if the system allows it."""
    try:
        import resource
    except ImportError:  # on Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def config_of(app: ASGIApp) -> uvicorn.Config:
    """Return how uvicorn is to run ``app``."""
    return uvicorn.Config(
        in_slices(app) if sys.platform == "win32" else app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=LARGEST_HEAD,
        timeout_graceful_shutdown=5,
    )
