"""Ctrl-C and other signals: how they end a command, and who holds Ctrl-C back; the server leaves its own to uvicorn."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

# SIGBREAK is Windows': a closed console, or Ctrl-Break.
ENDING = [getattr(signal, name) for name in ("SIGHUP", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]


class Interrupts(Protocol):
    """Holds Ctrl-C back for a while. ``pressed``: whether it has come."""

    pressed: bool


HELD: list[Interrupts] = []  # of the main thread, the only one that Python tells of Ctrl-C


def check_interrupts() -> None:
    """Raise KeyboardInterrupt if Ctrl-C is held back until the calling thread has computed a round.

    Called between inferences. Ending one early would be unsafe: after ``InferRequest.cancel``, OpenVINO 2026.4 may
    compute with shapes of the cancelled inference.
    """
    if threading.current_thread() is threading.main_thread() and any(held.pressed for held in HELD):
        raise KeyboardInterrupt


@dataclass
class EndSignal:
    """``code``: the exit code if a signal has ended the command, otherwise 0."""

    code: int = 0


def end_on_signals() -> EndSignal:
    """Make SIGHUP (a closed terminal), SIGBREAK and SIGTERM act as Ctrl-C, and note the exit code.

    A signal that is ignored, as nohup lets SIGHUP be, stays ignored.
    """
    ended = EndSignal()

    def end(number: int, _: object) -> None:
        ended.code = ended.code or 128 + number
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    return ended


def leave(ended: EndSignal) -> None:
    """Exit if a signal has ended the command, undisturbed by further ones."""
    if ended.code:
        for number in (*ENDING, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        sys.exit(ended.code)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore the signals that could end the process, so that a file is saved whole."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (*ENDING, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
