"""Large pages of memory for weights (Linux), which spare the processor looking up 250,000 pages for each gigabyte.

madvise with MADV_COLLAPSE (Linux 6.1, see madvise(2)) copies memory into pages of 2 MB, where the system allows them
(transparent huge pages "madvise" or "always"). No bit of the logits changes. docs/benchmarks.md has what it brings.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

PAGE = 1 << 21
COLLAPSE = 25  # MADV_COLLAPSE
ENOMEM, EAGAIN = 12, 11
PATIENCE = 5.0  # seconds of inference before it begins: copying takes two seconds a gigabyte, too long for short texts
# It is done between inferences: for this share of their time, at most so many seconds at once.
SHARE, LONGEST = 0.2, 0.02
MOST_REFUSALS = 16  # in a row, after which memory has no more large pages to give


class LargePages:
    """Of what is allocated from now on, when a model is compiled, until its inferences have taken ``PATIENCE``."""

    def __init__(self) -> None:
        self._before = set(pages(memory_ranges()))
        self.seconds = self._refused = 0.0  # of inference so far
        self._waiting: Iterator[int] | None = None
        self.done = not sys.platform.startswith("linux")
        self._lock = threading.Lock()  # a model may be used by several threads

    def spent(self, seconds: float) -> None:
        """An inference took ``seconds``. When it is time, some of the weights are moved before the next."""
        self.seconds += seconds
        if self.seconds >= PATIENCE and not self.done:
            self.move(min(SHARE * seconds, LONGEST))

    def move(self, seconds: float) -> None:
        """Go on for ``seconds``, unless another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return
        until = time.perf_counter() + seconds
        try:
            if self._waiting is None:
                self._waiting = iter([page for page in pages(memory_ranges()) if page not in self._before])
            while not self.done and time.perf_counter() < until:
                page = next(self._waiting, None)
                if page is None:
                    self.done = True
                elif collapse(page) in (ENOMEM, EAGAIN):
                    self._refused += 1
                    self.done = self._refused == MOST_REFUSALS
                else:
                    self._refused = 0
        finally:
            self._lock.release()


def memory_ranges() -> list[tuple[int, int]]:
    """(start, end) of memory that belongs to this process alone and to no file; none where that can't be told."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux, or not allowed
        return []
    ranges = []
    for line in lines:
        addresses, access, _, _, inode, *name = line.split(maxsplit=5)
        if access == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def pages(ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Addresses of the large pages that lie within ``ranges``."""
    for start, end in ranges:
        yield from range(-(-start // PAGE) * PAGE, end // PAGE * PAGE, PAGE)


@functools.cache
def madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def collapse(page: int) -> int:
    """Make one large page of the memory there; returns 0, or the number of the error that prevented it."""
    return ctypes.get_errno() if madvise()(page, PAGE, COLLAPSE) else 0
