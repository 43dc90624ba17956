"""Measure what large pages gain: load a model twice in one process, move one copy's weights, and time both in turns.

    python scripts/bench/large_pages.py DIR [--context 128] [--turns 20]

Prints median milliseconds of inferences of several widths, and how long the move took.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import ovspec
from ovspec.decoders.base import Decoder
from ovspec.ir.large_pages import LargePages

WIDTHS = (1, 2, 5, 9)
IDS = 1000  # any token ids below this will do


def usual(folder: Path, context: int) -> tuple[Decoder, LargePages]:
    """Load a model and run it once at each width, because weights are packed when they are first used."""
    loaded = ovspec.load(folder).target
    decoder = loaded.decoder()
    decoder.feed([np.random.default_rng(0).integers(5, IDS, context)], [0])
    for width in WIDTHS:
        timed(decoder, width, context)
    return decoder, loaded.ir.large_pages


def timed(decoder: Decoder, width: int, context: int) -> float:
    decoder.truncate(0, context)
    began = time.perf_counter()
    decoder.feed([np.arange(5, 5 + width)], [width])
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    small, _ = usual(args.folder, args.context)
    large, pages = usual(args.folder, args.context)
    began = time.perf_counter()
    pages.move(600.0)
    print(f"moved in {time.perf_counter() - began:.1f} s\n")
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.turns):
        for width in WIDTHS:
            for name, decoder in (("small", small), ("large", large)):
                times.setdefault((name, width), []).append(timed(decoder, width, args.context))
    print("| tokens in an inference | small pages, ms | large pages, ms | speed-up |\n|---|---|---|---|")
    for width in WIDTHS:
        before, after = (statistics.median(times[name, width]) for name in ("small", "large"))
        print(f"| {width} | {before:.1f} | {after:.1f} | {before / after:.2f}x |")


if __name__ == "__main__":
    main()
