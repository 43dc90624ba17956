"""Compare exact arithmetic with fast arithmetic and with another checkout of ovspec, in turns, on one pair.

    python scripts/bench/arithmetic.py DIR [--contexts 128,1024,4096] [--temperatures 0,1] [--batches 2,4,8,16]
        [--modes plain,default,lookup,draft,chain] [--tokens 48] [--turns 3] [--against CHECKOUT]

Each variant runs in a process of its own: exact, fast, and "before", which is exact's options in CHECKOUT. The variants
take turns, in an order that rotates, with the same prompts: prose and code after --contexts tokens of other text.
Prints milliseconds per generated token (the median turn), the ratio to the plain decoding of "before" if there is one
or of fast otherwise, and the share of proposed tokens that were accepted. Use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODES = {"plain": "none", "default": None, "lookup": "lookup", "draft": "draft", "chain": "lookup,draft"}


# ---------------------------------------------------------------- a variant's own process


def work(folder: str, options: dict[str, Any]) -> None:
    """Load the pair once, then answer requests from stdin, a line of JSON each."""
    import time

    import numpy as np

    import ovspec
    from ovspec.drafting.choice import parse_draft

    base = ovspec.load(folder, "lookup,draft", **options)
    assert base.draft
    model = str(base.draft.ir.folder)
    free = getattr(base.target, "guess_is_free", False)
    filler = base.encode((ROOT / "README.md").read_text("utf-8") * 20)
    models: dict[str, Any] = {}
    sessions: dict[tuple[str, int, str], Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        named = MODES[request["mode"]]
        named = ("lookup" if free else "none") if named is None else named
        if named not in models:
            models[named] = base.with_drafters(parse_draft(named.replace("draft", model)))
        lm, prompts = models[named], []
        for text in request["prompts"]:
            ids = base.encode(text)
            prompts.append(np.concatenate((filler[: max(0, request["context"] - len(ids))], ids)).tolist())
        # A seed of its own for each turn: sampled texts differ, as texts do.
        common: dict[str, Any] = {"max_tokens": request["tokens"], "ignore_eos": True, "seed": request["turn"]}
        common |= {"temperature": request["temperature"]} if request["temperature"] else {}
        if len(prompts) == 1:  # a session keeps the prompt's KV cache for the next turn
            key = (named, request["context"], request["prompts"][0])
            if key not in sessions:
                sessions[key] = session = lm.session()
                session.append(prompts[0])
            session = sessions[key]
            mark = session.mark()
            results = [session.generate(heal=False, **common)]
            session.rewind(mark)
            ms = results[0].stats.tpot_ms
        else:
            began = time.perf_counter()
            results = lm.generate(prompts, batch_size=len(prompts), **common)
            # From the first token of the last row on, so that prompts take no part.
            ms = 1e3 * (time.perf_counter() - began) - max(result.stats.ttft_ms for result in results)
            ms /= sum(result.stats.generated_tokens for result in results) - len(results)
        stats = [result.stats for result in results]
        answer = {"ms": ms, "proposed": sum(s.proposed for s in stats), "accepted": sum(s.accepted for s in stats)}
        print(json.dumps(answer), flush=True)


class Worker:
    """A variant's process."""

    def __init__(self, checkout: Path, folder: Path, options: dict[str, Any]) -> None:
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        command = [sys.executable, __file__, str(folder), "--work", json.dumps(options)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


# ---------------------------------------------------------------- taking turns


def measure(workers: dict[str, Worker], request: dict[str, Any], turns: int) -> dict[str, dict[str, Any]]:
    """Return {variant: its median turn}; the first turn, in which kernels are made, is left out."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for turn in range(turns + 1):
        order = list(workers)[turn % len(workers) :] + list(workers)[: turn % len(workers)]
        for name in order:
            answer = workers[name].ask(request | {"turn": turn})
            if turn:
                found[name].append(answer)
    median = {}
    for name, answers in found.items():
        times = [answer["ms"] for answer in answers]
        median[name] = answers[0] | {"ms": statistics.median(times), "low": min(times), "high": max(times)}
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--contexts", default="128,1024,4096")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    if args.work is not None:
        work(str(args.folder), json.loads(args.work))
        return
    folder = args.folder.resolve()
    workers = {
        "exact": Worker(ROOT, folder, {"arithmetic": "exact"}),
        "fast": Worker(ROOT, folder, {"arithmetic": "fast"}),
    }
    if args.against:
        workers["before"] = Worker(args.against.resolve(), folder, {})
    base = "before" if args.against else "fast"
    prompts = [entry["text"] for entry in json.loads((ROOT / "models" / "prompts.json").read_text("utf-8"))["prompts"]]
    prose = json.loads((HERE / "workloads.json").read_text("utf-8"))["prose"]
    heads = " | ".join(f"{name}, ms" for name in workers)
    print(f"| context | T | batch | mode | {heads} | exact against {base} | range | accepted |")
    print("|---" * (7 + len(workers)) + "|")
    for context in map(int, args.contexts.split(",")):
        for temperature in map(float, args.temperatures.split(",")):
            for batch in map(int, args.batches.split(",")):
                for mode in args.modes.split(","):
                    texts = [(prose + prompts)[number % (len(prose) + len(prompts))] for number in range(batch)]
                    request = {"mode": mode, "context": context, "prompts": texts, "tokens": args.tokens}
                    found = measure(workers, request | {"temperature": temperature}, args.turns)
                    times = " | ".join(f"{found[name]['ms']:.1f}" for name in workers)
                    ours, theirs = found["exact"], found[base]
                    ratio = f"{theirs['ms'] / ours['ms']:.2f}"
                    spread = f"{theirs['low'] / ours['high']:.2f}-{theirs['high'] / ours['low']:.2f}"
                    accepted = f"{ours['accepted']} of {ours['proposed']}"
                    cells = f"{context} | {temperature:g} | {batch} | {mode}"
                    print(f"| {cells} | {times} | {ratio} | {spread} | {accepted} |", flush=True)
    for worker in workers.values():
        worker.process.terminate()


if __name__ == "__main__":
    main()
