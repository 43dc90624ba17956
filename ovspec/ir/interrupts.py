"""Ctrl-C while a model reads a long prompt."""

from __future__ import annotations

import threading
from typing import Protocol


class Held(Protocol):
    """What holds Ctrl-C back until the end of a round; ``pressed``: it has done so."""

    pressed: bool


HELD: list[Held] = []  # of the main thread, the only one that Python tells of Ctrl-C


def check_interrupts() -> None:
    """Raise KeyboardInterrupt if Ctrl-C is held back until the calling thread has computed a round.

    Called between inferences. Ending one early would be unsafe: after ``InferRequest.cancel``, OpenVINO 2026.4 may
    compute with shapes of the cancelled inference.
    """
    if threading.current_thread() is threading.main_thread() and any(held.pressed for held in HELD):
        raise KeyboardInterrupt
