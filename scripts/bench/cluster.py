"""Time ``ovspec batch`` on a single machine against local clusters of Ray, and simulate it on many machines.

    python scripts/bench/cluster.py measure DIR [--lines 200] [--tokens 48] [--turns 3] [--json OUT]
    python scripts/bench/cluster.py simulate OUT [--workers 1,10,100,1000] [--hours 1] [--lines-per-hour N] [...]

measure: in turns, in fresh processes. "lines" excludes the start-up, measured with a single line. "half" is one worker
    on half of the processors, alone. Then the object store ships the model, and the driver runs groups of lines of no
    duration. Use an idle machine.
simulate: extrapolates the figures of one machine. A worker runs four groups of lines at a time; one driver distributes
    groups and keeps answers; machines get the model from each other; some workers are slow or get lost. First two
    workers of half a machine, as measured, then clusters of --workers machines, each with lines for --hours.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
import simpy
from figures import Table, machine, median, median_and_range, ratios, take_turns
from harness import CODE, PROSE, Option, arguments

from ovspec.batch.folder import BatchFile
from ovspec.batch.groups import GROUPS_PER_WORKER, MAX_GROUP_LINES, ResultCollector, make_groups
from ovspec.batch.ray.pool import GROUPS_IN_FLIGHT, WorkerPool
from ovspec.batch.requests import make_prompt_request
from ovspec.batch.resumable_run import BatchProgress

ANSWER = {"id": "1", "text": "An answer of some length. " * 10, "finish_reason": "length", "generated_tokens": 48}


def run_batch(options: list[str], processors: list[int]) -> float:
    """Return the seconds for a batch, limited to ``processors``."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "ovspec", "batch", *options], stderr=subprocess.PIPE) as run:
        psutil.Process(run.pid).cpu_affinity(processors)
        _, error = run.communicate()
    assert run.returncode == 0, error.decode()
    return time.perf_counter() - began


def write_prompts(file: Path, count: int, tokens: int) -> Path:
    """Write ``count`` different prompts, with answer lengths from half of ``tokens`` to one and a half times."""
    lines = [
        {"prompt": f"{number}. {prompt}", "max_tokens": tokens // 2 + number * 37 % (tokens + 1), "ignore_eos": True}
        for number, prompt in enumerate(islice(cycle(PROSE + CODE), count))
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8", newline="\n")
    return file


def shipping_speed(folder: Path) -> float:
    """Return the bytes per second of reading a model from a machine's object store."""
    import ray

    from ovspec.batch.ray.shipment import create_folder_once, read_pieces

    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        files = filter(Path.is_file, folder.iterdir())
        pieces = [(file.name, ray.put(piece)) for file in files for piece in read_pieces(file, 1 << 26)]
        create_folder_once(Path(scratch) / "copy", ((name, ray.get(piece)) for name, piece in pieces))
        return size / (time.perf_counter() - began)


class Nobody:
    """A worker of no cost."""

    def load_worker_model(self) -> Any:
        from ovspec.batch.ray.worker import ReferenceArithmetic

        return ReferenceArithmetic("", "nobody", "", [])

    def run_requests(self, requests: list[Any]) -> list[dict[str, Any]]:
        return [ANSWER | {"id": request.id} for request in requests]


def driver_seconds(count: int, actors: int) -> float:
    """Return the driver's seconds per group of lines, with workers of no cost."""
    import ray

    numbers = range(MAX_GROUP_LINES * count)
    requests = [make_prompt_request(str(number), f"prompt {number}", f"prompt {number}") for number in numbers]
    groups = list(make_groups(0, requests, "", (), 1))
    ways: Any = {"num_cpus": 0, "max_concurrency": GROUPS_IN_FLIGHT}
    with tempfile.TemporaryDirectory() as scratch:
        collector = ResultCollector([BatchFile("", str(Path(scratch) / "out"))], "", BatchProgress(0, 0))
        pool = WorkerPool(lambda _: ray.remote(**ways)(Nobody).remote(), actors, False, "")
        began, taken, before = 0.0, 0, 0
        for answered in pool.run_groups(groups):
            if not began and taken >= len(groups) // 4:  # by now all workers have started
                began, before = time.perf_counter(), taken
            for group in answered:
                collector.collect_group(group)
            taken += len(answered)
        pool.close()
        return (time.perf_counter() - began) / (len(groups) - before)


def measure(args: Namespace) -> None:
    processors = psutil.Process().cpu_affinity()
    half = max(1, len(processors) // 2)
    halves = ["--ray", "--cpus-per-worker", str(half)]
    whole = ["--ray", "--cpus-per-worker", str(len(processors))]
    ways = {"one machine": [], "1 worker": whole, "2 workers": halves, "half": halves}
    print(f"{machine()}\n")
    with tempfile.TemporaryDirectory() as scratch:
        single, all_lines = (write_prompts(Path(scratch) / f"{n}.jsonl", n, args.tokens) for n in (1, args.lines))

        def time_way(way: str, _: int) -> tuple[float, float]:
            options = ["-o", str(Path(scratch) / "out"), "--overwrite", *ways[way]]
            own = processors[:half] if way == "half" else processors
            start = run_batch([str(args.path), str(single), *options], own)
            return start, run_batch([str(args.path), str(all_lines), *options], own) - start

        by_way = take_turns(ways, time_way, args.turns, warm_up=int(args.turns > 1))
    starts, lines = ({way: [turn[i] for turn in turns] for way, turns in by_way.items()} for i in (0, 1))
    table = Table("setup", "start-up, s", f"{args.lines} lines, s", "relative speed")
    for way in ways:
        speed = median_and_range(ratios(lines["one machine"], lines[way]))
        table.row(way, median(starts[way]), median(lines[way]), speed)
    from ovspec.batch.ray.cluster import cluster_connection

    with cluster_connection("local"):
        figures = {
            "lines": args.lines,
            "cores": len(processors),
            "startup_s": statistics.median(starts["1 worker"]),
            "lines_s": {way: statistics.median(times) for way, times in lines.items()},
            "model_bytes": sum(file.stat().st_size for file in args.path.iterdir() if file.is_file()),
            "shipping_bytes_per_s": shipping_speed(args.path),
            "driver_s_per_group": driver_seconds(args.groups, 2),
        }
    print(f"\nshipping: {figures['shipping_bytes_per_s'] / 1e6:.0f} MB/s")
    print(f"driver: {figures['driver_s_per_group'] * 1e3:.2f} ms for a group of {MAX_GROUP_LINES} lines")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8", newline="\n")


# ---------------------------------------------------------------- more machines


@dataclass
class Cluster:
    """A run in progress; times in seconds."""

    workers: int
    lines: int
    line: float  # a worker's time per line
    start: float  # a worker's start-up time
    driver: float  # the driver's time per group
    spread: float = 0.0  # standard deviation of the workers' speeds
    slow: float = 0.0  # share of workers with half the speed
    lost: float = 0.0  # percentage of workers lost per hour; a replacement comes after a minute
    now: simpy.Environment = field(default_factory=simpy.Environment)
    random: random.Random = field(default_factory=lambda: random.Random(1))
    driving: float = 0.0  # the driver's busy time
    empty: float = 0.0  # when all groups were assigned
    answered: int = 0

    def run(self) -> float:
        """Return the seconds until all lines are answered."""
        size = max(1, min(MAX_GROUP_LINES, math.ceil(self.lines / (GROUPS_PER_WORKER * self.workers))))
        self.todo = [min(size, self.lines - begin) for begin in range(0, self.lines, size)]
        self.one_driver, self.ended = simpy.Resource(self.now), self.now.event()
        for number in range(self.workers):
            slow = 2 if number < self.slow * self.workers else 1
            self.now.process(self.worker(max(0.2, self.random.gauss(1, self.spread)) * slow))
        self.now.run(self.ended)
        return self.now.now

    def worker(self, pace: float) -> Generator[Any, Any, None]:
        """Run groups; the groups in progress share the worker's time equally."""
        yield self.now.timeout(self.start)
        left = self.random.expovariate(self.lost / 100 / 3600) if self.lost else math.inf
        groups: list[list[float]] = []  # [remaining seconds, number of lines]
        while True:
            while self.todo and len(groups) < GROUPS_IN_FLIGHT:
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
        """Let the driver keep a group's results; the worker waits, because its next group follows only then."""
        with self.one_driver.request() as turn:
            yield turn
            yield self.now.timeout(self.driver)
        self.driving += self.driver
        self.answered += lines
        if self.answered == self.lines and not self.ended.triggered:
            self.ended.succeed()


def simulate(args: Namespace) -> None:
    figures = json.loads(args.path.read_text(encoding="utf-8"))
    lines, seconds, driver = (figures[name] for name in ("lines", "lines_s", "driver_s_per_group"))
    halves = Cluster(2, lines, seconds["half"] / lines, 0.0, driver)
    print(f"two workers of half a machine: simulated {halves.run():.1f} s, measured {seconds['2 workers']:.1f} s")
    hourly = args.lines_per_hour or 3600 * lines / seconds["1 worker"]
    size = 1e9 * args.gigabytes if args.gigabytes else figures["model_bytes"]
    copy = size / min(figures["shipping_bytes_per_s"], args.network / 8 * 1e9)
    print(f"one worker: {hourly:.0f} lines an hour, {hourly / figures['cores']:.0f} for each core")
    print(f"the model: {copy:.1f} s from one machine to another\n")
    table = Table("workers", "lines an hour", "efficiency", "start, s", "last lines, s", "driver busy")
    for workers in args.workers:
        # Machines with the model pass it on, so the number of copies doubles in each step.
        start = figures["startup_s"] + copy * math.ceil(math.log2(workers + 1))
        luck = {"spread": args.spread, "slow": args.slow, "lost": args.lost} if workers > 1 else {}
        cluster = Cluster(workers, int(hourly * args.hours * workers), 3600 / hourly, start, driver, **luck)
        took = cluster.run()
        rate = 3600 * cluster.lines / took
        shares = (f"{rate / (hourly * workers):.2f}", f"{start:.0f}", f"{took - cluster.empty:.0f}")
        table.row(workers, f"{rate:.0f}", *shares, f"{cluster.driving / took:.0%}")


def main() -> None:
    commands = {"measure": measure, "simulate": simulate}
    args = arguments(
        __doc__,
        tuple(commands),
        "path",
        lines=200,
        tokens=48,
        turns=3,
        groups=Option(2000, "that the driver takes"),
        json=Option(Path, "write the figures to this file"),
        workers=[1, 10, 100, 1000],
        hours=Option(1.0, "of lines for each worker"),
        lines_per_hour=Option(float, "of one worker; by default as measured"),
        gigabytes=Option(float, "of the model; by default as measured"),
        network=Option(1.0, "gigabits per second of each machine"),
        spread=Option(0.05, "standard deviation of the workers' speeds"),
        slow=Option(0.02, "share of workers with half the speed"),
        lost=Option(5.0, "workers of a hundred that are taken away in an hour"),
    )
    commands[args.what](args)


if __name__ == "__main__":
    main()
