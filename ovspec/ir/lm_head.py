"""The end of a language model's graph: the lm_head, and how to reduce it to the logits of some tokens."""

from __future__ import annotations

import math

import numpy as np
import openvino as ov
from openvino import opset13 as ops

# Operations allowed after the lm_head, because they don't mix positions (bias, scale, soft cap).
ELEMENTWISE_OPERATIONS = {"Add", "Multiply", "Divide", "Subtract", "Tanh", "Convert", "Clamp"}
# Operations from constants to weights.
WEIGHT_OPERATIONS = {"Convert", "Multiply", "Subtract", "Add", "Divide"}


def find_lm_head(model: ov.Model) -> ov.Node | None:
    """Return the lm_head's MatMul, or None if it isn't found."""
    node = model.output("logits").get_node().input_value(0).get_node()
    while node.get_type_name() in ELEMENTWISE_OPERATIONS:
        sources = [node.input_value(i).get_node() for i in range(node.get_input_size())]
        computed_sources = [source for source in sources if source.get_type_name() not in ("Constant", "Convert")]
        if len(computed_sources) != 1:
            return None
        node = computed_sources[0]
    return node if node.get_type_name() == "MatMul" else None


def find_lm_head_input(model: ov.Model) -> ov.Output | None:
    """Return the lm_head's input, the hidden states of all tokens, or None if they aren't found."""
    lm_head = find_lm_head(model)
    if lm_head is None:
        return None
    hidden = lm_head.input_value(0)
    if not any("logits_idx" in port.names for port in model.inputs):
        return hidden
    # The rows picked by ``logits_idx``: Reshape, Gather, Unsqueeze.
    return hidden.get_node().input_value(0).get_node().input_value(0).get_node().input_value(0)


def find_logits_operations(model: ov.Model) -> list[ov.Node]:
    """Return the operations from the lm_head's MatMul to the logits; raises ValueError for an unknown operation."""
    node = find_lm_head(model)
    logits_operations: list[ov.Node] = []
    while node and node.get_type_name() != "Result":
        logits_operations.append(node)
        readers = node.output(0).get_target_inputs()
        node = next(iter(readers)).get_node() if len(readers) == 1 else None
    if not node:
        raise ValueError("its lm_head can't be found in the graph")
    return logits_operations


def keep_logits(logits_operations: list[ov.Node], ids: np.ndarray) -> None:
    """Reduce the operations of ``find_logits_operations`` to the logits of ``ids`` (n,).

    Cuts weights in place, so no other operation may use them (a tied embedding would). Raises ValueError if a weight
    comes from an unknown operation.
    """
    previous_node = logits_operations[0].input_value(0).get_node()
    row_axis = -2 if logits_operations[0].get_attributes()["transpose_b"] else -1
    for node in logits_operations:
        for port in node.inputs():
            if port.get_source_output().get_node().get_name() != previous_node.get_name():
                select_port_entries(port, row_axis, ids)
        previous_node = node
        row_axis = -1


def select_port_entries(port: ov.Input, axis: int, ids: np.ndarray) -> None:
    """Keep only the entries ``ids`` along ``axis``, counted from the end, of the tensor at an operation's input.

    Raises ValueError if the tensor comes from an unknown operation.
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
        case "Reshape":  # joins the quantisation groups, the axis after the rows
            inner_shape = list(node.input_value(0).get_shape())
            if axis != -len(shape) or inner_shape[0] != shape[0]:
                raise ValueError("the rows of its lm_head are reshaped")
            select_port_entries(node.input(0), -len(inner_shape), ids)
            new_shape = ops.constant([len(ids), *shape[1:]], dtype=ov.Type.i64)
            node.input(1).replace_source_output(new_shape.output(0))
        case operation if operation in WEIGHT_OPERATIONS:
            for operand in node.inputs():
                select_port_entries(operand, axis, ids)
        case operation:
            raise ValueError(f"its lm_head is computed by the operation {operation}")


def select_constant_entries(constant: ov.Node, axis: int, ids: np.ndarray) -> ov.Node:
    """Return a constant with only the entries ``ids`` along ``axis``, counted from the end."""
    shape = list(constant.get_output_shape(0))
    element_type = constant.get_element_type()
    stored_values = np.asarray(constant.data).reshape(-1).view(np.uint8)  # type: ignore[attr-defined]
    if element_type.bitwidth == 4:  # two values per byte, the first in the lower half
        stored_values = np.stack((stored_values & 15, stored_values >> 4), -1).reshape(-1)[: math.prod(shape)]
    selected_values = stored_values.reshape(*shape, -1).take(ids, axis - 1)
    if element_type.bitwidth == 4:
        selected_values = np.append(selected_values, np.zeros(selected_values.size % 2, np.uint8))
        selected_values = selected_values[::2] | selected_values[1::2] << 4
    shape[axis] = len(ids)
    tensor = ov.Tensor(np.ascontiguousarray(selected_values), shape, element_type)
    return ov.op.Constant(tensor, shared_memory=False)
