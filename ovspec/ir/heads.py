"""The graph of a head, and the parts exchanged between it and its target.

A head is a layer on its target's own hidden states: an EAGLE-3 head (Li et al., arXiv 2503.01840), or the multi-token
prediction (MTP) layer shipped with a model (DeepSeek-V3, arXiv 2412.19437). Its IR has two parts. The first turns the
target's hidden states into features; it is moved into the target, to compute features for each token on the way.
EAGLE-3 fuses the inputs of several layers, and MTP takes the lm_head's input unchanged. The second part proposes tokens
from features; without an embedding or an lm_head of its own, it uses the target's.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
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
from ovspec.ir.lm_head import find_lm_head_input, find_logits_operations, keep_logits

FEATURES_OUTPUT = "features"  # output added to a target: the head's input for each token
FUSION_INPUT = "target_hidden_states"  # input of the part moved into the target; its output is FUSED
FUSION_OUTPUT = "fused"
HIDDEN_OUTPUT = "hidden"  # output of the head: its input for tokens without features of the target
NEXT_LAYER_FOLDER = "next"  # in an MTP layer's folder: the layer for the token after its own
DRAFT_MODEL_ADVICE = "use a draft model instead"
IDENTITY_SIZE = 32  # rows of an identity product
# In the IR's rt_info: the target layers whose inputs are fused; none for a head on the lm_head's input.
TARGET_LAYERS_INFO = ["ovspec", "target_layers"]


def is_head_folder(folder: Path) -> bool:
    """Return whether the IR in ``folder`` is a head exported by ``ovspec export``."""
    file = folder / MODEL_FILE
    return file.is_file() and f'"{FUSION_INPUT}"'.encode() in file.read_bytes()


def list_head_layers(folder: Path) -> list[Path]:
    """Return the folder of each layer of the head in ``folder``, its own first."""
    next_folder = folder / NEXT_LAYER_FOLDER
    return [folder, *(list_head_layers(next_folder) if next_folder.is_dir() else [])]


def is_mtp_folder(folder: Path) -> bool:
    """Return whether the IR in ``folder`` is an MTP layer exported by ``ovspec export``: it has no lm_head."""
    return is_head_folder(folder) and b'"logits"' not in (folder / MODEL_FILE).read_bytes()


def add_features_output(model: ov.Model, target: Path, head: Path) -> None:
    """Add the output ``FEATURES_OUTPUT`` to a target, [..., width of the head] f32; rewrites in place.

    Args:
        model: the target, as exported.
        target, head: their folders.

    Raises:
        OvspecError: the head was made for another model.
    """
    head_model = read_openvino_model(head)
    states = find_target_states(model, read_target_layers(head_model), target, head)
    fusion_parameter = head_model.input(FUSION_INPUT).get_node()
    target_width = states.get_partial_shape()[-1]
    head_width = fusion_parameter.get_output_partial_shape(0)[-1]
    if target_width != head_width:
        problem = f"reads {head_width} hidden values per token, but the target has {target_width}"
        raise OvspecError(f"{head}: the head {problem}; use the head with the model it was trained for.")
    fusion_result = head_model.output(FUSION_OUTPUT).get_node()
    fusion_parameter.output(0).replace(states)
    features = fusion_result.input_value(0)
    if features == states:
        features = shield_from_output(states)
    add_output(model, features, FEATURES_OUTPUT)
    model.validate_nodes_and_infer_types()


def find_target_states(model: ov.Model, layers: list[int], target: Path, head: Path) -> ov.Output:
    """Return the target's hidden states for a head's features, for each token.

    Args:
        layers: the target layers whose inputs are joined; none for the lm_head's input.

    Raises:
        OvspecError: the head was made for another model.
    """
    if not layers:
        final_states = find_lm_head_input(model)
        if final_states is None:
            raise OvspecError(
                f"{head}: this target can't use a head: its lm_head can't be found; {DRAFT_MODEL_ADVICE}."
            )
        return final_states
    layer_inputs = find_target_layer_inputs(model, target, head)
    if max(layers) >= len(layer_inputs):
        problem = f"reads layer {max(layers)}, but the target has {len(layer_inputs)} layers"
        raise OvspecError(f"{head}: the head {problem}; use the head with the model it was trained for.")
    return ops.concat([layer_inputs[layer] for layer in layers], -1).output(0)


def shield_from_output(states: ov.Output) -> ov.Output:
    """Return hidden states [..., width] unchanged, as product with an identity matrix.

    In bf16, a CPU computes an output in f32, and with it all operations back to the last product. The identity product
    keeps this from the lm_head's input, where f32 would change the bits.
    """
    width = states.get_partial_shape()[-1].get_length()
    block_size = math.gcd(width, IDENTITY_SIZE)
    identity = ops.constant(np.eye(block_size, dtype=np.float32))
    blocks = ops.reshape(states, ops.constant([0, 0, width // block_size, block_size], dtype=ov.Type.i64), True)
    shape = ops.constant([0, 0, width], dtype=ov.Type.i64)
    return ops.reshape(ops.matmul(blocks, identity, False, False), shape, True).output(0)


def find_target_layer_inputs(model: ov.Model, target: Path, head_name: Path) -> list[ov.Output]:
    """Return the input of each layer of a target, in order; a head uses some of these hidden states.

    Args:
        model: the target, as exported.
        target: its folder.
        head_name: the folder to name first in errors.

    Raises:
        OvspecError: a head can't be used with this target, because some layers have no states of their own.
    """
    try:
        layer_inputs = find_layer_inputs(model, find_state_variables(model))
    except OvspecError as error:
        raise OvspecError(f"{head_name}: this target can't use a head: {error}; {DRAFT_MODEL_ADVICE}.") from None
    layer_count = read_model_config(target).layer_count or len(layer_inputs)
    check_layers_have_states(len(layer_inputs), layer_count, str(head_name))
    return layer_inputs


def check_layers_have_states(layers_with_states: int, layer_count: int, head_name: str) -> None:
    """Raise OvspecError if fewer than all ``layer_count`` layers of a target have keys and values, or recurrent states.

    Gemma 3n's last layers share the states of others.
    """
    if layers_with_states != layer_count:
        problem = f"only {layers_with_states} of its {layer_count} layers have their own keys and values"
        raise OvspecError(f"{head_name}: this target can't use a head: {problem}; {DRAFT_MODEL_ADVICE}.")


def read_target_layers(head: ov.Model) -> list[int]:
    """Return the target layers whose inputs a head reads."""
    return [int(layer) for layer in re.findall(r"\d+", head.get_rt_info(TARGET_LAYERS_INFO).astype(str))]


def read_head_graph(folder: Path, target: Path) -> ModelGraph:
    """Return the proposing part of the head in ``folder``, completed with parts of ``target``.

    Like other models it has the input ``logits_idx``, here also for rows of ``HIDDEN_OUTPUT``. An MTP layer followed by
    others passes its whole output to them as features.

    Raises:
        OvspecError: the IR can't be read, or the head was made for another model.
    """
    model = read_openvino_model(folder)
    states = find_state_variables(model)
    target_ids = read_target_ids(model)
    if target_ids is not None:
        model.remove_result(model.output(TARGET_IDS_OUTPUT).get_node())
    model.remove_result(model.output(FUSION_OUTPUT).get_node())
    model.remove_parameter(model.input(FUSION_INPUT).get_node())
    input_names = {name for port in model.inputs for name in port.names}
    if "input_ids" not in input_names:
        use_target_embedding(model, folder, target)
    hidden = model.output(HIDDEN_OUTPUT).get_node().input_value(0)
    picked_hidden = gather_rows_for_readers(model, hidden, list(hidden.get_target_inputs()))
    hidden.get_tensor().set_names(set())
    picked_hidden.get_tensor().set_names({HIDDEN_OUTPUT})
    if len(list_head_layers(folder)) > 1:
        add_output(model, hidden, FEATURES_OUTPUT)
    if is_mtp_layer(model):
        add_output(model, use_target_lm_head(picked_hidden, target_ids, folder, target), "logits")
    model.validate_nodes_and_infer_types()
    return ModelGraph(model, states, True, target_ids)


def is_mtp_layer(model: ov.Model) -> bool:
    """Return whether a head is a multi-token prediction layer, without an lm_head of its own."""
    return not any("logits" in port.names for port in model.outputs)


def use_target_lm_head(hidden: ov.Output, target_ids: np.ndarray | None, folder: Path, target: Path) -> ov.Output:
    """Return the logits of hidden states, computed by the lm_head of ``target``.

    Args:
        hidden: [1, n, width].
        target_ids: the ids with a logit, (n,) int64; None for all.
        folder: the head's, for errors.

    Raises:
        OvspecError: the lm_head isn't found, can't be cut, or reads other hidden states.
    """
    try:
        logits_operations = find_logits_operations(read_openvino_model(target))
        if target_ids is not None:
            keep_logits(logits_operations, target_ids)
    except ValueError as error:
        raise OvspecError(f"{folder}: this target can't use a head: {error}; {DRAFT_MODEL_ADVICE}.") from None
    target_width = logits_operations[0].get_input_partial_shape(0)[-1]
    head_width = hidden.get_partial_shape()[-1]
    if target_width != head_width:
        problem = f"outputs {head_width} values per token, but the target's lm_head takes {target_width}"
        raise OvspecError(f"{folder}: the head {problem}; use the head with the model it was trained for.")
    logits_operations[0].input(0).replace_source_output(hidden)
    for operation in logits_operations:
        operation.validate_and_infer_types()
    return logits_operations[-1].output(0)


def use_target_embedding(model: ov.Model, folder: Path, target: Path) -> None:
    """Replace the input ``inputs_embeds`` of a head by ``input_ids`` and the embedding of ``target``."""
    embeddings_parameter = model.input("inputs_embeds").get_node()
    embedding_table = find_embedding(read_openvino_model(target)).input_value(0)
    target_width = embedding_table.get_partial_shape()[-1]
    head_width = embeddings_parameter.get_output_partial_shape(0)[-1]
    if target_width != head_width:
        problem = f"needs embeddings of {head_width} values, but the target's have {target_width}"
        raise OvspecError(f"{folder}: the head {problem}; use the head with the model it was trained for.")
    input_ids = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    input_ids.output(0).get_tensor().set_names({"input_ids"})
    embeddings: ov.Node = ops.gather(embedding_table, input_ids, ops.constant(0, dtype=ov.Type.i64))
    if embedding_table.get_element_type() != ov.Type.f32:
        embeddings = ops.convert(embeddings, "f32")
    embeddings_parameter.output(0).replace(embeddings.output(0))
    model.remove_parameter(embeddings_parameter)
    model.add_parameters([input_ids])
