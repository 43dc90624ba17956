"""Drafts that propose only some of their target's ids: the ids, and an IR with the lm_head's rows of these alone.

A checkpoint of such a draft has the file ``DRAFT_VOCABULARY_FILE`` with the ids; its weights are a usual draft's. The
rows are cut when it is exported. Its IR names the ids in the output ``TARGET_IDS_OUTPUT``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass, write_atomically
from ovspec.ir.compile import (
    MODEL_FILE,
    check_weights_file,
    find_lm_head,
    has_trimmed_vocabulary,
    read_openvino_model,
    read_target_ids,
    write_target_ids,
)
from ovspec_export.sources import HeadSource, Source

DRAFT_VOCABULARY_FILE = "draft_vocabulary.json"
# Operations that make weights of constants.
ELEMENTWISE_OPERATIONS = {"Convert", "Multiply", "Subtract", "Add", "Divide"}


@dataclass(frozen=True)
class DraftVocabularyFile:
    """The content of a ``DRAFT_VOCABULARY_FILE``. ids: the proposed ids, sorted."""

    ids: list[int]


def write_draft_vocabulary(folder: Path, ids: np.ndarray) -> None:
    """Let the checkpoint in ``folder`` propose only ``ids`` (n,)."""
    write_atomically(folder / DRAFT_VOCABULARY_FILE, json.dumps({"ids": ids.tolist()}) + "\n")


def is_trimmed(source: Source) -> bool:
    """Return whether a model proposes only some ids."""
    return has_trimmed_vocabulary(source.path) if source.is_ir else (source.path / DRAFT_VOCABULARY_FILE).is_file()


def read_proposed_ids(draft: Source, target: Source) -> np.ndarray | None:
    """Return the ids that a draft model proposes, (n,) int64; None for a head, or if it proposes all.

    Raises:
        OvspecError: they aren't different ids of both models, or they can't be read.
    """
    if isinstance(draft, HeadSource) or not is_trimmed(draft):
        return None
    if draft.is_ir:
        check_weights_file(draft.path / MODEL_FILE)
        ids = read_target_ids(read_openvino_model(draft.path))
    else:
        ids = np.array(read_dataclass(DraftVocabularyFile, draft.path / DRAFT_VOCABULARY_FILE).ids, dtype=np.int64)
    if ids is None or not len(ids):
        raise OvspecError(f"{draft.name}: its draft vocabulary is empty; trim the draft again.")
    vocab_size = min(source.get_config_number("vocab") or np.iinfo(np.int64).max for source in (draft, target))
    if len(wrong_ids := ids[(ids < 0) | (ids >= vocab_size)]):
        raise OvspecError(f"{draft.name}: its draft vocabulary names the token {wrong_ids[0]} of {vocab_size}.")
    if len(np.unique(ids)) < len(ids):
        raise OvspecError(f"{draft.name}: its draft vocabulary names a token twice.")
    return ids


def trim_ir(folder: Path, ids: np.ndarray, name: str) -> None:
    """Keep of the lm_head of the IR in ``folder`` only the rows of ``ids`` (n,); the embedding keeps all.

    ``name`` is for messages.

    Raises:
        OvspecError: the lm_head isn't found, or its weights are made in an unknown way.
    """
    try:
        model = read_and_trim_model(folder, ids)
    except ValueError as error:
        raise OvspecError(f"{name}: its vocabulary can't be trimmed, because {error}; choose another draft.") from None
    write_target_ids(model, ids)
    ov.save_model(model, folder / "trimmed.xml", compress_to_fp16=False)
    del model  # it maps the file that is replaced next
    for suffix in (".bin", ".xml"):
        (folder / f"trimmed{suffix}").replace((folder / MODEL_FILE).with_suffix(suffix))


def read_and_trim_model(folder: Path, ids: np.ndarray) -> ov.Model:
    """Return the graph of the model in ``folder`` with logits of only ``ids`` (n,); ValueError if that can't be."""
    model = read_openvino_model(folder)
    # The embedding may have the lm_head's weights, so the rows come from a second reading.
    second_model = read_openvino_model(folder)
    logits_operations = find_logits_operations(model)
    previous_node = logits_operations[0].input_value(0).get_node()
    row_axis = -2 if logits_operations[0].get_attributes()["transpose_b"] else -1
    for node, copy_node in zip(logits_operations, find_logits_operations(second_model), strict=True):
        for port, copy_input_value in zip(node.inputs(), copy_node.input_values(), strict=True):
            if port.get_source_output().get_node().get_name() != previous_node.get_name():
                port.replace_source_output(copy_input_value)
                select_port_entries(port, row_axis, ids)
        previous_node = node
        row_axis = -1
    model.validate_nodes_and_infer_types()
    if model.output("logits").get_partial_shape()[-1] != len(ids):
        raise ValueError("its logits don't have one value for each row of its lm_head")
    return model


def find_logits_operations(model: ov.Model) -> list[ov.Node]:
    """Return the operations that make logits of hidden states, the lm_head's MatMul first; ValueError if unknown."""
    node = find_lm_head(model)
    logits_operations: list[ov.Node] = []
    while node and node.get_type_name() != "Result":
        logits_operations.append(node)
        readers = node.output(0).get_target_inputs()
        node = next(iter(readers)).get_node() if len(readers) == 1 else None
    if not node:
        raise ValueError("its lm_head can't be found in the graph")
    return logits_operations


def select_port_entries(port: ov.Input, axis: int, ids: np.ndarray) -> None:
    """Keep only the entries ``ids`` along ``axis``, counted from the end, of the tensor at an operation's input.

    Raises ValueError if an unknown operation makes that tensor.
    """
    source_output = port.get_source_output()
    node = source_output.get_node()
    shape = list(source_output.get_shape())
    if len(shape) < -axis or shape[axis] == 1:
        return
    match node.get_type_name():
        case "Constant":
            port.replace_source_output(select_constant_entries(node, axis, ids).output(0))
        case "Transpose":
            axis_order = node.input_value(1).get_node().get_data()  # type: ignore[attr-defined]
            select_port_entries(node.input(0), int(axis_order[axis]) - len(shape), ids)
        case "Reshape":  # of groups, which follow the rows
            inner_shape = list(node.input_value(0).get_shape())
            if axis != -len(shape) or inner_shape[0] != shape[0]:
                raise ValueError("the rows of its lm_head are reshaped")
            select_port_entries(node.input(0), -len(inner_shape), ids)
            new_shape = ops.constant([len(ids), *shape[1:]], dtype=ov.Type.i64)
            node.input(1).replace_source_output(new_shape.output(0))
        case operation if operation in ELEMENTWISE_OPERATIONS:
            for operand in node.inputs():
                select_port_entries(operand, axis, ids)
        case operation:
            raise ValueError(f"its lm_head is made by {operation}")


def select_constant_entries(constant: ov.Node, axis: int, ids: np.ndarray) -> ov.Node:
    """Return a constant with the entries ``ids`` along ``axis``, which counts from the end."""
    shape = list(constant.get_output_shape(0))
    element_type = constant.get_element_type()
    stored_values = np.asarray(constant.data).reshape(-1).view(np.uint8)  # type: ignore[attr-defined]
    if element_type.bitwidth == 4:  # two share a byte, the lower half first
        stored_values = np.stack((stored_values & 15, stored_values >> 4), -1).reshape(-1)[: math.prod(shape)]
    selected_values = stored_values.reshape(*shape, -1).take(ids, axis - 1)
    if element_type.bitwidth == 4:
        selected_values = np.append(selected_values, np.zeros(selected_values.size % 2, np.uint8))
        selected_values = selected_values[::2] | selected_values[1::2] << 4
    shape[axis] = len(ids)
    tensor = ov.Tensor(np.ascontiguousarray(selected_values), shape, element_type)
    return ov.op.Constant(tensor, shared_memory=False)
