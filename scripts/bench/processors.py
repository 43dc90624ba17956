"""Find the rule of exact arithmetic for each instruction set that this processor has, and what it costs.

    python scripts/bench/processors.py DIR [DIR ...] [--isa AVX2,AVX512_CORE] [--engines paged,stateful]

Each instruction set is tried in a process of its own, capped to it. The share is that of the positions that have other
bits in fast arithmetic. The prices are times by the rule, in those of fast arithmetic: of a token after 128 tokens, and
of a prompt of 1024; the two take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from ovspec.decoders.base import FAST, SessionDecoder
from ovspec.ir.device import DeviceOptions, available_devices
from ovspec.ir.instruction_set import NEEDED, instruction_set, processor_levels
from ovspec.setup.engine import compile_paged, load_ir
from ovspec.setup.exactness import FULL, find_exactness, probe_rule

CONTEXT, PROMPT, STEPS, TURNS = 128, 1024, 12, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    levels = processor_levels()
    usual = ",".join(levels[levels.index(NEEDED) :] if levels else ())
    parser.add_argument("--isa", default=usual, help="the instruction sets  [default: those of this processor]")
    parser.add_argument("--engines", default="paged", help="the engines, with commas between them")
    parser.add_argument("--here", action="store_true", help="print the lines for this process's instruction set only")
    args = parser.parse_args()
    if args.here:
        for folder in args.folders:
            for engine in args.engines.split(","):
                print(line(folder, engine), flush=True)
        return
    print(f"{dict(available_devices())['CPU']}, {os.cpu_count()} cores, {time.strftime('%B %Y')}\n")
    print("| instruction set | model | engine | rule | differ in fast | differ | price of a token | of a prompt |")
    print("|---" * 8 + "|", flush=True)
    for name in args.isa.split(","):
        capped = {**os.environ, "ONEDNN_MAX_CPU_ISA": name, "OV_CPU_MAX_ISA": name}
        subprocess.run([sys.executable, *sys.argv, "--here"], env=capped, check=True)


def line(folder: Path, engine: str) -> str:
    """Probe a model thoroughly; return a line of the table."""
    options = DeviceOptions(properties={"CACHE_DIR": ""})
    loaded = load_ir(folder, options, engine, arithmetic="fast")  # type: ignore[arg-type]
    vocabulary = loaded.ir.logits_width
    share = probe_rule(loaded.decoder(), vocabulary, FULL)
    fast = loaded.decoder()
    if engine == "paged":
        loaded.ir = compile_paged(folder, options)
    found = find_exactness(lambda rule: loaded.decoder(rule=rule), engine, vocabulary, FULL)
    cells = [instruction_set(), folder.name, engine, str(found.rule or "none"), f"{1 - share.share:.0%}"]
    cells.append(f"{found.differing} of {found.positions}")
    exact = loaded.decoder(rule=found.rule or FAST)
    for price in (token_price, prompt_price) if found.rule else ():
        ratios = price(exact, fast, np.random.default_rng(1).integers(0, vocabulary, PROMPT))
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return f"| {' | '.join(cells + ['-'] * (8 - len(cells)))} |"


def token_price(exact: SessionDecoder, fast: SessionDecoder, text: np.ndarray) -> list[float]:
    for decoder in (exact, fast):
        decoder.reset(1)
        decoder.feed([text[:CONTEXT]], [1])

    def steps(decoder: SessionDecoder) -> float:
        decoder.truncate(0, CONTEXT)
        begin = len(decoder.rows[0])
        times = []
        for i in range(begin, CONTEXT + STEPS):
            began = time.perf_counter()
            decoder.feed([text[i : i + 1]], [1])
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    return [steps(exact) / steps(fast) for _ in range(2 * TURNS)]


def prompt_price(exact: SessionDecoder, fast: SessionDecoder, text: np.ndarray) -> list[float]:
    def reading(decoder: SessionDecoder) -> float:
        decoder.reset(1)
        began = time.perf_counter()
        decoder.feed([text], [1])
        return time.perf_counter() - began

    return [reading(exact) / reading(fast) for _ in range(TURNS)]


if __name__ == "__main__":
    main()
