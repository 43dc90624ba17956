"""A server of the page whose answers are recorded: it sends them token by token, as fast as it is told."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from ovspec.server.page_files import add_page


def make_app(deltas: list[dict[str, str]], tokens_per_second: float) -> FastAPI:
    """Return an application that answers each chat with ``deltas``, a token each, and ends it."""
    app = FastAPI()
    add_page(app)

    async def events() -> AsyncIterator[str]:
        start = time.monotonic()
        for number, delta in enumerate(deltas):
            if (wait := start + number / tokens_per_second - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            elif number % 50 == 0:
                await asyncio.sleep(0)
            text = "".join(delta.values())
            choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": None}
            choice["token_sources"] = [{"id": number, "text": text, "source": ("target", "lookup")[number % 2]}]
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        yield 'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'

    @app.post("/v1/chat/completions")
    async def chat() -> StreamingResponse:
        return StreamingResponse(events(), media_type="text/event-stream")

    @app.get("/ready")
    async def ready() -> JSONResponse:
        return JSONResponse({"status": "ready", "drafters": ["lookup"]})

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"data": [{"id": "recorded"}]})

    @app.get("/openapi.json")
    async def document() -> PlainTextResponse:
        return PlainTextResponse("{}")

    return app


@contextmanager
def replay(deltas: list[dict[str, str]], tokens_per_second: float = 1e9) -> Iterator[str]:
    """Serve a recorded answer on a port of its own; yield the server's address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(make_app(deltas, tokens_per_second), log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)
