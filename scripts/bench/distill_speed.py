"""Time what 'ovspec distill' computes, in turns beside the usual ways: the target's features, and a head's training.

    python scripts/bench/distill_speed.py MODEL CHECKPOINT [--documents 40] [--turns 3] [--draft-vocabulary 16384]

MODEL is an exported model, CHECKPOINT the folder or GGUF file that it was made from. The documents are pieces of
ovspec's own pages, 60 to 480 tokens long. Features come from OpenVINO, as there, and from the checkpoint in torch, in
f32. A head is trained on packed documents, as there, and on the same ones padded to the longest of each step; only
their own tokens count. Peak memory is that of the whole script. Use an idle machine.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in the worker that trains

import numpy as np
import torch
from harness import ROOT, Table, machine, options, ratios, shown, take_turns
from ovspec_export.distill.documents import Document
from ovspec_export.distill.features import Example, computing, computing_in_torch, write_target
from ovspec_export.distill.head import (
    SHARE,
    STEP_TOKENS,
    STEPS,
    HeadStudent,
)
from ovspec_export.distill.new_head import new_config, new_layout
from ovspec_export.distill.packing import Batch, pack
from ovspec_export.distill.start import begin
from ovspec_export.distill.training import BETAS, keep_heap
from ovspec_export.distill.work import TARGET
from ovspec_export.export import make_checkpoint
from ovspec_export.head_layout import new_head_tap_layers
from ovspec_export.heads import EagleHead
from ovspec_export.sources import find_source
from safetensors.torch import load_file

from ovspec.base.files import read_json
from ovspec.ir.config import read_model_config
from ovspec.text.tokenizer import Tokenizer

SHORTEST, LONGEST = 60, 480  # tokens of a document


def texts(model: Path, count: int) -> list[list[int]]:
    """Return the ids of ``count`` pieces of the documentation."""
    pages = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs").rglob("*.md")))
    ids, draws = Tokenizer(model).encode(pages).tolist(), np.random.default_rng(0)
    lengths = draws.integers(SHORTEST, LONGEST, count)
    return [ids[end - length : end] for end, length in zip(lengths.cumsum(), lengths, strict=True)]


def groups(examples: list[Example]) -> Iterator[list[Example]]:
    """Yield the documents of each step."""
    taken = list[Example]()
    for example in examples:
        taken.append(example)
        if sum(len(each.ids) - 1 for each in taken) >= STEP_TOKENS:
            yield taken
            taken = []


def padded(examples: list[Example]) -> Batch:
    """Return a batch of documents that have the length of the longest; what they are filled with has no goal."""
    longest, filled = max(len(example.ids) for example in examples), list[Example]()
    for example in examples:
        lacking = longest - len(example.ids)
        parts = {
            name: torch.cat((values, values[-1:].expand(lacking, *values.shape[1:])))
            for name in ("ids", "features", "final", "choices", "logprobs")
            for values in [getattr(example, name)]
        }
        parts["logprobs"] = torch.cat(
            (example.logprobs, torch.full((lacking, example.logprobs.shape[1]), -100.0).half())
        )
        filled.append(replace(example, **parts))
    return pack(filled, STEPS, SHARE)


def new_student(model: Path, layers: list[int], examples: list[Example], draft_vocabulary: int) -> HeadStudent:
    with tempfile.TemporaryDirectory() as folder:
        write_target(model, Path(folder) / TARGET)
        target = load_file(Path(folder) / TARGET)
    embedding, rows = target["embedding"], target.get("lm_head", target["embedding"])
    ids = torch.arange(draft_vocabulary)  # which of them doesn't matter for speed
    vocab, hidden = embedding.shape
    config = new_config(read_json(model / "config.json"), vocab, hidden, layers, len(ids))
    head = EagleHead(new_layout(config, layers))
    divisor = begin(head, examples, embedding, rows[ids].float())
    return HeadStudent(head, embedding, ids, divisor, config, "cpu")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--draft-vocabulary", type=int, default=16384)
    args = parser.parse_args()
    documents, count = texts(args.model, args.documents), read_model_config(args.model).layer_count or 1
    layers, tokens = new_head_tap_layers(count), sum(map(len, documents))
    print(f"{machine()}. {len(documents)} documents, {tokens:,} tokens, layers {layers}.\n", flush=True)

    source = find_source(args.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(source, Path(folder) / "checkpoint", "fp32").folder
        ways = {
            "OpenVINO": computing(args.model, layers),
            "torch": computing_in_torch(str(checkpoint), source.model_type, layers, "cpu", False),
        }

        def compute(way: str, turn: int) -> float:
            began = time.perf_counter()
            computed[way] = [ways[way](ids) for ids in (documents if turn >= 0 else documents[:2])]
            return tokens / (time.perf_counter() - began)

        computed = dict[str, list[dict[str, torch.Tensor]]]()
        found = take_turns(ways, compute, args.turns)
    table = Table("features", "tokens/s", "of torch's speed")
    for way, speeds in found.items():
        table.row(way, shown(speeds, 0), shown(ratios(speeds, found["torch"])))
    ways.clear()

    examples = [
        Example(Document(ids, 0, "text", False, False), **parts)
        for ids, parts in zip(documents, computed["OpenVINO"], strict=True)
    ]
    keep_heap()
    student = new_student(args.model, layers, examples, args.draft_vocabulary)
    optimizer = torch.optim.AdamW(student.groups(), lr=1e-5, betas=BETAS, fused=True)

    def train(way: str, turn: int) -> float:
        began, own, entries[way] = time.perf_counter(), 0, 0
        for group in list(groups(examples))[: None if turn >= 0 else 2]:
            batch = student.scaled(pack(group, STEPS, SHARE) if way == "packed" else padded(group))
            student.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            own, entries[way] = own + sum(len(each.ids) - 1 for each in group), entries[way] + len(batch)
        return own / (time.perf_counter() - began)

    entries = dict[str, int]()
    trained = take_turns(("packed", "padded"), train, args.turns)
    weights = sum(weight.numel() for weight in student.module.parameters() if weight.requires_grad)
    print(f"\nA head of {weights:,} weights.\n")
    table = Table("training", "tokens/s", "of padded", "entries computed")
    for way, speeds in trained.items():
        table.row(way, shown(speeds, 0), shown(ratios(speeds, trained["padded"])), f"{entries[way]:,}")
    print(f"\nPeak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB.")


if __name__ == "__main__":
    main()
