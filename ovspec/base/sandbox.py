"""Processes that handle untrusted input and are stopped when they take too much time or memory."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

MOST = 4  # processes of a kind, so that a request that takes long doesn't hold up all others
STARTING = 60.0  # seconds that a process may take to start
PATIENCE = 6  # a request may wait this many times its limit of computing time, because the machine may be busy
# What Python and the system's loader need. A template or a grammar can't leak the rest.
ENVIRONMENT = ("PATH", "TZ", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "TEMP", "TMP")


class Stopped(Exception):
    """The process was stopped; the message names the limit it exceeded, as in "ran longer than 2 seconds"."""


class Process(psutil.Popen):
    """A process that serves requests. ``ready``: it has started to."""

    ready = False

    def end(self) -> None:
        self.kill()
        self.communicate()

    def used(self) -> tuple[float, int]:
        """Return the seconds of computing and the bytes of memory that it has used; zeros if it has just ended."""
        try:
            times = self.cpu_times()
            return times.user + times.system, self.memory_info().rss
        except psutil.Error:
            return 0.0, 0


class Worker:
    """Runs ``module``, which serves requests, in a few processes that are started when they are needed and then kept.

    An operation in compiled code can run for hours or fill the memory, and only a process can be stopped in the middle
    of one. An answer may take ``seconds`` of computing, and a process ``size`` bytes of memory.
    """

    def __init__(self, module: str, seconds: float, size: int) -> None:
        self.module, self.seconds, self.size = module, seconds, size
        self.idle: list[Process] = []
        self._free = threading.BoundedSemaphore(MOST)
        atexit.register(self.stop)

    def ask(self, request: str) -> dict[str, Any]:
        """Return the module's answer to a one-line request.

        Raises Stopped if the process exceeds a limit, OSError or ValueError if it fails twice to give an answer.
        """
        with self._free:
            try:
                return self._ask(request)
            except (OSError, ValueError):  # the process may have been killed since the last request, and others with it
                self.stop()
                return self._ask(request)

    def _ask(self, request: str) -> dict[str, Any]:
        try:
            process = self.idle.pop()
        except IndexError:
            process = self._start()
        try:
            answer = json.loads(self._talk(process, request))
        except BaseException:
            process.end()  # the next request must not get a late answer to this one
            raise
        self.idle.append(process)
        return answer

    def _talk(self, process: Process, request: str) -> str:
        """Send a request and return the answer; keep to the limits meanwhile."""
        answers: list[str] = []

        def talk() -> None:
            try:
                if not process.ready:
                    process.ready = bool(process.stdout.readline())
                process.stdin.write(request + "\n")
                process.stdin.flush()
                answers.append(process.stdout.readline())
            except (OSError, ValueError):
                answers.append("")

        talking = threading.Thread(target=talk, daemon=True)
        talking.start()
        began, (before, _) = time.monotonic(), process.used()
        while True:
            talking.join(0.02)
            if not talking.is_alive():
                break
            waited, (seconds, size) = time.monotonic() - began, process.used()
            if not process.ready:
                before = seconds  # starting doesn't count
                if waited > STARTING:
                    raise OSError(f"{self.module} didn't start")
            elif seconds - before > self.seconds or waited > STARTING + PATIENCE * self.seconds:
                raise Stopped(f"ran longer than {self.seconds:g} seconds")
            if size > self.size:
                raise Stopped(f"took more than {self.size // 1_000_000} MB of memory")
        if not answers[0]:
            raise OSError(f"{self.module} ended without an answer")
        return answers[0]

    def _start(self) -> Process:
        """Start a process. It ends when its standard input closes, so it doesn't outlive this one."""
        return Process(
            [sys.executable, "-P", "-m", self.module, str(self.seconds), str(self.size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        )

    def stop(self) -> None:
        """Stop the idle processes; the next request starts another one."""
        while self.idle:
            self.idle.pop().end()


def serve(answer: Callable[[Any], dict[str, Any]]) -> None:
    """Answer each request on standard input. Called by a module that a ``Worker`` runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent process
    seconds, size = float(sys.argv[1]), int(sys.argv[2])
    limit_memory(2 * size)
    sys.setrecursionlimit(10_000)  # what the parent process could write as JSON can be read
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print("ready", flush=True)
    for line in sys.stdin:
        alarm(2 * PATIENCE * seconds)  # if the parent process is gone, nobody else stops this one
        answered = json.dumps(answer(json.loads(line)))
        alarm(0)
        print(answered, flush=True)


def limit_memory(size: int) -> None:
    """Let this process take at most ``size`` bytes more than it has, where the system can limit that."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        most = psutil.Process().memory_info().vms + size
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def alarm(seconds: float) -> None:
    """End this process after ``seconds``, where the system can do that; 0 takes it back."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
