"""Turns a model's recurrent states (of convolutions, delta nets and SSMs) into inputs and outputs.

To roll a whole forward pass back, the caller keeps the states from before it. To roll back to a token inside it, the
caller runs the advance model, a small model cut out by ``expose_recurrent_states``. It computes the states after the
first tokens of the pass from these tokens' ``updates``, the values by which tokens change the states. Its operations
are copies of the model's, so the bits are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ovspec.ir.compile import AdvanceGraph, StateVariable, add_output, find_state_variables, last_error_line
from ovspec.ir.paged_attention import NotPaged, find_attention_operations, rewrite_to_paged

STATE_INPUT = "recurrent_state.{}"
STATE_OUTPUT = "next_recurrent_state.{}"
UPDATE = "recurrent_update.{}"  # an output of the model, and an input of the advance model
UPDATE_COUNT_INPUT = "recurrent_update_count"  # how many of the forward pass's first tokens to apply
SOURCE_OPERATIONS = {
    "Concat", "Convolution", "GroupConvolution", "MatMul", "Parameter", "Slice", "StridedSlice", "VariadicSplit",
}  # fmt: skip
LOOP_OUTPUT = "loop_output.{}"
LOOPS = {"Loop", "TensorIterator"}


def rewrite_states_to_paged(model: ov.Model, on_gpu: bool) -> AdvanceGraph | None:
    """Rewrite a stateful model in place for the paged decoder, with or without recurrent states.

    With recurrent states, the model computes a single row per forward pass, and its advance model is returned. Raises
    NotPaged if the rewrite is impossible.
    """
    recurrent_states = [state for state in find_state_variables(model) if state.sequence_axis is None]
    if not recurrent_states:
        rewrite_to_paged(model)
        return None
    if on_gpu:
        raise NotPaged("the model has states other than keys and values, kept by the paged engine only on a CPU")
    try:
        return rewrite_recurrent_to_paged(model, recurrent_states)
    except (RuntimeError, LookupError) as error:
        raise NotPaged(f"the model's recurrent states aren't supported ({last_error_line(error)})") from None


def rewrite_recurrent_to_paged(model: ov.Model, recurrent_states: list[StateVariable]) -> AdvanceGraph:
    graph = expose_recurrent_states(model, recurrent_states)
    hidden_loops = hide_loops(model)
    own_inputs = {name for port in model.inputs for name in port.names} - {"attention_mask", "beam_idx"}
    rewrite_to_paged(model, own_inputs)
    for output, stand_in in hidden_loops:
        for reader in stand_in.output(0).get_target_inputs():
            reader.replace_source_output(output)
        model.remove_parameter(stand_in)
    put_tokens_in_one_row(model)
    return graph


# ---------------------------------------------------------------- states as inputs and outputs


def expose_recurrent_states(model: ov.Model, states: list[StateVariable]) -> AdvanceGraph:
    """Turn the ``states`` of ``model`` into inputs and outputs, and add the updates as outputs; rewrites in place.

    Returns the advance model for the states. Raises NotPaged if a state's updates aren't found.
    """
    reads = {op.get_variable_id(): op for op in model.get_ops() if op.get_type_name() == "ReadValue"}
    assigns = {op.get_variable_id(): op for op in model.get_ops() if op.get_type_name() == "Assign"}
    inputs: list[ov.Node] = []
    for index, state in enumerate(states):
        read = reads[state.name]
        dimensions = list(read.get_output_partial_shape(0))
        shape = [1 if axis == state.batch_axis else dimension.get_length() for axis, dimension in enumerate(dimensions)]
        parameter = ops.parameter(shape, read.get_output_element_type(0), name=STATE_INPUT.format(index))
        parameter.output(0).get_tensor().set_names({STATE_INPUT.format(index)})
        for reader in read.output(0).get_target_inputs():
            gather = reader.get_node()
            if gather.get_type_name() == "Gather" and reader.get_index() == 0:  # gathers the rows of ``beam_idx``
                replace_value(gather.output(0), parameter)
            else:
                reader.replace_source_output(parameter.output(0))
        model.add_parameters([parameter])
        add_output(model, assigns[state.name].input_value(0), STATE_OUTPUT.format(index))
        model.remove_sink(assigns[state.name])
        inputs.append(parameter)
    names = {state.name for state in states}
    for variable in model.get_variables():
        if variable.info.variable_id in names:
            model.remove_variable(variable)
    index_of_operations = OperationIndex(model)
    updates: dict[tuple[str, int], ov.Output] = {}
    for parameter, state in zip(inputs, states, strict=True):
        for value in find_updates(parameter, assigns[state.name].input_value(0), index_of_operations):
            updates[identify_value(value)] = value
    token_axes = [find_token_axis(value) for value in updates.values()]
    advance = cut_out_advance_model(model, list(updates), len(states))
    count = ops.parameter([1], ov.Type.i64, name=UPDATE_COUNT_INPUT)
    count.output(0).get_tensor().set_names({UPDATE_COUNT_INPUT})
    model.add_parameters([count])
    zero = ops.constant([0], dtype=ov.Type.i64)
    one = ops.constant([1], dtype=ov.Type.i64)
    for index, (value, axis) in enumerate(zip(updates.values(), token_axes, strict=True)):
        first_tokens = ops.slice(value, zero, count, one, ops.constant([axis], dtype=ov.Type.i64))
        add_output(model, first_tokens.output(0), UPDATE.format(index))
    model.validate_nodes_and_infer_types()
    return AdvanceGraph(advance, [tuple(parameter.get_output_shape(0)) for parameter in inputs], token_axes)


class OperationIndex:
    """The names of a model's operations, in topological order: after their operands.

    constants: operations on constants alone. of_shapes: operations on constants and on other values' shapes.
    """

    def __init__(self, model: ov.Model) -> None:
        self.positions: dict[str, int] = {}
        self.constants: set[str] = set()
        self.of_shapes: set[str] = set()
        for op in model.get_ordered_ops():
            name = op.get_friendly_name()
            self.positions[name] = len(self.positions)
            operands = [op.input_value(i).get_node().get_friendly_name() for i in range(op.get_input_size())]
            for names, beginnings in ((self.constants, {"Constant"}), (self.of_shapes, {"Constant", "ShapeOf"})):
                if op.get_type_name() in beginnings or (operands and names.issuperset(operands)):
                    names.add(name)

    def list_token_operands(self, node: ov.Node) -> list[ov.Output]:
        """Return the operands of ``node`` except constants and shapes."""
        operands = [node.input_value(i) for i in range(node.get_input_size())]
        return [operand for operand in operands if operand.get_node().get_friendly_name() not in self.of_shapes]


def replace_value(value: ov.Output, parameter: ov.Node) -> None:
    """Make the readers of ``value`` read ``parameter``, without giving it the names of ``value``."""
    for reader in value.get_target_inputs():
        reader.replace_source_output(parameter.output(0))


def identify_value(value: ov.Output) -> tuple[str, int]:
    return value.get_node().get_friendly_name(), value.get_index()


def find_updates(state: ov.Node, next_state: ov.Output, operations: OperationIndex) -> Iterator[ov.Output]:
    """Yield the token values behind ``next_state``, other than the input ``state``."""
    dependents = list_dependents(state, next_state.get_node(), operations)
    pending = [next_state]
    seen: set[str] = set()
    while pending:
        value = pending.pop()
        node = value.get_node()
        name = node.get_friendly_name()
        if name in operations.constants or name in seen:
            continue
        if name not in dependents and value.get_element_type().is_real() and name not in operations.of_shapes:
            source = list_sources(value, operations)[-1]
            factors = operations.list_token_operands(source.get_node())
            is_outer_product = sum(map(count_token_values, factors)) < count_token_values(source)
            if source.get_node().get_type_name() == "Multiply" and is_outer_product:
                pending += factors
            else:
                yield source
            continue
        seen.add(name)
        pending += [node.input_value(i) for i in range(node.get_input_size())]


def list_dependents(node: ov.Node, last: ov.Node, operations: OperationIndex) -> set[str]:
    """Return the names of ``node`` and of its dependents among the operations before ``last``."""
    end = operations.positions[last.get_friendly_name()]
    names = {node.get_friendly_name()}
    pending = [node]
    while pending:
        for output in pending.pop().outputs():
            for reader in output.get_target_inputs():
                dependent = reader.get_node()
                name = dependent.get_friendly_name()
                if name not in names and operations.positions.get(name, end + 1) <= end:
                    names.add(name)
                    pending.append(dependent)
    return names


def list_sources(value: ov.Output, operations: OperationIndex) -> list[ov.Output]:
    """Return the chain of token values behind ``value``, beginning with ``value`` itself.

    The chain ends below a product with weights, an operation on several tokens, or an operation with several sources.
    """
    sources = [value]
    while (node := sources[-1].get_node()).get_type_name() not in SOURCE_OPERATIONS:
        operands = operations.list_token_operands(node)
        if not operands:
            break
        common = list_sources(operands[0], operations)
        for operand in operands[1:]:
            others = set(map(identify_value, list_sources(operand, operations)))
            common = [source for source in common if identify_value(source) in others]
        if not common:
            break
        sources.append(common[0])
    return sources


def count_token_values(value: ov.Output) -> int:
    """Return the number of values per token in ``value``."""
    return math.prod(dimension.get_length() for dimension in value.get_partial_shape() if dimension.is_static)


def find_token_axis(value: ov.Output) -> int:
    """Return the token axis of an update: the only dynamic axis after the row axis."""
    dynamic_axes = [axis for axis, dimension in enumerate(value.get_partial_shape()) if axis and dimension.is_dynamic]
    if len(dynamic_axes) != 1:
        raise NotPaged("the inputs of the model's recurrent states can't be found in the graph")
    return dynamic_axes[0]


def cut_out_advance_model(model: ov.Model, updates: list[tuple[str, int]], state_count: int) -> ov.Model:
    """Return the advance model: from states and ``updates``, each an (operation, output), to the next states."""
    copy = model.clone()
    operations = {op.get_friendly_name(): op for op in copy.get_ops()}
    parameters = [operations[STATE_INPUT.format(index)] for index in range(state_count)]
    for index, (operation, output_index) in enumerate(updates):
        value = operations[operation].output(output_index)
        shape = ov.PartialShape([1, *list(value.get_partial_shape())[1:]])
        parameter = ops.parameter(shape, value.get_element_type(), name=UPDATE.format(index))
        parameter.output(0).get_tensor().set_names({UPDATE.format(index)})
        replace_value(value, parameter)
        parameters.append(parameter)
    results = [copy.output(STATE_OUTPUT.format(index)).get_node() for index in range(state_count)]
    return ov.Model(results, parameters, "advance")  # type: ignore[arg-type]


# ---------------------------------------------------------------- with paged attention


def hide_loops(model: ov.Model) -> list[tuple[ov.Output, ov.Node]]:
    """Replace loop outputs by stand-ins, because OpenVINO's transformation would make the loops slower.

    Returns each output with its stand-in.
    """
    hidden: list[tuple[ov.Output, ov.Node]] = []
    for op in model.get_ops():
        if op.get_type_name() in LOOPS:
            for output in op.outputs():
                stand_in = ops.parameter(output.get_partial_shape(), output.get_element_type())
                stand_in.output(0).get_tensor().set_names({LOOP_OUTPUT.format(len(hidden))})
                replace_value(output, stand_in)
                model.add_parameters([stand_in])
                hidden.append((output, stand_in))
    return hidden


def put_tokens_in_one_row(model: ov.Model) -> None:
    """Make all operations but attention compute [1, tokens, ...]; OpenVINO's transformation leaves [tokens, 1, ...]."""

    def constant(*values: int) -> ov.Output:
        return ops.constant(np.array(values), dtype=ov.Type.i64).output(0)

    inputs = {name: port.get_node() for port in model.inputs for name in port.names}
    for name in ("input_ids", "position_ids"):
        for reader in inputs[name].output(0).get_target_inputs():
            if reader.get_node().get_type_name() != "Unsqueeze":
                raise NotPaged(f"the model's operations from {name} to the attention aren't supported")
            reader.get_node().input(1).replace_source_output(ops.constant(0, dtype=ov.Type.i64).output(0))
    for op in list_token_transpositions(model, inputs["position_ids"]):
        op.output(0).replace(op.input_value(0))
    # Outside of attention, use the text's length: attention's is longer with a second query.
    length = inputs["max_context_len"].output(0)
    count = ops.convert(ops.shape_of(inputs["input_ids"]), length.get_element_type())
    tokens = ops.add(ops.convert(inputs["past_lens"], length.get_element_type()), count)
    text_length = ops.reshape(tokens, constant(), special_zero=False).output(0)
    for reader in length.get_target_inputs():
        if reader.get_node().get_type_name() != "PagedAttentionExtension":
            reader.replace_source_output(text_length)
    for layer in find_attention_operations(model):
        head_count = 0
        for index in reversed(range(3)):  # values, keys and queries
            reshape = layer.input_value(index).get_node()
            if reshape.get_type_name() != "Reshape":
                raise NotPaged("the model's operations before the attention aren't supported")
            dimensions = list(reshape.input_value(0).get_partial_shape())[-2:]
            if any(dimension.is_dynamic for dimension in dimensions):
                raise NotPaged("the model's operations before the attention aren't supported")
            head_count, head_width = [dimension.get_length() for dimension in dimensions]
            flat = ops.reshape(reshape.input_value(0), constant(-1, head_count * head_width), special_zero=False)
            layer.input(index).replace_source_output(flat.output(0))
        for reader in layer.output(0).get_target_inputs():
            reshape = reader.get_node()
            dimensions = list(reshape.get_output_partial_shape(0))
            if reshape.get_type_name() != "Reshape" or len(dimensions) != 4 or dimensions[-1].is_dynamic:
                raise NotPaged("the model's operations after the attention aren't supported")
            shape = constant(1, -1, head_count, dimensions[-1].get_length())
            reshape.output(0).replace(ops.reshape(layer.output(0), shape, special_zero=False).output(0))
    model.validate_nodes_and_infer_types()


def list_token_transpositions(model: ov.Model, positions: ov.Node) -> list[ov.Node]:
    """Return the transpositions of [1, tokens, ...] among the values computed from ``positions`` alone."""
    operations = OperationIndex(model)
    names = {positions.get_friendly_name()}
    transpositions: list[ov.Node] = []
    for op in model.get_ordered_ops():
        operands = [operand.get_node().get_friendly_name() for operand in operations.list_token_operands(op)]
        if operands and names.issuperset(operands):
            names.add(op.get_friendly_name())
            if op.get_type_name() == "Transpose" and op.input_value(1).get_node().get_type_name() == "Constant":
                order = op.input_value(1).get_node().get_data()  # type: ignore[attr-defined]
                if list(order[:2]) == [1, 0]:
                    transpositions.append(op)
    return transpositions
