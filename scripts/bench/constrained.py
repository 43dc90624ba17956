"""Time JSON generation by a schema: what masks cost, and what forced tokens and drafters gain.

    python scripts/bench/constrained.py DIR [--max-tokens 128] [--temperature T] [--rounds 1]

For each schema of ``grammars.json``, the prompt shows one JSON text of it, as users' prompts do; the model generates
another. "plain" is masked decoding, one token per inference; "unconstrained" is plain decoding of the same number of
tokens without a mask. The modes take turns, and each turn begins with another one. The table counts the texts that are
equal to those of "plain".
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from harness import HERE, Table, compared, machine, options, speedup_cells, take_turns

import ovspec
from ovspec.drafting.choice import parse_draft

PLAIN, FREE = "plain", "unconstrained"
WAYS: dict[str, str | None] = {
    PLAIN: None,
    "forced": None,
    "lookup": "lookup",
    "draft": "draft",
    "lookup,draft": "lookup,draft",
}
HEADS = ("mode", "plain, ms per token", "ms per token", "speed-up", "range", "forced tokens", "tokens per round")
Timed = tuple[ovspec.Result, float]  # and the milliseconds per token after the first


def prompts() -> list[tuple[dict[str, Any], str]]:
    """Return (schema, prompt) for each schema."""
    found = []
    for entry in json.loads((HERE / "grammars.json").read_text(encoding="utf-8")):
        example = json.dumps(entry["values"][0], indent=2, ensure_ascii=False)
        name = entry["name"].replace(" ", "_")
        prompt = f"import json\n\n# Two examples of a {entry['name']}:\n{name}_1 = json.loads('''{example}''')\n"
        found.append((entry["schema"], f"{prompt}{name}_2 = json.loads('''"))
    return found


def timed(lm: ovspec.LanguageModel, prompt: str, given: dict[str, Any]) -> Timed:
    began = time.perf_counter()
    result = lm.generate(prompt, **given)
    spent = (time.perf_counter() - began) * 1e3 - result.stats.ttft_ms
    return result, spent / max(1, len(result.token_ids) - 1)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    whole, tasks = ovspec.load(args.folder, "lookup,draft", cache_memory=0), prompts()
    models = {way: whole.with_drafters(parse_draft(draft)) for way, draft in WAYS.items()}
    shared = {"temperature": args.temperature, "seed": 1, "max_tokens": args.max_tokens}

    free: list[Timed] = []

    def text(way: str, turn: int) -> Timed:
        schema, prompt = tasks[turn % len(tasks)]
        found = timed(
            models[way], prompt, shared | {"json_schema": schema} | ({"lookahead": 0} if way == PLAIN else {})
        )
        if way == PLAIN and turn >= 0:
            alike = {"max_tokens": max(2, len(found[0].token_ids)), "ignore_eos": True, "lookahead": 0}
            free.append(timed(models[PLAIN], prompt, shared | alike))
        return found

    found = take_turns(WAYS, text, len(tasks) * args.rounds, warm_up=2)
    print(f"{machine()}\n")
    table = Table(*HEADS, "equal texts")
    plain, plain_ms = zip(*found[PLAIN], strict=True)
    for way, texts in {**found, FREE: free}.items():
        results, ms = zip(*texts, strict=True)
        figures = compared(results, plain, (plain_ms, ms))
        rates = (f"{figures['forced']:.0%}", f"{figures['tokens_per_round']:.2f}")
        table.row(way, *speedup_cells(figures, way == PLAIN), *rates, None if way == FREE else figures["equal"])
    finished = [result.finish_reason for result in plain]
    print(f"\n{sum(reason != 'length' for reason in finished)} of {len(finished)} texts ended before the token limit.")


if __name__ == "__main__":
    main()
