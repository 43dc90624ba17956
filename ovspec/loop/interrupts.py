"""Ctrl-C waits for the end of a round, so that KV cache and text stay in agreement."""

from __future__ import annotations

import signal
import threading
from typing import Any


class HeldInterrupts:
    """Notes Ctrl-C while ``holding`` is set, and hands it on at once while it is not.

    The handler is installed once for a whole generation: doing so every round would cost as much as
    half the rest of the loop. Outside the main thread, where Python handles no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.holding = self.pressed = self._stopped = False
        self._previous: Any = None
        handler = signal.getsignal(signal.SIGINT)
        # A process that ignores Ctrl-C, as one in the background does, goes on doing so.
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._previous = handler
            signal.signal(signal.SIGINT, self._note)

    def stop(self) -> None:
        """Give the signal back to whoever had it. Streams may end in another order than they began."""
        self._stopped = True
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
