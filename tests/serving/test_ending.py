"""How a server ends: a signal lets running requests end, a second one doesn't wait, and a kill loses nothing else."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import httpx
import pytest
from servers import DEMO, Running, Start

LONG = {"prompt": "def f(", "max_tokens": 600, "ignore_eos": True}
pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to handle")


def sent(server: Running, body: dict[str, Any], found: list[Any]) -> threading.Thread:
    """Send a request in a thread, which adds the answer to ``found``."""

    def ask() -> None:
        try:
            found.append(server.post("/v1/completions", body))
        except httpx.HTTPError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def asked(server: Running, found: list[Any]) -> threading.Thread:
    """Send a request for a long text in a thread, and return when it is being generated."""
    thread = sent(server, LONG, found)
    ends = time.monotonic() + 20
    while server.metric("ovspec_texts_running") == 0:
        assert time.monotonic() < ends
        time.sleep(0.01)
    return thread


def test_a_signal_lets_requests_end(start: Start) -> None:
    server, found = start(DEMO, "--draft", "none", "--precision", "f32"), list[Any]()
    thread = asked(server, found)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert server.get("/ready").status_code == 503 and server.get("/health").status_code == 200
    refused = server.post("/v1/completions", LONG)
    assert refused.status_code == 503 and refused.headers["Retry-After"]
    assert server.process.poll() is None
    thread.join(60)
    assert found[0].status_code == 200 and found[0].json()["usage"]["completion_tokens"] == 600
    assert server.process.wait(10) == 0
    assert "Traceback" not in server.log.read_text(encoding="utf-8")


def test_a_second_signal_ends_them(start: Start) -> None:
    server, found = start(DEMO, "--draft", "none", "--precision", "f32"), list[Any]()
    thread = asked(server, found)
    began = time.monotonic()
    for _ in range(2):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    server.process.wait(10)
    thread.join(10)
    assert time.monotonic() - began < 8
    assert found[0].status_code == 503 and "stopped" in found[0].json()["error"]["message"]
    assert "Traceback" not in server.log.read_text(encoding="utf-8")


def test_a_second_signal_ends_what_is_read_first(start: Start) -> None:
    """Prompts whose log-probabilities are repeated, and the texts that would have followed."""
    server, found = start(DEMO, "--draft", "none"), list[httpx.Response]()
    body = {"prompt": [[100 + number] * 1500 for number in range(60)], "max_tokens": 50, "echo": True, "logprobs": 1}
    thread = threading.Thread(target=lambda: found.append(server.post("/v1/completions", body)))
    thread.start()
    time.sleep(0.7)
    for _ in range(2):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert server.process.wait(5) == 0
    thread.join(10)
    assert found[0].status_code == 503 and "stopped" in found[0].json()["error"]["message"]


@pytest.mark.parametrize("signals", [2, 3])
def test_a_second_signal_ends_what_is_prepared(start: Start, signals: int) -> None:
    """A grammar whose check would take seconds; the process doesn't wait for it, either."""
    server, found = start(DEMO, "--draft", "none"), list[Any]()
    thread = sent(server, {"prompt": "a", "json_schema": {"type": "integer", "multipleOf": 9999889}}, found)
    time.sleep(1)
    for _ in range(signals):
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    assert server.process.wait(3) == (0 if signals == 2 else 1)
    thread.join(10)
    if signals == 2:
        assert found[0].status_code == 503 and "stopped" in found[0].json()["error"]["message"]


def test_without_requests_it_ends_at_once(start: Start) -> None:
    server = start(DEMO, "--draft", "none")
    assert server.end() == 0


def test_idle_connections_do_not_hold_it_up(start: Start) -> None:
    server = start(DEMO, "--draft", "none")
    with httpx.Client() as client, httpx.Client() as other:
        for each in (client, other):
            assert each.get(f"{server.url}/health").status_code == 200
        assert server.end() == 0
    assert "timeout" not in server.log.read_text(encoding="utf-8")


def test_a_killed_server_starts_again(start: Start) -> None:
    server, found = start(DEMO, "--draft", "none", "--precision", "f32"), list[Any]()
    thread = asked(server, found)
    server.process.kill()
    thread.join(10)
    assert isinstance(found[0], Exception)
    assert start(DEMO, "--draft", "none", "--precision", "f32").get("/ready").status_code == 200
