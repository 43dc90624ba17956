"""Train a draft model on its target's likeliest tokens (distillation)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ovspec.base.files import rename_with_retries
from ovspec.base.json_types import JsonObject
from ovspec_export.distill.features import Example, read_examples
from ovspec_export.distill.packing import Batch, iterate_batches, pack_examples
from ovspec_export.distill.training import TrainingLimits, compute_mean_accepted, train_student
from ovspec_export.distill.work_folder import TRAINING_STATE_FILE

STEP_TOKENS = 1024
PEAK_LEARNING_RATE = 1e-4  # the highest
JUDGED_GUESSES = 3  # consecutive guesses to evaluate
MAX_LOGIT_DIFFERENCE = 1e-2  # between documents packed and alone, as a share of the logits' spread


class DraftStudent:
    """A draft model in training.

    packs_documents: whether documents can share a forward pass without seeing each other.
    """

    def __init__(self, model: nn.Module, packs_documents: bool, device: str = "cpu") -> None:
        self.module = model.requires_grad_(True).to(device)
        self.packs_documents = packs_documents
        self.device = torch.device(device)

    def parameter_groups(self) -> list[dict[str, Any]]:
        weights = list(self.module.parameters())
        return [
            {
                "params": [weight for weight in weights if weight.ndim > 1],
                "peak_rate": PEAK_LEARNING_RATE,
                "weight_decay": 0.01,
            },
            {
                "params": [weight for weight in weights if weight.ndim <= 1],
                "peak_rate": PEAK_LEARNING_RATE,
                "weight_decay": 0.0,
            },
        ]

    def make_batches(self, examples: Sequence[Example]) -> Iterator[Batch]:
        batch_tokens = STEP_TOKENS if self.packs_documents else 1
        return (batch.to(self.device) for batch in iterate_batches(examples, batch_tokens, 1, 0, token_offset=0))

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy with the target's likeliest tokens."""
        logits = compute_draft_logits(self.module, batch)
        in_vocabulary = batch.choices < logits.shape[-1]
        probabilities = batch.logprobs.exp() * in_vocabulary
        expected_logits = (probabilities * logits.gather(1, batch.choices * in_vocabulary)).sum(-1)
        return (probabilities.sum(-1) * logits.logsumexp(-1) - expected_logits).mean()

    @torch.no_grad()
    def measure_acceptance(self, examples: Iterable[Example]) -> JsonObject:
        """Return the share of guesses equal to the target's choice, and the mean accepted of 1, 2, … guesses."""
        agreements = list[Tensor]()
        guess_runs = list[Tensor]()
        for example in examples:
            batch = pack_examples([example], 1, 0, token_offset=0).to(self.device)
            guess_is_right = (compute_draft_logits(self.module, batch).argmax(-1) == batch.choices[:, 0])[
                batch.in_answers
            ].float()
            agreements.append(guess_is_right)
            if len(guess_is_right) >= JUDGED_GUESSES:
                guess_runs.append(guess_is_right.unfold(0, JUDGED_GUESSES, 1))
        if not guess_runs:
            return {}
        agreement_rate = torch.cat(agreements).mean().item()
        return {"agreement": [round(agreement_rate, 4)], "accepted": compute_mean_accepted(torch.cat(guess_runs))}

    def write_checkpoint(self, folder: Path) -> None:
        """Write the draft as a checkpoint in bf16."""
        weights = {name: weight.bfloat16() for name, weight in self.module.state_dict().items()}
        partial_folder = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial_folder, ignore_errors=True)
        self.module.save_pretrained(partial_folder, state_dict=weights)  # type: ignore[operator]
        shutil.rmtree(folder, ignore_errors=True)
        rename_with_retries(partial_folder, folder)


def compute_draft_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits [n, vocabulary] after each token; positions start anew with each document."""
    return model(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False).logits[0].float()


def train_draft(
    source: str,
    model_type: str,
    work_folder: str,
    seconds: float,
    tokens: int,
    trust_remote_code: bool,
    torch_device: str = "cpu",
) -> None:
    """Train the draft model of the checkpoint ``source`` for about ``seconds``, or until it has seen ``tokens``."""
    from ovspec_export.patches import adapt_optimum
    from ovspec_export.quantised import load_checkpoint_model

    began = time.monotonic()
    work_path = Path(work_folder)
    model = load_checkpoint_model(source, trust_remote_code, dtype=torch.float32, **adapt_optimum(model_type))
    training_state: dict[str, Any] = {}
    if (work_path / TRAINING_STATE_FILE).is_file():
        training_state = torch.load(work_path / TRAINING_STATE_FILE, "cpu", weights_only=True)
        model.load_state_dict(training_state["weights"])
    student = DraftStudent(model, can_pack_documents(model, read_examples(work_path, held_out=False)), torch_device)
    limits = TrainingLimits(seconds - (time.monotonic() - began), tokens, torch_device)
    train_student(student, work_path, training_state, {}, limits)


@torch.no_grad()
def can_pack_documents(model: nn.Module, examples: Sequence[Example]) -> bool:
    """Return whether documents in a shared forward pass get the same logits as alone."""
    if len(examples) < 2:
        return True
    first_examples = [examples[0], examples[1]]
    packed_logits, second_logits = (
        compute_draft_logits(model, pack_examples(packed_examples, 1, 0, token_offset=0))
        for packed_examples in (first_examples, first_examples[1:])
    )
    return bool(
        (packed_logits[-len(second_logits) :] - second_logits).abs().max() < MAX_LOGIT_DIFFERENCE * second_logits.std()
    )
