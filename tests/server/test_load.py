"""Many clients at once: each is answered or refused properly, and afterwards everything is back where it was."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import httpx
import psutil
import pytest
from conftest import PROMPTS
from servers import DEMO, Running, ServerProcess, Start


async def client(number: int, server: ServerProcess, ends: float, breaks_off: float, found: Counter[str]) -> None:
    """Send requests one after the other until ``ends``; break off a share of the streams."""
    chance = random.Random(number)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as connection:
        while time.monotonic() < ends:
            body = {"prompt": chance.choice(PROMPTS), "max_tokens": chance.randint(1, 24), "stream": number % 2 == 0}
            if chance.random() < 0.3:
                body |= {"temperature": 1.0, "seed": chance.randrange(100), "regex": "[a-z ]{1,20}"}
            try:
                async with connection.stream("POST", "/v1/completions", json=body) as answer:
                    if breaks_off and chance.random() < breaks_off:
                        async for _ in answer.aiter_bytes():
                            break
                        found["broken off"] += 1
                        continue
                    text = (await answer.aread()).decode()
                    answered = "error" not in text[:10] and (not body["stream"] or text.endswith("data: [DONE]\n\n"))
                    found[str(answer.status_code) if answered or answer.status_code == 429 else text[:80]] += 1
                    if answer.status_code == 429:
                        await asyncio.sleep(0.05)
            except httpx.HTTPError as error:
                found[repr(error)] += 1


def resources(server: ServerProcess) -> tuple[float, int, int]:
    """Return a server's memory in MB, its open files, and its threads."""
    process = psutil.Process(server.process.pid)
    return process.memory_info().rss / 1e6, process.num_fds(), process.num_threads()


def settle(server: ServerProcess) -> None:
    """Wait until the server has noticed that everybody has gone."""
    ends = time.monotonic() + 10
    while server.metric("ovspec_texts_running") + server.metric("ovspec_texts_waiting"):
        assert time.monotonic() < ends
        time.sleep(0.05)
    time.sleep(0.3)


async def load(server: ServerProcess, clients: int, seconds: float, breaks_off: float = 0.0) -> Counter[str]:
    found: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    await asyncio.gather(*[client(number, server, ends, breaks_off, found) for number in range(clients)])
    return found


@pytest.mark.skipif(psutil.WINDOWS, reason="Windows counts handles otherwise")
@pytest.mark.parametrize(
    ("clients", "queue", "seconds", "breaks_off"),
    [
        (20, None, 0.8, 0.0),  # of the tests' own server
        pytest.param(32, 4, 1.5, 0.0, marks=pytest.mark.slow),
        pytest.param(200, 200, 60, 0.0, marks=pytest.mark.slow),
        pytest.param(200, 200, 1200, 0.05, marks=pytest.mark.soak),
    ],
)
def test_load(
    start: Start, server: Running, clients: int, queue: int | None, seconds: float, breaks_off: float
) -> None:
    assert isinstance(server, ServerProcess)
    if queue is not None:
        server = start(DEMO, "--draft", "lookup,draft", "--precision", "f32", "--queue-size", str(queue))
    asyncio.run(load(server, clients, min(seconds / 2, 8)))  # what is made once: threads, grammars
    settle(server)
    before, found, megabytes = resources(server), Counter[str](), list[float]()
    parts = 4 if breaks_off else 1
    for _ in range(parts):
        found += asyncio.run(load(server, clients, seconds / parts, breaks_off))
        settle(server)
        megabytes.append(resources(server)[0])
    after = resources(server)
    assert found.keys() <= {"200", "429", "broken off"}, found
    assert found["200"] > 5 * seconds, found
    assert found["429"] > 0 or queue is None or queue >= clients, found
    assert server.metric("ovspec_texts_running") == server.metric("ovspec_texts_waiting") == 0
    assert server.metric("ovspec_cache_blocks_used") == 0
    assert after[1] <= before[1] + 5 and after[2] <= before[2] + 5, (before, after)
    if breaks_off:  # OpenVINO keeps kernels for each new width, so memory grows until all of them have been seen
        assert found["broken off"] > 100 and megabytes[3] < megabytes[1] + 30, megabytes
    print(found, before, megabytes)
