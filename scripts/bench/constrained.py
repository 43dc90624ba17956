"""Time JSON generation by a schema: what masks cost, and what forced tokens and drafters gain.

    python scripts/bench/constrained.py DIR [--max-tokens 128] [--temperature T] [--rounds 1] [--out FILE]

For each schema of ``grammars.json``, the prompt shows one JSON text of it, as users' prompts do; the model generates
another. "plain" is masked decoding, one token per inference; "unconstrained" is plain decoding of the same number of
tokens without a mask. The modes take turns, and the table counts the texts that are equal to those of "plain".
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import ovspec

HERE = Path(__file__).resolve().parent
WAYS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "plain": (None, {"lookahead": 0}),
    "forced": (None, {}),
    "lookup": ("lookup", {}),
    "draft": ("draft", {}),
    "lookup,draft": ("lookup,draft", {}),
}


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
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    whole = ovspec.load(arguments.folder, "lookup,draft")
    models = {way: whole.with_drafters(choice_of(draft)) for way, (draft, _) in WAYS.items()}
    cells: dict[str, list[dict[str, Any]]] = defaultdict(list)
    shared = {"temperature": arguments.temperature, "seed": 1, "max_tokens": arguments.max_tokens}
    for way in (*WAYS, *WAYS):  # warm-up: compile the kernels of every width
        name, schema, prompt = prompts()[1]
        timed(models[way], prompt, shared | {"json_schema": schema} | WAYS[way][1])
    for _ in range(arguments.rounds):
        for name, schema, prompt in prompts():
            expected: list[int] = []
            for way, (_, options) in WAYS.items():
                result, ms = timed(models[way], prompt, shared | {"json_schema": schema} | options)
                expected = expected or result.token_ids
                stats = result.stats
                cells[way].append(
                    {
                        "schema": name,
                        "way": way,
                        "ms": ms,
                        "tokens": len(result.token_ids),
                        "finish": result.finish_reason,
                        "forced": stats.forced,
                        "accepted": stats.accepted,
                        "rounds": stats.rounds,
                        "other_ms": stats.other_ms / max(1, stats.rounds),
                        "equal": result.token_ids == expected,
                    }
                )
            free = shared | {"max_tokens": max(2, len(expected)), "ignore_eos": True, "lookahead": 0}
            result, ms = timed(models["plain"], prompt, free)
            cells["unconstrained"].append({"schema": name, "way": "unconstrained", "ms": ms, "equal": True})
            print(name, {way: round(found[-1]["ms"], 1) for way, found in cells.items()}, file=sys.stderr)
    if arguments.out:
        lines = [json.dumps(cell) for found in cells.values() for cell in found]
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("| mode | ms per token | speed-up | least, most | forced tokens | tokens per round | equal texts |")
    print("|---|---|---|---|---|---|---|")
    for way, found in cells.items():
        ratios = [plain["ms"] / cell["ms"] for plain, cell in zip(cells["plain"], found, strict=True)]
        tokens = sum(cell.get("tokens", 0) for cell in found)
        rounds, forced = sum(cell.get("rounds", 0) for cell in found), sum(cell.get("forced", 0) for cell in found)
        print(
            f"| {way} | {statistics.mean(cell['ms'] for cell in found):.1f} | {statistics.geometric_mean(ratios):.2f} "
            f"| {min(ratios):.2f}, {max(ratios):.2f} | {forced / tokens if tokens else 0:.0%} "
            f"| {tokens / rounds if rounds else 1:.2f} | {sum(cell['equal'] for cell in found)} of {len(found)} |"
        )
    finished = [cell["finish"] for cell in cells["plain"]]
    print(f"\n{sum(reason != 'length' for reason in finished)} of {len(finished)} texts ended before the token limit.")


def choice_of(draft: str | None) -> Any:
    from ovspec.drafting.choice import parse_draft

    return parse_draft(draft) if draft else None


if __name__ == "__main__":
    main()
