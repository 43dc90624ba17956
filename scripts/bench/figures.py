"""The figures of the benchmarks: times of turns, their ratios and medians, and tables of them."""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import openvino as ov

from ovspec.api.comparison import rotate_modes
from ovspec.engine.results import Result
from ovspec.ir.device import list_available_devices

K = TypeVar("K")
T = TypeVar("T")


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def take_turns(names: Iterable[K], run: Callable[[K, int], T], turns: int, warm_up: int = 1) -> dict[K, list[T]]:
    """Run each name in each turn; return the results of ``run(name, turn)`` by name, in the order of the turns.

    Each turn begins with another name, because a machine's speed drifts. The first ``warm_up`` turns, for compiling
    kernels, have negative numbers and are left out.
    """
    figures: dict[K, list[T]] = {name: [] for name in names}
    for turn in range(-warm_up, turns):
        for name in rotate_modes(list(figures), turn):
            figure = run(name, turn)
            if turn >= 0:
                figures[name].append(figure)
    return figures


def totals(results: Iterable[Result], *names: str) -> list[int]:
    """Return the sums of some fields of the results' stats."""
    stats = [result.stats for result in results]
    return [sum(getattr(text, name) for text in stats) for name in names]


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    """Return the ratio of each turn."""
    return [a / b for a, b in zip(over, under, strict=True)]


def median_interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval of the median; with fewer than six values, the extremes.

    It consists of order statistics, without assumptions about the distribution.
    """
    ordered = sorted(values)
    count = len(ordered)
    tails = itertools.accumulate(math.comb(count, i) for i in range(count // 2))  # in units of 2^-count
    outside = sum(2 * tail <= (1 - confidence) * 2**count for tail in tails)
    place = max(outside - 1, 0)
    return ordered[place], ordered[-1 - place]


def median(values: Iterable[float], digits: int = 1) -> str:
    """Return the median, formatted for tables."""
    return f"{statistics.median(values):.{digits}f}"


def median_and_range(values: Sequence[float], digits: int = 2) -> str:
    return f"{median(values, digits)} ({min(values):.{digits}f} to {max(values):.{digits}f})"


# ---------------------------------------------------------------- output


def machine(isa: str | None = None) -> str:
    """Return the machine's description for tables: processor, its cap, system and OpenVINO's version."""
    version = ov.get_version().split("-")[0]
    cpu = dict(list_available_devices()).get("CPU", "CPU")
    capped = f"capped to {isa}, " if isa else ""
    return f"{cpu}, {capped}{os.cpu_count()} cores, {platform.system()}, OpenVINO {version}, {time.strftime('%B %Y')}"


class Table:
    """A Markdown table, printed row by row while measuring."""

    def __init__(self, *heads: str) -> None:
        self.width = len(heads)
        self.row(*heads)
        print("|---" * self.width + "|", flush=True)

    def row(self, *cells: Any) -> None:
        """Print a row; cells of None, and missing cells at the end, stay empty."""
        filled = [*cells, *[None] * (self.width - len(cells))]
        print(f"| {' | '.join('' if cell is None else str(cell) for cell in filled)} |", flush=True)
