"""Answers on the server's socket while its model is exported and loaded: status 503, and the progress."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ovspec.base.progress import describe_running_step, print_note
from ovspec.server.access import AccessMiddleware
from ovspec.server.errors import ApiError, make_error_response
from ovspec.server.http_protocol import make_uvicorn_config
from ovspec.server.page_files import find_page_file

RETRY_SECONDS = 10


@contextlib.contextmanager
def answer_while_preparing(listener: socket.socket, keys: list[str], insecure: bool) -> Iterator[None]:
    """Answer requests while the block prepares the model; later connections wait for the server.

    Args:
        listener: the server's socket; it stays open.
        keys, insecure: access, as for the server.
    """
    app = AccessMiddleware(answer_unready, keys, not keys and not insecure, lambda *_: None)
    server = uvicorn.Server(make_uvicorn_config(app))
    server_socket = listener.dup()  # a copy, because uvicorn closes it
    answering_thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[server_socket])), name="startup", daemon=True
    )
    answering_thread.start()
    host, port = listener.getsockname()[:2]
    print_note(f"{host}:{port} answers with status 503 until the model is ready; /ready reports the progress")
    try:
        yield
    finally:
        server.should_exit = True
        answering_thread.join()


async def answer_unready(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request to a server whose model isn't ready."""
    progress = describe_running_step() or "starting"
    if page_file := find_page_file(scope["path"], Headers(scope=scope)):
        response = page_file
    elif scope["path"] == "/health":
        response = Response(json.dumps({"status": "ok"}), media_type="application/json")
    elif scope["path"] == "/ready":
        body = {"status": "preparing", "progress": progress}
        response = Response(json.dumps(body), 503, {"Retry-After": str(RETRY_SECONDS)}, "application/json")
    else:
        message = f"The model isn't ready yet ({progress}); try again later."
        response = make_error_response(ApiError(503, message, retry_after=RETRY_SECONDS), scope)
    await response(scope, receive, send)
