"""The processors that a process computes on, where several processes share a machine."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from ovspec.ir.device import default_cache_dir

NODES = Path("/sys/devices/system/node")
_held: list[FileLock] = []  # until the process ends


def processors() -> list[list[int]]:
    """Return the processors that this process may use, by NUMA node; a single list where the system tells no nodes."""
    process = psutil.Process()
    usable = process.cpu_affinity() if hasattr(process, "cpu_affinity") else list(range(psutil.cpu_count() or 1))
    files = sorted(NODES.glob("node[0-9]*/cpulist"))
    nodes = [sorted(set(usable) & numbers(file.read_text(encoding="ascii"))) for file in files]
    return [node for node in nodes if node] or [sorted(usable)]


def numbers(text: str) -> set[int]:
    """Return the numbers in a list of Linux, such as 0-3,8."""
    found = re.findall(r"(\d+)(?:-(\d+))?", text)
    return {number for first, last in found for number in range(int(first), int(last or first) + 1)}


def claim(count: int) -> None:
    """Pin this process to ``count`` processors that no other has claimed, of one NUMA node if it has as many.

    It isn't pinned if they are taken, or where the system can't. Call it before OpenVINO counts the processors.
    """
    nodes = processors()
    if not any(len(node) >= count for node in nodes):
        nodes = [sorted(number for node in nodes for number in node)]
    for node in nodes:
        for begin in range(0, len(node) - count + 1, count):
            share = node[begin : begin + count]
            if taken(share):
                if hasattr(psutil.Process, "cpu_affinity"):
                    psutil.Process().cpu_affinity(share)
                return


def taken(share: list[int]) -> bool:
    """Return whether this process could take all processors of ``share``."""
    folder = default_cache_dir() / "processors"
    folder.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(folder / f"{number}.lock") for number in share]
    with contextlib.ExitStack() as release:
        for lock in locks:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
            release.callback(lock.release)
        release.pop_all()
    _held.extend(locks)
    return True
