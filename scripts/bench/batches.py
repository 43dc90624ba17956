"""Time batches with a draft and with a chain against plain decoding, in turns, on one pair.

    python scripts/bench/batches.py DIR [--batches 1,2,4,8,16] [--temperatures 0,1] [--tokens 64] [--turns 9]

One process; plain decoding, the draft, and the chain of lookup and draft take turns with the same prompts, prose and
code. Prints the median milliseconds per generated token, and plain decoding's time as a multiple of the drafters' time,
turn by turn: median, lowest and highest. Use an idle machine.
"""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

from harness import Table, Worker, machine, mixed, options, ratios, several, shown, take_turns

MODES = ("plain", "draft", "chain")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=several(int), default="1,2,4,8,16")
    parser.add_argument("--temperatures", type=several(float), default="0,1")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    print(f"{machine()}\n")
    with Worker("modes", {"folder": str(args.folder.resolve()), "load": {}, "filler": ""}) as worker:
        table = Table("T", "batch", "plain, ms", "draft, ms", "plain / draft", "chain, ms", "plain / chain")
        for temperature, batch in itertools.product(args.temperatures, args.batches):
            asked = {"temperature": temperature, "prompts": mixed(batch), "tokens": args.tokens, "context": 0}

            def ms(mode: str, turn: int, asked: dict[str, Any] = asked) -> float:
                return worker.answer(asked | {"mode": mode, "turn": turn + 1})["ms"]

            times = take_turns(MODES, ms, args.turns)
            cells = [f"{statistics.median(times['plain']):.2f}"]
            for mode in MODES[1:]:
                cells += [f"{statistics.median(times[mode]):.2f}", shown(ratios(times["plain"], times[mode]))]
            table.row(f"{temperature:g}", batch, *cells)


if __name__ == "__main__":
    main()
