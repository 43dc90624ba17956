"""The processors of a process on a machine shared by several processes."""

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
    """Return the processors available to this process, by NUMA node; a single list if the system shows no nodes."""
    process = psutil.Process()
    usable_cpus = list(range(psutil.cpu_count() or 1))
    if hasattr(process, "cpu_affinity"):
        usable_cpus = process.cpu_affinity()
    cpulist_files = sorted(NUMA_NODES.glob("node[0-9]*/cpulist"))
    nodes = [
        sorted(set(usable_cpus) & parse_cpu_list(cpulist_file.read_text(encoding="ascii")))
        for cpulist_file in cpulist_files
    ]
    return [node for node in nodes if node] or [sorted(usable_cpus)]


def parse_cpu_list(cpu_list: str) -> set[int]:
    """Return the numbers in a Linux list, such as 0-3,8."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", cpu_list)
    return {cpu for first_cpu, last_cpu in ranges for cpu in range(int(first_cpu), int(last_cpu or first_cpu) + 1)}


def pin_to_free_processors(processor_count: int) -> None:
    """Pin this process to ``processor_count`` unclaimed processors, if possible on the same NUMA node.

    It isn't pinned if too few are unclaimed, or the system can't pin. Call it before OpenVINO counts the processors.
    """
    nodes = usable_processors()
    if not any(len(node) >= processor_count for node in nodes):
        nodes = [sorted(processor for node in nodes for processor in node)]
    for node in nodes:
        for first_index in range(0, len(node) - processor_count + 1, processor_count):
            processors = node[first_index : first_index + processor_count]
            if lock_processors(processors):
                if hasattr(psutil.Process, "cpu_affinity"):
                    psutil.Process().cpu_affinity(processors)
                return


def lock_processors(processors: list[int]) -> bool:
    """Lock these processors for this process, all or none; return whether they were unclaimed."""
    locks_folder = default_cache_dir() / "processors"
    locks_folder.mkdir(parents=True, exist_ok=True)
    locks = [FileLock(locks_folder / f"{processor}.lock") for processor in processors]
    with contextlib.ExitStack() as locks_to_release:
        for lock in locks:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                return False
            locks_to_release.callback(lock.release)
        locks_to_release.pop_all()
    _held_locks.extend(locks)
    return True
