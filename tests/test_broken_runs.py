"""Runs of small projects with the tests' own plugins, in which processes die and tests hang: each run ends."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import family_models
import guardian
import psutil
import pytest
from conftest import ROOT
from durations import KEPT
from guardian import kill_marked, marked
from places import cores_at
from scheduling import LongestFirst
from servers import wait_until

SUPPORT = ROOT / "tests" / "support"
# Like a cluster's daemon, it has left its session and ends at no signal that can be ignored.
HARDY = """
import os, signal, sys, time
for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
    signal.signal(number, signal.SIG_IGN)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".part", sys.argv[1])
time.sleep(600)
"""
HELPERS = f"""
import os, signal, subprocess, sys, threading, time
from pathlib import Path
import psutil, pytest

def hardy(name):
    "Start a process that something else than this one is the parent of; return its id."
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], start_new_session=True)"
    subprocess.run([sys.executable, "-c", code, {HARDY!r}, name], check=True)
    ends = time.monotonic() + 10
    while not Path(name).exists():
        assert time.monotonic() < ends
        time.sleep(0.02)
    return int(Path(name).read_text())

def runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
"""
Started = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Started]:
    """Return a function that starts a run of test files in two workers, with the plugins of conftest.py."""
    started: list[subprocess.Popen[str]] = []

    def start(**files: str) -> subprocess.Popen[str]:
        (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        (tmp_path / "helpers.py").write_text(HELPERS, encoding="utf-8")
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text("from helpers import *\n" + dedent(text), encoding="utf-8")
        plugins = [word for name in ("xdist", "durations", "guardian", "limits", "scheduling") for word in ("-p", name)]
        command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", *plugins]
        search = os.pathsep.join(map(str, (SUPPORT, tmp_path)))
        environment = {**os.environ, "PYTHONPATH": search, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
        started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes))
        return started[-1]

    yield start
    for run in started:
        run.kill()
        run.wait()
        kill_marked(mark_of(run))


def mark_of(run: subprocess.Popen[str]) -> str:
    return f"{os.environ[guardian.NAME]}/{run.pid}"


def test_a_worker_that_dies_and_tests_that_hang(project: Started, tmp_path: Path) -> None:
    """The run names each of them, goes on with the others, and leaves no process."""
    run = project(
        test_dying="""
        def test_before():
            Path("place").write_text(os.environ["OVSPEC_TESTS_PLACE"])

        def test_dies():
            hardy("dead")
            os.kill(os.getpid(), signal.SIGFPE)

        def test_what_it_started_is_gone():
            assert os.environ["PYTEST_XDIST_WORKER"] == "gw2"
            ends = time.monotonic() + 10
            while runs(int(Path("dead").read_text())):
                assert time.monotonic() < ends
                time.sleep(0.1)

        def test_it_has_the_others_place():
            assert os.environ["OVSPEC_TESTS_PLACE"] == Path("place").read_text()
        """,
        test_hanging="""
        @pytest.fixture(scope="module")
        def stuck():
            threading.Event().wait()

        @pytest.mark.limit(1)
        def test_hangs():
            hardy("held")
            threading.Event().wait()

        @pytest.mark.limit(1)
        def test_of_a_fixture_that_hangs(stuck): ...

        @pytest.mark.limit(1, patience=0.5)
        def test_hears_nothing():
            if hasattr(signal, "pthread_sigmask"):
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            threading.Event().wait()

        def test_after(): ...
        """,
    )
    told, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "4 passed" in told, told
    assert "3 failed, " in told and "1 error" in told, told
    assert re.search(r"FAILED test_hanging\.py::test_hangs .*takes longer than 1 s", told), told
    assert re.search(r"ERROR test_hanging\.py::test_of_a_fixture_that_hangs .*takes longer than 1 s", told), told
    for name in ("test_dying.py::test_dies", "test_hanging.py::test_hears_nothing"):
        assert re.search(rf"worker 'gw\d' crashed while running '{name}'", told), told
    assert re.search(r"Timeout \(0:00:01\.5\d*\)!(?s:.*)in test_hears_nothing", told), told
    slowest = told.partition("slowest fixtures")[2]
    assert re.search(r" 1\.\d s  test_hanging\.py::stuck", slowest), told
    seconds = json.loads((tmp_path / ".pytest_cache" / "v" / KEPT).read_text("utf-8"))
    assert seconds["test_hanging.py"] > seconds["test_dying.py"] > 0
    wait_until(lambda: not marked(mark_of(run)), 10)


@pytest.mark.slow
def test_all_files_of_a_dead_worker_are_run(project: Started) -> None:
    """Also if each has a single test left, and the other worker takes no more."""
    run = project(
        test_a="""
        def test_dies():
            os.kill(os.getpid(), signal.SIGFPE)

        def test_left(): ...
        """,
        test_b="def test_one(): ...",
        test_c="""
        def test_one(): ...
        def test_two(): ...
        """,
    )
    told, _ = run.communicate(timeout=60)
    assert "1 failed, 4 passed" in told, told


def test_the_longest_files_come_first() -> None:
    queue = LongestFirst({"b": 3.0, "c": 9.0})
    queue.update({name: {} for name in "abcd"})
    assert [queue.popitem(last=False)[0] for _ in "abcd"] == ["c", "b", "a", "d"]


def test_a_run_that_is_killed(project: Started, tmp_path: Path) -> None:
    """Its workers, and what they started, end with it."""
    run = project(
        test_forever="""
        def test_waits():
            hardy("held")
            threading.Event().wait()
        """
    )
    wait_until((tmp_path / "held").exists, 30)
    held = psutil.Process(int((tmp_path / "held").read_text("utf-8")))
    time.sleep(0.5)
    assert held in marked(mark_of(run))
    run.kill()
    wait_until(lambda: not marked(mark_of(run)), 10)


@pytest.mark.slow
def test_a_cluster_ends_with_its_worker(project: Started, tmp_path: Path) -> None:
    """Its daemons leave their parents and write themselves titles."""
    pytest.importorskip("ray", reason="needs the extra ovspec[ray]")
    run = project(
        test_cluster="""
        def test_dies():
            import ray

            ray.init(num_cpus=1, include_dashboard=False)
            assert ray.get(ray.remote(lambda: 1).remote()) == 1
            found = [each.pid for each in psutil.Process().children(recursive=True) if "ray" in str(each.cmdline())]
            Path("found").write_text(" ".join(map(str, found)))
            os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
        """
    )
    told, _ = run.communicate(timeout=100)
    assert "worker 'gw0' crashed while running 'test_cluster.py::test_dies'" in told, told
    found = [int(pid) for pid in (tmp_path / "found").read_text("utf-8").split()]
    assert len(found) > 2
    wait_until(lambda: not any(map(is_alive, found)), 10)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# Answers a job with its name, after a while.
WORKER = """
import json, sys, time
for line in sys.stdin:
    job, arguments = json.loads(line)
    time.sleep(arguments["seconds"])
    print(json.dumps(job), flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")
def test_no_job_gets_the_answer_of_one_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.cache
    def worker(_: None) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", WORKER], stdin=pipe, stdout=pipe, text=True)

    monkeypatch.setattr(family_models, "worker", worker)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        family_models.run(None, "first", seconds=5)
    assert family_models.run(None, "second", seconds=0) == "second"
    worker(None).kill()


def test_workers_share_the_cores() -> None:
    assert [cores_at(f"{number} of 2", {0, 2, 4, 6, 7}) for number in range(2)] == [[0, 4, 7], [2, 6]]
    assert [cores_at(f"{number} of 2", {5}) for number in range(2)] == [[5], [5]], "one for both"
