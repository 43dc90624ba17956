"""The figures of the demo pair in the docs: time to help and to the first token, speed-up, overhead, KV cache drift.

    python scripts/bench/readme.py [--json]

Times are medians. Run it on an idle machine; it exports the demo pair in f32 first (about 20 s).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import CODE, ROOT, Table, compared, machine, milliseconds, options, speedup_cells, take_turns, totals

import ovspec
from ovspec.cache.decoder import Rollback
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.text.tokenizer import Tokenizer

CHECKPOINTS = ROOT / "models" / "demo-hf"
DEMO = ROOT / "models" / "demo"
COMMAND = (sys.executable, "-m", "ovspec")
LOOKAHEADS = (0, 1, 2, 3, 4, 6, 8, "auto")
DRIFTS = ("again", "compacted", "regrouped")


def time_to_help() -> float:
    """Return the seconds from process start to the end of ``ovspec --help``, median of 10."""
    once = lambda: subprocess.run([*COMMAND, "--help"], capture_output=True, check=True)  # noqa: E731
    return statistics.median(milliseconds(once) for _ in range(10)) / 1e3


def time_to_first_token(folder: Path, cache: Path) -> float:
    """Return the seconds from process start to the first byte of text, compile cache warm, median of 5."""
    command = [*COMMAND, "generate", folder, CODE[0], "--draft", "-n", "16", "--cache-dir", cache]

    def once() -> float:
        began = time.perf_counter()
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE) as running:
            assert running.stdout
            running.stdout.read(1)
            seconds = time.perf_counter() - began
            running.communicate()
        return seconds

    once()  # fills the cache
    return statistics.median(once() for _ in range(5))


def speed(folder: Path, cache: Path, args: argparse.Namespace, **given: Any) -> list[dict[str, Any]]:
    """Time every prompt plain and speculative, in turns; the speed-up is that of ``ovspec.api.comparison``."""
    lm = ovspec.load(folder, True, cache_dir=cache, **given)

    def text(lookahead: Any, turn: int) -> ovspec.Result:
        return lm.generate(CODE[turn], max_tokens=args.tokens, ignore_eos=True, lookahead=lookahead)

    rows = []
    runs = take_turns(LOOKAHEADS, text, args.prompts)
    for lookahead, results in runs.items():
        row = {"lookahead": lookahead} | compared(results, runs[0])
        rounds, proposed = totals(results, "rounds", "proposed")
        row["overhead_ms_per_inference"] = sum(r.stats.other_ms for r in results) / (rounds + proposed)
        rows.append(row)
    return rows


def rollback_drift(folder: Path, cache: Path) -> list[dict[str, Any]]:
    """Return how far logits move when tokens are rolled back and fed again, for each type of KV cache.

    ``again``: the last 4 tokens, fed as before. ``regrouped``: the last 100 and 4, first fed as 200 and 4.
    In units of the logits' standard deviation.
    """
    rows = []
    text = Tokenizer(folder).encode("".join(CODE))[:204]
    for precision, kv_precision in itertools.product(("f32", "bf16"), ("f32", "f16", "bf16", "u8")):
        device = DeviceOptions(precision=precision, kv_precision=kv_precision, cache_dir=cache)
        decoder = StatefulDecoder(compile_ir(folder, device), Rollback("mask"))
        decoder.feed([text[:200]], [0])
        first = decoder.feed([text[200:]], [4])[0].copy()
        row: dict[str, Any] = {"precision": precision, "kv_precision": kv_precision}
        for name in DRIFTS:
            decoder.truncate(0, 200)
            if name == "compacted":
                decoder.compact()
            elif name == "regrouped":
                decoder.truncate(0, 100)
                decoder.feed([text[100:200]], [0])
            row[name] = float(np.abs(decoder.feed([text[200:]], [4])[0] - first).max() / first.std())
        rows.append(row)
    return rows


def print_speed(rows: list[dict[str, Any]]) -> None:
    heads = ("lookahead", "plain, ms per token", "ms per token", "speed-up", "range", "accepted of proposed")
    table = Table(*heads, "conditional acceptance", "tokens per round", "overhead, ms per inference", "equal")
    for row in rows:
        acceptance, cells = row["acceptance"], speedup_cells(row, not row["lookahead"])
        drafted = (f"{row['accepted']} of {row['proposed']}", f"{acceptance:.2f}") if acceptance else (None, None)
        rates = (f"{row['tokens_per_round']:.2f}", f"{row['overhead_ms_per_inference']:.3f}")
        table.row(row["lookahead"] or "plain", *cells, *drafted, *rates, row["equal"])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--prompts", type=int, default=len(CODE))
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cache, f32 = Path(scratch) / "cache", Path(scratch) / "f32"
        command = ["export", CHECKPOINTS / "target", "--draft", CHECKPOINTS / "draft", "-o", f32]
        subprocess.run([*COMMAND, *map(str, command), "--weight-format", "fp32"], check=True)
        figures = {
            "machine": machine(),
            "help_s": time_to_help(),
            "first_token_s": time_to_first_token(DEMO, cache),
            "f32": speed(f32, cache, args, precision="f32"),
            "int8": speed(DEMO, cache, args),
            "drift": rollback_drift(f32, cache),
        }
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    print(f"machine: {figures['machine']}")
    print(f"ovspec --help: {figures['help_s']:.3f} s")
    print(f"first token from process start, compile cache warm: {figures['first_token_s']:.2f} s")
    for name in ("f32", "int8"):
        print(f"\n{name} demo pair, {args.prompts} held-out prompts, {args.tokens} tokens each, greedy\n")
        print_speed(figures[name])
    print("\nlargest change of a logit after a rollback, in standard deviations of the logits\n")
    table = Table("arithmetic", "KV cache", "rolled back", "and compacted", "and fed in other groups")
    for row in figures["drift"]:
        table.row(row["precision"], row["kv_precision"], *(f"{row[name]:.0e}" for name in DRIFTS))


if __name__ == "__main__":
    main()
