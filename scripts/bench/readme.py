"""The figures of the demo pair in the docs: time to help and to the first token, speed-up, overhead, KV cache drift.

    python scripts/bench/readme.py [--json]

Times are medians. Run it on an idle machine; it exports the demo pair in f32 first (about 20 s).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

import ovspec
from ovspec.comparison import rotated, speedup_of_results
from ovspec.decoders.base import Rollback
from ovspec.decoders.stateful import StatefulDecoder
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions, available_devices
from ovspec.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
CHECKPOINTS = ROOT / "models" / "demo-hf"
PROMPTS = [entry["text"] for entry in json.loads((ROOT / "models" / "prompts.json").read_text("utf-8"))["prompts"]]
TOKENS = 128
Ahead = int | Literal["auto"]


def time_to_help() -> float:
    """Return the seconds from process start to the end of ``ovspec --help``, median of 10."""

    def once() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ovspec", "--help"], capture_output=True, check=True)
        return time.perf_counter() - began

    return statistics.median(once() for _ in range(10))


def time_to_first_token(folder: Path, cache: Path, *options: str) -> float:
    """Return the seconds from process start to the first byte of text, compile cache warm, median of 5."""

    def once() -> float:
        command = [sys.executable, "-m", "ovspec", "generate", str(folder), PROMPTS[0], "--draft", "-n", "16"]
        began = time.perf_counter()
        process = subprocess.Popen([*command, "--cache-dir", str(cache), *options], stdout=subprocess.PIPE)
        assert process.stdout
        process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.communicate()
        return seconds

    once()  # fills the cache
    return statistics.median(once() for _ in range(5))


def speed(folder: Path, cache: Path, lookaheads: list[Ahead], **options: Any) -> list[dict[str, Any]]:
    """Time plain and speculative decoding of every prompt in turns; the speed-up is that of ``ovspec.comparison``."""
    lm = ovspec.load(folder, True, cache_dir=cache, **options)
    modes: list[Ahead] = [0, *lookaheads]
    for lookahead in modes:
        lm.generate(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True, lookahead=lookahead)
    runs: dict[Ahead, list[ovspec.Result]] = {lookahead: [] for lookahead in modes}
    for turn, prompt in enumerate(PROMPTS):
        for lookahead in rotated(modes, turn):
            runs[lookahead].append(lm.generate(prompt, max_tokens=TOKENS, ignore_eos=True, lookahead=lookahead))
    rows = []
    for lookahead, results in runs.items():
        stats, speedup = [result.stats for result in results], speedup_of_results(runs[0], results)
        proposed, accepted, reached, rounds, tokens = (
            sum(getattr(s, name) for s in stats)
            for name in ("proposed", "accepted", "reached", "rounds", "generated_tokens")
        )
        rows.append(
            {
                "lookahead": lookahead,
                "plain_tpot_ms": speedup.plain_ms,
                "tpot_ms": speedup.ms,
                "speedup": speedup.claimed if lookahead else None,
                "spread": (speedup.ratios[0], speedup.ratios[-1]),
                "proposed": proposed,
                "accepted": accepted,
                "conditional_acceptance": accepted / reached if reached else None,
                "tokens_per_round": tokens / rounds,
                "overhead_ms_per_inference": sum(s.other_ms for s in stats) / (rounds + proposed),
                "equal": sum(a.token_ids == b.token_ids for a, b in zip(results, runs[0], strict=True)),
            }
        )
    return rows


def rollback_drift(folder: Path, cache: Path) -> list[dict[str, Any]]:
    """Return how far logits move when tokens are rolled back and fed again, for each type of KV cache.

    ``again``: the last 4 tokens, fed as before. ``regrouped``: the last 100 and 4, first fed as 200 and 4.
    In units of the logits' standard deviation.
    """
    rows = []
    for precision, kv_precision in itertools.product(("f32", "bf16"), ("f32", "f16", "bf16", "u8")):
        options = DeviceOptions(precision=precision, kv_precision=kv_precision, cache_dir=cache)
        decoder = StatefulDecoder(compile_ir(folder, options), Rollback("mask"))
        text = Tokenizer(folder).encode("".join(PROMPTS))[:204]
        decoder.feed([text[:200]], [0])
        first = decoder.feed([text[200:]], [4])[0].copy()
        decoder.truncate(0, 200)
        again = decoder.feed([text[200:]], [4])[0].copy()
        decoder.truncate(0, 200)
        decoder.compact()
        compacted = decoder.feed([text[200:]], [4])[0].copy()
        decoder.truncate(0, 100)
        decoder.feed([text[100:200]], [0])
        regrouped = decoder.feed([text[200:]], [4])[0].copy()
        drifts = {"again": again, "compacted": compacted, "regrouped": regrouped}
        row = {name: float(np.abs(logits - first).max() / first.std()) for name, logits in drifts.items()}
        rows.append({"precision": precision, "kv_precision": kv_precision} | row)
    return rows


def drift_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| arithmetic | KV cache | rolled back | and compacted | and fed in other groups |", "|---" * 5 + "|"]
    for row in rows:
        drifts = " | ".join(f"{row[name]:.0e}" for name in ("again", "compacted", "regrouped"))
        lines.append(f"| {row['precision']} | {row['kv_precision']} | {drifts} |")
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    heads = ["lookahead", "plain, ms per token", "ms per token", "speed-up", "range", "accepted of proposed"]
    heads += ["conditional acceptance", "tokens per round", "overhead, ms per inference", "equal"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        speedup, drafted = row["speedup"], row["conditional_acceptance"] is not None
        cells = [
            str(row["lookahead"] or "plain"),
            f"{row['plain_tpot_ms']:.2f}" if row["lookahead"] else "",
            f"{row['tpot_ms']:.2f}",
            f"{speedup:.2f}" if speedup else "none" if row["lookahead"] else "",
            f"{row['spread'][0]:.2f} to {row['spread'][1]:.2f}" if speedup else "",
            f"{row['accepted']} of {row['proposed']}" if drafted else "",
            f"{row['conditional_acceptance']:.2f}" if drafted else "",
            f"{row['tokens_per_round']:.2f}",
            f"{row['overhead_ms_per_inference']:.3f}",
            f"{row['equal']} of {len(PROMPTS)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args()
    lookaheads: list[Ahead] = [1, 2, 3, 4, 6, 8, "auto"]
    with tempfile.TemporaryDirectory() as scratch:
        cache, f32 = Path(scratch) / "cache", Path(scratch) / "f32"
        command = ["export", CHECKPOINTS / "target", "--draft", CHECKPOINTS / "draft", "-o", f32]
        subprocess.run(
            [sys.executable, "-m", "ovspec", *map(str, command), "--weight-format", "fp32"], check=True, text=True
        )
        figures = {
            "machine": f"{dict(available_devices())['CPU']}, {os.cpu_count()} cores, {platform.system()}",
            "help_s": time_to_help(),
            "first_token_s": time_to_first_token(ROOT / "models" / "demo", cache),
            "f32": speed(f32, cache, lookaheads, precision="f32"),
            "int8": speed(ROOT / "models" / "demo", cache, lookaheads),
            "drift": rollback_drift(f32, cache),
        }
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    print(f"machine: {figures['machine']}")
    print(f"ovspec --help: {figures['help_s']:.3f} s")
    print(f"first token from process start, compile cache warm: {figures['first_token_s']:.2f} s")
    for name in ("f32", "int8"):
        print(f"\n{name} demo pair, {len(PROMPTS)} held-out prompts, {TOKENS} tokens each, greedy\n")
        print(table(figures[name]))
    print("\nlargest change of a logit after a rollback, in standard deviations of the logits\n")
    print(drift_table(figures["drift"]))


if __name__ == "__main__":
    main()
