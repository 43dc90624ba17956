"""Cuts products that sum over many values, where OpenVINO multiplies few tokens by another kernel than many."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

# On these instruction sets, products with integer weights over 7,168 values or more take another kernel for up to four
# tokens.
CUTTING = ("AVX2",)
WIDEST = 6144
INTEGERS = {"i8", "u8", "i4", "u4"}


def cut_products(model: ov.Model, widest: int = WIDEST) -> int:
    """Cut products with integer weights over more than ``widest`` values into parts to add; return how many."""
    found = [op for op in model.get_ops() if op.get_type_name() == "MatMul" and is_wide(op, widest)]
    for product in found:
        parts = parts_of(product, widest)
        tokens = ops.split(product.input_value(0), ops.constant(-1, dtype=np.int64), parts)
        total: ov.Node | None = None
        for part, values in enumerate(tokens.outputs()):
            one = ops.matmul(values, columns(product.input_value(1), part, parts), False, True)
            total = ops.add(total, one) if total else one
        assert total
        total.set_friendly_name(product.get_friendly_name())
        for reader in list(product.output(0).get_target_inputs()):
            reader.replace_source_output(total.output(0))
    model.validate_nodes_and_infer_types()
    return len(found)


def parts_of(product: ov.Node, widest: int) -> int:
    """Return the least number of equal parts, none of which is too wide, divides a group or splits a byte."""
    integers = integers_of(product.input_value(1))
    assert integers
    groups = integers.get_output_shape(0)[1]
    return next(count for count in range(-(-summed(product) // widest), groups) if groups % (2 * count) == 0)


def is_wide(product: ov.Node, widest: int) -> bool:
    attributes, weights = product.get_attributes(), product.input_value(1).get_partial_shape()
    if attributes["transpose_a"] or not attributes["transpose_b"] or weights.is_dynamic or len(weights) != 2:
        return False
    return summed(product) > widest and integers_of(product.input_value(1)) is not None


def summed(product: ov.Node) -> int:
    return product.input_value(1).get_shape()[1]


def integers_of(weights: ov.Output) -> ov.Node | None:
    """Return the constant of integers that ``weights`` are made of; None if they are made otherwise."""
    node = weights.get_node()
    while node.get_type_name() in ("Convert", "Multiply", "Subtract", "Reshape"):
        node = node.input_value(0).get_node()
    return node if node.get_type_name() == "Constant" and node.get_element_type().get_type_name() in INTEGERS else None


def columns(weights: ov.Output, part: int, parts: int) -> ov.Node:
    """Return one of ``parts`` equal shares of the columns of ``weights``, made by the same operations."""
    node = weights.get_node()
    match node.get_type_name():
        case "Constant":
            return share(node, part, parts)
        case "Convert":
            return ops.convert(columns(node.input_value(0), part, parts), node.get_element_type().get_type_name())
        case "Reshape":
            rows, width = node.get_output_shape(0)
            return ops.reshape(columns(node.input_value(0), part, parts), [rows, width // parts], False)
    make = {"Multiply": ops.multiply, "Subtract": ops.subtract}[node.get_type_name()]
    return make(*(columns(value, part, parts) for value in node.input_values()))


def share(constant: ov.Node, part: int, parts: int) -> ov.Node:
    """Return the part of a constant [rows, columns or groups, ...] along its second axis, if that is longer than 1."""
    shape, kind = constant.get_output_shape(0), constant.get_element_type()
    if len(shape) < 2 or shape[1] == 1:
        return constant
    stored = np.asarray(constant.data).reshape(shape[0], -1)  # two values of four bits share a byte
    size = stored.shape[1] // parts
    taken = np.ascontiguousarray(stored[:, part * size : (part + 1) * size])
    return ov.op.Constant(ov.Tensor(taken, [shape[0], shape[1] // parts, *shape[2:]], kind), shared_memory=False)
