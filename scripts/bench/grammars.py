"""Measure the cost of a grammar's mask per token, with a vocabulary as large as in today's models.

    python scripts/train/tokenizer.py
    python scripts/bench/peers/install.py xgrammar llamacpp
    python scripts/bench/grammars.py [--peers xgrammar,llamacpp_grammar] [--steps N] [--gbnf FILE]

Texts are fed to their grammars token by token: JSON by the schemas of grammars.json, each text indented and compact,
and C by ovspec's own grammar. The grammar is constructed again for each text. Engines, each in a separate process, get
the same texts in turns, schema by schema: llguidance, the engine of ovspec, and --peers; these get C only with a
grammar given by --gbnf. llama.cpp computes and applies a mask at once, and its construction time excludes the
conversion of the schema. Times are milliseconds. Use an idle machine.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from figures import Table, machine
from harness import HERE, ROOT, Option, Worker, arguments
from tokenizers import Tokenizer

from ovspec.api.comparison import rotate_modes

TOKENIZER = ROOT / ".cache" / "bench" / "tokenizer-128k" / "tokenizer.json"
GRAMMARS = ROOT / "demos" / "grammars"
OURS = "llguidance"
PEERS = ("xgrammar", "llamacpp_grammar")
STYLES: tuple[dict[str, Any], ...] = ({"indent": 2}, {"separators": (",", ":")})


def subjects() -> Iterator[tuple[str, str, str, str, list[str]]]:
    """Yield (set, name, kind, source, allowed texts) of each grammar: the schemas, and C."""
    for entry in json.loads((HERE / "grammars.json").read_text(encoding="utf-8")):
        texts = [json.dumps(value, ensure_ascii=False, **style) for value in entry["values"] for style in STYLES]
        yield "JSON", entry["name"], "json", json.dumps(entry["schema"]), texts
    samples = [sample.read_text(encoding="utf-8") for sample in sorted((GRAMMARS / "samples").glob("*.c"))]
    yield "C", "c11", "lark", (GRAMMARS / "c11.lark").read_text(encoding="utf-8"), samples


def vocabulary_of(file: Path) -> dict[str, Any]:
    """Return the vocabulary of a tokenizer.json; its first added token counts as the end of a text."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(added["id"] for added in tokenizer["added_tokens"])]
    return {"file": str(file), "size": max(ids) + 1, "end": tokenizer["added_tokens"][0]["id"]}


def main() -> None:
    args = arguments(
        __doc__,
        tokenizer=TOKENIZER,
        peers=Option(["none"], choices=(*PEERS, "none")),
        gbnf=Option(Path, "grammar of C in GBNF, for the peers"),
        steps=Option(1_000_000, "maximum number of tokens per text"),
    )
    if not args.tokenizer.exists():
        sys.exit(f"{args.tokenizer} does not exist; run scripts/train/tokenizer.py")
    vocabulary = vocabulary_of(args.tokenizer)
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    errors = list[str]()
    outside = 0
    with ExitStack() as ends:
        workers = dict[str, Worker]()
        for engine in (OURS, *(peer for peer in args.peers if peer != "none")):
            setup = {"task": "grammars"} | vocabulary
            workers[engine] = ends.enter_context(Worker(engine, setup, seconds=300))
            print(f"{engine}: {workers[engine].ready}", file=sys.stderr, flush=True)
        for turn, (part, name, kind, source, texts) in enumerate(subjects()):
            # Encoded as ordinary text, like a model's usual tokens.
            ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
            task = {"kind": kind, "source": source, "texts": ids, "steps": args.steps}
            for engine in rotate_modes(list(workers), turn):
                own_task = task
                if engine in PEERS and kind == "lark":
                    if not args.gbnf:
                        continue
                    own_task = task | {"kind": "gbnf", "source": args.gbnf.read_text(encoding="utf-8")}
                answer = workers[engine].ask(own_task)
                for operation, milliseconds in answer.get("times", {}).items():
                    times[part, engine, operation] += milliseconds
                outside += answer.get("outside", 0)
                if "error" in answer:
                    errors.append(f"- {engine}, {name}: {answer['error']}")
            print(f"{name}: measured", file=sys.stderr, flush=True)
    print(f"{machine()}; {vocabulary['size']} tokens\n")
    table = Table("set", "engine", "operation", "count", "mean, ms", "p50", "p99", "max")
    for (part, engine, operation), milliseconds in sorted(times.items(), key=lambda entry: entry[0][:2]):
        figures = (np.mean(milliseconds), *np.percentile(milliseconds, [50, 99]), max(milliseconds))
        table.row(part, engine, operation, len(milliseconds), *(f"{ms:.4f}" for ms in figures))
    print("\n".join([f"\n{outside} tokens of the texts that masks forbid", *errors]))


if __name__ == "__main__":
    main()
