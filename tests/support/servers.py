"""A real server: a process that listens on a port of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import ROOT

DEMO = ROOT / "models" / "demo"
REAL = ROOT / "smollm2"
READY = re.compile(r"on (http://\S+)/v1 ")


@dataclass
class Running:
    """A server that listens. ``url`` has no path; ``log`` is what it writes to stderr."""

    process: subprocess.Popen[bytes]
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


Start = Callable[..., Running]


def start_server(log: Path, environment: dict[str, str], *arguments: str | Path) -> Running:
    """Start 'ovspec serve' with ``arguments`` and wait until it listens."""
    command = [sys.executable, "-m", "ovspec", "serve", *map(str, arguments), "--port", "0"]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        if found := READY.search(log.read_text(encoding="utf-8", errors="replace")):
            return Running(process, found[1], log)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    process.kill()
    raise AssertionError(log.read_text(encoding="utf-8"))


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until a condition holds; fails if it doesn't in so many seconds."""
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, command_environment: dict[str, str]) -> Iterator[Start]:
    """Return a function that starts a server, which ends with the module."""
    started: list[Running] = []

    def start(*arguments: str | Path, **variables: str) -> Running:
        log = tmp_path_factory.mktemp("server") / "stderr"
        started.append(start_server(log, {**command_environment, **variables}, *arguments))
        return started[-1]

    yield start
    for server in started:  # they end side by side
        server.tell_to_end()
    for server in started:
        server.end()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, command_environment: dict[str, str]) -> Iterator[Running]:
    """A server of the demo pair, in f32, with two drafters, which propose whether that pays here or not."""
    options = ("--draft", "lookup,draft", "--lookahead", "2", "--precision", "f32", "--model-name", "demo")
    server = start_server(tmp_path_factory.mktemp("server") / "stderr", command_environment, DEMO, *options)
    yield server
    server.end()


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, command_environment: dict[str, str]) -> Iterator[Running]:
    """A server of the real model, with lookup."""
    if not REAL.is_dir():
        pytest.skip("the real model could not be fetched")
    options = ("--draft", "lookup", "--lookahead", "4", "--temperature", "0", "--no-tune")
    server = start_server(tmp_path_factory.mktemp("server") / "stderr", command_environment, REAL, *options)
    yield server
    server.end()
