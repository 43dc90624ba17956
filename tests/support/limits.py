"""An end for every test: each of its parts (set-up, call, tear-down) takes at most the limit of its kind.

At the limit the test fails where it waits. A wait that hears nothing, in a library's own code, ends with its process,
after the stacks of all threads have been written; the other tests go on in a new worker.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

SECONDS = {"soak": 4 * 3600.0, "slow": 900.0}  # by marker
OTHERS = 120.0
PATIENCE = 60.0  # for what cleans up after a test that failed so
COLLECTION = 600.0
END = 60.0  # of the process, after its tests
MARKER = "limit(seconds, patience): how long each part of the test may take, and then how long its end"
STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    config.stash[STDERR] = os.dup(2)  # a test's own is captured, and lost with the process


def limits_of(item: pytest.Item) -> tuple[float, float]:
    """Return the seconds for each part of a test, and those for its end after that."""
    usual = next((seconds for name, seconds in SECONDS.items() if item.get_closest_marker(name)), OTHERS)
    marker = item.get_closest_marker("limit")
    seconds = marker.args[0] if marker else usual
    return seconds, marker.kwargs.get("patience", PATIENCE) if marker else PATIENCE


@contextmanager
def process_ends_after(seconds: float, config: pytest.Config) -> Iterator[None]:
    """End this process if the block takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[STDERR])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextmanager
def fails_after(seconds: float) -> Iterator[None]:
    """Fail in the block if it takes longer, where the system can interrupt it."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def fail(*_: Any) -> NoReturn:
        faulthandler.dump_traceback(2)
        pytest.fail(f"takes longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limited(item: pytest.Item) -> Generator[None, Any, Any]:
    seconds, patience = limits_of(item)
    with process_ends_after(seconds + patience, item.config), fails_after(seconds):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    return (yield from limited(item))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, Any, Any]:
    with process_ends_after(COLLECTION, session.config):
        return (yield)


def pytest_enter_pdb() -> None:
    """Let a debugger take its time."""
    faulthandler.cancel_dump_traceback_later()
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End this process soon, whatever threads the tests have left; a worker waits until the others are done."""
    if hasattr(config, "workerinput"):
        return
    faulthandler.dump_traceback_later(END, exit=True, file=config.stash[STDERR])
