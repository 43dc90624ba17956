"""Waiting for a GPU's kernels, which threads of the process compile."""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from collections.abc import Callable

import pytest

from ovspec.ir import gpu
from ovspec.ir.gpu import free_models_at_exit, free_registered_models, wait_for_compilation


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
    monkeypatch.setattr(gpu, "LONGEST_WAIT_SECONDS", 0.5)
    monkeypatch.setattr(gpu, "QUIET_SECONDS", -1.0)  # work never counts as little
    monkeypatch.setattr(gpu.time, "sleep", lambda _: None)
    began = time.monotonic()
    wait_for_compilation()
    assert time.monotonic() - began < 5


class Held:
    def __init__(self, freed: list[str]) -> None:
        self.freed = freed

    def free(self) -> None:
        self.freed.append("model")


def test_models_are_freed_when_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    registered, freed = list[Callable[[], None]](), list[str]()
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(gpu, "wait_for_compilation", lambda: freed.append("waited"))
    held = [Held(freed), Held(freed)]
    for each in held:
        free_models_at_exit(each)
    free_models_at_exit(Held(freed))  # which nobody keeps
    assert registered == [free_registered_models]
    free_registered_models()
    assert freed == ["waited", "model", "model"]
    free_registered_models()
    assert len(freed) == 3
