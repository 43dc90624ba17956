"""The processors that a process computes on, where several processes share a machine."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from ovspec.ir.device import default_cache_dir

NUMA_NODES = Path("/sys/devices/system/node")
_held_locks: list[FileLock] = []  # released when the process ends


def usable_processors() -> list[list[int]]:
    """Return the processors that this process may use, by NUMA node; one list where the system lists no nodes."""
    process = psutil.Process()
    usable = list(range(psutil.cpu_count() or 1))
    if hasattr(process, "cpu_affinity"):
        usable = process.cpu_affinity()
    files = sorted(NUMA_NODES.glob("node[0-9]*/cpulist"))
    nodes = [sorted(set(usable) & parse_cpu_list(file.read_text(encoding="ascii"))) for file in files]
    return [node for node in nodes if node] or [sorted(usable)]


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers in a list of Linux, such as 0-3,8."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}


def pin_to_free_processors(count: int) -> None:
    """Pin this process to ``count`` processors that no other has claimed, of one NUMA node if it has as many.

    It isn't pinned if they are taken, or where the system can't. Call it before OpenVINO counts the processors.
    """
    nodes = usable_processors()
    if not any(len(node) >= count for node in nodes):
        nodes = [sorted(number for node in nodes for number in node)]
    for node in nodes:
        for begin in range(0, len(node) - count + 1, count):
            processors = node[begin : begin + count]
            if lock_processors(processors):
                if hasattr(psutil.Process, "cpu_affinity"):
                    psutil.Process().cpu_affinity(processors)
                return


def lock_processors(processors: list[int]) -> bool:
    """Return whether this process could lock all of these processors."""
    folder = default_cache_dir() / "processors"
    folder.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(folder / f"{number}.lock") for number in processors]
    with contextlib.ExitStack() as release:
        for lock in locks:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
            release.callback(lock.release)
        release.pop_all()
    _held_locks.extend(locks)
    return True
