"""Processors that processes share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ovspec.batch.ray import processors

CLAIM = """
import sys, psutil
from ovspec.batch.ray import processors
processors.usable_processors = lambda: eval(sys.argv[1])
processors.pin_to_free_processors(int(sys.argv[2]))
print(psutil.Process().cpu_affinity(), flush=True)
sys.stdin.read()
"""


def test_numbers_in_lists_of_linux() -> None:
    assert processors.parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert processors.parse_cpu_list("\n") == set()


def test_processors_by_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = processors.usable_processors()
    assert sorted(number for node in here for number in node) == psutil.Process().cpu_affinity()
    for name, text in (("node0", "0\n"), ("node1", "1-999\n"), ("node2", "1000-1200\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(text, encoding="ascii")
    monkeypatch.setattr(processors, "NUMA_NODES", tmp_path)
    usable = psutil.Process().cpu_affinity()
    nodes = [number for number in usable if number < 1], [number for number in usable if number >= 1]
    assert processors.usable_processors() == [node for node in nodes if node]
    monkeypatch.setattr(processors, "NUMA_NODES", tmp_path / "none")
    assert processors.usable_processors() == [usable], "one node where the system tells none"


def test_each_process_claims_other_processors(command_environment: dict[str, str]) -> None:
    """And the ones that another process had once that has ended; too many are not pinned."""
    usable = psutil.Process().cpu_affinity()
    nodes = repr([[number] for number in usable])

    def claim(count: int) -> tuple[subprocess.Popen[str], list[int]]:
        command, pipe = [sys.executable, "-c", CLAIM, nodes, str(count)], subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=command_environment)
        assert process.stdout
        return process, eval(process.stdout.readline())

    held = [claim(1) for _ in usable]
    assert sorted(pinned for _, found in held for pinned in found) == usable
    held.append(claim(1))
    assert held[-1][1] == usable, "none is left, so this one isn't pinned"
    held[0][0].kill()
    held[0][0].wait()
    held.append(claim(1))
    assert held[-1][1] == held[0][1], "free again"
    for process, _ in held:
        process.kill()
        process.communicate()
    whole, found = claim(len(usable))
    whole.kill()
    whole.communicate()
    assert found == usable, "of several nodes, because none has as many"
