"""Time JSON generation by a schema: what masks cost, and what forced tokens and drafters gain.

    python scripts/bench/constrained.py DIR [--max-tokens 128] [--temperature T] [--rounds 1]

For each schema of ``grammars.json``, the prompt shows one JSON text of it, as users' prompts do; the model generates
another. "plain" is masked decoding, one token per inference; "unconstrained" is plain decoding of the same number of
tokens without a mask. The modes take turns, and each turn begins with another one. The table counts the texts that are
equal to those of "plain".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import ovspec
from ovspec.comparison import rotated, speedup_of

HERE = Path(__file__).resolve().parent
WAYS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {"lookahead": 0}),
    "forced": (None, {}),
    "lookup": ("lookup", {}),
    "draft": ("draft", {}),
    "lookup,draft": ("lookup,draft", {}),
}
FREE = "unconstrained"
HEADS = ("mode", "plain, ms per token", "ms per token", "speed-up", "range", "forced tokens", "tokens per round")
HEADS = (*HEADS, "equal texts")


def prompts() -> list[tuple[str, dict[str, Any], str]]:
    """Return (name, schema, prompt) for each schema."""
    entries = json.loads((HERE / "grammars.json").read_text(encoding="utf-8"))
    found = []
    for entry in entries:
        example = json.dumps(entry["values"][0], indent=2, ensure_ascii=False)
        name = entry["name"].replace(" ", "_")
        prompt = f"import json\n\n# Two examples of a {entry['name']}:\n{name}_1 = json.loads('''{example}''')\n"
        found.append((entry["name"], entry["schema"], f"{prompt}{name}_2 = json.loads('''"))
    return found


def timed(lm: ovspec.LanguageModel, prompt: str, options: dict[str, Any]) -> tuple[ovspec.Result, float]:
    """Return the result and the milliseconds per token after the first."""
    began = time.perf_counter()
    result = lm.generate(prompt, **options)
    spent = (time.perf_counter() - began) * 1e3 - result.stats.ttft_ms
    return result, spent / max(1, len(result.token_ids) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    whole = ovspec.load(arguments.folder, "lookup,draft")
    models = {way: whole.with_drafters(choice_of(draft)) for way, (draft, _) in WAYS.items()}
    shared = {"temperature": arguments.temperature, "seed": 1, "max_tokens": arguments.max_tokens}
    for way in (*WAYS, *WAYS):  # warm-up: compile the kernels of every width
        name, schema, prompt = prompts()[1]
        timed(models[way], prompt, shared | {"json_schema": schema} | WAYS[way][1])
    found: dict[str, list[tuple[ovspec.Result, float]]] = {way: [] for way in (*WAYS, FREE)}
    for turn, (name, schema, prompt) in enumerate(prompts() * arguments.rounds):
        for way in rotated(list(WAYS), turn):
            found[way].append(timed(models[way], prompt, shared | {"json_schema": schema} | WAYS[way][1]))
        count = len(found["plain"][-1][0].token_ids)
        free = shared | {"max_tokens": max(2, count), "ignore_eos": True, "lookahead": 0}
        found[FREE].append(timed(models["plain"], prompt, free))
        print(name, {way: round(texts[-1][1], 1) for way, texts in found.items()}, file=sys.stderr)
    print(f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|")
    for way, texts in found.items():
        print(row(way, texts, found["plain"]))
    finished = [result.finish_reason for result, _ in found["plain"]]
    print(f"\n{sum(reason != 'length' for reason in finished)} of {len(finished)} texts ended before the token limit.")


def row(way: str, texts: list[tuple[ovspec.Result, float]], plain: list[tuple[ovspec.Result, float]]) -> str:
    """Return the table's row of one mode; see ``ovspec.comparison`` for the speed-up."""
    stats = [result.stats for result, _ in texts]
    speedup = speedup_of([ms for _, ms in plain], [ms for _, ms in texts], stats)
    tokens, rounds, forced = (sum(getattr(s, name) for s in stats) for name in ("generated_tokens", "rounds", "forced"))
    equal = sum(one.token_ids == other.token_ids for (one, _), (other, _) in zip(texts, plain, strict=True))
    alone = way == "plain"
    cells = [
        way,
        "" if alone else f"{speedup.plain_ms:.1f}",
        f"{speedup.ms:.1f}",
        "" if alone else f"{speedup.claimed:.2f}" if speedup.claimed else "none",
        f"{speedup.ratios[0]:.2f} to {speedup.ratios[-1]:.2f}" if speedup.claimed and not alone else "",
        f"{forced / tokens:.0%}",
        f"{tokens / max(1, rounds):.2f}",
        "" if way == FREE else f"{equal} of {len(texts)}",
    ]
    return f"| {' | '.join(cells)} |"


def choice_of(draft: str | None) -> Any:
    from ovspec.drafting.choice import parse_draft

    return parse_draft(draft) if draft else None


if __name__ == "__main__":
    main()
