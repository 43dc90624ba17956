"""What a process of the tests started ends with it, however that ended: a guardian kills it.

    python guardian.py PID MARK    wait until a process has ended, then kill all that have its mark

The mark is in the environment, so that also what has left its parent and its session keeps it, such as a cluster's
daemons.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

NAME = "OVSPEC_TESTS"  # ids of the processes of tests that something descends from, from the outermost one
ROUNDS = 20  # for those that are started while others are killed
GUARDIAN = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    """Mark what this process will start, and start its guardian."""
    outer = [os.environ[NAME]] if NAME in os.environ else []
    mark = "/".join([*outer, str(os.getpid())])
    config.stash[GUARDIAN] = subprocess.Popen(
        [sys.executable, __file__, str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != NAME},
        start_new_session=True,  # Ctrl-C is not meant for it
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
    )
    os.environ[NAME] = mark
    os.environ["SPT_NOENV"] = "1"  # asks what writes a title for itself, as Ray's daemons do, to leave the mark


def marked(mark: str) -> set[psutil.Process]:
    """Return the processes with this mark, and their children, which may have another environment."""
    found = set[psutil.Process]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or it has ended
            if f"{process.environ().get(NAME)}/".startswith(f"{mark}/"):
                found |= {process, *process.children(recursive=True)}
    return found


def kill_marked(mark: str) -> None:
    for _ in range(ROUNDS):
        if not (found := marked(mark)):
            return
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=2)


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended, whether its parent has noticed or not."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.2)


if __name__ == "__main__":
    wait_for_end(int(sys.argv[1]))
    kill_marked(sys.argv[2])
