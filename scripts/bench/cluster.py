"""Time ``ovspec batch`` on one machine against local clusters of Ray, in turns, in fresh processes.

    python scripts/bench/cluster.py DIR [--lines 200] [--tokens 48] [--turns 3] [--json OUT]

Each way also answers a single line, which is its start-up: "lines" is the time of all lines without it. "half" is one
worker with half of the processors, beside which nothing runs. Then the object store ships the model, and the driver
takes groups of lines that need no time. Prints tables; --json writes the figures for simulate_cluster.py. Use an idle
machine.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
from harness import CODE, PROSE, Option, Table, arguments, machine, median, median_and_range, ratios, take_turns

from ovspec.batch.file import BatchProgress
from ovspec.batch.folder import BatchFile
from ovspec.batch.groups import MOST, Answers, groups_of
from ovspec.batch.requests import prompt_request

ANSWER = {"id": "1", "text": "An answer of some length. " * 10, "finish_reason": "length", "generated_tokens": 48}


def run_batch(options: list[str], processors: list[int]) -> float:
    """Return the seconds that a batch takes that has only these processors."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", "ovspec", "batch", *options], stderr=subprocess.PIPE) as run:
        psutil.Process(run.pid).cpu_affinity(processors)
        _, error = run.communicate()
    assert run.returncode == 0, error.decode()
    return time.perf_counter() - began


def write_prompts(file: Path, count: int, tokens: int) -> Path:
    """Write prompts, no two alike, whose answers have different lengths, half of ``tokens`` to one and a half."""
    lines = [
        {"prompt": f"{number}. {prompt}", "max_tokens": tokens // 2 + number * 37 % (tokens + 1), "ignore_eos": True}
        for number, prompt in enumerate(islice(cycle(PROSE + CODE), count))
    ]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8", newline="\n")
    return file


def shipping_speed(folder: Path) -> float:
    """Return the bytes per second at which a model comes from the object store, of one machine."""
    import ray

    from ovspec.base.files import create_folder_once, read_blocks

    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        files = filter(Path.is_file, folder.iterdir())
        pieces = [(file.name, ray.put(piece)) for file in files for piece in read_blocks(file, 1 << 26)]
        create_folder_once(Path(scratch) / "copy", ((name, ray.get(piece)) for name, piece in pieces))
        return size / (time.perf_counter() - began)


class Nobody:
    """A worker that needs no time."""

    def load(self) -> Any:
        from ovspec.batch.ray.worker import Reference

        return Reference("", "nobody", "", [])

    def answer(self, requests: list[Any]) -> list[dict[str, Any]]:
        return [ANSWER | {"id": request.id} for request in requests]


def driver_seconds(count: int, actors: int) -> float:
    """Return the seconds that the driver takes for a group of lines, with workers that need no time."""
    import ray

    from ovspec.batch.ray.pool import TOGETHER, Pool

    asked = [prompt_request(str(number), f"prompt {number}", f"prompt {number}") for number in range(MOST * count)]
    groups = list(groups_of(0, asked, "", (), 1))
    ways: Any = {"num_cpus": 0, "max_concurrency": TOGETHER}
    with tempfile.TemporaryDirectory() as scratch:
        answers = Answers([BatchFile("", str(Path(scratch) / "out"))], "", BatchProgress(0, 0))
        pool = Pool(lambda _: ray.remote(**ways)(Nobody).remote(), actors, False, "")
        began, taken, before = 0.0, 0, 0
        for answered in pool.answer(groups):
            if not began and taken >= len(groups) // 4:  # all workers are there
                began, before = time.perf_counter(), taken
            for group in answered:
                answers.take(group)
            taken += len(answered)
        pool.close()
        return (time.perf_counter() - began) / (len(groups) - before)


def main() -> None:
    args = arguments(
        __doc__,
        "folder",
        lines=200,
        tokens=48,
        turns=3,
        groups=Option(2000, "that the driver takes"),
        json=Option(Path, "write the figures to this file"),
    )
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
            start = run_batch([str(args.folder), str(single), *options], own)
            return start, run_batch([str(args.folder), str(all_lines), *options], own) - start

        by_way = take_turns(ways, time_way, args.turns, warm_up=int(args.turns > 1))
    starts, lines = ({way: [turn[i] for turn in turns] for way, turns in by_way.items()} for i in (0, 1))
    table = Table("way", "start-up, s", f"{args.lines} lines, s", "of one machine's speed")
    for way in ways:
        speed = median_and_range(ratios(lines["one machine"], lines[way]))
        table.row(way, median(starts[way]), median(lines[way]), speed)
    from ovspec.batch.ray.cluster import connected

    with connected("local"):
        figures = {
            "lines": args.lines,
            "cores": len(processors),
            "startup_s": statistics.median(starts["1 worker"]),
            "lines_s": {way: statistics.median(times) for way, times in lines.items()},
            "model_bytes": sum(file.stat().st_size for file in args.folder.iterdir() if file.is_file()),
            "shipping_bytes_per_s": shipping_speed(args.folder),
            "driver_s_per_group": driver_seconds(args.groups, 2),
        }
    print(f"\nshipping: {figures['shipping_bytes_per_s'] / 1e6:.0f} MB/s")
    print(f"driver: {figures['driver_s_per_group'] * 1e3:.2f} ms for a group of {MOST} lines")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
