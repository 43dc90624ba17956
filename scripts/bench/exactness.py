"""Count the texts that a drafter changes, with fast and with exact arithmetic, and verify each token.

    python scripts/bench/exactness.py DIR [DIR ...] [--prompts 20] [--tokens 200] [--lookahead 4]

For each prompt, greedy text without a drafter is compared with text of lookup and draft. ``verify`` then checks every
token of both by one forward pass.
"""

from __future__ import annotations

from harness import CODE, Table, arguments, machine, totals

import ovspec


def main() -> None:
    args = arguments(__doc__, "folders+", prompts=len(CODE), tokens=200, lookahead=4)
    print(f"{machine()}\n")
    table = Table("model", "arithmetic", "texts that differ", "tokens that one pass would not choose", "accepted")
    prompts = CODE[: args.prompts]
    for folder in args.folders:
        for arithmetic in ("fast", "exact"):
            lm = ovspec.load(folder, "lookup,draft", arithmetic=arithmetic)
            plain, drafted = (
                [lm.generate(prompt, lookahead=k, max_tokens=args.tokens, ignore_eos=True) for prompt in prompts]
                for k in (0, args.lookahead)
            )
            differ = sum(a.token_ids != b.token_ids for a, b in zip(plain, drafted, strict=True))
            checks = [lm.verify(result) for result in plain + drafted]
            wrong = sum(not check.ok for check in checks)
            tokens = wrong + sum(check.is_exact for check in checks)
            proposed, accepted = totals(drafted, "proposed", "accepted")
            counts = (f"{differ} of {len(prompts)}", f"{wrong} of {tokens}", f"{accepted} of {proposed}")
            table.row(folder.name, arithmetic, *counts)


if __name__ == "__main__":
    main()
