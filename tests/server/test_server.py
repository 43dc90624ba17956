"""How a server ends: a signal lets running requests end, a second one doesn't wait, and a kill loses nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from servers import DEMO, ServerProcess, Start

SMALL = DEMO / "draft"  # which starts sooner
PLAIN = ("--draft", "none", "--precision", "f32", "--arithmetic", "fast")  # so does what probes nothing
LONG_REQUEST = {"prompt": "def f(", "max_tokens": 600, "ignore_eos": True}
SLOW_GRAMMAR = {"prompt": "a", "json_schema": {"type": "integer", "multipleOf": 9999889}}  # its check takes seconds
pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to handle")


def sent(server: ServerProcess, body: dict[str, Any], found: list[Any]) -> threading.Thread:
    """Send a request in a thread, which adds the answer to ``found``."""

    def ask() -> None:
        try:
            found.append(server.post("/v1/completions", body))
        except httpx.HTTPError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def asked(server: ServerProcess, found: list[Any]) -> threading.Thread:
    """Send a request for a long text in a thread, and return when it is being generated."""
    thread = sent(server, LONG_REQUEST, found)
    ends = time.monotonic() + 20
    while server.metric("ovspec_texts_running") == 0:
        assert time.monotonic() < ends
        time.sleep(0.01)
    return thread


@contextlib.contextmanager
def its_checks_end(server: ServerProcess) -> Iterator[None]:
    """Demand that the processes that check grammars for ``server`` end with it, however much they have to do."""
    checking = psutil.Process(server.process.pid).children(recursive=True)
    assert checking
    yield
    _, alive = psutil.wait_procs(checking, timeout=5)
    assert not alive


def test_a_signal_lets_requests_end(start: Start) -> None:
    server, found = start(DEMO, *PLAIN), list[Any]()
    thread = asked(server, found)
    with httpx.Client() as idle:  # which does not hold it up
        assert idle.get(f"{server.url}/health").status_code == 200
        signalled(server, thread, found)


def signalled(server: ServerProcess, thread: threading.Thread, found: list[Any]) -> None:
    """Tell a server to end and check what it does until then."""
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.get("/ready").status_code == 503 and server.get("/health").status_code == 200
    refused = server.post("/v1/completions", LONG_REQUEST)
    assert refused.status_code == 503 and refused.headers["Retry-After"]
    assert server.process.poll() is None
    thread.join(60)
    assert found[0].status_code == 200 and found[0].json()["usage"]["completion_tokens"] == 600
    assert server.process.wait(10) == 0
    log = server.log.read_text(encoding="utf-8")
    assert "Traceback" not in log and "timeout" not in log


def test_a_second_signal_ends_them(start: Start) -> None:
    """A text that grows; prompts that are read for their log-probabilities; a grammar whose check takes seconds."""
    server, found = start(DEMO, *PLAIN), list[Any]()
    threads = [asked(server, found)]
    prompts = [[100 + number] * 1500 for number in range(60)]
    threads.append(sent(server, {"prompt": prompts, "max_tokens": 50, "echo": True, "logprobs": 1}, found))
    threads.append(sent(server, SLOW_GRAMMAR, found))
    time.sleep(0.7)
    assert not found
    began = time.monotonic()
    with its_checks_end(server):
        for _ in range(2):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert server.process.wait(5) == 0
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - began < 8
    for answer in found:
        assert answer.status_code == 503 and "stopped" in answer.json()["error"]["message"]
    assert len(found) == 3
    assert "Traceback" not in server.log.read_text(encoding="utf-8")


def test_a_third_signal_ends_it_without_answers(start: Start) -> None:
    server, found = start(SMALL, *PLAIN), list[Any]()
    thread = sent(server, SLOW_GRAMMAR, found)
    time.sleep(1)
    with its_checks_end(server):
        for _ in range(3):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert server.process.wait(3) == 1
    thread.join(10)


@pytest.mark.slow
def test_a_killed_server_starts_again(start: Start) -> None:
    server, found = start(DEMO, *PLAIN), list[Any]()
    thread = asked(server, found)
    server.process.kill()
    thread.join(10)
    assert isinstance(found[0], Exception)
    restarted = start(DEMO, *PLAIN)
    assert restarted.get("/ready").status_code == 200


@pytest.mark.slow
def test_without_requests_it_ends_at_once(start: Start) -> None:
    """Idle connections do not hold it up."""
    server = start(SMALL, *PLAIN, "--engine", "stateful")
    with httpx.Client() as client, httpx.Client() as other:
        for each in (client, other):
            assert each.get(f"{server.url}/health").status_code == 200
        began = time.monotonic()
        assert server.end() == 0
        assert time.monotonic() - began < 8
    assert "timeout" not in server.log.read_text(encoding="utf-8")
