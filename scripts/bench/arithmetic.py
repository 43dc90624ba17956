"""Compare exact arithmetic with fast arithmetic and with another checkout of ovspec, in turns, on one pair.

    python scripts/bench/arithmetic.py DIR [--contexts 128,1024,4096] [--temperatures 0,1] [--batches 2,4,8,16]
        [--modes plain,default,lookup,draft,chain] [--tokens 48] [--turns 3] [--against CHECKOUT]

Each variant runs in a process of its own: exact, fast, and "before", which is exact's options in CHECKOUT. The variants
take turns with the same prompts: prose and code after --contexts tokens of other text. Prints milliseconds per
generated token (the median turn), the ratio to "before" if there is one or to fast otherwise, and the share of proposed
tokens that were accepted. Use an idle machine.
"""

from __future__ import annotations

import itertools
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import ROOT, Table, Worker, machine, mixed, options, several, take_turns

MODES = ("plain", "default", "lookup", "draft", "chain")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--contexts", type=several(int), default="128,1024,4096")
    parser.add_argument("--temperatures", type=several(float), default="0,1")
    parser.add_argument("--batches", type=several(int), default="1")
    parser.add_argument("--modes", type=several(choices=MODES), default=",".join(MODES))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    variants = {"exact": (ROOT, {"arithmetic": "exact"}), "fast": (ROOT, {"arithmetic": "fast"})}
    if args.against:
        variants["before"] = (args.against.resolve(), {})
    base = "before" if args.against else "fast"
    setup = {"folder": str(args.folder.resolve()), "filler": (ROOT / "README.md").read_text("utf-8") * 20}
    print(f"{machine()}\n")
    with ExitStack() as ends:
        workers = {
            name: ends.enter_context(Worker("modes", setup | {"load": load}, checkout=checkout))
            for name, (checkout, load) in variants.items()
        }
        heads = (*(f"{name}, ms" for name in workers), f"exact against {base}", "range", "accepted")
        table = Table("context", "T", "batch", "mode", *heads)
        for cell in itertools.product(args.contexts, args.temperatures, args.batches, args.modes):
            context, temperature, batch, mode = cell
            asked = {"mode": mode, "context": context, "temperature": temperature}
            asked |= {"prompts": mixed(batch), "tokens": args.tokens}

            def answer(name: str, turn: int, asked: dict[str, Any] = asked) -> dict[str, Any]:
                return workers[name].answer(asked | {"turn": turn + 1})

            found = take_turns(workers, answer, args.turns)
            times = {name: [answer["ms"] for answer in answers] for name, answers in found.items()}
            middle = {name: statistics.median(each) for name, each in times.items()}
            ours, theirs = times["exact"], times[base]
            spread = f"{min(theirs) / max(ours):.2f}-{max(theirs) / min(ours):.2f}"
            accepted = f"{found['exact'][0]['accepted']} of {found['exact'][0]['proposed']}"
            ratio = f"{middle[base] / middle['exact']:.2f}"
            shown = (f"{ms:.1f}" for ms in middle.values())
            table.row(context, f"{temperature:g}", batch, mode, *shown, ratio, spread, accepted)


if __name__ == "__main__":
    main()
