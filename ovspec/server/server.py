"""Runs the application: the socket, uvicorn, the log, and signals."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

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
from ovspec.server.access import ACCESS_LOG, AccessMiddleware, is_loopback
from ovspec.server.admission import Admission
from ovspec.server.app import make_app
from ovspec.server.context import ServerContext
from ovspec.server.http_protocol import make_uvicorn_config, raise_open_file_limit
from ovspec.text.generation_config import format_sampling

# Python's default of 5 ms would delay the engine's thread.
THREAD_SWITCH_SECONDS = 0.0005
KEY_VARIABLE = "OVSPEC_API_KEY"


def read_api_keys(key_file: Path | None) -> list[str]:
    """Return the valid API keys, from ``key_file`` or OVSPEC_API_KEY."""
    key_lines = read_text(key_file).splitlines() if key_file else [os.environ.get(KEY_VARIABLE, "")]
    keys = [key_line.strip() for key_line in key_lines if key_line.strip()]
    if key_file and not keys:
        raise OvspecError(f"{key_file}: contains no API key; write each API key on a separate line.")
    if not all(key.isascii() for key in keys):
        raise OvspecError(
            f"{key_file or KEY_VARIABLE}: a key has non-ASCII characters, but clients can send only ASCII; choose "
            "another key."
        )
    return keys


def check_option_combinations(options: ServeParams, keys: list[str]) -> None:
    """Raise OvspecError for conflicting options, before a model is loaded."""
    if not is_loopback(options.host) and not keys and not options.insecure:
        raise OvspecError(
            f"`host` is {options.host}, so anyone could use the server without a key; set `api_key_file`, or set "
            "`insecure` to serve everybody."
        )
    if options.lookup_memory and len(keys) > 1:
        raise OvspecError(
            "`lookup_memory` can't be combined with several API keys, because latency could reveal others' prompts; "
            "leave `lookup_memory` out."
        )


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address; raises OvspecError if binding fails."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    dualstack = is_ipv6 and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=dualstack)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # Python adds the address
        raise OvspecError(f"Can't listen on {host}:{port} ({reason}); choose another `host` or `port`.") from None


class DrainingServer(uvicorn.Server):
    """uvicorn's server. The first signal waits for running requests, the second ends them, the third exits at once."""

    def __init__(
        self, config: uvicorn.Config, admission: Admission, greeting: str, on_start: Callable[[], object]
    ) -> None:
        super().__init__(config)
        self._on_start = on_start
        self._admission = admission
        self._greeting = greeting
        self._signal_count = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print_note(self._greeting)
        self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._signal_count += 1
        self._admission.draining = True
        request_count = self._admission.request_count
        if self._signal_count == 1 and request_count:
            print_note(
                f"waiting for {request_count} request{'s' * (request_count > 1)} to finish; another signal cancels them"
            )
        elif self._signal_count == 2:
            self._admission.end_all_requests()
        elif self._signal_count > 2:
            end_process(1)

    async def on_tick(self, counter: int) -> bool:
        if self._admission.draining and not self._admission.request_count:
            self.should_exit = True
        return await super().on_tick(counter)


def serve(
    lm: LanguageModel,
    model_names: list[str],
    keys: list[str],
    listener: socket.socket,
    options: ServeParams,
    on_start: Callable[[], object] = lambda: None,
) -> None:
    """Serve ``lm`` under its names on a listening socket until a signal ends it; ``on_start``: called once it is up."""
    arithmetic_note = lm.target.arithmetic_note
    if options.deterministic and arithmetic_note != "exact":
        raise OvspecError(
            "`deterministic` needs exact arithmetic, but with this model and machine, arithmetic is "
            f"{arithmetic_note}; leave `deterministic` out."
        )
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    lm.runtime.preload_files()
    engine = EngineThread(lm.runtime, options.batch_size, options.lookup_memory, options.prefill_chunk)
    context = ServerContext(lm, engine, model_names, options)
    engine.start()
    api_app = make_app(context)

    def count_request(scope: Scope, status: int) -> None:
        context.metrics.requests.labels(find_route_path(api_app, scope), str(status)).inc()

    guarded_app = AccessMiddleware(api_app, keys, not keys and not options.insecure, count_request)
    log_to_stderr()
    raise_open_file_limit()
    try:
        greeting = make_greeting(context, listener)
        server = DrainingServer(make_uvicorn_config(guarded_app), context.admission, greeting, on_start)
        asyncio.run(server.serve(sockets=[listener]))
    finally:
        engine.stop(timeout_s=2.0)
        if context.admission.has_ended_requests:
            end_process(0)


def make_greeting(context: ServerContext, listener: socket.socket) -> str:
    """Return the lines with the server's address and settings."""
    lm = context.lm
    host, port = listener.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    draft_description = lm.runtime.models.draft_choice or "none"
    settings_text = f"{lm.target.engine} engine, {lm.target.arithmetic_note} arithmetic, draft: {draft_description}"
    greeting = f"{context.model_names[0]} on http://{host}:{port}/v1 ({settings_text})"
    greeting += f"\nchat in a browser: http://{host}:{port}/"
    if context.recommended_sampling:
        sampling = format_sampling(context.recommended_sampling)
        greeting += f"\ndefault sampling, as the model recommends: {sampling}; --temperature 0 for greedy"
    return greeting


def end_process(exit_status: int) -> None:
    """End the process without waiting for its threads or child processes."""
    for child_process in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            child_process.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)


def find_route_path(api_app: FastAPI, scope: Scope) -> str:
    """Return a request's endpoint, such as /v1/models/{name}; "other" for unknown paths."""
    for route in api_app.routes:
        if isinstance(route, APIRoute) and route.matches(scope)[0] is not Match.NONE:
            return route.path_format
    return "other"


def log_to_stderr() -> None:
    """Write the access log, and errors inside the server, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    for logger, level in ((ACCESS_LOG, logging.INFO), (logging.getLogger("uvicorn.error"), logging.ERROR)):
        logger.setLevel(level)
        logger.handlers = [handler]
        logger.propagate = False
