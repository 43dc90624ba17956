"""The channel between a worker and its parent process: progress to the parent, a request to stop to the worker.

Progress goes through the worker's standard output, one JSON object per line; libraries' output goes to its standard
error instead. The worker ends when its standard input closes, so it doesn't outlive a killed parent. Any input there
asks the worker to stop.
"""

from __future__ import annotations

import json
import os
import threading

from ovspec.base.json_types import JsonValue

_stop_event = threading.Event()
_progress_fd: int | None = None


def open_channel() -> None:
    """Reserve the standard input and output of this process for the channel."""
    global _progress_fd
    _progress_fd = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_wait_for_stop, daemon=True).start()


def report_progress(**figures: JsonValue) -> None:
    """Report figures on the job's progress to the parent; without a parent, do nothing."""
    if _progress_fd is not None:
        os.write(_progress_fd, (json.dumps(figures) + "\n").encode())


def is_stop_requested() -> bool:
    """Return whether the parent wants the job to save its work so far, and to end."""
    return _stop_event.is_set()


def _wait_for_stop() -> None:
    while os.read(0, 1024):  # not through sys.stdin: it would stay locked at the end of the interpreter
        _stop_event.set()
    os._exit(1)
