"""Count how many proposed tokens a round are accepted, of heads or drafts on real chats and on documents held out.

    python scripts/bench/accepted.py MODEL DRAFT... [--documents FILE] [--prompts 24] [--lookahead 3] [--tokens 128]

MODEL is an exported model, each DRAFT the folder of an exported head or draft model. Prompts are the chats for judging
in chats.json, and what 'ovspec distill --work DIR' has held out (DIR/documents.jsonl). Each round proposes
--lookahead tokens, at T=0 and T=1, so that speed and the choice of the lookahead play no part. "By position" tells
which share of the first, second, ... tokens were accepted where those before them were.
"""

from __future__ import annotations

from itertools import pairwise, zip_longest
from pathlib import Path

from harness import Table, chats, machine, options, totals
from ovspec_export.distill.gain import prompts_in

import ovspec
from ovspec import Result


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("drafts", type=Path, nargs="+", metavar="DRAFT")
    parser.add_argument("--documents", type=Path, metavar="FILE")
    parser.add_argument("--prompts", type=int, default=24, help="documents, and chats, at most (default 24)")
    parser.add_argument("--lookahead", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    print(f"{machine()}. {args.model.name}, {args.lookahead} tokens proposed a round.\n", flush=True)
    table = Table("draft", "texts", "prompts", "T", "accepted a round", "accepted of proposed", "by position")
    for draft in args.drafts:
        lm = ovspec.load(args.model, draft, tune=False)
        prompts = {"chats": [lm.encode(chat.messages).tolist() for chat in chats() if chat.judge][: args.prompts]}
        if args.documents:
            found = {source: prompts_in(args.documents, args.prompts, source) for source in ("own", "chats", "text")}
            prompts |= {f"held out, {source}": given for source, given in found.items() if given}
        for name, given in prompts.items():
            for temperature in (0.0, 1.0):
                fixed = {"lookahead": args.lookahead, "max_tokens": args.tokens}
                results = [lm.generate(prompt, temperature=temperature, **fixed) for prompt in given]
                proposed, accepted, rounds = totals(results, "proposed", "accepted", "rounds")
                shares = f"{accepted / max(rounds, 1):.3f}", f"{accepted / max(proposed, 1):.3f}"
                table.row(draft.name, name, len(given), temperature, *shares, by_position(results, args.lookahead))


def by_position(results: list[Result], proposed: int) -> str:
    """Return the conditional acceptance of each of ``proposed`` tokens; proposals at the end of a text are shorter."""
    counts = (result.stats.accepted_by_position for result in results)
    accepted = [sum(each) for each in zip_longest([0] * proposed, *counts, fillvalue=0)]
    first = sum(result.stats.reached for result in results) - sum(accepted[:-1])
    return " ".join(f"{stood / max(reached, 1):.2f}" for reached, stood in pairwise([first, *accepted]))


if __name__ == "__main__":
    main()
