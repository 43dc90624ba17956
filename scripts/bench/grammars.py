"""Measure what a grammar's mask costs per token, with a vocabulary as large as those of today's models.

    python scripts/train/tokenizer.py
    python scripts/bench/grammars.py [--steps N] [--out FILE]
    python scripts/bench/peers/install.py xgrammar llamacpp
    python scripts/bench/grammars.py --peers [NAME ...]

Texts are fed to their grammars token by token: JSON by the schemas of grammars.json, each text indented and compact,
and C by ovspec's own grammar. Each text constructs its grammar again. Engines, each in its own process, get the same
texts in turns, schema by schema: llguidance with several ways to slice the vocabulary for faster masks, or with --peers
beside other engines, which get C if --gbnf names a grammar for it. llama.cpp applies a mask while it computes it, and
its construction time excludes the conversion of the schema. Times are milliseconds. Use an idle machine.
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
from harness import HERE, ROOT, Table, Worker, machine, options
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from ovspec.api.comparison import rotate_modes

TOKENIZER = ROOT / ".cache" / "bench" / "tokenizer-128k" / "tokenizer.json"
GRAMMARS = ROOT / "demos" / "grammars"
OURS = "llguidance"
PEERS = ("xgrammar", "llamacpp_grammar")
STYLES: tuple[dict[str, Any], ...] = ({"indent": 2}, {"separators": (",", ":")})


def subjects(schemas: Path, grammar: Path, samples: list[Path]) -> Iterator[tuple[str, str, str, str, list[str]]]:
    """Yield (set, name, kind, source, texts that it allows) of each grammar.

    These are a schema for each {name, schema, values} of ``schemas``, and the grammar of C if it is there.
    """
    for entry in json.loads(schemas.read_text(encoding="utf-8")):
        texts = [json.dumps(value, ensure_ascii=False, **style) for value in entry["values"] for style in STYLES]
        yield "JSON", entry["name"], "json", json.dumps(entry["schema"]), texts
    if grammar.exists() and samples:
        texts = [sample.read_text(encoding="utf-8") for sample in samples]
        yield "C", grammar.stem, "lark", grammar.read_text(encoding="utf-8"), texts


def vocabulary_of(file: Path) -> dict[str, Any]:
    """Return the vocabulary of a tokenizer.json; its first added token counts as the end of a text."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    ids = [*tokenizer["model"]["vocab"].values(), *(added["id"] for added in tokenizer["added_tokens"])]
    return {"file": str(file), "size": max(ids) + 1, "end": tokenizer["added_tokens"][0]["id"]}


def engines_of(peers: list[str] | None) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the worker and its set-up for each engine; slices for JSON are left out if they are the default."""
    if peers is not None:
        return {name: (name, {}) for name in (OURS, *(peers or PEERS))}
    ways = {"default slices": {}, "no slices": {"slices": []}}
    if LLTokenizer.json_slices() != LLTokenizer.general_slices():
        ways["JSON slices"] = {"slices": LLTokenizer.json_slices()}
    return {name: (OURS, setup) for name, setup in ways.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--schemas", type=Path, default=HERE / "grammars.json")
    parser.add_argument("--grammar", type=Path, default=GRAMMARS / "c11.lark", help="grammar of C in Lark's syntax")
    parser.add_argument("--samples", type=Path, nargs="*", default=sorted((GRAMMARS / "samples").glob("*.c")))
    parser.add_argument("--gbnf", type=Path, help="grammar of C in GBNF, for the peers")
    parser.add_argument("--steps", type=int, default=1_000_000, help="maximum number of tokens per text")
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="compare with these peers (default: all)")
    parser.add_argument("--out", type=Path, help="write a JSON line for each figure to this file")
    args = parser.parse_args()
    if not args.tokenizer.exists():
        parser.error(f"{args.tokenizer} does not exist; run scripts/train/tokenizer.py")
    vocabulary, tokenizer = vocabulary_of(args.tokenizer), Tokenizer.from_file(str(args.tokenizer))
    gbnf = args.gbnf.read_text(encoding="utf-8") if args.gbnf else None
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    errors, outside = [], 0
    with ExitStack() as ends:
        workers = {}
        for engine, (worker, setup) in engines_of(args.peers).items():
            workers[engine] = ends.enter_context(Worker(worker, vocabulary | setup, seconds=300))
            print(f"{engine}: {workers[engine].ready}", file=sys.stderr, flush=True)
        for turn, subject in enumerate(subjects(args.schemas, args.grammar, args.samples)):
            part, name, kind, source, texts = subject
            # As ordinary text, so that a grammar gets the tokens that a model would mostly choose.
            ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
            task = {"kind": kind, "source": source, "texts": ids, "steps": args.steps}
            for engine in rotate_modes(list(workers), turn):
                asked = task | ({"details": True} if engine == "default slices" else {})
                if engine in PEERS and kind == "lark":
                    if gbnf is None:
                        continue
                    asked |= {"kind": "gbnf", "source": gbnf}
                answer = workers[engine].ask(asked)
                for operation, found in answer.get("times", {}).items():
                    times[part, engine, operation] += found
                outside += answer.get("outside", 0)
                if "error" in answer:
                    errors.append(f"- {engine}, {name}: {answer['error']}")
            print(f"{name}: measured", file=sys.stderr, flush=True)
    print(f"{machine()}; {vocabulary['size']} tokens\n")
    table, lines = Table("set", "engine", "operation", "count", "mean, ms", "p50", "p99", "max"), []
    for (part, engine, operation), found in sorted(times.items(), key=lambda item: item[0][:2]):
        p50, p99 = np.percentile(found, [50, 99]).tolist()
        figures = {"mean": float(np.mean(found)), "p50": p50, "p99": p99, "max": max(found)}
        lines.append({"set": part, "engine": engine, "operation": operation, "count": len(found), **figures})
        table.row(part, engine, operation, len(found), *(f"{ms:.4f}" for ms in figures.values()))
    print("\n".join([f"\n{outside} tokens of the texts that masks forbid", *errors]))
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
