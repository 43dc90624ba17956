"""Train the small draft that the tests use: one layer, distilled from the demo pair's draft.

Writes ``models/small-hf``. The tests' pair has the demo pair's draft as its target (five times cheaper than the demo
target) and this model as its draft. Corpus, tokenizer, losses and resuming are those of ``demo_pair.py``.

    python scripts/train/small_draft.py --minutes 9
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from demo_pair import (
    ROOT,
    Corpus,
    acceptance,
    distillation_loss,
    new_model,
    split_files,
    train,
    write_model,
)
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "models" / "small-hf")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    work = args.output.parent / (args.output.name + ".training")
    work.mkdir(parents=True, exist_ok=True)

    source = ROOT / "models" / "demo-hf" / "draft"
    tokenizer = AutoTokenizer.from_pretrained(source)
    target: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    documents, held_out = (
        Corpus([torch.tensor(tokenizer(text)["input_ids"] + [0]).numpy() for _, text in files])
        for files in split_files()
    )
    draft = new_model("small")
    loss: Any = lambda batch: distillation_loss(draft, target, batch)  # noqa: E731
    train("small", draft, loss, documents, args.minutes, work / "small.pt", args.seed)
    draft.eval()
    rates = acceptance(target, draft, held_out, False, args.seed) | acceptance(target, draft, held_out, True, args.seed)
    print(", ".join(f"{name} {rate:.3f}" for name, rate in rates.items()))
    write_model(draft, tokenizer, args.output)


if __name__ == "__main__":
    main()
