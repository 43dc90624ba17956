"""Say on stderr what takes long: in a line that is updated on a terminal, in lines of their own elsewhere."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

SHOW_AFTER = 1.0  # seconds that a step may take before it is shown
REPEAT_AFTER = 60.0  # seconds until it is shown again where lines stay, if its text has changed
CLEAR_REST = "\x1b[K"  # removes what a terminal shows in the rest of the line
CLEAR_LINE = f"\r{CLEAR_REST}"


@dataclass
class Step:
    """A step in progress. ``text`` may change meanwhile; ``result``, such as a size, is shown after its time."""

    text: str
    result: str = ""


def print_note(text: str) -> None:
    """Print a line, such as a warning or a result."""
    with contextlib.suppress(OSError):  # a full disk that stderr is written to stops nothing
        print(CLEAR_LINE * on_terminal() + text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def show_step(text: str, keep: bool = False) -> Iterator[Step]:
    """Show ``text`` while the block runs, if that takes long. With ``keep``, leave a line with the time it took."""
    made, began, ended, live = Step(text), time.monotonic(), threading.Event(), on_terminal()

    def show() -> None:
        if ended.wait(SHOW_AFTER):
            return
        told = ""
        while not live:
            if made.text != told:
                told = made.text
                print_note(f"{told} …")
            if ended.wait(REPEAT_AFTER):
                return
        while not ended.wait(0.5):
            line = f"{made.text} … {time.monotonic() - began:.0f} s "
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r{line}{CLEAR_REST}", end="", file=sys.stderr, flush=True)
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        yield made
    finally:
        ended.set()
        shown.join()
    if keep:
        print_note(f"{made.text}: {time.monotonic() - began:.1f} s" + (f", {made.result}" if made.result else ""))


@contextlib.contextmanager
def drop_native_stderr() -> Iterator[None]:
    """Drop what libraries in other languages write to stderr."""
    before, kept, null = sys.stderr, os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8", errors="replace", newline="\n") as sys.stderr:
            yield
    finally:
        sys.stderr = before
        os.dup2(kept, 2)
        os.close(kept)


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def format_size(size: float) -> str:
    """Return a size in bytes as MB or GB."""
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
