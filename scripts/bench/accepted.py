"""Count how many proposed tokens a round are accepted, of heads or drafts on real chats and on documents held out.

    python scripts/bench/accepted.py MODEL DRAFT... [--documents FILE] [--prompts 24] [--lookahead 3] [--tokens 128]

MODEL is an exported model, each DRAFT the folder of an exported head or draft model. Prompts are the chats for judging
in chats.json, and what 'ovspec distill --work DIR' has held out (DIR/documents.jsonl). Each round proposes
--lookahead tokens, at T=0 and T=1, so that speed and the choice of the lookahead play no part.
"""

from __future__ import annotations

from pathlib import Path

from harness import Option, Table, arguments, chats, machine, totals
from ovspec_export.distill.gain import prompts_in

import ovspec


def main() -> None:
    args = arguments(
        __doc__,
        "model",
        "drafts+",
        documents=Path,
        prompts=Option(24, "documents, and chats, at most"),
        lookahead=3,
        tokens=128,
    )
    print(f"{machine()}. {args.model.name}, {args.lookahead} tokens proposed a round.\n", flush=True)
    table = Table("draft", "texts", "prompts", "T", "accepted a round", "accepted of proposed")
    for draft in args.drafts:
        lm = ovspec.load(args.model, draft, tune=False)
        prompts = {"chats": [lm.encode(chat.content).tolist() for chat in chats() if chat.judge][: args.prompts]}
        for source in ("own", "chats", "text") if args.documents else ():
            prompts[f"held out, {source}"] = prompts_in(args.documents, args.prompts, source)
        for name, texts in prompts.items():
            for temperature in (0.0, 1.0) if texts else ():
                options = {"temperature": temperature, "lookahead": args.lookahead, "max_tokens": args.tokens}
                results = [lm.generate(text, **options) for text in texts]
                proposed, accepted, rounds = totals(results, "proposed", "accepted", "rounds")
                shares = f"{accepted / max(rounds, 1):.3f}", f"{accepted / max(proposed, 1):.3f}"
                table.row(draft.name, name, len(texts), temperature, *shares)


if __name__ == "__main__":
    main()
