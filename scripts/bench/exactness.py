"""Count the texts that a drafter changes, with fast and with exact arithmetic, and verify each token.

    python scripts/bench/exactness.py DIR [DIR ...] [--prompts 20] [--tokens 200] [--lookahead 4]

For each prompt, greedy text without a drafter is compared with text of lookup and draft. ``verify`` then checks every
token of both by one forward pass.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import CODE, Table, machine, options, totals

import ovspec


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--prompts", type=int, default=len(CODE))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--lookahead", type=int, default=4)
    args = parser.parse_args()
    print(f"{machine()}\n")
    heads = ("model", "arithmetic", "texts that differ", "tokens that one pass would not choose", "accepted")
    table = Table(*heads)
    for folder in args.folders:
        for arithmetic in ("fast", "exact"):
            lm = ovspec.load(folder, "lookup,draft", arithmetic=arithmetic)
            given: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True}
            prompts = CODE[: args.prompts]
            plain, drafted = (
                [lm.generate(prompt, lookahead=k, **given) for prompt in prompts] for k in (0, args.lookahead)
            )
            differ = sum(a.token_ids != b.token_ids for a, b in zip(plain, drafted, strict=True))
            checked = [lm.verify(result) for result in plain + drafted]
            wrong = sum(not each.ok for each in checked)
            tokens = wrong + sum(each.is_exact for each in checked)
            proposed, accepted = totals(drafted, "proposed", "accepted")
            counts = (f"{differ} of {len(prompts)}", f"{wrong} of {tokens}", f"{accepted} of {proposed}")
            table.row(folder.name, arithmetic, *counts)


if __name__ == "__main__":
    main()
