"""Runs the application: the socket, uvicorn, the log, and what signals do."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.progress import print_note
from ovspec.engine.engine_thread import EngineThread
from ovspec.params.serving import ServeParams
from ovspec.server.admission import Service
from ovspec.server.app import make_app
from ovspec.server.connections import allow_files, config_of
from ovspec.server.guard import LOG, Guard, is_here
from ovspec.text.generation_config import format_sampling

# The engine's thread must not wait for the 5 ms that Python grants other threads.
SWITCH_SECONDS = 0.0005
KEY = "OVSPEC_API_KEY"


def keys_of(file: Path | None) -> list[str]:
    """Return the keys that clients may use: those in ``file``, or that in OVSPEC_API_KEY."""
    lines = read_text(file).splitlines() if file else [os.environ.get(KEY, "")]
    keys = [line.strip() for line in lines if line.strip()]
    if file and not keys:
        raise OvspecError(f"{file}: no key in it; write one a line.")
    if not all(key.isascii() for key in keys):
        raise OvspecError(
            f"{file or KEY}: a key has characters other than ASCII, which clients can't send; choose another."
        )
    return keys


def check_options(options: ServeParams, keys: list[str]) -> None:
    """Raise OvspecError for options that can't be combined, before a model is loaded."""
    if not is_here(options.host) and not keys and not options.insecure:
        raise OvspecError(
            f"`host` is {options.host}, so others could use the server without a key; give an `api_key_file`, or "
            "set `insecure` to serve everybody."
        )
    if options.lookup_memory and len(keys) > 1:
        raise OvspecError(
            "`lookup_memory` can't be combined with several keys: its speed would tell what others wrote."
        )


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; raises OvspecError if that isn't possible."""
    six = ":" in host
    family = socket.AF_INET6 if six else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=six and socket.has_dualstack_ipv6())
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # Python adds the address
        raise OvspecError(f"Can't listen on {host}:{port} ({reason}); choose another.") from None


class Draining(uvicorn.Server):
    """uvicorn's server. The first signal lets running requests end, the second ends them, the third doesn't wait."""

    def __init__(self, config: uvicorn.Config, service: Service, greeting: str) -> None:
        super().__init__(config)
        self._service, self._greeting, self._signals = service, greeting, 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print_note(self._greeting)

    def handle_exit(self, sig: int, frame: Any) -> None:  # noqa: ARG002
        self._signals += 1
        self._service.draining = True
        count = self._service.requests
        if self._signals == 1 and count:
            print_note(f"waiting for {count} request{'s' * (count > 1)} to end; another signal ends them")
        elif self._signals == 2:
            self._service.give_up()
        elif self._signals > 2:
            end_process(1)

    async def on_tick(self, counter: int) -> bool:
        if self._service.draining and not self._service.requests:
            self.should_exit = True
        return await super().on_tick(counter)


def serve(lm: LanguageModel, names: list[str], keys: list[str], opened: socket.socket, options: ServeParams) -> None:
    """Serve ``lm`` under ``names`` on the socket ``opened`` until a signal ends it."""
    promise = lm.target.arithmetic_note
    if options.deterministic and promise != "exact":
        raise OvspecError(f"`deterministic`: on this machine the arithmetic is {promise}; leave it out.")
    sys.setswitchinterval(SWITCH_SECONDS)
    size = None if options.cache_size is None else 1e9 * options.cache_size
    lm.runtime.preload_files()
    engine = EngineThread(lm.runtime, options.batch_size, size, options.lookup_memory, options.prefill_chunk)
    service = Service(lm, engine, names, options)
    engine.start()
    api = make_app(service)

    def count_request(scope: Scope, status: int) -> None:
        service.metrics.requests.labels(endpoint_of(api, scope), str(status)).inc()

    app = Guard(api, keys, not keys and not options.insecure, count_request)
    host, port = opened.getsockname()[:2]
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
    how = f"{lm.target.engine} engine, {promise} arithmetic, draft: {lm.runtime.models.choice or 'none'}"
    greeting = f"{names[0]} on {where} ({how})"
    if service.recommended:
        words = format_sampling(service.recommended)
        told = f"sampling that a request leaves out is as the model recommends: {words}; --temperature 0 for greedy"
        greeting += f"\n{told}"
    log_to_stderr()
    allow_files()
    try:
        asyncio.run(Draining(config_of(app), service, greeting).serve(sockets=[opened]))
    finally:
        engine.stop(timeout_s=2.0)
        if service.given_up:
            end_process(0)


def end_process(status: int) -> None:
    """End the process without waiting for its threads, nor for grammars that its own processes check."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def endpoint_of(api: FastAPI, scope: Scope) -> str:
    """Return the endpoint that a request is for, such as /v1/models/{name}; "other" if there is none."""
    found = (route for route in api.routes if isinstance(route, APIRoute) and route.matches(scope)[0] is not Match.NONE)
    return next((route.path_format for route in found), "other")


def log_to_stderr() -> None:
    """Write the access log, and what goes wrong inside, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for logger, level in ((LOG, logging.INFO), (logging.getLogger("uvicorn.error"), logging.ERROR)):
        logger.setLevel(level)
        logger.handlers = [handler]
        logger.propagate = False
