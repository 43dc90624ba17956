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
    find_state_variables,
    gather_rows_for_readers,
    read_openvino_model,
    read_target_ids,
)
from ovspec.ir.config import read_model_config
from ovspec.ir.hidden_states import find_embedding, find_layer_inputs

FEATURES_OUTPUT = "features"  # output added to a target, which the head reads with each token
FUSION_INPUT = "target_hidden_states"  # input of the part that is moved into the target, whose output is FUSED
FUSION_OUTPUT = "fused"
HIDDEN_OUTPUT = "hidden"  # output of the head, which it reads with a token that has no features of the target yet
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
    head_model = read_openvino_model(head)
    layers = read_target_layers(head_model)
    layer_inputs = find_target_layer_inputs(model, target, head)
    if max(layers) >= len(layer_inputs):
        problem = f"reads layer {max(layers)}, but its target has {len(layer_inputs)} layers"
        raise OvspecError(f"{head}: the head {problem}; use it with the model that it was trained for.")
    joined_hidden = ops.concat([layer_inputs[layer] for layer in layers], -1)
    fusion_parameter = head_model.input(FUSION_INPUT).get_node()
    target_width = joined_hidden.get_output_partial_shape(0)[-1]
    head_width = fusion_parameter.get_output_partial_shape(0)[-1]
    if target_width != head_width:
        problem = f"reads {head_width} hidden states a token, but its target has {target_width}"
        raise OvspecError(f"{head}: the head {problem}; use it with the model that it was trained for.")
    fusion_parameter.output(0).replace(joined_hidden.output(0))
    features = head_model.output(FUSION_OUTPUT).get_node().input_value(0)
    add_output(model, features, FEATURES_OUTPUT)
    model.validate_nodes_and_infer_types()


def find_target_layer_inputs(model: ov.Model, target: Path, error_subject: Path) -> list[ov.Output]:
    """Return the input of each layer of a target, in order; a head reads some of these hidden states.

    Args:
        model: the target, as exported.
        target: its folder.
        error_subject: the folder that an error names first.

    Raises:
        OvspecError: a head can't be used with this target, because some layers have no states of their own.
    """
    try:
        layer_inputs = find_layer_inputs(model, find_state_variables(model))
    except OvspecError as error:
        raise OvspecError(f"{error_subject}: a head can't be used with this target: {error}.") from None
    layer_count = read_model_config(target).layer_count or len(layer_inputs)
    check_layers_have_states(len(layer_inputs), layer_count, str(error_subject))
    return layer_inputs


def check_layers_have_states(layers_with_states: int, layer_count: int, error_subject: str) -> None:
    """Raise OvspecError if fewer than all ``layer_count`` layers of a target have keys and values, or recurrent states.

    Gemma 3n's last layers read those of others.
    """
    if layers_with_states != layer_count:
        problem = f"only {layers_with_states} of its {layer_count} layers have keys and values of their own"
        raise OvspecError(f"{error_subject}: a head can't be used with this target: {problem}.")


def read_target_layers(head: ov.Model) -> list[int]:
    """Return the layers of the target whose inputs a head reads."""
    return [int(layer) for layer in re.findall(r"\d+", head.get_rt_info(TARGET_LAYERS_INFO).astype(str))]


def read_head_graph(folder: Path, target: Path) -> ModelGraph:
    """Return the part of the head in ``folder`` that proposes, with the embedding of ``target`` if it has none.

    It has the input ``logits_idx`` like other models, which also picks rows of ``HIDDEN_OUTPUT``.

    Raises:
        OvspecError: the IR can't be read, or the head was made for another model.
    """
    model = read_openvino_model(folder)
    states = find_state_variables(model)
    target_ids = read_target_ids(model)
    for output_name in (FUSION_OUTPUT, TARGET_IDS_OUTPUT):
        model.remove_result(model.output(output_name).get_node())
    model.remove_parameter(model.input(FUSION_INPUT).get_node())
    input_names = {name for port in model.inputs for name in port.names}
    if "input_ids" not in input_names:
        use_target_embedding(model, folder, target)
    hidden = model.output(HIDDEN_OUTPUT).get_node().input_value(0)
    picked_hidden = gather_rows_for_readers(model, hidden, list(hidden.get_target_inputs()))
    hidden.get_tensor().set_names(set())
    picked_hidden.get_tensor().set_names({HIDDEN_OUTPUT})
    model.validate_nodes_and_infer_types()
    return ModelGraph(model, states, True, target_ids)


def use_target_embedding(model: ov.Model, folder: Path, target: Path) -> None:
    """Replace the input ``inputs_embeds`` of a head by ``input_ids`` and the embedding of ``target``."""
    embeddings_parameter = model.input("inputs_embeds").get_node()
    embedding_table = find_embedding(read_openvino_model(target)).input_value(0)
    target_width = embedding_table.get_partial_shape()[-1]
    head_width = embeddings_parameter.get_output_partial_shape(0)[-1]
    if target_width != head_width:
        problem = f"embeds tokens in {head_width} values, but its target in {target_width}"
        raise OvspecError(f"{folder}: the head {problem}; use it with the model that it was trained for.")
    input_ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    input_ids.output(0).get_tensor().set_names({"input_ids"})
    embeddings: ov.Node = ops.gather(embedding_table, input_ids, ops.constant(0, dtype=ov.Type.i64))
    if embedding_table.get_element_type() != ov.Type.f32:
        embeddings = ops.convert(embeddings, "f32")
    embeddings_parameter.output(0).replace(embeddings.output(0))
    model.remove_parameter(embeddings_parameter)
    model.add_parameters([input_ids])
