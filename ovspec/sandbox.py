"""A process that handles untrusted input and is stopped when it takes too much time or memory."""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil


class Stopped(Exception):
    """The process was stopped; the message names the limit it exceeded, as in "ran longer than 2 seconds"."""


class Worker:
    """Runs ``module``, which serves requests, in a process that is started on first use and then kept.

    An operation in compiled code can run for hours or fill the memory. Only a process can be stopped in the middle of
    one, on any platform and from any thread. An answer may take ``seconds``, and the process ``size`` bytes of memory.
    """

    def __init__(self, module: str, seconds: float, size: int) -> None:
        self.module, self.seconds, self.size = module, seconds, size
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        atexit.register(self.stop)

    def ask(self, request: str) -> dict[str, Any]:
        """Return the module's answer to a one-line request.

        Raises Stopped if the process exceeds a limit, OSError or ValueError if it fails twice to give an answer.
        """
        with self._lock:
            try:
                try:
                    return self._ask(request)
                except (OSError, ValueError):  # the process may have been killed since the last request
                    self.stop()
                    return self._ask(request)
            except BaseException:
                self.stop()  # the next request must not get a late answer to this one
                raise

    def _ask(self, request: str) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        answers: list[str] = []

        def talk() -> None:
            assert process.stdin and process.stdout
            try:
                process.stdin.write(request + "\n")
                process.stdin.flush()
                answers.append(process.stdout.readline())
            except (OSError, ValueError):
                answers.append("")

        talking = threading.Thread(target=talk, daemon=True)
        talking.start()
        until, watched = time.monotonic() + self.seconds, psutil.Process(process.pid)
        while talking.is_alive():
            talking.join(0.02)
            if talking.is_alive() and time.monotonic() > until:
                raise Stopped(f"ran longer than {self.seconds:g} seconds")
            if talking.is_alive() and memory_of(watched) > self.size:
                raise Stopped(f"took more than {self.size // 1_000_000} MB of memory")
        if not answers[0]:
            raise OSError(f"{self.module} ended without an answer")
        return json.loads(answers[0])

    def _start(self) -> subprocess.Popen[str]:
        """Start the process. It ends when its standard input closes, so it doesn't outlive this one."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )

    def stop(self) -> None:
        """Stop the process; the next request starts another one."""
        if self._process:
            self._process.kill()
            self._process.communicate()
            self._process = None


def serve(answer: Callable[[Any], dict[str, Any]]) -> None:
    """Answer each request on standard input. Called by a module that a ``Worker`` runs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent process
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def memory_of(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:  # the process has just ended
        return 0
