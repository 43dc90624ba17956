"""What signals do to commands that keep a session: they end it as Ctrl-C does, and never during a save."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass

ENDING = [getattr(signal, name) for name in ("SIGHUP", "SIGTERM") if hasattr(signal, name)]


@dataclass
class Ended:
    """Whether a signal has ended the command: ``code`` is then the exit code, else 0."""

    code: int = 0


def end_on_signals() -> Ended:
    """Make SIGHUP (a closed terminal) and SIGTERM do what Ctrl-C does, and note the exit code.

    What nohup has told the process to ignore stays ignored.
    """
    ended = Ended()

    def end(number: int, _: object) -> None:
        ended.code = ended.code or 128 + number
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    return ended


def leave(ended: Ended) -> None:
    """Exit if a signal has ended the command; no other one disturbs that any more."""
    if ended.code:
        for number in (*ENDING, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        sys.exit(ended.code)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore the signals that could end the process, until what was shown is saved."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (*ENDING, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
