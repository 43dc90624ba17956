"""Joins matrix products of the same input, and cuts products with long sums into parts."""

from __future__ import annotations

import functools

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ovspec.ir.instruction_set import describe_instruction_set

WEIGHT_OPERATIONS = {"Convert", "Multiply", "Subtract", "Reshape"}  # between an integer constant and a product
# On these instruction sets, products with integer weights over 7,168 values or more use a different kernel for up to
# four tokens.
SPLITTING_INSTRUCTION_SETS = ("AVX2",)
MAX_SUMMED_VALUES = 6144
INTEGER_TYPES = {"i8", "u8", "i4", "u4"}
ELEMENTWISE_FUNCTIONS = {"Multiply": ops.multiply, "Subtract": ops.subtract}


# ---------------------------------------------------------------- joining


def join_products(model: ov.Model) -> int:
    """Join products of the same input, such as a layer's q, k and v, with integer weights; return the number of joins.

    The weights are concatenated, so each value is computed as before. A large product is faster than several small
    products.
    """
    groups: dict[tuple[str | int, ...], list[ov.Node]] = {}
    for op in model.get_ordered_ops():
        if op.get_type_name() == "MatMul" and is_plain_product(op) and find_integer_constant(op.input_value(1)):
            values, weights = op.input_values()
            recipe = describe_weights_recipe(weights, weights.get_shape()[0])
            group_key = (values.get_node().get_friendly_name(), values.get_index(), *recipe)
            groups.setdefault(group_key, []).append(op)
    joined_groups = [group for group in groups.values() if len(group) > 1]
    for products in joined_groups:
        weights = [product.input_value(1) for product in products]
        joined_product = ops.matmul(products[0].input_value(0), stack_weights(weights), False, True)
        product_outputs = ops.variadic_split(joined_product, -1, [output.get_shape()[0] for output in weights])
        for product, product_output in zip(products, product_outputs.outputs(), strict=True):
            product.output(0).replace(product_output)
    model.validate_nodes_and_infer_types()
    return sum(map(len, joined_groups))


def describe_weights_recipe(weights: ov.Output, row_count: int) -> list[str]:
    """Return the operations and types behind ``weights``; unique if a constant doesn't have ``row_count`` rows."""
    node = weights.get_node()
    shape = list(weights.get_shape())
    recipe = [node.get_type_name(), node.get_element_type().get_type_name(), str(shape[1:])]
    if len(shape) > 1 and shape[0] != row_count:
        recipe.append(node.get_friendly_name())
    return recipe + [step for value in node.input_values() for step in describe_weights_recipe(value, row_count)]


def stack_weights(weights: list[ov.Output]) -> ov.Node:
    """Return the rows of all ``weights``, computed by the same operations."""
    weight_nodes = [output.get_node() for output in weights]
    first_node = weight_nodes[0]
    element_type = first_node.get_element_type()
    if first_node.get_type_name() == "Constant" and len(weights[0].get_shape()) < 2:
        return first_node
    shape = [sum(output.get_shape()[0] for output in weights), *list(weights[0].get_shape())[1:]]
    if first_node.get_type_name() == "Constant":
        stacked_bytes = np.concatenate([np.asarray(node.data).reshape(-1).view(np.uint8) for node in weight_nodes])
        return ov.op.Constant(ov.Tensor(stacked_bytes, shape, element_type), shared_memory=False)
    inputs = [
        stack_weights([node.input_value(index) for node in weight_nodes])
        for index in range(first_node.get_input_size())
    ]
    match first_node.get_type_name():
        case "Convert":
            return ops.convert(*inputs, element_type.get_type_name())
        case "Reshape":
            return ops.reshape(inputs[0], shape, False)
    return ELEMENTWISE_FUNCTIONS[first_node.get_type_name()](*inputs)


# ---------------------------------------------------------------- cutting


def needs_split_products() -> bool:
    """Return whether wide products use different kernels for few and for many tokens on this machine."""
    return describe_instruction_set() in SPLITTING_INSTRUCTION_SETS


def split_wide_products(model: ov.Model, max_summed_values: int = MAX_SUMMED_VALUES) -> int:
    """Cut integer products with sums over more than ``max_summed_values`` values into parts; return their number.

    For such products OpenVINO has different kernels for few and for many tokens, with different bits.
    """
    products = (op for op in model.get_ops() if op.get_type_name() == "MatMul" and is_plain_product(op))
    wide_products = [
        op
        for op in products
        if count_summed_values(op) > max_summed_values and find_integer_constant(op.input_value(1))
    ]
    for product in wide_products:
        part_count = count_product_parts(product, max_summed_values)
        values = ops.split(product.input_value(0), ops.constant(-1, dtype=np.int64), part_count)
        weights = [
            slice_weight_columns(product.input_value(1), part_index, part_count) for part_index in range(part_count)
        ]
        summands = [
            ops.matmul(*values_and_weights, False, True)
            for values_and_weights in zip(values.outputs(), weights, strict=True)
        ]
        total = functools.reduce(ops.add, summands)
        total.set_friendly_name(product.get_friendly_name())
        product.output(0).replace(total.output(0))
    model.validate_nodes_and_infer_types()
    return len(wide_products)


def count_product_parts(product: ov.Node, max_summed_values: int) -> int:
    """Return the smallest number of equal parts, narrow enough, with no cut inside a quantisation group or a byte."""
    integer_constant = find_integer_constant(product.input_value(1))
    assert integer_constant
    group_count = integer_constant.get_output_shape(0)[1]
    min_part_count = -(-count_summed_values(product) // max_summed_values)
    return next(part_count for part_count in range(min_part_count, group_count) if group_count % (2 * part_count) == 0)


def is_plain_product(product: ov.Node) -> bool:
    """Return whether an operation multiplies values by rows of weights."""
    attributes = product.get_attributes()
    shape = product.input_value(1).get_partial_shape()
    return not attributes["transpose_a"] and attributes["transpose_b"] and not shape.is_dynamic and len(shape) == 2


def count_summed_values(product: ov.Node) -> int:
    return product.input_value(1).get_shape()[1]


def find_integer_constant(weights: ov.Output) -> ov.Node | None:
    """Return the integer constant behind ``weights``; None if they are computed otherwise."""
    node = weights.get_node()
    while node.get_type_name() in WEIGHT_OPERATIONS:
        node = node.input_value(0).get_node()
    is_integer = node.get_type_name() == "Constant" and node.get_element_type().get_type_name() in INTEGER_TYPES
    return node if is_integer else None


def slice_weight_columns(weights: ov.Output, part_index: int, part_count: int) -> ov.Node:
    """Return part ``part_index`` of the columns of ``weights`` in ``part_count`` parts, by the same operations."""
    node = weights.get_node()
    match node.get_type_name():
        case "Constant":
            return slice_constant(node, part_index, part_count)
        case "Convert":
            columns = slice_weight_columns(node.input_value(0), part_index, part_count)
            return ops.convert(columns, node.get_element_type().get_type_name())
        case "Reshape":
            rows, width = node.get_output_shape(0)
            return ops.reshape(
                slice_weight_columns(node.input_value(0), part_index, part_count), [rows, width // part_count], False
            )
    return ELEMENTWISE_FUNCTIONS[node.get_type_name()](
        *(slice_weight_columns(value, part_index, part_count) for value in node.input_values())
    )


def slice_constant(constant: ov.Node, part_index: int, part_count: int) -> ov.Node:
    """Return the part of a constant [rows, columns or groups, ...] along its second axis, if longer than 1."""
    shape = constant.get_output_shape(0)
    if len(shape) < 2 or shape[1] == 1:
        return constant
    stored_rows = np.asarray(constant.data).reshape(shape[0], -1)  # two values of four bits share a byte
    part_width = stored_rows.shape[1] // part_count
    part_values = np.ascontiguousarray(stored_rows[:, part_index * part_width : (part_index + 1) * part_width])
    part_shape = [shape[0], shape[1] // part_count, *shape[2:]]
    return ov.op.Constant(ov.Tensor(part_values, part_shape, constant.get_element_type()), shared_memory=False)
