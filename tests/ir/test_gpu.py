"""Waiting for a GPU's kernels, which threads of the process compile."""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from collections.abc import Callable

import pytest

from ovspec.ir import gpu
from ovspec.ir.gpu import wait_at_exit, wait_for_compilation


def test_work_in_the_background_is_waited_for() -> None:
    ended: list[float] = []

    def compile_kernels() -> None:
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            hashlib.sha256(bytes(1_000_000)).digest()
        ended.append(time.monotonic())

    thread = threading.Thread(target=compile_kernels)
    thread.start()
    wait_for_compilation()
    assert ended
    thread.join()


def test_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LONGEST_WAIT", 0.5)
    monkeypatch.setattr(gpu, "QUIET", -1.0)  # work never counts as little
    monkeypatch.setattr(gpu.time, "sleep", lambda _: None)
    began = time.monotonic()
    wait_for_compilation()
    assert time.monotonic() - began < 5


def test_a_process_waits_once_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    wait_at_exit.cache_clear()
    wait_at_exit()
    wait_at_exit()
    wait_at_exit.cache_clear()
    assert registered == [wait_for_compilation]
