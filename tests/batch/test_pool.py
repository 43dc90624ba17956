"""What a pool does when its workers die, with a stand-in for Ray that needs no cluster: every call ends at once."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs the extra ovspec[ray]")

from ray.exceptions import NodeDiedError

from ovspec.base.errors import OvspecError
from ovspec.batch.groups import RequestGroup, make_groups
from ovspec.batch.ray.pool import GROUPS_IN_FLIGHT, RESTARTS_PER_WORKER, WorkerPool
from ovspec.batch.requests import BatchRequest, make_prompt_request

DEADLY = "kill"


@dataclass(eq=False)
class Ended:
    """A call that has ended: with what it returned, or because its worker died."""

    value: Any = None
    died: bool = False


def get(call: Ended) -> Any:
    if call.died:
        raise NodeDiedError("")
    return call.value


def answer(requests: list[BatchRequest]) -> Ended:
    lines = [{"id": request.id, "text": request.source} for request in requests]
    return Ended(lines, died=any(request.source == DEADLY for request in requests))


RAY = SimpleNamespace(get=get, wait=lambda refs, **_: (list(refs), []), kill=lambda _: None, ObjectRef=Ended)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of the workers that pools start; nothing here needs Ray itself."""
    monkeypatch.setattr("ovspec.batch.ray.pool.ray", RAY)
    return []


def pool_of(count: int, started: list[int], deadly: int | None = None) -> WorkerPool:
    """Return a pool whose worker ``deadly`` dies while it loads."""

    def start(number: int) -> Any:
        started.append(number)
        arithmetic = SimpleNamespace(computing_conditions="here")
        load = SimpleNamespace(remote=lambda: Ended(arithmetic, died=number == deadly))
        return SimpleNamespace(load_worker_model=load, run_requests=SimpleNamespace(remote=answer))

    return WorkerPool(start, count, False, "model")


def groups(texts: list[str]) -> list[RequestGroup]:
    return list(make_groups(0, [make_prompt_request(str(n), text, text) for n, text in enumerate(texts)], "", (), 2))


def test_lines_that_all_kill_stop_the_run(started: list[int]) -> None:
    """Each is tried with others and alone; the workers that are started for that are counted."""
    runs = pool_of(1, started).run_groups(groups([DEADLY] * 6))
    with pytest.raises(OvspecError, match="No workers are left: the last worker was lost with its machine while"):
        for _ in range(100):
            next(runs)
    assert started == [1] * (1 + RESTARTS_PER_WORKER)


def test_a_line_that_kills_gets_an_error_and_the_others_an_answer(started: list[int]) -> None:
    texts = [f"prompt {n}" for n in range(60)]
    texts[30:30] = [DEADLY]
    runs, lines = pool_of(2, started).run_groups(groups(texts)), dict[int, dict[str, Any]]()
    for _ in range(100):
        if (answered := next(runs, None)) is None:
            break
        for group in answered:
            lines |= group.lines
    else:
        pytest.fail("the run doesn't end")
    error = lines.pop(30)["error"]
    assert "ran this line, and the last was lost with its machine; leave the line out" in error
    assert {n: line["text"] for n, line in lines.items()} == {n: t for n, t in enumerate(texts) if t != DEADLY}
    assert len(started) == 2 + 3, "it dies beside others, with its group, and alone"


def test_a_worker_that_dies_while_it_loads_is_left_out(
    started: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = list[int]()
    monkeypatch.setattr(RAY, "wait", lambda refs, **_: calls.append(len(refs)) or (list(refs), []))
    pool, texts = pool_of(2, started, deadly=2), [f"prompt {n}" for n in range(60)]
    lines = dict[int, dict[str, Any]]()
    for answered in itertools.islice(pool.run_groups(groups(texts)), 100):
        for group in answered:
            lines |= group.lines
    assert [lines[n]["text"] for n in range(60)] == texts
    assert max(calls) == GROUPS_IN_FLIGHT, "the other stays full"
    assert (started, pool.worker_count) == ([1, 2], 1)
    assert "worker 2 was lost with its machine; it is left out" in capsys.readouterr().err
