"""Measure what large pages gain: load a model twice in one process, move one copy's weights, and time both in turns.

    python scripts/bench/large_pages.py DIR [--context 128] [--turns 20]

Prints median milliseconds of inferences of several widths, and how long the move took.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path

import numpy as np
from harness import Table, machine, milliseconds, options, take_turns

import ovspec

WIDTHS = (1, 2, 5, 9)
IDS = 1000  # any token ids below this will do


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    models = {pages: ovspec.load(args.folder).target for pages in ("small", "large")}
    decoders = {pages: model.decoder() for pages, model in models.items()}
    for decoder in decoders.values():
        decoder.feed([np.random.default_rng(0).integers(5, IDS, args.context)], [0])

    def inference(way: tuple[int, str], _: int) -> float:
        width, pages = way
        decoders[pages].truncate(0, args.context)
        return milliseconds(lambda: decoders[pages].feed([np.arange(5, 5 + width)], [width]))

    ways = list(itertools.product(WIDTHS, decoders))
    take_turns(ways, inference, 1)  # weights are packed when they are first used
    moving = milliseconds(lambda: models["large"].ir.large_pages.move_pages(600.0))
    print(f"{machine()}\nmoved in {moving / 1e3:.1f} s\n")
    times = take_turns(ways, inference, args.turns, warm_up=0)
    table = Table("tokens in an inference", "small pages, ms", "large pages, ms", "speed-up")
    for width in WIDTHS:
        before, after = (statistics.median(times[width, pages]) for pages in decoders)
        table.row(width, f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}x")


if __name__ == "__main__":
    main()
