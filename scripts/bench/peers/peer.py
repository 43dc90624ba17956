"""The driver's side of a worker: start it, send it requests with a time limit, and stop it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from install import python_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
ANSWER_SECONDS = 600.0
# Worker: the peer whose interpreter runs it. All other workers run in the driver's interpreter.
INTERPRETERS = {"genai": "genai", "genai_serving": "genai", "optimum": "optimum", "llamacpp": "llamacpp"}


@dataclass
class Worker:
    """A peer's process. Its answers are dicts, with "error" if it failed, died or was too slow.

    Args:
        name: the process runs worker_NAME.py.
        setup: the fields of ``protocol.Setup``.
        seconds: time limit for each answer.
    """

    name: str
    setup: dict[str, Any]
    seconds: float = ANSWER_SECONDS
    ready: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the process, or restart it after it has died."""
        peer = INTERPRETERS.get(self.name)
        python = python_of(peer) if peer else Path(sys.executable)
        self._process: subprocess.Popen[str] | None = None
        if not python.exists():
            self.ready = {"error": f"{self.name} isn't installed; run scripts/bench/peers/install.py {peer}"}
            return
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(python), str(HERE / f"worker_{self.name}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            start_new_session=True,  # so that the processes it starts can be killed with it
            # PYTHONPATH is for ovspec's own worker; other environments don't import the project's code.
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "HF_HUB_OFFLINE": "1"},
        )
        self.ready = self.ask(self.setup)

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None and "error" not in self.ready

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or not process.stdin or not process.stdout:
            return self.ready
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(self.seconds, give_up)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if line:
            return json.loads(line)
        code = process.wait()
        return {"error": f"no answer within {self.seconds:g} s" if late.is_set() else self._last_words(code)}

    def _last_words(self, code: int) -> str:
        self._log.seek(0)
        said = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"  # below 0: a signal, on POSIX
        return f"its process ended ({how}){': ' + said[-1][:300] if said else ''}"

    def stop(self) -> None:
        if self._process and self._process.stdin:
            try:
                self._process.stdin.close()
                self._process.wait(30)
            except (OSError, subprocess.TimeoutExpired):
                self._kill()
                self._process.wait()
            self._log.close()
        self._process = None

    def _kill(self) -> None:
        """Kill the process and any server that it started, which would outlive it."""
        assert self._process
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
