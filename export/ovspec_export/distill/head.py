"""Train a head, either new or trained before."""

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
from ovspec_export.distill.training import TrainingLimits, compute_mean_accepted, move_vocabulary_rows, train_student
from ovspec_export.distill.unroll import compare_guesses, compute_unrolled_loss
from ovspec_export.distill.work_folder import TARGET_TABLES_FILE, TRAINING_STATE_FILE
from ovspec_export.head_layout import read_head_layout
from ovspec_export.heads import EagleHead, load_head_checkpoint

UNROLL_STEPS = 3  # of the unroll
DEEP_ENTRY_SHARE = 0.25  # of the entries, unrolled beyond the first step
# After 500,000 tokens of SmolLM2's chats 0.62 guesses in a row are right, with AdamW at 5e-4 for all and steps of 640
# tokens 0.57. A token costs a sixth more, but 250,000 are nearly as good as 500,000 were. Twice Muon's rate is worse.
STEP_TOKENS = 320
MATRIX_LEARNING_RATE, ADAMW_LEARNING_RATE = 5e-4, 3e-4  # the highest rates: of Muon, and of AdamW for all other weights
FC_RATE_SHARE, LM_HEAD_RATE_SHARE = 0.3, 0.2  # their shares of these: they start near their goals
WEIGHTS_FILE = "model.safetensors"


class HeadStudent:
    """A head in training.

    feature_divisor: the divisor of its features. target_ids: the target's id of each id of the head.
    """

    def __init__(
        self,
        head: EagleHead,
        embedding: Tensor,
        target_ids: Tensor,
        feature_divisor: Tensor,
        config: JsonObject,
        device: str,
    ) -> None:
        self.module = head.requires_grad_(True).to(device)
        if head.embed_tokens is not None:
            head.embed_tokens.requires_grad_(False)
        draft_ids = torch.full((len(embedding),), -1).index_put_((target_ids,), torch.arange(len(target_ids)))
        tables = (embedding, target_ids, feature_divisor, draft_ids)
        self.embedding, self.target_ids, self.feature_divisor, self.draft_ids = (table.to(device) for table in tables)
        self.config = config
        self.device = torch.device(device)

    def parameter_groups(self) -> list[dict[str, Any]]:
        trainable_weights = [(name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad]
        lm_head_weights = [weight for name, weight in trainable_weights if name.startswith("lm_head.")]
        inner_weights = [(name, weight) for name, weight in trainable_weights if not name.startswith("lm_head.")]
        fc_weights = [weight for name, weight in inner_weights if name == "fc.weight"]
        matrices = [weight for name, weight in inner_weights if weight.ndim > 1 and name != "fc.weight"]
        vectors = [weight for _, weight in inner_weights if weight.ndim == 1]
        muon_options = {"weight_decay": 0.01, "orthogonal": True}
        return [
            {"params": fc_weights, "peak_rate": MATRIX_LEARNING_RATE * FC_RATE_SHARE} | muon_options,
            {"params": matrices, "peak_rate": MATRIX_LEARNING_RATE} | muon_options,
            {"params": vectors, "peak_rate": ADAMW_LEARNING_RATE, "weight_decay": 0.0},
            {"params": lm_head_weights, "peak_rate": ADAMW_LEARNING_RATE * LM_HEAD_RATE_SHARE, "weight_decay": 0.0},
        ]

    def make_batches(self, examples: Sequence[Example]) -> Iterator[Batch]:
        return map(self.scale_features, iterate_batches(examples, STEP_TOKENS, UNROLL_STEPS, DEEP_ENTRY_SHARE))

    def scale_features(self, batch: Batch) -> Batch:
        batch = batch.to(self.device)
        return replace(batch, features=batch.features / self.feature_divisor)

    def compute_loss(self, batch: Batch) -> Tensor:
        return compute_unrolled_loss(self.module, batch, self.embedding, self.draft_ids, UNROLL_STEPS)

    def measure_acceptance(self, examples: Iterable[Example]) -> JsonObject:
        """Return the share of guesses equal to the target's by depth, and the mean accepted of 1, 2, … guesses."""
        agreements = [
            compare_guesses(self.module, self.scale_features(batch), self.embedding, self.target_ids, UNROLL_STEPS)
            for batch in (pack_examples([example], UNROLL_STEPS, 1.0) for example in examples)
        ]
        guess_is_right = torch.cat([torch.zeros(0, UNROLL_STEPS, dtype=torch.bool), *agreements]).float()
        if not len(guess_is_right):
            return {}
        agreement_rates = [round(rate, 4) for rate in guess_is_right.mean(0).tolist()]
        return {"agreement": agreement_rates, "accepted": compute_mean_accepted(guess_is_right)}

    def write_checkpoint(self, folder: Path) -> None:
        """Write the head as a checkpoint in AngelSlim's format; a head from another format keeps its config."""
        folder.mkdir(exist_ok=True)
        weights = {name: weight.detach() for name, weight in self.module.state_dict().items()}
        weights["fc.weight"] = weights["fc.weight"] / self.feature_divisor
        tensors = {to_angelslim_name(name): weight.bfloat16().contiguous() for name, weight in weights.items()}
        tensors["d2t"] = self.target_ids - torch.arange(len(self.target_ids), device=self.device)
        tensors["t2d"] = self.draft_ids >= 0
        with open_replacement(folder / WEIGHTS_FILE) as partial_file:
            save_file(tensors, partial_file, {"format": "pt"})
        write_atomically(folder / "config.json", json.dumps(self.config, indent=2) + "\n")


def to_angelslim_name(name: str) -> str:
    """Return AngelSlim's name of a tensor."""
    return "mid" * name.startswith("layer.") + name


def train_head(
    model: str,
    work_folder: str,
    layers: list[int],
    seconds: float,
    tokens: int,
    draft_vocabulary: int,
    start_checkpoint: str = "",
    torch_device: str = "cpu",
) -> None:
    """Train a head for about ``seconds``, or until it has seen ``tokens`` over all runs.

    Args:
        model: the exported target.
        work_folder: the folder with the documents and the target's features.
        layers: the target layers whose inputs the head reads.
        draft_vocabulary: number of target tokens the head can propose.
        start_checkpoint: the checkpoint of a head to start from; a new head by default.
    """
    began = time.monotonic()
    work_path = Path(work_folder)
    examples, embedding, lm_head_rows, target_ids = read_training_inputs(work_path, draft_vocabulary)
    training_state: dict[str, Any] = {}
    if (work_path / TRAINING_STATE_FILE).is_file():
        training_state = torch.load(work_path / TRAINING_STATE_FILE, "cpu", weights_only=True)
        change_draft_vocabulary(training_state, target_ids, lm_head_rows)
        shapes = {name: list(weight.shape) for name, weight in training_state["weights"].items()}
        head = EagleHead(read_head_layout(training_state["config"], shapes, "the head"))
        head.load_state_dict(training_state["weights"])
        feature_divisor = training_state["divisor"]
        config = training_state["config"]
    elif start_checkpoint:
        head = load_head_checkpoint(Path(start_checkpoint), embedding=embedding)
        config = read_json(Path(start_checkpoint) / "config.json")
        config |= {"draft_vocab_size": len(target_ids)}
        old_ids = torch.arange(len(head.d2t)) + head.d2t
        head.lm_head.weight = nn.Parameter(
            move_vocabulary_rows(head.lm_head.weight, old_ids, target_ids, lm_head_rows[target_ids].float())
        )
        if head.lm_head.bias is not None:
            head.lm_head.bias = nn.Parameter(
                move_vocabulary_rows(head.lm_head.bias, old_ids, target_ids, torch.zeros(len(target_ids)))
            )
        feature_divisor = torch.ones(head.fc.in_features)
        if not head.layout.fused_norm:  # as in a new head
            feature_divisor = compute_rms_sizes(examples, "features")
            head.fc.weight.mul_(feature_divisor)
    else:
        vocab_size, hidden_size = embedding.shape
        config = make_head_config(
            read_json(Path(model) / "config.json"), vocab_size, hidden_size, layers, len(target_ids)
        )
        head = EagleHead(make_head_layout(config, layers))
        feature_divisor = initialize_head(head, examples, embedding, lm_head_rows[target_ids].float())
    student = HeadStudent(head, embedding, target_ids, feature_divisor, config, torch_device)
    extra_state = {"config": config, "divisor": feature_divisor, "ids": target_ids}
    limits = TrainingLimits(seconds - (time.monotonic() - began), tokens, torch_device)
    train_student(student, work_path, training_state, extra_state, limits)


def read_training_inputs(work_folder: Path, draft_vocabulary: int) -> tuple[Examples, Tensor, Tensor, Tensor]:
    """Return a head's training inputs: examples, the target's embedding and lm_head, and the ids to propose.

    The tables are [vocabulary, hidden]; there are ``draft_vocabulary`` ids, sorted.
    """
    target_tables = load_file(work_folder / TARGET_TABLES_FILE)
    embedding = target_tables["embedding"]
    lm_head_rows = target_tables.get("lm_head", embedding)
    examples = read_examples(work_folder, held_out=False)
    return examples, embedding, lm_head_rows, choose_draft_ids(examples, len(lm_head_rows), draft_vocabulary)


def choose_draft_ids(examples: Examples, vocab_size: int, id_count: int) -> Tensor:
    """Return the ``id_count`` ids most often expected by the target, sorted; among unseen ids, smaller ids come first.

    Small ids are frequent in most tokenizers, because merges are numbered in their order of discovery.
    """
    expected_counts = torch.linspace(1e-6, 0, vocab_size, dtype=torch.float64)
    for span in examples.spans:
        document_ids, choices, logprobs = span.read_tensors("ids", "choices", "logprobs")
        expected_counts.index_add_(0, choices.flatten().long(), logprobs.flatten().double().exp())
        expected_counts.index_add_(0, document_ids.long(), torch.ones(len(document_ids), dtype=torch.float64))
    return expected_counts.topk(min(id_count, vocab_size)).indices.sort().values


def change_draft_vocabulary(training_state: dict[str, Any], new_ids: Tensor, lm_head_rows: Tensor) -> None:
    """Change a state's lm_head to ``new_ids``; new rows start as the target's ``lm_head_rows``."""
    initial_values = {"lm_head.weight": lm_head_rows[new_ids].float(), "lm_head.bias": torch.zeros(len(new_ids))}
    for name in initial_values.keys() & training_state["averaged"].keys():
        for weights in (training_state["weights"], training_state["averaged"]):
            weights[name] = move_vocabulary_rows(weights[name], training_state["ids"], new_ids, initial_values[name])
        moments = training_state["optimizer"][name]
        for moment_name in ("exp_avg", "exp_avg_sq"):
            moments[moment_name] = move_vocabulary_rows(
                moments[moment_name], training_state["ids"], new_ids, torch.zeros_like(initial_values[name])
            )
    training_state["ids"] = new_ids
    training_state["config"]["draft_vocab_size"] = len(new_ids)
