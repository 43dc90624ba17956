"""Processes that render templates, check grammars and judge texts are killed, as the system does without memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from servers import Running, ServerProcess

import ovspec
from ovspec.base.errors import UnavailableError
from ovspec.params.serving import ServeParams
from ovspec.server.context import ServerContext
from ovspec.server.errors import ApiError

MODULES = (
    "ovspec.text.chat_template_worker",
    "ovspec.sampling.grammar_conversion",
    "ovspec.sampling.schema_validation",
)
CHAT = {"messages": [{"role": "user", "content": "Write a function."}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def workers_of(server: Running) -> list[psutil.Process]:
    """Return the server's processes that handle untrusted input."""
    assert isinstance(server, ServerProcess)
    found = list[psutil.Process]()
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):  # it has ended
            found += [child] * any(module in child.cmdline() for module in MODULES)
    return found


def requests_to(number: int) -> list[tuple[str, Any]]:
    """Return requests, each of which needs a process that hasn't seen it."""
    schema = {"type": "object", "title": f"{number}", "properties": {"a": {"type": "string", "pattern": "^a*$"}}}
    named = {**TOOL["function"], "description": f"{number}", "parameters": schema}
    of_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "response_format": of_schema, "json_schema_mode": "checked"}),
        ("/v1/messages/count_tokens", {**CHAT, "system": f"{number}"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "regex": f"[a-z ]{{1,{number + 2}}}"}),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": named}]}),
    ]


@pytest.mark.skipif(psutil.WINDOWS, reason="kills as on POSIX systems")
@pytest.mark.slow
def test_kills_under_load(server: Running, clients: int = 4, kills: int = 30) -> None:
    """No request fails, whether its process is killed while it is idle, starts, or answers (see test_sandbox.py)."""
    chance, numbers, over = random.Random(kills), itertools.count(1), threading.Event()
    statuses = list[tuple[int, str]]()

    def ask() -> None:
        while not over.is_set():
            for path, body in requests_to(next(numbers)):
                answer = server.post(path, body)
                statuses.append((answer.status_code, answer.text))

    for path, body in requests_to(0):
        assert server.post(path, body).status_code == 200
    killed = 0
    with ThreadPoolExecutor(clients) as pool:
        asking = [pool.submit(ask) for _ in range(clients)]
        try:
            while killed < kills:
                if workers := workers_of(server):
                    for worker in workers if killed == 0 else [chance.choice(workers)]:
                        with contextlib.suppress(psutil.Error):
                            worker.kill()
                    killed += 1
                time.sleep(chance.random() / 5)
        finally:
            over.set()
    for asked in asking:
        asked.result()
    assert len(statuses) >= 5 * clients  # all requests of each client
    assert [answer for answer in statuses if answer[0] != 200] == []


def test_killed_each_time(load: Callable[..., ovspec.LanguageModel]) -> None:
    """Clients try again after 503, and aren't told that the request is wrong."""

    def fail() -> None:
        raise UnavailableError("The process that checks grammars was killed, 6 times; try again.")

    engine: Any = SimpleNamespace(metrics=None)
    service = ServerContext(load(), engine, ["it"], ServeParams())
    with pytest.raises(ApiError, match="was killed, 6 times") as found:
        asyncio.run(service.threads.run_in_thread(fail))
    assert (found.value.status_code, found.value.param) == (503, None)
