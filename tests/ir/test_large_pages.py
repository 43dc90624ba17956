"""Weights in large pages are the same bits in another place."""

from __future__ import annotations

import mmap
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import PROMPTS

import ovspec
from ovspec.ir import large_pages
from ovspec.ir.large_pages import (
    ENOMEM,
    PAGE_BYTES,
    LargePageMover,
    collapse_page,
    list_page_candidates,
    read_memory_ranges,
)

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")


def huge_megabytes() -> int:
    """Return how many megabytes of this process are in large pages, as counted by the kernel."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    found = re.search(r"AnonHugePages:\s+(\d+) kB", text)
    return int(found[1]) // 1024 if found else 0


def can_collapse() -> bool:
    with mmap.mmap(-1, 4 * PAGE_BYTES, PRIVATE) as memory:
        memory.write(bytes(range(256)) * (4 * PAGE_BYTES // 256))
        start = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        return collapse_page(next(list_page_candidates([(start, start + 4 * PAGE_BYTES)]))) == 0


def test_pages_lie_within_their_ranges() -> None:
    assert list(
        list_page_candidates([(0, PAGE_BYTES), (PAGE_BYTES + 1, 3 * PAGE_BYTES), (5 * PAGE_BYTES, 6 * PAGE_BYTES - 1)])
    ) == [0, 2 * PAGE_BYTES]


def test_memory_is_moved_and_stays_the_same() -> None:
    before, large = huge_megabytes(), LargePageMover()
    values = np.random.default_rng(0).integers(0, 256, 1 << 24, dtype=np.uint8).tobytes()
    memory = mmap.mmap(-1, 1 << 24, PRIVATE)  # numpy's own arrays request large pages themselves
    memory.write(values)
    start = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    assert any(a <= start and start + len(values) <= b for a, b in read_memory_ranges())
    large.move_weights_for(60.0)
    assert memory[:] == values
    if not can_collapse():
        pytest.skip(f"no large pages here ({THP.read_text() if THP.exists() else 'none'})")
    assert huge_megabytes() >= before + 14


@pytest.mark.usefixtures("compiled_anew")
def test_texts_stay_the_same(pair: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = ovspec.load(pair, True, precision="f32", cache_dir=cache_dir)
    expected = lm.generate(PROMPTS[0], max_tokens=20, lookahead=3)
    logits = lm.next_logits(PROMPTS[1])
    asked: list[int] = []

    def counted(page: int) -> int:
        asked.append(page)
        return collapse_page(page)

    monkeypatch.setattr(large_pages, "collapse_page", counted)
    for loaded in (lm.target, lm.draft):
        assert loaded
        loaded.ir.large_page_mover._older_pages.clear()  # a process that has run long reuses memory it had before
    lm.use_large_pages()
    again = lm.generate(PROMPTS[0], max_tokens=20, lookahead=3)
    assert again.token_ids == expected.token_ids
    assert again.stats.accepted > 0
    np.testing.assert_array_equal(lm.next_logits(PROMPTS[1]), logits)
    # 38 MB of weights, some of them in pieces smaller than a page.
    assert len(set(asked)) > 5
    count = len(asked)
    lm.generate(PROMPTS[0], max_tokens=5)
    assert len(asked) == count, "weights are moved only once"


def used_up(monkeypatch: pytest.MonkeyPatch, answer: Callable[[int], int]) -> list[int]:
    """Return the pages that are requested, in order, out of 100."""
    asked: list[int] = []

    def refusing(page: int) -> int:
        asked.append(page)
        return answer(page)

    monkeypatch.setattr(large_pages, "read_memory_ranges", list)
    large = LargePageMover()
    monkeypatch.setattr(large_pages, "read_memory_ranges", lambda: [(0, 100 * PAGE_BYTES)])
    monkeypatch.setattr(large_pages, "collapse_page", refusing)
    for _ in range(3):
        large.move_weights_for(5.0)
    return asked


def test_it_stops_where_no_large_pages_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(used_up(monkeypatch, lambda page: ENOMEM)) == large_pages.MAX_REFUSALS_IN_A_ROW  # noqa: ARG005
    assert len(used_up(monkeypatch, lambda page: ENOMEM if page % (2 * PAGE_BYTES) else 0)) == 100


def wait_until(reached: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not reached() and time.monotonic() < until:
        time.sleep(0.01)
    return reached()


def test_pages_move_only_while_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    large = LargePageMover()
    monkeypatch.setattr(large_pages, "read_memory_ranges", lambda: [(0, 60 * PAGE_BYTES)])
    monkeypatch.setattr(large_pages, "collapse_page", lambda page: asked.append(page) or time.sleep(0.01) or 0)
    monkeypatch.setattr(large_pages, "LEAST_IDLE_SECONDS", 0.05)
    large.busy_requests.add(2)
    large.last_inference_end = 0.0
    large.start_mover_thread()
    time.sleep(0.2)
    assert not asked, "a request is computing"
    large.busy_requests.discard(2)
    assert wait_until(lambda: len(asked) > 1)
    large.busy_requests.add(1)
    time.sleep(3 * large_pages.MOVE_STEP_SECONDS)
    count = len(asked)
    time.sleep(0.1)
    assert len(asked) == count < 60
    large.busy_requests.discard(1)
    assert wait_until(lambda: large.is_done)
    assert sorted(asked) == list(range(0, 60 * PAGE_BYTES, PAGE_BYTES)), "each page once"


@pytest.mark.usefixtures("compiled_anew")
def test_only_a_process_with_much_to_do_moves_them(
    pair: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = ovspec.load(pair, precision="f32", cache_dir=cache_dir)
    lm.generate(PROMPTS[0], max_tokens=5)
    assert not lm.target.ir.large_page_mover._mover_thread
    monkeypatch.setattr(
        large_pages, "INFERENCE_SECONDS_BEFORE_MOVE", lm.target.ir.large_page_mover.inference_seconds + 1e-6
    )
    lm.generate(PROMPTS[0], max_tokens=5)
    mover = lm.target.ir.large_page_mover._mover_thread
    assert mover
    mover.join(20)
    assert lm.target.ir.large_page_mover.is_done


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    large = LargePageMover()
    begin = 1 << 60  # where this process has no memory: what it had before isn't moved
    monkeypatch.setattr(large_pages, "read_memory_ranges", lambda: [(begin, begin + 2000 * PAGE_BYTES)])
    monkeypatch.setattr(large_pages, "collapse_page", lambda page: asked.append(page) or 0)
    threads = [threading.Thread(target=large.move_weights_for, args=(5.0,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(asked) == list(range(begin, begin + 2000 * PAGE_BYTES, PAGE_BYTES))
