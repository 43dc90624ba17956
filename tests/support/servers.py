"""Real servers, each with a port of its own: processes, and threads of this process, which start much sooner."""

from __future__ import annotations

import functools
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import ROOT
from httpx._transports import default
from kept import kept_model

import ovspec
from ovspec.cli import cli
from ovspec.ir.instruction_set import describe_instruction_set

# Each new client reads all certificates, which takes 40 ms, and ``httpx.post`` makes one for each request.
transports: Any = default
transports.create_ssl_context = functools.cache(transports.create_ssl_context)
DEMO = ROOT / "models" / "demo"
REAL, REAL_F32 = ROOT / "smollm2", ROOT / ".cache" / "smollm2-f32"
READY = re.compile(r"on (http://\S+)/v1 ")
LOGGERS = [logging.getLogger(name) for name in ("ovspec.access", "uvicorn.error")]


@dataclass
class Running:
    """A server that listens. ``url`` has no path; ``log`` is what it writes to stderr."""

    url: str
    log: Path

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        found = re.findall(rf"(?m)^{name}(?:{{[^}}]*}})? (\S+)$", self.get("/metrics").text)
        return sum(map(float, found))


@dataclass
class ServerProcess(Running):
    process: subprocess.Popen[bytes]

    def tell_to_end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT if os.name == "nt" else signal.SIGTERM)

    def end(self) -> int:
        self.tell_to_end()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@dataclass
class ServerThread(Running):
    """A server in a thread of this process. ``server``: uvicorn's."""

    server: Any
    thread: threading.Thread

    def tell_to_end(self) -> None:
        self.server.should_exit = True

    def end(self) -> None:
        self.tell_to_end()
        self.thread.join(30)
        assert not self.thread.is_alive()


Start = Callable[..., ServerProcess]
StartHere = Callable[..., ServerThread]


def start_server(log: Path, environment: dict[str, str], *arguments: str | Path) -> ServerProcess:
    """Start 'ovspec serve' with ``arguments`` and wait until it listens."""
    command = [sys.executable, "-m", "ovspec", "serve", *map(str, arguments), "--port", "0"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        if found := READY.search(log.read_text(encoding="utf-8", errors="replace")):
            return ServerProcess(found[1], log, process)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.kill()
    raise AssertionError(log.read_text(encoding="utf-8"))


def start_thread(log: Path, environment: dict[str, str], *arguments: str | Path) -> ServerThread:
    """Do what ``start_server`` does, in a thread; only signals and the end of the process can't be tested so."""
    from ovspec.server import server as module

    told: queue.SimpleQueue[module.DrainingServer | BaseException] = queue.SimpleQueue()

    class Telling(module.DrainingServer):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            told.put(self)

    def serve() -> None:
        try:
            cli.main(["serve", *map(str, arguments), "--port", "0"], standalone_mode=False)
        except BaseException as error:  # which the main thread raises
            told.put(error)

    thread = threading.Thread(target=serve, name=f"server {log}", daemon=True)
    others = [logger.handlers for logger in LOGGERS]
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        patched.setattr(module, "DrainingServer", Telling)
        patched.setattr(sys, "stderr", log.open("w", buffering=1, encoding="utf-8"))
        thread.start()
        server = told.get(timeout=120)
    if isinstance(server, BaseException):
        raise server
    for logger, handlers in zip(LOGGERS, others, strict=True):  # each server writes its own log
        logger.handlers[0].addFilter(lambda record: record.threadName == thread.name)
        logger.handlers = [*handlers, *logger.handlers]
    [url] = READY.findall(log.read_text(encoding="utf-8"))
    return ServerThread(url, log, server, thread)


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until a condition holds; fails if it doesn't in so many seconds."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.fixture(scope="module")
def start(
    tmp_path_factory: pytest.TempPathFactory, command_environment: dict[str, str], cache_dir: Path
) -> Iterator[Start]:
    """Return a function that starts a server, which ends with the module."""
    started: list[ServerProcess] = []

    def start(*arguments: str | Path, **variables: str) -> ServerProcess:
        log = tmp_path_factory.mktemp("server") / "stderr"
        started.append(start_server(log, {**command_environment, **variables}, "--cache-dir", cache_dir, *arguments))
        return started[-1]

    yield start
    for server in started:  # they end side by side
        server.tell_to_end()
    for server in started:
        server.end()


@pytest.fixture(scope="module")
def start_here(
    tmp_path_factory: pytest.TempPathFactory, command_environment: dict[str, str], cache_dir: Path
) -> Iterator[StartHere]:
    """Return a function that starts a server in this process, which ends with the module."""
    started: list[ServerThread] = []
    interval, handlers = sys.getswitchinterval(), [logger.handlers for logger in LOGGERS]

    def start(*arguments: str | Path, **variables: str) -> ServerThread:
        log = tmp_path_factory.mktemp("server") / "stderr"
        started.append(start_thread(log, {**command_environment, **variables}, "--cache-dir", cache_dir, *arguments))
        return started[-1]

    yield start
    for server in started:
        server.tell_to_end()
    for server in started:
        server.end()
    sys.setswitchinterval(interval)
    for logger, before in zip(LOGGERS, handlers, strict=True):
        logger.handlers = before


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, command_environment: dict[str, str], cache_dir: Path
) -> Iterator[Running]:
    """A server of the demo pair, in f32, with two drafters, which propose whether that pays here or not."""
    options = ("--draft", "lookup,draft", "--lookahead", "2", "--precision", "f32", "--model-name", "demo")
    more = ("--cache-dir", cache_dir, *options)
    server = start_server(tmp_path_factory.mktemp("server") / "stderr", command_environment, DEMO, *more)
    yield server
    server.end()


def find_out(cache: Path) -> None:
    """Fill a cache with what the first loads of the real model take long to find out."""
    cache.mkdir()
    ovspec.load(REAL, "lookup", tune=False, cache_dir=cache)
    if REAL_F32.is_dir():
        ovspec.load(REAL_F32, "lookup", precision="f32", arithmetic="fast", tune=False, cache_dir=cache)


def find_out_in_f32(cache: Path) -> None:
    """Do the same for the server, which only slow tests ask."""
    cache.mkdir()
    ovspec.load(REAL, "lookup", precision="f32", tune=False, cache_dir=cache)


@pytest.fixture(scope="session")
def known_of_real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache with what is known of the real model on this processor, kept between runs."""
    if not REAL.is_dir():
        pytest.skip("the real model could not be fetched")
    return kept_model(tmp_path_factory, f"known-of-smollm2-{describe_instruction_set()}", find_out)


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, command_environment: dict[str, str]) -> Iterator[Running]:
    """A server of the real model, with lookup, in f32, where texts are the same on all processors."""
    options = ("--draft", "lookup", "--lookahead", "4", "--temperature", "0", "--no-tune", "--precision", "f32")
    if not REAL.is_dir():
        pytest.skip("the real model could not be fetched")
    known = kept_model(tmp_path_factory, f"known-of-smollm2-f32-{describe_instruction_set()}", find_out_in_f32)
    more = ("--cache-dir", known, *options)
    server = start_server(tmp_path_factory.mktemp("server") / "stderr", command_environment, REAL, *more)
    yield server
    server.end()
