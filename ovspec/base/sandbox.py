"""Processes for untrusted input, stopped when they take too much time or memory."""

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

import psutil

from ovspec.base.errors import UnavailableError
from ovspec.base.json_types import JsonObject, JsonValue

MAX_PROCESSES = 4  # processes of a kind: more than one, to keep a slow request from blocking others
MAX_START_SECONDS = 60.0  # seconds a process may take to start
# A request fails if the deaths of its processes reach this weight; a death weighs more if the request is likely at
# fault.
MAX_DEATH_WEIGHT = 30
CRASHED_DEATH_WEIGHT = 15
KILLED_DEATH_WEIGHT = 5
NOT_STARTED_DEATH_WEIGHT = 1
# Exit codes of a crashed process; a process killed from outside has others.
CRASH_EXIT_CODES = {
    -getattr(signal, name, 0) for name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP")
}
ANSWERING_STACK_BYTES = 8 << 20  # bytes, for the answering thread on Windows
MAX_WAIT_FACTOR = 6  # a request may wait this many times its CPU time limit, because the machine may be busy
# Needed by Python and the system's loader; on Windows also to find the user's own packages. Templates and grammars
# can't leak any other variable.
PASSED_ENVIRONMENT_VARIABLES = (
    "PATH", "TZ", "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "LD_LIBRARY_PATH", "TMPDIR", "TEMP", "TMP",
    "SYSTEMROOT", "APPDATA", "USERPROFILE", "HOME",
)  # fmt: skip


class SandboxLimitExceeded(Exception):
    """A request failed through its own fault; the message has the reason, as in "ran longer than 2 seconds"."""


class SandboxProcessDied(Exception):
    """A process has ended without an answer; the message has the reason, and ``weight`` is an above constant."""

    def __init__(self, manner_of_death: str, weight: int = KILLED_DEATH_WEIGHT) -> None:
        super().__init__(manner_of_death)
        self.weight = weight


class SandboxProcess(psutil.Popen):
    """A process for requests. ``ready``: it has started serving."""

    ready = False

    def end(self) -> None:
        with suppress(psutil.Error):  # it has ended
            self.kill()
        self.communicate()

    def explain_death(self) -> SandboxProcessDied:
        """Return how this process ended."""
        if not self.ready:
            return SandboxProcessDied("did not start", NOT_STARTED_DEATH_WEIGHT)
        has_crashed = self.returncode >= 0 or self.returncode in CRASH_EXIT_CODES
        return SandboxProcessDied("crashed", CRASHED_DEATH_WEIGHT) if has_crashed else SandboxProcessDied("was killed")

    def measure_usage(self) -> tuple[float, int]:
        """Return CPU seconds and bytes of memory used by the process; zeros if it has just ended."""
        try:
            cpu_times = self.cpu_times()
            return cpu_times.user + cpu_times.system, self.memory_info().rss
        except psutil.Error:
            return 0.0, 0


class SandboxPool:
    """Runs ``module``, a server of requests, in a few processes, started on demand and then kept.

    Compiled code can run for hours or fill the memory, and can be stopped only by ending its process. An answer may
    take ``max_seconds`` of CPU time, and a process ``max_bytes`` bytes of memory. Errors state the processes'
    ``purpose``, as in "renders chat templates".
    """

    def __init__(self, module: str, purpose: str, max_seconds: float, max_bytes: int) -> None:
        self.module = module
        self.purpose = purpose
        self.max_seconds = max_seconds
        self.max_bytes = max_bytes
        self.idle_processes: list[SandboxProcess] = []
        self._process_slots = threading.BoundedSemaphore(MAX_PROCESSES)
        atexit.register(self.end_idle_processes)

    def ask(self, request: str) -> JsonObject:
        """Return the module's answer to a one-line request.

        A dead process is replaced, because the system may have killed it for lack of memory.

        Raises:
            SandboxLimitExceeded: the request made its process exceed a limit, or made processes crash.
            UnavailableError: processes were killed, or didn't start, too often.
        """
        deaths = list[SandboxProcessDied]()
        with self._process_slots:
            while sum(death.weight for death in deaths) < MAX_DEATH_WEIGHT:
                try:
                    return self._ask_process(request)
                except SandboxProcessDied as death:
                    deaths.append(death)
        if sum(death.weight for death in deaths if death.weight == CRASHED_DEATH_WEIGHT) >= MAX_DEATH_WEIGHT:
            raise SandboxLimitExceeded("crashed")
        death_text = f"failed {len(deaths)} times (it {deaths[-1]})"
        raise UnavailableError(f"The process that {self.purpose} {death_text}; free some memory, and try again.")

    def _ask_process(self, request: str) -> JsonObject:
        """Return a process's answer; raises SandboxLimitExceeded or SandboxProcessDied if there is none."""
        process = self._pop_idle_process() or self._start_process()
        try:
            answer = json.loads(self._exchange_lines(process, request))
        except BaseException as error:
            process.end()  # the next request must not get a late answer to this request
            if isinstance(error, ValueError):  # no answer, or part of an answer
                raise process.explain_death() from None
            raise
        # A process with much memory in use is dropped: it would count against the next request.
        if process.measure_usage()[1] < self.max_bytes / 2:
            self.idle_processes.append(process)
        else:
            process.end()
        return answer

    def _pop_idle_process(self) -> SandboxProcess | None:
        """Pop a live idle process; None if there is none."""
        while True:
            try:
                process = self.idle_processes.pop()
            except IndexError:
                return None
            if process.poll() is None:
                return process
            process.end()

    def _exchange_lines(self, process: SandboxProcess, request: str) -> str:
        """Send a request and return the answer, within the limits."""
        answers: list[str] = []

        def exchange() -> None:
            try:
                if not process.ready:
                    process.ready = bool(process.stdout.readline())
                process.stdin.write(request + "\n")
                process.stdin.flush()
                answers.append(process.stdout.readline())
            except (OSError, ValueError):
                answers.append("")

        exchange_thread = threading.Thread(target=exchange, daemon=True)
        exchange_thread.start()
        start_time = time.monotonic()
        cpu_seconds_before, _ = process.measure_usage()
        while True:
            exchange_thread.join(0.02)
            if not exchange_thread.is_alive():
                break
            waited_seconds = time.monotonic() - start_time
            cpu_seconds, used_bytes = process.measure_usage()
            if not process.ready:
                cpu_seconds_before = cpu_seconds  # starting doesn't count
                if waited_seconds > MAX_START_SECONDS:
                    raise SandboxProcessDied("did not start in time")
            elif cpu_seconds - cpu_seconds_before > self.max_seconds:
                raise SandboxLimitExceeded(f"ran longer than {self.max_seconds:g} seconds")
            elif waited_seconds > MAX_START_SECONDS + MAX_WAIT_FACTOR * self.max_seconds:  # the machine was busy
                raise SandboxProcessDied("got no CPU time")
            if used_bytes > self.max_bytes:
                raise SandboxLimitExceeded(f"used more than {self.max_bytes // 1_000_000} MB of memory")
        return answers[0]

    def _start_process(self) -> SandboxProcess:
        """Start a process. It ends when its standard input closes, so it doesn't outlive its parent."""
        python, environment = find_interpreter()
        try:
            return SandboxProcess(
                [python, "-P", "-m", self.module, str(self.max_seconds), str(self.max_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="utf-8",
                env={name: os.environ[name] for name in PASSED_ENVIRONMENT_VARIABLES if name in os.environ}
                | environment,
            )
        except (OSError, psutil.Error) as error:
            raise SandboxProcessDied(f"could not be started: {error}", NOT_STARTED_DEATH_WEIGHT) from None

    def end_idle_processes(self) -> None:
        """Stop the idle processes; the next request starts a new process."""
        while process := self._pop_idle_process():
            process.end()


def find_interpreter() -> tuple[str, dict[str, str]]:
    """Return the Python interpreter, and the environment variables for finding this process's packages.

    On Windows, the ``python.exe`` of a virtual environment only starts another interpreter, beyond the limits of time
    and memory. So the other interpreter is started directly, with the environment set as in multiprocessing.
    """
    base_executable = getattr(sys, "_base_executable", sys.executable)
    if sys.platform == "win32" and base_executable != sys.executable:
        return base_executable, {"__PYVENV_LAUNCHER__": sys.executable}
    return sys.executable, {}


def serve_requests(answer_request: Callable[[JsonValue], JsonObject]) -> None:
    """Answer each request on standard input. Called by modules run in a ``SandboxPool``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the parent process
    max_seconds = float(sys.argv[1])
    max_bytes = int(sys.argv[2])
    limit_memory(2 * max_bytes)
    sys.setrecursionlimit(10_000)  # deep enough to read any JSON from the parent process
    sys.stdin.reconfigure(encoding="utf-8")  # type: ignore[union-attr]

    def answer_requests() -> None:
        print("ready", flush=True)
        for request_line in sys.stdin:
            set_alarm(2 * MAX_WAIT_FACTOR * max_seconds)  # if the parent process is gone, this alone stops this process
            reply = json.dumps(answer_request(json.loads(request_line)))
            set_alarm(0)
            print(reply, flush=True)

    if sys.platform != "win32":
        return answer_requests()
    threading.stack_size(ANSWERING_STACK_BYTES)  # eight times the main thread's stack on Windows
    answering_thread = threading.Thread(target=answer_requests)
    answering_thread.start()
    return answering_thread.join()


def limit_memory(added_bytes: int) -> None:
    """Limit this process to ``added_bytes`` bytes more than it has now, on systems that can limit it."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        max_bytes = psutil.Process().memory_info().vms + added_bytes
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def set_alarm(seconds: float) -> None:
    """End this process after ``seconds``, on systems with alarms; 0 cancels the alarm."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)
