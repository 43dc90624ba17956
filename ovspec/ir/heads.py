"""The graph of an EAGLE-3 head (Li et al., arXiv 2503.01840), and the parts that it and its target exchange.

A head is one layer on its target's own hidden states. Its IR has two parts. One fuses hidden states of several of the
target's layers into features; it is moved into the target, which then computes them for each token that it reads. The
other proposes tokens from features; if it has no embedding of its own, it gets the target's.
"""

from __future__ import annotations

import re
from pathlib import Path

import openvino as ov
from openvino import opset13 as ops

from ovspec.base.errors import OvspecError
from ovspec.ir.compile import (
    MODEL_FILE,
    TARGET_IDS_OUTPUT,
    ModelGraph,
    add_output,
    find_model_states,
    pick_rows,
    read_model,
    read_target_ids,
)
from ovspec.ir.config import read_model_config
from ovspec.ir.hidden_states import find_embedding, find_layer_inputs

FEATURES_OUTPUT = "features"  # output that a target gets: what the head reads beside each token
FUSION_INPUT = "target_hidden_states"  # input of the part that is moved into the target, whose output is FUSED
FUSION_OUTPUT = "fused"
HIDDEN_OUTPUT = "hidden"  # output of the head: what it reads beside a token of which the target has no features yet
TARGET_LAYERS_INFO = ["ovspec", "target_layers"]  # in the IR's rt_info: the layers of the target whose inputs are fused


def is_head_folder(folder: Path) -> bool:
    """Return whether the IR in ``folder`` is a head that ``ovspec export`` made."""
    file = folder / MODEL_FILE
    return file.is_file() and f'"{FUSION_INPUT}"'.encode() in file.read_bytes()


def add_features_output(model: ov.Model, target: Path, head: Path) -> None:
    """Add the output ``FEATURES_OUTPUT`` to a target, [..., width of the head] f32; rewrites in place.

    Args:
        model: the target, as exported.
        target, head: the folders of the two.

    Raises:
        OvspecError: the head was made for another model.
    """
    fusing = read_model(head)
    layers = read_target_layers(fusing)
    found = find_head_inputs(model, target, head)
    count = len(found)
    if max(layers) >= count:
        told = f"reads layer {max(layers)}, but its target has {count} layers"
        raise OvspecError(f"{head}: the head {told}; use it with the model that it was trained for.")
    hidden = ops.concat([found[layer] for layer in layers], -1)
    parameter = fusing.input(FUSION_INPUT).get_node()
    ours, theirs = hidden.get_output_partial_shape(0)[-1], parameter.get_output_partial_shape(0)[-1]
    if ours != theirs:
        told = f"reads {theirs} hidden states a token, but its target has {ours}"
        raise OvspecError(f"{head}: the head {told}; use it with the model that it was trained for.")
    parameter.output(0).replace(hidden.output(0))
    fused = fusing.output(FUSION_OUTPUT).get_node().input_value(0)
    add_output(model, fused, FEATURES_OUTPUT)
    model.validate_nodes_and_infer_types()


def find_head_inputs(model: ov.Model, target: Path, named: Path) -> list[ov.Output]:
    """Return what each layer of a target reads, in order: some of these hidden states are what a head reads.

    Args:
        model: the target, as exported.
        target: its folder.
        named: the folder that an error names first.

    Raises:
        OvspecError: a head can't be used with this target, because some layers have no keys and values of their own.
    """
    try:
        found = find_layer_inputs(model, find_model_states(model))
    except OvspecError as error:
        raise OvspecError(f"{named}: a head can't be used with this target: {error}.") from None
    check_layers_have_keys(len(found), read_model_config(target).layer_count or len(found), str(named))
    return found


def check_layers_have_keys(found: int, layers: int, named: str) -> None:
    """Raise OvspecError if fewer than all ``layers`` of a target have keys and values of their own."""
    if found != layers:
        told = f"only {found} of its {layers} layers have keys and values of their own"
        raise OvspecError(f"{named}: a head can't be used with this target: {told}.")


def read_target_layers(head: ov.Model) -> list[int]:
    """Return the layers of the target whose inputs a head reads."""
    return [int(layer) for layer in re.findall(r"\d+", head.get_rt_info(TARGET_LAYERS_INFO).astype(str))]


def read_head(folder: Path, target: Path) -> ModelGraph:
    """Return the part of the head in ``folder`` that proposes, with the embedding of ``target`` if it has none.

    It has the input ``logits_idx`` like other models, which also picks what is in ``HIDDEN_OUTPUT``.

    Raises:
        OvspecError: the IR can't be read, or the head was made for another model.
    """
    model = read_model(folder)
    states = find_model_states(model)
    ids = read_target_ids(model)
    for name in (FUSION_OUTPUT, TARGET_IDS_OUTPUT):
        model.remove_result(model.output(name).get_node())
    model.remove_parameter(model.input(FUSION_INPUT).get_node())
    names = {name for port in model.inputs for name in port.names}
    if "input_ids" not in names:
        share_embedding(model, folder, target)
    hidden = model.output(HIDDEN_OUTPUT).get_node().input_value(0)
    picked = pick_rows(model, hidden, list(hidden.get_target_inputs()))
    hidden.get_tensor().set_names(set())
    picked.get_tensor().set_names({HIDDEN_OUTPUT})
    model.validate_nodes_and_infer_types()
    return ModelGraph(model, states, True, ids)


def share_embedding(model: ov.Model, folder: Path, target: Path) -> None:
    """Replace the input ``inputs_embeds`` of a head by ``input_ids`` and the embedding of ``target``."""
    parameter = model.input("inputs_embeds").get_node()
    table = find_embedding(read_model(target)).input_value(0)
    ours, theirs = table.get_partial_shape()[-1], parameter.get_output_partial_shape(0)[-1]
    if ours != theirs:
        told = f"embeds tokens in {theirs} values, but its target in {ours}"
        raise OvspecError(f"{folder}: the head {told}; use it with the model that it was trained for.")
    ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    ids.output(0).get_tensor().set_names({"input_ids"})
    found: ov.Node = ops.gather(table, ids, ops.constant(0, dtype=ov.Type.i64))
    if table.get_element_type() != ov.Type.f32:
        found = ops.convert(found, "f32")
    parameter.output(0).replace(found.output(0))
    model.remove_parameter(parameter)
    model.add_parameters([ids])
