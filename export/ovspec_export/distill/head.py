"""Teach a head: a new one, or one that was trained before."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ovspec.base.files import open_replacement, read_json, write_atomically
from ovspec.base.json_types import JsonObject
from ovspec_export.distill.features import Example, Examples, read_examples
from ovspec_export.distill.head_initialization import compute_rms_sizes, initialize_head
from ovspec_export.distill.new_head import make_head_config, make_head_layout
from ovspec_export.distill.packing import Batch, iterate_batches, pack_examples
from ovspec_export.distill.training import TrainingLimits, compute_accepted, move_rows, train_student
from ovspec_export.distill.unroll import compare_guesses, compute_unrolled_loss
from ovspec_export.distill.work_folder import STATE_FILE, TARGET_FILE
from ovspec_export.head_layout import read_head_layout
from ovspec_export.heads import EagleHead, load_head_checkpoint

UNROLL_STEPS = 3  # of the unroll
DEEP_SHARE = 0.25  # of the entries, for which the unroll goes beyond its first step
# After 500,000 tokens of SmolLM2's chats 0.62 guesses in a row are right, with AdamW at 5e-4 for all and steps of 640
# tokens 0.57. A token costs a sixth more, but 250,000 bring nearly what 500,000 did. Twice Muon's rate is worse.
STEP_TOKENS = 320
MATRIX_RATE, ADAMW_RATE = 5e-4, 3e-4  # the highest rates: by Muon, and by AdamW of all else
FC_RATE_SHARE, LM_HEAD_RATE_SHARE = 0.3, 0.2  # their shares of these: they begin near their goals
WEIGHTS_FILE = "model.safetensors"


class HeadStudent:
    """A head that learns. divisor: what its features are divided by; ids: the target's id of each of its own."""

    def __init__(
        self, head: EagleHead, embedding: Tensor, ids: Tensor, divisor: Tensor, config: JsonObject, device: str
    ) -> None:
        self.module = head.requires_grad_(True).to(device)
        if head.embed_tokens is not None:
            head.embed_tokens.requires_grad_(False)
        draft_ids = torch.full((len(embedding),), -1).index_put_((ids,), torch.arange(len(ids)))
        tables = (embedding, ids, divisor, draft_ids)
        self.embedding, self.ids, self.divisor, self.draft_ids = (table.to(device) for table in tables)
        self.config = config
        self.device = torch.device(device)

    def parameter_groups(self) -> list[dict[str, Any]]:
        named = [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]
        last = [weight for name, weight in named if name.startswith("lm_head.")]
        inner = [(name, weight) for name, weight in named if not name.startswith("lm_head.")]
        first = [weight for name, weight in inner if name == "fc.weight"]
        matrices = [weight for name, weight in inner if weight.ndim > 1 and name != "fc.weight"]
        vectors = [weight for _, weight in inner if weight.ndim == 1]
        muon = {"weight_decay": 0.01, "orthogonal": True}
        return [
            {"params": first, "peak_rate": MATRIX_RATE * FC_RATE_SHARE} | muon,
            {"params": matrices, "peak_rate": MATRIX_RATE} | muon,
            {"params": vectors, "peak_rate": ADAMW_RATE, "weight_decay": 0.0},
            {"params": last, "peak_rate": ADAMW_RATE * LM_HEAD_RATE_SHARE, "weight_decay": 0.0},
        ]

    def make_batches(self, examples: Sequence[Example]) -> Iterator[Batch]:
        return map(self.scale_features, iterate_batches(examples, STEP_TOKENS, UNROLL_STEPS, DEEP_SHARE))

    def scale_features(self, batch: Batch) -> Batch:
        batch = batch.to(self.device)
        return replace(batch, features=batch.features / self.divisor)

    def compute_loss(self, batch: Batch) -> Tensor:
        return compute_unrolled_loss(self.module, batch, self.embedding, self.draft_ids, UNROLL_STEPS)

    def measure_acceptance(self, examples: Iterable[Example]) -> JsonObject:
        """Return how often the head agrees with the target at each depth, and how many of 1, 2, … are accepted."""
        agreements = [
            compare_guesses(self.module, self.scale_features(batch), self.embedding, self.ids, UNROLL_STEPS)
            for batch in (pack_examples([example], UNROLL_STEPS, 1.0) for example in examples)
        ]
        agree = torch.cat([torch.zeros(0, UNROLL_STEPS, dtype=torch.bool), *agreements]).float()
        if not len(agree):
            return {}
        rates = [round(rate, 4) for rate in agree.mean(0).tolist()]
        return {"agreement": rates, "accepted": compute_accepted(agree)}

    def write_checkpoint(self, folder: Path) -> None:
        """Write the head as a checkpoint in AngelSlim's format; one that had another keeps its config."""
        folder.mkdir(exist_ok=True)
        weights = {name: weight.detach() for name, weight in self.module.state_dict().items()}
        weights["fc.weight"] = weights["fc.weight"] / self.divisor
        tensors = {angelslim_name(name): weight.bfloat16().contiguous() for name, weight in weights.items()}
        tensors["d2t"] = self.ids - torch.arange(len(self.ids), device=self.device)
        tensors["t2d"] = self.draft_ids >= 0
        with open_replacement(folder / WEIGHTS_FILE) as partial:
            save_file(tensors, partial, {"format": "pt"})
        write_atomically(folder / "config.json", json.dumps(self.config, indent=2) + "\n")


def angelslim_name(name: str) -> str:
    """Return AngelSlim's name of a tensor."""
    return "mid" * name.startswith("layer.") + name


def train_head(
    model: str,
    work: str,
    layers: list[int],
    seconds: float,
    tokens: int,
    draft_vocabulary: int,
    start: str = "",
    torch_device: str = "cpu",
) -> None:
    """Teach a head for about ``seconds``, or until it has seen ``tokens`` over all runs.

    Args:
        model: the exported target.
        work: the work folder, with the documents and what the target computes on them.
        layers: the target's layers whose inputs it reads.
        draft_vocabulary: how many of the target's tokens it can propose.
        start: the checkpoint of a head to begin with; a new one by default.
    """
    began = time.monotonic()
    folder = Path(work)
    target = load_file(folder / TARGET_FILE)
    embedding = target["embedding"]
    rows = target.get("lm_head", target["embedding"])
    examples = read_examples(folder, held_out=False)
    ids = choose_draft_ids(examples, len(rows), draft_vocabulary)
    state: dict[str, Any] = {}
    if (folder / STATE_FILE).is_file():
        state = torch.load(folder / STATE_FILE, "cpu", weights_only=True)
        change_vocabulary(state, ids, rows)
        shapes = {name: list(weight.shape) for name, weight in state["weights"].items()}
        head = EagleHead(read_head_layout(state["config"], shapes, "the head"))
        head.load_state_dict(state["weights"])
        divisor = state["divisor"]
        config = state["config"]
    elif start:
        head = load_head_checkpoint(Path(start), embedding=embedding)
        config = read_json(Path(start) / "config.json")
        config |= {"draft_vocab_size": len(ids)}
        old = torch.arange(len(head.d2t)) + head.d2t
        head.lm_head.weight = nn.Parameter(move_rows(head.lm_head.weight, old, ids, rows[ids].float()))
        if head.lm_head.bias is not None:
            head.lm_head.bias = nn.Parameter(move_rows(head.lm_head.bias, old, ids, torch.zeros(len(ids))))
        divisor = torch.ones(head.fc.in_features)
        if not head.layout.fused_norm:  # as in a new one
            divisor = compute_rms_sizes(examples, "features")
            head.fc.weight.mul_(divisor)
    else:
        vocab, hidden = embedding.shape
        config = make_head_config(read_json(Path(model) / "config.json"), vocab, hidden, layers, len(ids))
        head = EagleHead(make_head_layout(config, layers))
        divisor = initialize_head(head, examples, embedding, rows[ids].float())
    student = HeadStudent(head, embedding, ids, divisor, config, torch_device)
    kept = {"config": config, "divisor": divisor, "ids": ids}
    limits = TrainingLimits(seconds - (time.monotonic() - began), tokens, torch_device)
    train_student(student, folder, state, kept, limits)


def choose_draft_ids(examples: Examples, vocabulary: int, count: int) -> Tensor:
    """Return the ``count`` ids that the target expects most often, sorted; of unseen ones the smaller come first.

    Small ids are frequent in most tokenizers, because merges are numbered in the order in which they were found.
    """
    counts = torch.linspace(1e-6, 0, vocabulary, dtype=torch.float64)
    for span in examples.spans:
        ids, choices, logprobs = span.read_tensors("ids", "choices", "logprobs")
        counts.index_add_(0, choices.flatten().long(), logprobs.flatten().double().exp())
        counts.index_add_(0, ids.long(), torch.ones(len(ids), dtype=torch.float64))
    return counts.topk(min(count, vocabulary)).indices.sort().values


def change_vocabulary(state: dict[str, Any], ids: Tensor, rows: Tensor) -> None:
    """Give a state the lm_head for other ``ids``; new ones begin as the target's ``rows``."""
    fresh = {"lm_head.weight": rows[ids].float(), "lm_head.bias": torch.zeros(len(ids))}
    for name in fresh.keys() & state["averaged"].keys():
        for values in (state["weights"], state["averaged"]):
            values[name] = move_rows(values[name], state["ids"], ids, fresh[name])
        moments = state["optimizer"][name]
        for moment in ("exp_avg", "exp_avg_sq"):
            moments[moment] = move_rows(moments[moment], state["ids"], ids, torch.zeros_like(fresh[name]))
    state["ids"] = ids
    state["config"]["draft_vocab_size"] = len(ids)
