"""Train an MTP layer, either new or trained before. The target's lm_head stays unchanged."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_json
from ovspec.base.json_types import JsonObject
from ovspec_export.distill.features import Example
from ovspec_export.distill.head import HeadStudent, read_training_inputs
from ovspec_export.distill.head_initialization import INITIAL_CONFIDENCE, compute_rms_sizes, fit_linear_guess
from ovspec_export.distill.training import TrainingLimits, train_student
from ovspec_export.distill.work_folder import TRAINING_STATE_FILE
from ovspec_export.draft_vocabulary import write_draft_vocabulary
from ovspec_export.heads import EagleHead
from ovspec_export.mtp import MtpLayer, load_mtp_layer, make_new_mtp_layer, save_mtp_layer

UNSUPPORTED = "ovspec can't train an MTP layer for this model family; set `kind='head'` to train a head instead"


class MtpStudent(HeadStudent):
    """An MTP layer in training, with a head's loss."""

    def write_checkpoint(self, folder: Path) -> None:
        """Write the layer as a separate checkpoint, with the ids it proposes."""
        save_mtp_layer(cast(MtpLayer, self.module), self.config, folder)
        write_draft_vocabulary(folder, self.target_ids.cpu().numpy())


def train_mtp(
    model: str,
    work_folder: str,
    seconds: float,
    tokens: int,
    draft_vocabulary: int,
    start_checkpoint: str = "",
    torch_device: str = "cpu",
) -> None:
    """Train an MTP layer for about ``seconds``, or until it has seen ``tokens`` over all runs.

    Args:
        model: the exported target.
        work_folder: the folder with the documents and the target's features.
        draft_vocabulary: number of target tokens the layer can propose.
        start_checkpoint: the checkpoint of a layer to start from; a new layer by default.
    """
    began = time.monotonic()
    work_path = Path(work_folder)
    examples, embedding, lm_head_rows, target_ids = read_training_inputs(work_path, draft_vocabulary)
    config = read_text_config(Path(model))
    training_state: dict[str, Any] = {}
    if start_checkpoint and not (work_path / TRAINING_STATE_FILE).is_file():
        layer, _ = load_mtp_layer(Path(start_checkpoint), Path(start_checkpoint).name)
    else:
        layer = make_new_mtp_layer(config)
    layer.lm_head = nn.Linear(embedding.shape[1], len(target_ids), bias=False)
    if (work_path / TRAINING_STATE_FILE).is_file():
        training_state = torch.load(work_path / TRAINING_STATE_FILE, "cpu", weights_only=True)
        weights = {
            name: weight for name, weight in training_state["weights"].items() if not name.startswith("lm_head.")
        }
        layer.load_state_dict(weights, strict=False)
    elif not start_checkpoint:
        initialize_mtp_layer(layer, examples, embedding)
    head = cast(EagleHead, layer)  # it has a head's interface in training
    student = MtpStudent(head, embedding, target_ids, torch.ones(embedding.shape[1]), config, torch_device)
    layer.lm_head.weight.requires_grad_(False).copy_(lm_head_rows[target_ids])
    limits = TrainingLimits(seconds - (time.monotonic() - began), tokens, torch_device)
    train_student(student, work_path, training_state, {}, limits)


def check_mtp_possible(model: str) -> None:
    """Raise OvspecError if transformers can't make an MTP layer for the exported target ``model``."""
    try:
        layer = make_new_mtp_layer(read_text_config(Path(model)))
        states = torch.zeros(1, 2, layer.layout.hidden_size)
        layer.run_layer(states, states, torch.zeros(1, 1, 2, 2), torch.arange(2)[None], layer.make_empty_cache())
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, NotImplementedError):
        raise OvspecError(UNSUPPORTED) from None
    if any("experts" in name for name, _ in layer.named_parameters()):
        raise OvspecError("ovspec can't train an MTP layer with experts; set `kind='head'` to train a head instead")


def read_text_config(model: Path) -> JsonObject:
    """Return the config of the text model in an exported folder."""
    config = read_json(model / "config.json")
    return config.get("text_config") or config


@torch.no_grad()
def initialize_mtp_layer(layer: MtpLayer, examples: Sequence[Example], embedding: Tensor) -> None:
    """Set the weights of a new layer to the best linear guess of the lm_head's input.

    The guess comes out of ``fc``; the contributions of attention and the MLP start at zero.

    embedding: the target's, [vocabulary, hidden].
    """
    feature_sizes, final_sizes = (compute_rms_sizes(examples, name) for name in ("features", "final_states"))
    feature_weights, token_weights, _ = fit_linear_guess(examples, feature_sizes, final_sizes, embedding, 1)
    layer.fc.weight.copy_(torch.cat((token_weights, feature_weights), 1))
    for name, weight in layer.layer.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    # The norm divides by the size of the whole, and then small components are enlarged.
    set_gains(layer.feature_norm, feature_sizes.square().mean().sqrt() / feature_sizes)
    set_gains(layer.norm, INITIAL_CONFIDENCE * final_sizes)


def set_gains(norm: nn.Module, gains: Tensor) -> None:
    """Make a new norm multiply by these; its weight may be added to 1."""
    weight = norm.weight
    weight.add_(gains - 1)  # type: ignore[operator]
