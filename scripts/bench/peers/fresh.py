"""Time a fresh process, from its start to the 32nd and the 400th token, against openvino-genai in turns.

    python scripts/bench/peers/install.py genai
    python scripts/bench/peers/fresh.py PAIR [--turns 9] [--tokens 32,400]

Greedy, without a draft; "default" is ovspec with lookup, as it is without any option. Every process imports, loads and
reads the prompt anew; the first turn, which fills compile caches and the page cache, is left out. Prints the median
seconds until each token, and openvino-genai's time as a multiple, turn by turn. Use an idle machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import Table, Worker, machine, options, ratios, several, shown, take_turns

from ovspec.text.tokenizer import Tokenizer

PROMPT = "It was late in the evening when she came home, and"
GENAI = "openvino-genai"
SMALL = {"settle": False}  # a fresh process has no time to move weights into large pages
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "ovspec": ("ovspec", {"mode": "plain", "options": SMALL}),
    "ovspec, fast": ("ovspec", {"mode": "plain", "options": SMALL | {"arithmetic": "fast"}}),
    "ovspec, default": ("ovspec", {"mode": "default", "options": SMALL}),
    GENAI: ("genai", {"options": {"backend": None}}),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--tokens", type=several(int), default="32,400")
    parser.add_argument("--ways", type=several(choices=WAYS, separator=";"), default=";".join(WAYS))
    args = parser.parse_args()
    request = {"prompts": [Tokenizer(args.pair).encode(PROMPT).tolist()], "max_tokens": max(args.tokens)}

    def seconds(way: str, _: int) -> list[float]:
        name, setup = WAYS[way]
        began = time.perf_counter()
        with Worker(name, setup | {"target": str(args.pair)}) as worker:
            loaded = time.perf_counter() - began
            times = worker.answer(request)["times"]
        return [loaded + times[n - 1] for n in args.tokens]

    found = take_turns(args.ways, seconds, args.turns)
    print(f"{machine()}\n")
    table = Table("", *(head for n in args.tokens for head in (f"{n} tokens, s", "genai as a multiple")))
    for way, turns in found.items():
        cells = []
        for index, times in enumerate(zip(*turns, strict=True)):
            cells.append(f"{statistics.median(times):.1f}")
            genai = [turn[index] for turn in found.get(GENAI, ())]
            cells.append(shown(ratios(genai, times)) if genai else None)
        table.row(way, *cells)


if __name__ == "__main__":
    main()
