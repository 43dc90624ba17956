"""Batches for clusters of Ray, and the lines that one machine writes for them."""

from __future__ import annotations

import functools
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import ovspec
from ovspec.batch.requests import read_requests
from ovspec.batch.resumable_run import BatchProgress, run_file
from ovspec.params import make_params

PROMPTS = ["def fib(", "The sky is", "Once upon a time", "import os\n"]
OPTIONS = make_params({"max_tokens": 12, "seed": 5})
LOADING: Any = {"threads": 1}
FLAGS = ("--cpus-per-worker", "1", "--threads", "1", "--max-tokens", "12", "--seed", "5")  # the same on a command line


def on_cluster(
    source: Any, output: Any, model: Path, draft: Any = None, loading: Any = LOADING, **ways: Any
) -> BatchProgress:
    from ovspec.batch.ray.driver import run_on_cluster

    return run_on_cluster(source, str(output), model, draft, loading, OPTIONS, cpus=1, **ways)


def requests_of_all_kinds(count: int = 12) -> list[Any]:
    """Return requests with and without seeds, and some that fail."""
    own: Any = [{"id": f"own {n}", "prompt": PROMPTS[n % 4] + str(n), "temperature": n % 2} for n in range(count)]
    seeded = [{"id": f"seed {n}", "prompt": PROMPTS[n], "seed": n, "temperature": 0.8, "n": 2} for n in range(4)]
    body = {"model": "m", "prompt": "def f(", "max_tokens": 5, "logprobs": 2}
    openai = {"custom_id": "openai", "method": "POST", "url": "/v1/completions", "body": body}
    return [
        *own,
        *seeded,
        openai,
        {"id": "bad", "prompt": "x", "max_tokens": -5},
        "just a prompt",
        {"id": "own 3", "prompt": "twice"},
    ]


def as_lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def file_of_all_kinds(folder: Path, count: int = 12) -> Path:
    file = folder / "requests.jsonl"
    file.write_text(as_lines(requests_of_all_kinds(count)), encoding="utf-8")
    return file


def without_times(text: str) -> list[dict[str, Any]]:
    """Return the lines of a result without times, ids of the run and cached tokens."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: cleaned(each) for name, each in value.items() if name not in ("created", "cached_tokens")}
        return [cleaned(each) for each in value] if isinstance(value, list) else value

    return [cleaned(json.loads(line)) for line in text.splitlines()]


@functools.cache
def loaded(model: Path, draft: Any = None, **loading: Any) -> ovspec.LanguageModel:
    return ovspec.load(model, draft, **loading)


def alone(model: Path, file: Path, draft: Any = None, loading: Any = LOADING) -> list[dict[str, Any]]:
    """Return what one machine writes for a file."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out.jsonl")
        run_file(loaded(model, draft, **loading), read_requests(file), output, OPTIONS)
        return without_times(output.read_text("utf-8"))


def of_ray(of: int, name: str = "") -> list[psutil.Process]:
    """Return the processes of a cluster that the process ``of`` runs, or those whose name begins with ``name``."""
    found = list[psutil.Process]()
    for process in psutil.Process(of).children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            found += [process] * "".join(process.cmdline()).startswith(name)
    return found


def addresses(processes: list[psutil.Process]) -> set[str]:
    """Return the addresses that processes listen at."""
    found = list[Any]()
    for process in processes:
        with suppress(psutil.Error):
            found += process.net_connections()
    return {each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN}
