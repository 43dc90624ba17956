"""Show slow steps on stderr: in an updated line on a terminal, in separate lines elsewhere."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

SHOW_AFTER_SECONDS = 1.0  # seconds a step may take before it is shown
REPEAT_AFTER_SECONDS = 60.0  # seconds until a changed text is shown again, where lines stay
CLEAR_REST_OF_LINE = "\x1b[K"  # erases to the end of the terminal's line
CLEAR_LINE = f"\r{CLEAR_REST_OF_LINE}"


@dataclass
class ProgressStep:
    """A step in progress. ``text`` may change during the step; ``result``, such as a size, is shown after its time."""

    text: str
    result: str = ""
    start_time: float = field(default_factory=time.monotonic)


RUNNING_STEPS: list[ProgressStep] = []  # the innermost last


def describe_running_step() -> str:
    """Return the innermost running step of this process and its time so far; empty if there is none."""
    if not RUNNING_STEPS:
        return ""
    return f"{RUNNING_STEPS[-1].text}, {time.monotonic() - RUNNING_STEPS[-1].start_time:.0f} s"


def print_note(text: str) -> None:
    """Print a line, such as a warning or a result."""
    with contextlib.suppress(OSError):  # with stderr redirected to a full disk, work continues
        print(CLEAR_LINE * on_terminal() + text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def show_step(text: str, keep_line: bool = False) -> Iterator[ProgressStep]:
    """Show ``text`` while the block runs, if it is slow. With ``keep_line``, a line with the time stays."""
    shown_step = ProgressStep(text)
    start_time = shown_step.start_time
    has_ended = threading.Event()
    on_live_terminal = on_terminal()

    def print_progress() -> None:
        if has_ended.wait(SHOW_AFTER_SECONDS):
            return
        printed_text = ""
        while not on_live_terminal:
            if shown_step.text != printed_text:
                printed_text = shown_step.text
                print_note(f"{printed_text} …")
            if has_ended.wait(REPEAT_AFTER_SECONDS):
                return
        while not has_ended.wait(0.5):
            line = f"{shown_step.text} … {time.monotonic() - start_time:.0f} s "
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r{line}{CLEAR_REST_OF_LINE}", end="", file=sys.stderr, flush=True)
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    printer_thread = threading.Thread(target=print_progress, daemon=True)
    printer_thread.start()
    RUNNING_STEPS.append(shown_step)
    try:
        yield shown_step
    finally:
        RUNNING_STEPS.remove(shown_step)
        has_ended.set()
        printer_thread.join()
    if keep_line:
        print_note(
            f"{shown_step.text}: {time.monotonic() - start_time:.1f} s"
            + (f", {shown_step.result}" if shown_step.result else "")
        )


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def format_size(size: float) -> str:
    """Return a size in bytes as MB or GB."""
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
