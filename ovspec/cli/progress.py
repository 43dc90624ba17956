"""Progress of a long command, on stderr: a line that is updated on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import click


@dataclass
class TerminalStep:
    """A step of the command; ``result`` is printed after its time."""

    result: str = ""


class TerminalProgress:
    """``with progress.step("converting") as step: ...; step.result = "9.5 MB"``

    With ``lines`` each step leaves a line with the time it took.
    """

    def __init__(self, lines: bool = True) -> None:
        self._live, self._lines = sys.stderr.isatty(), lines

    def note(self, text: str) -> None:
        click.echo(text, err=True)

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[TerminalStep]:
        step, began, ended = TerminalStep(), time.monotonic(), threading.Event()

        def moving() -> None:
            while not ended.wait(0.5):
                click.echo(f"\r{text} … {time.monotonic() - began:.0f} s ", nl=False, err=True)

        shown = threading.Thread(target=moving, daemon=True)
        if self._live:
            shown.start()
        try:
            yield step
        finally:
            ended.set()
            if self._live:
                shown.join()
                click.echo("\r\x1b[K", nl=False, err=True)
        result = f", {step.result}" if step.result else ""
        if self._lines:
            click.echo(f"{text}: {time.monotonic() - began:.1f} s{result}", err=True)
