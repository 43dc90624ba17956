"""The channel between a worker and the process that started it: progress one way, the request to stop the other.

Progress goes through the worker's standard output, a JSON object a line; what libraries print there goes to its
standard error instead. The worker ends when its standard input closes, so that it doesn't outlive a parent that was
killed, and is asked to stop by anything written there.
"""

from __future__ import annotations

import json
import os
import threading

from ovspec.base.json_types import JsonValue

_stop_event = threading.Event()
_progress_fd: int | None = None


def open_channel() -> None:
    """Take the standard input and output of this process for the channel."""
    global _progress_fd
    _progress_fd = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_wait_for_stop, daemon=True).start()


def report_progress(**figures: JsonValue) -> None:
    """Send the parent figures on the job's progress; without a parent, nothing happens."""
    if _progress_fd is not None:
        os.write(_progress_fd, (json.dumps(figures) + "\n").encode())


def is_stop_requested() -> bool:
    """Return whether the parent wants the job to write what it has, and to end."""
    return _stop_event.is_set()


def _wait_for_stop() -> None:
    while os.read(0, 1024):  # not through sys.stdin, whose lock would be held when the interpreter ends
        _stop_event.set()
    os._exit(1)
