"""Simulate batches on a drawer of machines, from what cluster.py measured of one.

    python scripts/bench/simulate_cluster.py FIGURES [--workers 1,10,100,1000] [--hours 1] [--lines-per-hour N] [...]

FIGURES is the file that cluster.py --json wrote. Each worker answers four groups of lines at a time, one driver hands
out all groups and keeps the answers, machines get the model from those that have it, and some workers are slow or are
taken away. First two workers of half a machine are simulated, which were measured, too; then clusters of --workers
machines, each with lines for --hours.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy
from harness import Option, Table, arguments

from ovspec.batch.groups import GROUPS, MOST

TOGETHER = 4  # groups that a worker answers at a time


@dataclass
class Cluster:
    """A run in progress; times in seconds."""

    workers: int
    lines: int
    line: float  # that a worker needs for one
    start: float  # until a worker answers
    driver: float  # that the driver needs for a group
    spread: float = 0.0  # of the workers' speeds, a standard deviation
    slow: float = 0.0  # share of workers with half the speed
    lost: float = 0.0  # workers of a hundred that are taken away in an hour; another comes after a minute
    now: simpy.Environment = field(default_factory=simpy.Environment)
    random: random.Random = field(default_factory=lambda: random.Random(1))
    driving: float = 0.0  # seconds that the driver was busy
    empty: float = 0.0  # when nothing was left to hand out
    answered: int = 0

    def run(self) -> float:
        """Return the seconds until all lines are answered."""
        size = max(1, min(MOST, math.ceil(self.lines / (GROUPS * self.workers))))
        self.todo = [min(size, self.lines - begin) for begin in range(0, self.lines, size)]
        self.one_driver, self.ended = simpy.Resource(self.now), self.now.event()
        for number in range(self.workers):
            slow = 2 if number < self.slow * self.workers else 1
            self.now.process(self.worker(max(0.2, self.random.gauss(1, self.spread)) * slow))
        self.now.run(self.ended)
        return self.now.now

    def worker(self, pace: float) -> Generator[Any, Any, None]:
        """Answer groups; of those in progress, each gets the same share of the worker's time."""
        yield self.now.timeout(self.start)
        left = self.random.expovariate(self.lost / 100 / 3600) if self.lost else math.inf
        groups: list[list[float]] = []  # seconds to go, and lines
        while True:
            while self.todo and len(groups) < TOGETHER:
                lines = self.todo.pop()
                work = sum(self.random.uniform(0.5, 1.5) for _ in range(lines)) * self.line * pace
                groups.append([work, lines])
                self.empty = self.now.now
            if not groups:
                return
            shortest = min(groups)
            step = min(shortest[0] * len(groups), left)
            yield self.now.timeout(step)
            left -= step
            for group in groups:
                group[0] -= step / len(groups)
            if left <= 0:
                self.todo += [int(lines) for _, lines in groups]
                yield self.now.timeout(60 + self.start)
                left, groups = self.random.expovariate(self.lost / 100 / 3600), []
                continue
            groups.remove(shortest)
            yield from self.keep(int(shortest[1]))

    def keep(self, lines: int) -> Generator[Any, Any, None]:
        """Let the driver keep the answers, which a worker waits for because its next group comes with that."""
        with self.one_driver.request() as turn:
            yield turn
            yield self.now.timeout(self.driver)
        self.driving += self.driver
        self.answered += lines
        if self.answered == self.lines and not self.ended.triggered:
            self.ended.succeed()


def main() -> None:
    args = arguments(
        __doc__,
        "figures",
        workers=[1, 10, 100, 1000],
        hours=Option(1.0, "of lines for each worker"),
        lines_per_hour=Option(float, "of one worker; by default as measured"),
        gigabytes=Option(float, "of the model; by default as measured"),
        network=Option(1.0, "gigabits per second of each machine"),
        spread=Option(0.05, "standard deviation of the workers' speeds"),
        slow=Option(0.02, "share of workers with half the speed"),
        lost=Option(5.0, "workers of a hundred that are taken away in an hour"),
    )
    figures = json.loads(args.figures.read_text(encoding="utf-8"))
    lines, seconds, driver = (figures[name] for name in ("lines", "lines_s", "driver_s_per_group"))
    halves = Cluster(2, lines, seconds["half"] / lines, 0.0, driver)
    print(f"two workers of half a machine: simulated {halves.run():.1f} s, measured {seconds['2 workers']:.1f} s")
    hourly = args.lines_per_hour or 3600 * lines / seconds["1 worker"]
    size = 1e9 * args.gigabytes if args.gigabytes else figures["model_bytes"]
    copy = size / min(figures["shipping_bytes_per_s"], args.network / 8 * 1e9)
    print(f"one worker: {hourly:.0f} lines an hour, {hourly / figures['cores']:.0f} for each core")
    print(f"the model: {copy:.1f} s from one machine to another\n")
    table = Table("workers", "lines an hour", "of as many single ones", "start, s", "last lines, s", "driver busy")
    for workers in args.workers:
        # Whoever has the model hands it on, so the number of copies doubles.
        start = figures["startup_s"] + copy * math.ceil(math.log2(workers + 1))
        luck = {"spread": args.spread, "slow": args.slow, "lost": args.lost} if workers > 1 else {}
        cluster = Cluster(workers, int(hourly * args.hours * workers), 3600 / hourly, start, driver, **luck)
        took = cluster.run()
        rate = 3600 * cluster.lines / took
        shares = (f"{rate / (hourly * workers):.2f}", f"{start:.0f}", f"{took - cluster.empty:.0f}")
        table.row(workers, f"{rate:.0f}", *shares, f"{cluster.driving / took:.0%}")


if __name__ == "__main__":
    main()
