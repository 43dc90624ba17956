"""Connections that are slow: over a real socket, with short time limits."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn

from ovspec.serving import guard
from ovspec.serving import server as server_module
from ovspec.serving.guard import Guard, Keys
from ovspec.serving.server import Connection
from ovspec.serving.streams import Stream

HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


class Streaming:
    """An application that streams ``parts`` of ``size`` bytes, and notes when a stream has ended."""

    def __init__(self, parts: int, size: int, pause: float) -> None:
        self.sent = self.ended = 0
        self._parts, self._part, self._pause = parts, b"x" * size, pause

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await Stream(self._events(), self._note)(scope, receive, send)

    async def _events(self) -> AsyncIterator[bytes]:
        for _ in range(self._parts):
            await asyncio.sleep(self._pause)
            yield self._part
            self.sent += 1

    def _note(self) -> None:
        self.ended += 1


class Served:
    """An application behind the server's own guard and connections, in a thread."""

    def __init__(self, app: Streaming) -> None:
        self.app, self.statuses = app, list[int]()
        guarded = Guard(app, Keys(), True, lambda _, status: self.statuses.append(status))
        self._socket = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(guarded, http=Connection, ws="none", lifespan="off", log_config=None)  # type: ignore
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self._socket]), daemon=True)
        self._thread.start()

    def connect(self) -> socket.socket:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(self._socket.getsockname())
        return client

    def end(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(guard, "WRITE_SECONDS", 0.5)
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.5)
    made = Served(Streaming(*request.param))
    yield made
    made.end()


def wait_until(holds: Any, seconds: float = 20.0) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize("served", [(1000, 100_000, 0.0)], indirect=True)
def test_a_client_that_does_not_read_is_cut_off(served: Served) -> None:
    with served.connect() as client:
        client.sendall(HEAD + b"\r\n")
        wait_until(lambda: served.app.ended == 1)
        assert served.app.sent < 1000 and served.statuses == [499]
    with served.connect() as client:  # one that reads gets everything
        client.sendall(HEAD + b"\r\n")
        got = 0
        while got < 100_000_000:
            part = len(client.recv(1 << 20))
            assert part, got
            got += part
    wait_until(lambda: served.statuses == [499, 200])


@pytest.mark.parametrize("served", [(15, 10, 0.1)], indirect=True)
def test_a_head_that_does_not_arrive(served: Served) -> None:
    """Nor does one that comes after an answer; an answer itself may take as long as it wants."""
    with served.connect() as silent, served.connect() as slow, served.connect() as whole:
        slow.sendall(HEAD)
        whole.sendall(HEAD + b"\r\n")
        for client in (silent, slow):
            began = time.monotonic()
            with pytest.raises(ConnectionResetError):
                if not client.recv(1):
                    raise ConnectionResetError
            assert time.monotonic() - began < 5
        found = b""
        while not found.endswith(b"0\r\n\r\n"):
            part = whole.recv(10_000)
            assert part, found
            found += part
        assert found.count(b"x" * 10) == 15
        wait_until(lambda: served.app.ended == 1)
        whole.sendall(HEAD)  # a second one, which doesn't end
        with pytest.raises(ConnectionResetError):
            if not whole.recv(1):
                raise ConnectionResetError
