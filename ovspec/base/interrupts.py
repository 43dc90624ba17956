"""Ctrl-C and other signals: delayed, or ending a command. The server leaves signals to uvicorn."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# SIGBREAK is Windows': a closed console, or Ctrl-Break.
END_SIGNALS = [getattr(signal, name) for name in ("SIGHUP", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]


class DelayedInterrupts:
    """Delays Ctrl-C until the end of a round, to keep KV cache and text consistent.

    While ``delaying`` is set, Ctrl-C only sets ``ctrl_c_pressed``, and prefill stops; otherwise it goes to the previous
    handler at once.

    The handler is installed once for a whole generation: installing it every round would cost half as much as
    the rest of the loop. Outside the main thread, where Python handles no signals, the class does nothing.
    """

    def __init__(self) -> None:
        self.delaying = self.ctrl_c_pressed = self._stopped = False
        self._previous_handler: Any = None
        handler = signal.getsignal(signal.SIGINT)
        # A process started with Ctrl-C ignored, for example in the background, keeps ignoring it.
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._previous_handler = handler
            signal.signal(signal.SIGINT, self._handle_interrupt)
            ACTIVE_DELAYS.append(self)

    def restore_handler(self) -> None:
        """Restore the previous handler, skipping handlers of stopped streams: streams may end in any order."""
        self._stopped = True
        if self in ACTIVE_DELAYS:
            ACTIVE_DELAYS.remove(self)
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) != self._handle_interrupt
        ):
            return
        previous_handler = self._previous_handler
        while (
            isinstance(handler_owner := getattr(previous_handler, "__self__", None), DelayedInterrupts)
            and handler_owner._stopped
        ):
            previous_handler = handler_owner._previous_handler
        signal.signal(signal.SIGINT, previous_handler)

    def _handle_interrupt(self, *arguments: Any) -> None:
        if self.delaying:
            self.ctrl_c_pressed = True
        else:
            self._previous_handler(*arguments)


ACTIVE_DELAYS: list[DelayedInterrupts] = []  # of the main thread, the only thread that gets Ctrl-C in Python


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C is pending until the calling thread has finished a round.

    Called between forward passes. Cancelling a pass would be unsafe: after ``InferRequest.cancel``, OpenVINO 2026.4
    may compute with the cancelled pass's shapes.
    """
    if threading.current_thread() is threading.main_thread() and any(delay.ctrl_c_pressed for delay in ACTIVE_DELAYS):
        raise KeyboardInterrupt


@dataclass
class EndSignal:
    """``exit_code``: its value if a signal has ended the command, otherwise 0."""

    exit_code: int = 0


def end_on_signals() -> EndSignal:
    """Make SIGHUP (a closed terminal), SIGBREAK and SIGTERM act as Ctrl-C, and note the exit code.

    An ignored signal, such as SIGHUP under nohup, stays ignored.
    """
    end_signal = EndSignal()

    def interrupt_command(signal_number: int, _: object) -> None:
        end_signal.exit_code = end_signal.exit_code or 128 + signal_number
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    for signal_number in END_SIGNALS:
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, interrupt_command)
    return end_signal


def exit_if_ended(end_signal: EndSignal) -> None:
    """Exit if a signal has ended the command, ignoring further signals."""
    if end_signal.exit_code:
        for signal_number in (*END_SIGNALS, signal.SIGINT):
            signal.signal(signal_number, signal.SIG_IGN)
        sys.exit(end_signal.exit_code)


@contextlib.contextmanager
def exit_on_sigterm(message: str) -> Iterator[None]:
    """Let SIGTERM end the process with ``message`` and cleanup, by SystemExit; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(message))  # no library catches SystemExit
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous_handler is None else previous_handler)


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore the end signals and Ctrl-C, to save a file completely."""
    previous_handlers = {
        signal_number: signal.signal(signal_number, signal.SIG_IGN) for signal_number in (*END_SIGNALS, signal.SIGINT)
    }
    try:
        yield
    finally:
        for signal_number, handler in previous_handlers.items():
            signal.signal(signal_number, signal.SIG_DFL if handler is None else handler)
