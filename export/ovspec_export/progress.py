"""What an export tells about itself while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass
class Step:
    """``result`` is set before it ends: a size, a count."""

    result: str = ""


class Progress(Protocol):
    def step(self, text: str) -> contextlib.AbstractContextManager[Step]:
        """Around something that takes a while."""
        ...

    def note(self, text: str) -> None:
        """A line on its own: a warning, the result."""
        ...


class Silent:
    """Tells nothing."""

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[Step]:  # noqa: ARG002
        yield Step()

    def note(self, text: str) -> None: ...


SILENT = Silent()
