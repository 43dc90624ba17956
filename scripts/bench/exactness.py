"""Count the texts that a drafter changes, with fast and with exact arithmetic, and verify each token.

    python scripts/bench/exactness.py DIR [DIR ...] [--prompts 20] [--tokens 200] [--lookahead 4]

For each prompt, greedy text without a drafter is compared with text of lookup and draft. ``verify`` then checks every
token of both by one forward pass.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import ovspec

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = [entry["text"] for entry in json.loads((ROOT / "models" / "prompts.json").read_text("utf-8"))["prompts"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--lookahead", type=int, default=4)
    args = parser.parse_args()
    print("| model | arithmetic | texts that part | tokens that one pass would not choose | accepted |")
    print("|---|---|---|---|---|")
    for folder in args.folders:
        for arithmetic in ("fast", "exact"):
            lm = ovspec.load(folder, "lookup,draft", arithmetic=arithmetic)
            parted = wrong = tokens = proposed = accepted = 0
            for prompt in PROMPTS[: args.prompts]:
                options: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True}
                plain, drafted = (lm.generate(prompt, lookahead=k, **options) for k in (0, args.lookahead))
                parted += plain.token_ids != drafted.token_ids
                proposed, accepted = proposed + drafted.stats.proposed, accepted + drafted.stats.accepted
                for result in (plain, drafted):
                    found = lm.verify(result)
                    tokens, wrong = tokens + found.exact + (not found.ok), wrong + (not found.ok)
            cells = f"{parted} of {args.prompts} | {wrong} of {tokens} | {accepted} of {proposed}"
            print(f"| {folder.name} | {arithmetic} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
