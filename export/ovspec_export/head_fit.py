"""Check that a head fits its target: its width, vocabulary and layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.ir.compile import MODEL_FILE, check_weights_file, read_target_ids
from ovspec.ir.device import openvino_core
from ovspec.ir.heads import (
    FUSION_INPUT,
    FUSION_OUTPUT,
    HIDDEN_OUTPUT,
    TARGET_LAYERS_INFO,
    is_mtp_layer,
    read_target_layers,
)
from ovspec_export.head_layout import choose_default_tap_layers
from ovspec_export.sources import HeadSource, MtpSource, Source

NAME_CHECKPOINT_ADVICE = "give the head's checkpoint instead"
OTHER_HEAD_ADVICE = "choose a head made for this target"


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of a head, to compare with its target.

    states_width: width of its input states, of ``tap_count`` layers together.
    tap_layers: these layers, or None for the default; empty for the lm_head's input.
    proposed_ids: the target's ids of the head's tokens.
    is_proposable: for each of the target's ids, whether the head can propose it.
    has_own_embedding, has_own_lm_head: whether it has them; otherwise they are made from the target's embedding.
    """

    hidden_size: int
    states_width: int
    tap_count: int
    vocab_size: int | None
    proposed_ids: np.ndarray
    tap_layers: Sequence[int] | None = None
    is_proposable: np.ndarray | None = None
    has_own_embedding: bool = True
    has_own_lm_head: bool = True


def read_head_sizes(head: HeadSource) -> HeadSizes:
    """Return the sizes of a head; raises OvspecError if it is unusable."""
    if head.is_ir:
        return read_head_ir_sizes(head)
    if isinstance(head, MtpSource):
        return read_mtp_sizes(head)
    layout = head.layout
    offsets = head.read_integers("d2t")
    proposed_ids = np.arange(layout.draft_vocab_size)
    if offsets is not None:
        if offsets.shape != proposed_ids.shape:
            raise OvspecError(
                f"{head.name}: the head proposes {len(proposed_ids)} tokens, but the tensor d2t has {len(offsets)} "
                "entries; download the head again."
            )
        proposed_ids = proposed_ids + offsets
    elif layout.draft_vocab_size != layout.vocab_size:
        raise OvspecError(
            f"{head.name}: the head proposes {layout.draft_vocab_size} of {layout.vocab_size} tokens, but has no "
            "tensor d2t with the ids of these tokens; download the head again."
        )
    return HeadSizes(
        hidden_size=layout.hidden_size,
        states_width=layout.tensor_shapes()["fc.weight"][1],
        tap_count=layout.tap_count,
        vocab_size=layout.vocab_size,
        proposed_ids=proposed_ids,
        tap_layers=layout.tap_layers,
        is_proposable=head.read_integers("t2d"),
        has_own_embedding=layout.has_own_embedding,
        has_own_lm_head=layout.has_own_lm_head,
    )


def read_mtp_sizes(layer: MtpSource) -> HeadSizes:
    """Return the sizes of the MTP layer in a checkpoint."""
    shapes = layer.tensor_shapes()
    if "fc.weight" not in shapes:
        raise OvspecError(f"{layer.name}: its MTP layer lacks the tensor fc.weight; download the model again.")
    width = shapes["fc.weight"][0]
    vocab_size = layer.get_config_number("vocab") or 0
    return HeadSizes(
        hidden_size=width,
        states_width=width,
        tap_count=1,
        vocab_size=vocab_size,
        proposed_ids=np.arange(vocab_size),
        tap_layers=(),
        has_own_embedding=False,
    )


def read_head_ir_sizes(head: HeadSource) -> HeadSizes:
    """Return the sizes of a head exported by ovspec."""
    check_weights_file(head.path / MODEL_FILE)
    try:
        model = openvino_core().read_model(head.path / MODEL_FILE)
        inputs, outputs = (
            {port.get_any_name(): port for port in ports if port.get_names()} for ports in (model.inputs, model.outputs)
        )
        proposed_ids = read_target_ids(model)
        vocab_size = head.get_config_number("vocab")
        if proposed_ids is None and is_mtp_layer(model):
            proposed_ids = np.arange(vocab_size or 0)
        if FUSION_OUTPUT not in outputs or proposed_ids is None or not model.has_rt_info(TARGET_LAYERS_INFO):
            raise OvspecError(
                f"{head.name}: the head's IR lacks parts of a head exported by ovspec; {NAME_CHECKPOINT_ADVICE}."
            )
        tap_layers = read_target_layers(model)
        return HeadSizes(
            hidden_size=outputs[HIDDEN_OUTPUT].get_partial_shape()[2].get_length(),
            states_width=inputs[FUSION_INPUT].get_partial_shape()[2].get_length(),
            tap_count=len(tap_layers) or 1,
            vocab_size=vocab_size,
            proposed_ids=proposed_ids,
            tap_layers=tap_layers,
            has_own_embedding="input_ids" in inputs,
        )
    except (RuntimeError, KeyError, ValueError):
        raise OvspecError(f"{head.name}: the head's IR cannot be read; {NAME_CHECKPOINT_ADVICE}.") from None


def check_head_fits(target: Source, head: HeadSource) -> list[int]:
    """Return the target layers whose inputs the head reads; empty for the lm_head's input.

    Raises:
        OvspecError: the head was made for a target of another width, vocabulary or number of layers.
    """
    sizes = read_head_sizes(head)
    refusal = f"{head.name} cannot draft for {target.name}:"
    hidden_size, vocab_size, layer_count = (target.get_config_number(name) for name in ("hidden", "vocab", "layers"))
    if hidden_size is None or vocab_size is None or layer_count is None:
        raise OvspecError(
            f"{refusal} the target's config.json lacks hidden_size, vocab_size or num_hidden_layers; add the missing "
            "entry."
        )
    if sizes.states_width != sizes.tap_count * hidden_size:
        raise OvspecError(
            f"{refusal} the head reads {sizes.states_width} values per token from {sizes.tap_count} target layers, but "
            f"these layers have {sizes.tap_count * hidden_size}; {OTHER_HEAD_ADVICE}."
        )
    if not sizes.has_own_embedding and sizes.hidden_size != hidden_size:
        raise OvspecError(
            f"{refusal} the head uses the target's embedding, but the head's hidden size is {sizes.hidden_size}, and "
            f"the target's {hidden_size}; {OTHER_HEAD_ADVICE}."
        )
    if not sizes.has_own_embedding and not sizes.has_own_lm_head and target.is_ir:
        raise OvspecError(
            f"{refusal} the head needs the embedding from the target's checkpoint, but the target is already an "
            "OpenVINO IR; give the target's checkpoint."
        )
    if sizes.vocab_size != vocab_size:
        raise OvspecError(
            f"{refusal} the head's vocabulary has {sizes.vocab_size} tokens, but the target's has {vocab_size}; "
            f"{OTHER_HEAD_ADVICE}."
        )
    check_head_token_ids(sizes, vocab_size, head.name)
    tap_layers = choose_default_tap_layers(layer_count) if sizes.tap_layers is None else list(sizes.tap_layers)
    if any(not 0 <= layer < layer_count for layer in tap_layers):
        raise OvspecError(
            f"{refusal} the head reads the target's layers {', '.join(map(str, tap_layers))}, but the target has only "
            f"layers 0 to {layer_count - 1}; {OTHER_HEAD_ADVICE}."
        )
    return tap_layers


def check_head_token_ids(sizes: HeadSizes, vocab_size: int, name: str) -> None:
    """Raise OvspecError unless the head's tokens are distinct tokens of the target."""
    proposed_ids = sizes.proposed_ids
    lowest_id = proposed_ids.min()
    highest_id = proposed_ids.max()
    if lowest_id < 0 or highest_id >= vocab_size:
        raise OvspecError(
            f"{name}: its tensor d2t has the token id {lowest_id if lowest_id < 0 else highest_id}, but the vocabulary "
            f"has {vocab_size} tokens; download the head again."
        )
    if len(np.unique(proposed_ids)) < len(proposed_ids):
        raise OvspecError(f"{name}: its tensor d2t has a token twice; download the head again.")
    if sizes.is_proposable is not None and not np.array_equal(
        np.flatnonzero(sizes.is_proposable), np.sort(proposed_ids)
    ):
        raise OvspecError(f"{name}: its tensors t2d and d2t contain different tokens; download the head again.")
