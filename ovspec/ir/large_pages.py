"""Large memory pages for weights (Linux): without them, the processor looks up 250,000 pages per gigabyte.

madvise with MADV_COLLAPSE (Linux 6.1, see madvise(2)) copies memory into pages of 2 MB, if the system allows them
(transparent huge pages "madvise" or "always"). No bit of the logits changes. docs/benchmarks.md shows the gain.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE_BYTES = 1 << 21
MADV_COLLAPSE = 25
ENOMEM = 12
EAGAIN = 11
INFERENCE_SECONDS_BEFORE_MOVE = 5.0  # inference time before copying starts: a process with less work gains nothing
# Copying slows inference down, so the mover waits for an idle time of LEAST_IDLE_SECONDS, and copies for
# MOVE_STEP_SECONDS before it checks again.
LEAST_IDLE_SECONDS = 0.5
MOVE_STEP_SECONDS = 0.02
MAX_REFUSALS_IN_A_ROW = 16  # consecutive refusals; the system is then assumed to have no large pages left


class LargePageMover:
    """Moves a model's weights into large pages during idle times. Create it just before the model is compiled.

    All memory allocated during the first ``INFERENCE_SECONDS_BEFORE_MOVE`` of inference is assumed to be weights.
    """

    def __init__(self) -> None:
        self._older_pages = set(list_page_candidates(read_memory_ranges()))
        self.busy_requests: set[int] = set()  # ids of running requests
        self.inference_seconds = 0.0  # total until the mover starts
        self.last_inference_end = time.monotonic()  # the end of the latest inference
        self.is_done = not sys.platform.startswith("linux")
        self._refusals = 0  # in a row
        self._pages_to_move: Iterator[int] | None = None
        self._mover_thread: threading.Thread | None = None
        self._lock = threading.Lock()  # held while a thread moves pages

    def start_mover_thread(self) -> None:
        if not self._mover_thread and not self.is_done:
            self._mover_thread = threading.Thread(target=self._move_when_idle, name="large pages", daemon=True)
            self._mover_thread.start()

    def move_weights_for(self, seconds: float) -> None:
        """Move weights for ``seconds``, or until all are moved."""
        deadline = time.perf_counter() + seconds
        with self._lock:
            if self._pages_to_move is None:
                pages = [page for page in list_page_candidates(read_memory_ranges()) if page not in self._older_pages]
                self._pages_to_move = iter(pages)
            while not self.is_done and time.perf_counter() < deadline:
                page = next(self._pages_to_move, None)
                if page is None:
                    self.is_done = True
                elif collapse_page(page) in (ENOMEM, EAGAIN):
                    self._refusals += 1
                    self.is_done = self._refusals == MAX_REFUSALS_IN_A_ROW
                else:
                    self._refusals = 0

    def move_in_steps(self) -> Iterator[None]:
        """Move all weights, a part at each step, for a server without long idle times."""
        while not self.is_done:
            self.move_weights_for(MOVE_STEP_SECONDS)
            yield

    def _move_when_idle(self) -> None:
        while not self.is_done:
            if self.busy_requests or time.monotonic() - self.last_inference_end < LEAST_IDLE_SECONDS:
                time.sleep(LEAST_IDLE_SECONDS)
            else:
                self.move_weights_for(MOVE_STEP_SECONDS)


def read_memory_ranges() -> list[tuple[int, int]]:
    """Return the (start, end) of private memory not mapped from a file; [] if the system doesn't show it."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux, or not allowed
        return []
    ranges = []
    for line in lines:
        addresses, permissions, _, _, inode, *region_name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and (not region_name or region_name[0] == "[heap]"):
            start, end = addresses.split("-")
            ranges.append((int(start, 16), int(end, 16)))
    return ranges


def list_page_candidates(ranges: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield the addresses of the large pages inside ``ranges``."""
    for start, end in ranges:
        yield from range(-(-start // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES, PAGE_BYTES)


def collapse_page(page_address: int) -> int:
    """Turn the memory at ``page_address`` into a large page; return 0, or the errno of a failure."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    failed = madvise(ctypes.c_void_p(page_address), ctypes.c_size_t(PAGE_BYTES), MADV_COLLAPSE)
    return ctypes.get_errno() if failed else 0
