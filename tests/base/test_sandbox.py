"""Processes that die are replaced; a request that ends its process each time has one clear error."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ovspec.base import sandbox
from ovspec.base.errors import OvspecError, UnavailableError
from ovspec.base.sandbox import SandboxPool, SandboxProcess, find_interpreter
from ovspec.sampling.grammar_conversion import GRAMMAR_CONVERTER, convert_grammar
from ovspec.text.chat_template import RENDERER, ChatTemplate

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
TEMPLATE = ChatTemplate("{{ messages | length }}", {})
End = Callable[[SandboxPool, list[signal.Signals]], None]


@pytest.fixture
def end_next(monkeypatch: pytest.MonkeyPatch) -> End:
    """Return a function that lets the next processes of a worker end by signals, when they have got a request."""

    def end_next(worker: SandboxPool, signals: list[signal.Signals]) -> None:
        def talk(process: SandboxProcess, request: str) -> str:
            process.ready = process.ready or bool(process.stdout.readline())
            if signals:
                process.send_signal(signals.pop(0))
            return talked(process, request)

        talked: Any = worker._exchange_lines
        monkeypatch.setattr(worker, "_exchange_lines", talk)

    return end_next


@pytest.mark.parametrize("names", ["KILL TERM KILL", "SEGV KILL"])
def test_another_process_answers(end_next: End, names: str) -> None:
    signals = [signal.Signals[f"SIG{name}"] for name in names.split()]
    end_next(RENDERER, signals)
    assert TEMPLATE.render([{"role": "user", "content": "a"}]) == "1"
    assert not signals


def test_on_windows_the_process_is_the_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, a virtual environment's ``python.exe`` only starts another process, which no limit would hold."""
    assert find_interpreter() == (sys.executable, {})
    windows = SimpleNamespace(platform="win32", executable=r"C:\venv\python.exe", _base_executable=r"C:\py\python.exe")
    monkeypatch.setattr(sandbox, "sys", windows)
    assert find_interpreter() == (r"C:\py\python.exe", {"__PYVENV_LAUNCHER__": r"C:\venv\python.exe"})
    windows._base_executable = windows.executable  # no virtual environment
    assert find_interpreter() == (r"C:\venv\python.exe", {})


def test_packages_that_a_user_installed_for_himself_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("APPDATA", "USERPROFILE", "PYTHONUSERBASE"):
        monkeypatch.setenv(name, "a folder")
    monkeypatch.setenv("SECRET", "1")
    given: list[dict[str, str]] = []
    monkeypatch.setattr(sandbox, "SandboxProcess", lambda *_, env, **__: given.append(env))
    RENDERER._start_process()
    assert {"APPDATA", "USERPROFILE", "PYTHONUSERBASE"} <= set(given[0]) and "SECRET" not in given[0]


def test_killed_each_time(end_next: End, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_DEATH_WEIGHT", 2 * sandbox.KILLED_DEATH_WEIGHT)
    signals = [signal.SIGKILL] * 3
    end_next(RENDERER, signals)
    told = (
        r"^The process that renders chat templates failed 2 times \(it was killed\); free some memory, and "
        r"try again\.$"
    )
    with pytest.raises(UnavailableError, match=told):
        TEMPLATE.render([])
    assert len(signals) == 1
    monkeypatch.setattr(sys, "executable", "/no/such/file")
    RENDERER.end_idle_processes()
    with pytest.raises(UnavailableError, match=r"failed 10 times \(it could not be started: .*No such file"):
        TEMPLATE.render([])


def test_crashed_each_time(end_next: End) -> None:
    end_next(GRAMMAR_CONVERTER, [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT, signal.SIGKILL])
    with pytest.raises(OvspecError, match=r"^--regex: the check crashed; simplify the grammar\.$") as found:
        convert_grammar("regex", "[a-z]{17}", "--regex")
    assert not isinstance(found.value, UnavailableError)


def test_a_process_that_has_grown_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    RENDERER.end_idle_processes()
    assert TEMPLATE.render([]) == "0"
    [process] = RENDERER.idle_processes
    monkeypatch.setattr(RENDERER, "max_bytes", int(1.5 * process.memory_info().rss))
    assert TEMPLATE.render([]) == "0"
    assert not RENDERER.idle_processes
    assert not process.is_running()
