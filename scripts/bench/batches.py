"""Time batches with a draft and with a chain against plain decoding, in turns, on one pair.

    python scripts/bench/batches.py DIR [--batches 1,2,4,8,16] [--temperatures 0,1] [--tokens 64] [--turns 9]

One process; plain decoding, "draft" and "lookup,draft" take turns with the same prompts, prose and code. Prints the
median milliseconds per generated token, and plain decoding's time as a multiple of the drafters' time, turn by turn:
median, lowest and highest. The first turn, in which kernels are made, is left out. Use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import ovspec
from ovspec.drafting.choice import parse_draft

HERE = Path(__file__).resolve().parent
MODES = ("none", "draft", "lookup,draft")


def ms_per_token(lm: ovspec.LanguageModel, prompts: list[str], options: dict[str, Any]) -> float:
    """Return the milliseconds per token from the first token of the last row on, so that prompts take no part."""
    began = time.perf_counter()
    results = lm.generate(prompts, batch_size=len(prompts), ignore_eos=True, **options)
    ms = 1e3 * (time.perf_counter() - began) - max(result.stats.ttft_ms for result in results)
    return ms / (sum(result.stats.generated_tokens for result in results) - len(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    base = ovspec.load(args.folder, "lookup,draft")
    assert base.draft
    draft = str(base.draft.ir.folder)
    models = {mode: base.with_drafters(parse_draft(mode.replace("draft", draft))) for mode in MODES}
    root = HERE.parent.parent
    code = [entry["text"] for entry in json.loads((root / "models" / "prompts.json").read_text("utf-8"))["prompts"]]
    texts = [*json.loads((HERE / "workloads.json").read_text("utf-8"))["prose"], *code]
    print("| T | batch | plain, ms | draft, ms | plain / draft | chain, ms | plain / chain |\n" + "|---" * 7 + "|")
    for temperature in map(float, args.temperatures.split(",")):
        for batch in map(int, args.batches.split(",")):
            prompts = [texts[number % len(texts)] for number in range(batch)]
            times: dict[str, list[float]] = {mode: [] for mode in MODES}
            for turn in range(args.turns + 1):
                options = {"max_tokens": args.tokens, "temperature": temperature, "seed": turn}
                for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
                    found = ms_per_token(models[mode], prompts, options)
                    if turn:
                        times[mode].append(found)
            cells = [f"{temperature:g}", str(batch), f"{statistics.median(times['none']):.2f}"]
            for mode in MODES[1:]:
                ratios = [plain / ours for plain, ours in zip(times["none"], times[mode], strict=True)]
                middle = statistics.median(ratios)
                cells += [
                    f"{statistics.median(times[mode]):.2f}",
                    f"{middle:.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                ]
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
