"""A worker from the driver's side: started, asked, stopped, and never waited for without end."""

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
# Whose interpreter runs which worker; the others run in the driver's.
INTERPRETERS = {"genai": "genai", "optimum": "optimum", "llamacpp": "llamacpp"}


@dataclass
class Worker:
    """A peer's process. What it answers is a dict; one with "error" where it failed, died or was too slow.

    Args:
        name: worker_NAME.py is run.
        setup: the fields of ``protocol.Setup``.
    """

    name: str
    setup: dict[str, Any]
    seconds: float = ANSWER_SECONDS
    ready: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Also again, after it has died."""
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
            # Only ovspec's own worker finds the project's code there; other environments don't import it.
            start_new_session=True,  # what it starts itself can be killed with it
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
        """With the server that it may have started, which outlives a worker that has died."""
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
