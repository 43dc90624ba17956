"""Workers that die: restarts are bounded, the others answer, and whoever can't be answered is told why."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra ovspec[ray]")

import ray
from ray.exceptions import ActorDiedError, NodeDiedError, OutOfMemoryError

from ovspec.base.errors import OvspecError
from ovspec.integrations.ray.cluster import connected
from ovspec.integrations.ray.deaths import how_it_died, note_signals
from ovspec.integrations.ray.pool import RESTARTS, TOGETHER, Pool
from ovspec.integrations.ray.worker import Reference
from ovspec.openai.batch_groups import Group, groups_of
from ovspec.openai.batch_requests import BatchRequest, prompt_request

DEADLY = "kill"


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    with connected("local"):
        yield


def starting(how: signal.Signals, started: list[int], loading: tuple[int, ...] = ()) -> Callable[[int], Any]:
    """Return what starts workers without a model, which a signal ends at a deadly line, or while ``loading``."""

    class Fake:
        def __init__(self, number: int) -> None:
            note_signals(number)
            self._number, self._answering = number, 0

        def load(self) -> Reference:
            if self._number in loading:
                self.die()
            return Reference("", f"kind of {self._number}", "", [])

        def answer(self, requests: list[BatchRequest]) -> list[dict[str, Any]]:
            self._answering += 1
            time.sleep(0.05)  # so that several groups are answered at a time
            if any(request.source.startswith(DEADLY) for request in requests):
                self.die()
            lines = [{"id": request.id, "text": request.source, "beside": self._answering - 1} for request in requests]
            self._answering -= 1
            return lines

        def die(self) -> None:
            os.kill(os.getpid(), how)
            time.sleep(60)

    def start(number: int) -> Any:
        started.append(number)
        ways: Any = {"num_cpus": 0, "max_restarts": 0, "max_concurrency": TOGETHER}
        return ray.remote(**ways)(Fake).remote(number)

    return start


def groups(texts: list[str], known: tuple[int, ...] = ()) -> list[Group]:
    """Return the groups of a file of such prompts, some of which an earlier run answered."""
    requests = [prompt_request(str(place), text, text) for place, text in enumerate(texts)]
    keys = [key for group in groups_of(0, requests, "", (), 2) for key in group.keys.items()]
    return list(groups_of(0, requests, "", [key for place, key in keys if place in known], 2))


def lines_of(pool: Pool, todo: list[Group]) -> dict[int, dict[str, Any]]:
    """Return all output lines by place; each line is there once."""
    lines, keys = list[tuple[int, dict[str, Any]]](), list[int]()
    for answered in pool.answer(todo):
        for group in answered:
            lines.extend(group.lines.items())
            keys.extend(group.keys)
    assert sorted(keys) == list(range(todo[0].total))
    found = dict(lines)
    assert len(found) == len(lines)
    return found


def test_a_worker_that_dies_while_it_loads_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    started = list[int]()
    pool = Pool(starting(signal.SIGFPE, started, loading=(2,)), 2, False, "model")
    found = lines_of(pool, groups([f"prompt {n}" for n in range(100)]))
    pool.close()
    assert [found[n]["text"] for n in range(100)] == [f"prompt {n}" for n in range(100)]
    assert max(line["beside"] for line in found.values()) == TOGETHER - 1, "the others stay full"
    assert (started, pool.size) == ([1, 2], 1)
    assert "worker 2 died of SIGFPE; it is left out" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_line_that_kills_gets_an_error(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends a worker with others, then with its group, then alone; nothing else has an error."""
    started, texts = list[int](), [f"prompt {n}" for n in range(99)]
    texts[70:70] = [f"{DEADLY} this"]
    pool = Pool(starting(signal.SIGFPE, started), count, True, "model")
    found = lines_of(pool, groups(texts, known=(3, 72)))
    pool.close()
    error = found.pop(70)
    assert "died of SIGFPE" in error["error"]
    assert re.fullmatch(r"kind of \d", error["worker"])
    assert sorted(found) == [n for n in range(100) if n not in (3, 70, 72)]
    assert all(line["text"] == texts[n] for n, line in found.items())
    assert len(started) == count + 3
    assert capsys.readouterr().err.count("died of SIGFPE; another one starts") == 3


@pytest.mark.slow
def test_lines_that_all_kill_stop_the_run() -> None:
    started, answered = list[int](), list[Group]()
    pool = Pool(starting(signal.SIGKILL, started), 1, False, "model in words")
    told = r"No worker is left, because the last one was killed \(.*SIGKILL.*\) while it answered with model in words; "
    with pytest.raises(OvspecError, match=told):
        for more in pool.answer(groups([f"{DEADLY} {n}" for n in range(6)])):
            answered.extend(more)
    pool.close()
    failed = [line for group in answered for line in group.lines.values()]
    assert len(failed) == 2 and all("was killed" in line["error"] for line in failed), "they are kept"
    assert len(started) == 1 + RESTARTS


@pytest.mark.slow
def test_workers_that_all_die_while_they_load_stop_the_run() -> None:
    started = list[int]()
    pool = Pool(starting(signal.SIGABRT, started, loading=(1, 2)), 2, False, "model in words")
    with pytest.raises(OvspecError, match=r"because the last one died of SIGABRT while it loaded model in words; "):
        list(pool.answer(groups(["a", "b"])))
    pool.close()
    assert started == [1, 2]


@pytest.mark.slow
def test_progress_goes_on_while_workers_load() -> None:
    class Slow:
        def load(self) -> Reference:
            time.sleep(2.5)
            return Reference("", "kind", "", [])

        def answer(self, requests: list[BatchRequest]) -> list[dict[str, Any]]:
            return [{} for _ in requests]

    pool = Pool(lambda _: ray.remote(num_cpus=0)(Slow).remote(), 1, False, "model")
    found = [(len(answered), pool.loading) for answered in pool.answer(groups(["a"]))]
    pool.close()
    assert found[0] == (0, 1) and found[-1] == (1, 0)
    assert len(found) >= 4, "each second"


@pytest.mark.slow
def test_files_are_read_while_others_are_answered() -> None:
    begun = list[int]()

    @ray.remote(num_cpus=0)
    def reading(number: int) -> list[Group]:
        texts = [f"{number} {place}" for place in range(32)]
        return list(groups_of(0, [prompt_request(text, text, text) for text in texts], "", (), 2))

    def files() -> Iterator[Any]:
        for number in range(40):
            begun.append(number)
            yield reading.remote(number)

    pool, behind = Pool(starting(signal.SIGFPE, []), 1, False, "model"), list[int]()
    texts = list[str]()
    for answered in pool.answer([], files()):
        texts.extend(line["text"] for group in answered for line in group.lines.values())
        behind.append(32 * len(begun) - len(texts))
    pool.close()
    assert sorted(texts) == sorted(f"{number} {place}" for number in range(40) for place in range(32))
    assert max(behind) < 32 * 40 / 2, "files are read as they are needed"


def test_how_a_worker_was_lost() -> None:
    class Broken:
        def __init__(self) -> None:
            raise ImportError("no module named x")

        def load(self) -> None:
            pass

    broken: Any = ray.remote(num_cpus=0)(Broken)
    with pytest.raises(ActorDiedError) as found:
        ray.get(broken.remote().load.remote())
    assert how_it_died(1, found.value) == "failed to start (ImportError: no module named x)"
    assert "ran out of memory" in how_it_died(1, OutOfMemoryError("1 worker(s) were killed"))
    assert "lost with its machine" in how_it_died(1, NodeDiedError(""))
