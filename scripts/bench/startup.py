"""Time fresh processes: of the command line, of loading a model, and beside openvino-genai up to some tokens.

    python scripts/bench/startup.py command MODEL
    python scripts/bench/startup.py load MODEL
    python scripts/bench/peers/install.py genai
    python scripts/bench/startup.py tokens MODEL [--turns 9] [--tokens 32,400] [--ways "ovspec; openvino-genai"]

command: seconds until the help, and until a text's first piece, with a warm compile cache; medians.
load: seconds to load the model, and then to generate a token, with a cold and a warm compile cache.
tokens: greedy and without a draft, the processes in turns. Every process imports, loads and prefills anew, after a turn
    to fill compile caches and page cache. Prints the median seconds until each token, and openvino-genai's time as a
    multiple, turn by turn. Use an idle machine.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from figures import Table, machine, median, median_and_range, milliseconds, ratios, take_turns
from harness import CODE, Option, Worker, arguments

from ovspec.text.tokenizer import Tokenizer

COMMAND = (sys.executable, "-m", "ovspec")
PROMPT = "It was late in the evening when she came home, and"
GENAI = "openvino-genai"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    # A fresh process has no time to move weights into large pages.
    "ovspec": ("ovspec", {"mode": "plain", "options": {"settle": False}}),
    GENAI: ("genai", {"options": {"backend": None}}),
}


def time_first_piece(model: Path, cache: str) -> float:
    """Return the seconds from process start to the first byte of text."""
    command = [*COMMAND, "generate", str(model), CODE[0], "-n", "16", "--cache-dir", cache]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout
        if not running.stdout.read(1):
            sys.exit(f"Error: {' '.join(command[2:])} wrote nothing")
        seconds = time.perf_counter() - began
        running.communicate()
    return seconds


def time_command(args: Namespace, cache: str) -> None:
    show_help = lambda: subprocess.run([*COMMAND, "--help"], capture_output=True, check=True)  # noqa: E731
    print(f"ovspec --help: {statistics.median(milliseconds(show_help) for _ in range(10)) / 1e3:.3f} s")
    time_first_piece(args.model, cache)  # fills the cache
    print(f"first token: {median((time_first_piece(args.model, cache) for _ in range(5)), 2)} s")


def time_loading(args: Namespace, cache: str) -> None:
    request = {"prompts": [[5, 6, 7, 8]], "max_tokens": 1}
    for state in ("cold", "warm", "warm"):
        setup = {"target": str(args.model), "options": {"settle": False, "cache_dir": cache}}
        with Worker("ovspec", setup) as worker:
            first = worker.answer(request)["ttft_ms"] / 1e3
            print(f"{state} cache: loaded in {worker.ready['load_s']:.2f} s, first token {first:.2f} s", flush=True)


def time_tokens(args: Namespace, _: str) -> None:
    request = {"prompts": [Tokenizer(args.model).encode(PROMPT).tolist()], "max_tokens": max(args.tokens)}

    def seconds(way: str, _: int) -> list[float]:
        name, setup = WAYS[way]
        began = time.perf_counter()
        with Worker(name, setup | {"target": str(args.model)}) as worker:
            loaded = time.perf_counter() - began
            times = worker.answer(request)["times"]
        return [loaded + times[count - 1] for count in args.tokens]

    by_way = take_turns(args.ways, seconds, args.turns)
    table = Table("", *(head for count in args.tokens for head in (f"{count} tokens, s", "genai as a multiple")))
    for way, own_turns in by_way.items():
        cells = []
        for index, times in enumerate(zip(*own_turns, strict=True)):
            genai = [turn[index] for turn in by_way.get(GENAI, ())]
            cells += [median(times), median_and_range(ratios(genai, times)) if genai else None]
        table.row(way, *cells)


def main() -> None:
    measure = {"command": time_command, "load": time_loading, "tokens": time_tokens}
    args = arguments(
        __doc__,
        tuple(measure),
        "model",
        turns=9,
        tokens=[32, 400],
        ways=Option(list(WAYS), choices=WAYS, separator=";"),
    )
    print(f"{args.model.name} on {machine()}\n")
    with tempfile.TemporaryDirectory() as cache:
        measure[args.what](args, cache)


if __name__ == "__main__":
    main()
