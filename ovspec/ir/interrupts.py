"""Ctrl-C while a model computes."""

from __future__ import annotations

import signal
import threading
from typing import Any

HELD: list[HeldInterrupts] = []  # of the main thread, the only one that Python tells of Ctrl-C


class HeldInterrupts:
    """Delays Ctrl-C until the end of a round, so that KV cache and text stay consistent.

    While ``holding`` is set, Ctrl-C only sets ``pressed``, and a prompt is read no further; otherwise it goes to the
    previous handler at once.

    The handler is installed once for a whole generation: installing it every round would cost half as much as
    the rest of the loop. Outside the main thread, where Python handles no signals, the class does nothing.
    """

    def __init__(self) -> None:
        self.holding = self.pressed = self._stopped = False
        self._previous: Any = None
        handler = signal.getsignal(signal.SIGINT)
        # A process that ignores Ctrl-C, as one in the background does, continues to ignore it.
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._previous = handler
            signal.signal(signal.SIGINT, self._note)
            HELD.append(self)

    def stop(self) -> None:
        """Restore the previous handler, skipping those that have stopped: streams may end in any order."""
        self._stopped = True
        if self in HELD:
            HELD.remove(self)
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) != self._note:
            return
        previous = self._previous
        while isinstance(owner := getattr(previous, "__self__", None), HeldInterrupts) and owner._stopped:
            previous = owner._previous
        signal.signal(signal.SIGINT, previous)

    def _note(self, *arguments: Any) -> None:
        if self.holding:
            self.pressed = True
        else:
            self._previous(*arguments)


def check_interrupts() -> None:
    """Raise KeyboardInterrupt if Ctrl-C is held back until the calling thread has computed a round.

    Called between inferences. Ending one early would be unsafe: after ``InferRequest.cancel``, OpenVINO 2026.4 may
    compute with shapes of the cancelled inference.
    """
    if threading.current_thread() is threading.main_thread() and any(held.pressed for held in HELD):
        raise KeyboardInterrupt
