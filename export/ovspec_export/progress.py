"""How an export reports its progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass
class Step:
    """A step in progress. ``result`` (a size or a count) is set before it ends."""

    result: str = ""


class Progress(Protocol):
    def step(self, text: str) -> contextlib.AbstractContextManager[Step]:
        """Return a context manager for something that takes a while."""
        ...

    def note(self, text: str) -> None:
        """Report a line on its own, such as a warning or the result."""
        ...


class Silent:
    """Progress that reports nothing."""

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[Step]:  # noqa: ARG002
        yield Step()

    def note(self, text: str) -> None: ...


SILENT = Silent()
