"""Say on stderr what takes long: in a line that is updated on a terminal, in lines of their own elsewhere."""

import contextlib
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
    current = Step(text)
    start = time.monotonic()
    ended = threading.Event()
    is_live = on_terminal()

    def print_progress() -> None:
        if ended.wait(SHOW_AFTER):
            return
        printed = ""
        while not is_live:
            if current.text != printed:
                printed = current.text
                print_note(f"{printed} …")
            if ended.wait(REPEAT_AFTER):
                return
        while not ended.wait(0.5):
            line = f"{current.text} … {time.monotonic() - start:.0f} s "
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r{line}{CLEAR_REST}", end="", file=sys.stderr, flush=True)
        print(CLEAR_LINE, end="", file=sys.stderr, flush=True)

    printer = threading.Thread(target=print_progress, daemon=True)
    printer.start()
    try:
        yield current
    finally:
        ended.set()
        printer.join()
    if keep:
        print_note(
            f"{current.text}: {time.monotonic() - start:.1f} s" + (f", {current.result}" if current.result else "")
        )


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def format_size(size: float) -> str:
    """Return a size in bytes as MB or GB."""
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
