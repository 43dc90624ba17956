"""Connections that are slow, idle or too many: over a real socket, with short time limits."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import h11
import pytest
import uvicorn
from servers import wait_until
from starlette.responses import Response

from ovspec.protocols.reply import ReplyMaker
from ovspec.server import body_limits, errors, http_protocol
from ovspec.server.access import AccessMiddleware
from ovspec.server.body_limits import BoundedRequest
from ovspec.server.endpoints import EventStream
from ovspec.server.errors import ApiError, make_error_response
from ovspec.server.http_protocol import make_uvicorn_config, raise_open_file_limit

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"


class FailingReply(ReplyMaker):
    """Only makes the event of a failure."""

    def __init__(self) -> None:
        pass

    def whole_reply(self, results: Any) -> Any:
        raise NotImplementedError

    def piece_events(self, index: int, piece: Any, /) -> Any:
        raise NotImplementedError


class Streaming:
    """An application that streams ``parts`` of ``size`` bytes, then may fail, and notes when a stream has ended."""

    def __init__(self, parts: int, size: int, pause: float = 0.0, error: Exception | None = None) -> None:
        self.sent = self.ended = 0
        self._parts, self._part, self._pause, self._error = parts, b"x" * size, pause, error

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            try:
                await BoundedRequest(scope, receive).body()
            except ApiError as error:
                return await make_error_response(error, scope)(scope, receive, send)
        return await EventStream(b"", self._events(), FailingReply(), self._note)(scope, receive, send)

    async def _events(self) -> AsyncGenerator[bytes]:
        for _ in range(self._parts):
            await asyncio.sleep(self._pause)
            yield self._part
            self.sent += 1
        if self._error:
            raise self._error

    def _note(self) -> None:
        self.ended += 1


class Served:
    """An application behind the server's own guard and connections, in a thread."""

    def __init__(self, app: Any) -> None:
        self.statuses = list[int]()
        guarded = AccessMiddleware(app, [], True, lambda _, status: self.statuses.append(status))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(make_uvicorn_config(guarded))
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self._socket]), daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def connect(self, sends: bytes = b"") -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(self._socket.getsockname())
        client.sendall(sends)
        return client

    def end(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


Serve = Callable[[Any], Served]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that serves an application, with short time limits."""
    for name in ("WRITE_SECONDS", "HEAD_SECONDS"):
        monkeypatch.setattr(http_protocol, name, 0.5)
    monkeypatch.setattr(errors, "LINGER_SECONDS", 0.3)
    served: list[Served] = []

    def serve(app: Any) -> Served:
        served.append(Served(app))
        return served[-1]

    yield serve
    for each in served:
        each.end()


def read_all(client: socket.socket) -> bytes:
    """Return what comes until the connection is closed or reset."""
    found = list[bytes]()
    try:
        while part := client.recv(1 << 20):
            found.append(part)
    except ConnectionResetError:
        pass
    return b"".join(found)


def error_of(answer: bytes) -> tuple[int, str]:
    """Return the status and the message of an answer that is an error, in OpenAI's shape."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head.lower() and b"connection: close" in head.lower(), answer
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["message"]


def test_a_client_that_does_not_read_a_stream_is_cut_off(serve: Serve) -> None:
    app = Streaming(300, 100_000)
    served = serve(app)
    with served.connect(HEAD + b"\r\n"):
        wait_until(lambda: app.ended == 1)
        assert app.sent < 300 and served.statuses == [499]
    with served.connect(HEAD + b"Connection: close\r\n\r\n") as client:  # one that reads gets everything
        assert len(read_all(client)) > 30_000_000
    wait_until(lambda: served.statuses == [499, 200])


def test_answers_are_written_in_slices_on_windows(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a write counts as unread until its last byte is read, whatever the client has read of it."""
    written, write = list[int](), h11.Connection.send

    def noting(self: h11.Connection, event: Any) -> Any:
        written.append(len(getattr(event, "data", b"")))
        return write(self, event)

    monkeypatch.setattr(http_protocol, "sys", SimpleNamespace(platform="win32", maxsize=sys.maxsize))
    monkeypatch.setattr(h11.Connection, "send", noting)
    content = os.urandom(100_000)
    served = serve(Response(content))
    with served.connect(HEAD + b"Connection: close\r\n\r\n") as client:
        assert read_all(client).endswith(content)
    assert max(written) == http_protocol.SLICE_BYTES and sum(written) == len(content)
    assert served.statuses == [200]


@pytest.mark.parametrize("ending", [pytest.param(b"\r\n", marks=pytest.mark.slow), b"Connection: close\r\n\r\n"])
def test_a_client_that_does_not_read_an_answer_is_cut_off(serve: Serve, ending: bytes) -> None:
    """An answer counts as sent when it has been handed over, so that nothing else waits for its client."""
    served = serve(Response(b"x" * 20_000_000))
    with served.connect(HEAD + ending) as client:
        wait_until(lambda: served.statuses == [200] and not served.connections)
        assert len(read_all(client)) < 20_000_000
    with served.connect(HEAD + b"Connection: close\r\n\r\n") as client:  # one that reads gets everything
        assert len(read_all(client)) > 20_000_000


@pytest.mark.parametrize(
    ("error", "status"), [(ApiError(422, "It can't go on."), 422), (ValueError(), 500), (None, 200)]
)
def test_a_stream_counts_as_it_ends(serve: Serve, error: Exception | None, status: int) -> None:
    served = serve(Streaming(2, 10, error=error))
    with served.connect(HEAD + b"Connection: close\r\n\r\n") as client:
        assert b" 200 " in read_all(client)
    wait_until(lambda: served.statuses == [status])


def test_a_client_that_leaves(serve: Serve) -> None:
    """Amid a stream, or before its own body has arrived."""
    served = serve(Streaming(1000, 10, 0.1))
    with served.connect(HEAD + b"\r\n") as client:
        assert client.recv(1000)
    wait_until(lambda: served.statuses == [499])
    with served.connect(POST + b"{"):
        wait_until(lambda: served.connections == 1)
    wait_until(lambda: served.statuses == [499, 499])


def test_a_body_that_does_not_arrive(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_limits, "BODY_SECONDS", 0.3)
    served = serve(Streaming(1, 10))
    with served.connect(POST + b"{") as client:
        assert error_of(read_all(client)) == (
            408,
            "The request's body did not arrive within 0.3 seconds; send it again.",
        )
    assert served.statuses == [408]


@pytest.mark.parametrize(
    ("length", "body"),
    [
        (b"Content-Length: 8000001", b""),
        (b"Content-Length: 99000000000\r\nExpect: 100-continue", b""),
        (b"Transfer-Encoding: chunked", b"400000\r\n" + b"x" * 0x400000 + b"\r\n400000\r\n" + b"x" * 0x400000),
    ],
    ids=["declared", "expects", "chunked"],
)
def test_a_body_that_is_too_large_is_refused_at_once(serve: Serve, length: bytes, body: bytes) -> None:
    """The answer comes though the rest of the body never does, and the connection is closed then."""
    served = serve(Streaming(1, 10))
    with served.connect(POST.replace(b"Content-Length: 10", length) + body) as client:
        assert error_of(read_all(client)) == (413, "The request's body is larger than 8 MB; send a smaller body.")
    assert served.statuses == [413]


def test_the_answer_to_a_body_that_is_too_large_is_not_lost(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client sends all of its body before it reads the answer, and the connection isn't reset meanwhile."""
    monkeypatch.setattr(errors, "LINGER_SECONDS", 20.0)
    served = serve(Streaming(1, 10))
    with served.connect(POST.replace(b" 10", b" 30000000")) as client:
        for _ in range(30):
            client.sendall(b"x" * 1_000_000)
        assert error_of(read_all(client))[0] == 413


def test_an_idle_connection(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept for the next request, and is closed in the end."""
    monkeypatch.setattr(http_protocol, "IDLE_SECONDS", 0.6)
    served = serve(Response(b"x"))
    with served.connect() as client:
        for _ in range(2):
            client.sendall(HEAD + b"\r\n")
            found = b""
            while not found.endswith(b"x"):
                found += client.recv(1000)
            time.sleep(0.1)
        assert read_all(client) == b""
    assert served.statuses == [200, 200]


def test_more_connections_than_there_may_be(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "MAX_CONNECTIONS", 2)
    served = serve(Streaming(5, 10, 0.1))
    with served.connect(HEAD + b"\r\n") as first:
        assert first.recv(12) == b"HTTP/1.1 200"
        with served.connect(HEAD + b"\r\n") as second:
            assert read_all(second).startswith(b"HTTP/1.1 503 ")


@pytest.mark.parametrize("sent", [b"Hello\r\n\r\n", HEAD + b"X: " + b"x" * 100_000])
def test_what_is_not_http(serve: Serve, sent: bytes) -> None:
    served = serve(Response(b"x"))
    with served.connect(sent) as client:
        status, message = error_of(read_all(client))
        assert status == 400 and "not HTTP" in message


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limit")
def test_files_for_all_connections() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        raise_open_file_limit()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert hard == before[1] and soft == (hard if 0 <= hard < 2200 else 2200)


def test_a_head_that_does_not_arrive(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that comes after an answer; an answer itself may take as long as it wants."""
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    app = Streaming(8, 10, 0.1)
    served = serve(app)
    with served.connect() as silent, served.connect(HEAD) as slow, served.connect(HEAD + b"\r\n") as whole:
        for client in (silent, slow):
            began = time.monotonic()
            assert read_all(client) == b""
            assert time.monotonic() - began < 5
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            part = whole.recv(10_000)
            assert part, found
            found += part
        assert found.count(b"x" * 10) == 8
        wait_until(lambda: app.ended == 1)
        whole.sendall(HEAD)  # a second one, which doesn't end
        assert read_all(whole) == b""
