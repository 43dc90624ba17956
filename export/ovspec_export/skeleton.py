"""A model without its large weights, its graph, and the quantised weights inserted into the graph.

Each matrix of the model is zeros without memory, with a mark to find it in the graph.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ovspec.base.errors import OvspecError
from ovspec_export.experts import find_expert_stacks
from ovspec_export.gguf_weights import GgufWeights
from ovspec_export.kept_weights import KeptForms, KeptWeights
from ovspec_export.packed_weights import PackedWeights, make_constant, make_weights_node

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel

CHECKED_ROWS = 512  # rows to check of each matrix
# Largest difference of kept weights from the source's, root mean square, as a share of the source's: 3-bit weights
# converted to int8 differ by 0.02.
MAX_DIFFERENCE = 0.05
MARK_STEP = 2.0**-20  # a mark is a multiple of this


# ---------------------------------------------------------------- the model


def make_model_without_data(model_class: type[PreTrainedModel], config: Any, **options: Any) -> PreTrainedModel:
    """Return a model with parameters without data, only shapes; its buffers are computed as usual."""
    import torch

    original_register = torch.nn.Module.register_parameter

    def register_without_data(module: Module, name: str, parameter: Any) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        original_register(module, name, parameter)

    torch.nn.Module.register_parameter = register_without_data  # type: ignore[method-assign]
    try:
        return model_class._from_config(config, dtype=torch.float32, **options).eval()
    finally:
        torch.nn.Module.register_parameter = original_register  # type: ignore[method-assign]


def fill_skeleton(model: PreTrainedModel, kept: KeptWeights, source: str) -> dict[str, float]:
    """Fill the parameters of a model without data with the source's values, and kept matrices with marked zeros.

    Experts get another width, ``SKELETON_WIDTH``, because a graph holds their zeros in memory.

    Returns the mark of each matrix.

    Raises:
        OvspecError: the source lacks a parameter.
    """
    import torch

    matrices = kept.list_matrices()
    shapes = kept.list_shapes()
    expert_stacks = find_expert_stacks(shapes)
    marks: dict[str, float] = {}

    def make_next_zeros(matrix: str, shape: tuple[int, ...]) -> np.ndarray:
        marks[matrix] = MARK_STEP * (len(marks) + 1)
        return make_marked_zeros(shape, marks[matrix])

    for name, module, parameter_name in iterate_parameters(model):
        if name not in shapes:
            continue
        if name in matrices:
            values = make_next_zeros(name, shapes[name])
        elif stack := expert_stacks.get(name):
            parts = [make_next_zeros(matrix, stack.skeleton_shape) for matrix in stack.matrices]
            values = np.concatenate(parts, axis=1)
        else:
            values = kept.read_values(name)
        module._parameters[parameter_name] = torch.nn.Parameter(torch.from_numpy(values), requires_grad=False)
    model.tie_weights()
    missing_names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing_names:
        raise OvspecError(
            f"{source}: lacks {len(missing_names)} of the model's tensors, such as {missing_names[0]}; download the "
            "model again."
        )
    # A matrix tied to another is the same matrix.
    tied_names = matrices.keys() - {name for name, _ in model.named_parameters()}
    return {name: mark for name, mark in marks.items() if name not in tied_names}


def make_marked_zeros(shape: tuple[int, ...], mark: float) -> np.ndarray:
    """Return a matrix with the mark twice at the start of its first row, to be found even if it is transposed.

    Each expert has such a row. The system allocates memory only on writing; numpy.zeros may write all.
    """
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, 4 * math.prod(shape), **private)
    with contextlib.suppress(AttributeError, OSError):  # unavailable on some systems
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    values = np.frombuffer(memory, np.float32).reshape(shape)
    values[..., 0, :2] = mark
    return values


def read_rounded_values(kept: GgufWeights, product_only: frozenset[str], name: str) -> np.ndarray:
    """Return the values of a parameter as in the IR, close to the file's.

    product_only: as in ``GraphFiller``.

    Raises:
        OvspecError: they aren't close.
    """
    values = kept.read_values(name)
    step = max(1, math.prod(values.shape[:-1]) // CHECKED_ROWS)
    sample = values.reshape(-1, values.shape[-1])[::step].copy()
    del values  # to keep only one matrix in memory
    rounded_values = kept.read_kept_values(name, name in product_only)
    difference = rounded_values.reshape(-1, sample.shape[1])[::step] - sample
    if np.sqrt(np.mean(np.square(difference))) > MAX_DIFFERENCE * np.sqrt(np.mean(np.square(sample))):
        raise OvspecError(f"the exported weights of {name} differ from the source's; report this bug to ovspec")
    return rounded_values


def iterate_parameters(model: Module) -> Iterator[tuple[str, Module, str]]:
    """Yield each parameter's full name, its module and its name in the module."""
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield f"{prefix}.{name}" if prefix else name, module, name


def read_matrices_when_used(
    model: PreTrainedModel, read_values: Callable[[str], np.ndarray], kept: KeptWeights
) -> None:
    """Make each module of a skeleton read its matrices just before its computation, and drop them afterwards.

    read_values: returns the values of a parameter of ``kept``, by name.
    """
    read_names = kept.list_matrices().keys() | find_expert_stacks(kept.list_shapes()).keys()
    names = {id(parameter): name for name, parameter in model.named_parameters() if name in read_names}
    for module in model.modules():
        for parameter_name, parameter in module._parameters.items():
            if name := names.get(id(parameter)):
                assert parameter is not None
                module.register_forward_pre_hook(functools.partial(set_values, read_values, name, parameter_name))
                module.register_forward_hook(functools.partial(drop_values, parameter_name, parameter.data))


def set_values(
    read_values: Callable[[str], np.ndarray], name: str, parameter_name: str, module: Module, *_: Any
) -> None:
    """Set a module's parameter to its values. The other arguments are for torch's hooks."""
    import torch

    getattr(module, parameter_name).data = torch.from_numpy(read_values(name))


def drop_values(parameter_name: str, placeholder: Tensor, module: Module, *_: Any) -> None:
    """Set a module's parameter to its placeholder again. The other arguments are for torch's hooks."""
    getattr(module, parameter_name).data = placeholder


# ---------------------------------------------------------------- the graph


@dataclass
class GraphFiller:
    """Puts quantised weights into a graph in place of marked matrices.

    product_only: the names of the matrices used only in plain products; their groups may have offsets.
    """

    model: ov.Model
    kept: KeptWeights
    product_only: frozenset[str] = frozenset()
    forms: KeptForms = field(default_factory=KeptForms)
    _changed_values: dict[tuple[str | int | bytes, ...], ov.Node] = field(default_factory=dict)

    def fill(self, marks: dict[str, float]) -> None:
        """Replace every marked matrix.

        Raises:
            OvspecError: a matrix isn't found, or is used in an unknown way.
        """
        matrices = self.kept.list_matrices()
        constants = self._find_constants(marks)
        if missing_names := sorted(marks.keys() - constants.keys()):
            raise OvspecError(
                f"the quantised weights can't be exported unchanged, because {missing_names[0]} is not a separate "
                "matrix in the OpenVINO graph; export the unquantised checkpoint"
            )
        for name, nodes in constants.items():
            weights = self.kept.read_matrix(name, name in self.product_only)
            shape = nodes[0].get_output_shape(0)
            expert_count = shape[0] if len(shape) == 3 else None
            self.forms.add(self.kept.describe_kind(name), weights, expert_count or 1)
            if isinstance(weights, np.ndarray):
                weights_node = make_float_node(weights, expert_count)
            else:
                weights_node = make_weights_node(weights, expert_count)
            for node in nodes:
                is_transposed = matrices.get(name, False) != (not get_first_matrix(node)[0, 1])
                for port in node.output(0).get_target_inputs():
                    self._replace_use(port, weights, weights_node, name, is_transposed)
        self.model.validate_nodes_and_infer_types()

    def _find_constants(self, marks: dict[str, float]) -> dict[str, list[ov.Node]]:
        """Return the constants of the marked matrices."""
        names_by_mark = {mark: name for name, mark in marks.items()}
        constants: dict[str, list[ov.Node]] = {}
        for node in self.model.get_ordered_ops():
            if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32:
                continue
            values = get_first_matrix(node)
            if values.ndim != 2 or min(values.shape) < 2 or {values[0, 1], values[1, 0]} != {values[0, 0], 0}:
                continue
            if (name := names_by_mark.get(float(values[0, 0]))) is not None:
                constants.setdefault(name, []).append(node)
        return constants

    def _replace_use(
        self,
        port: ov.Input,
        weights: PackedWeights | np.ndarray,
        weights_node: ov.Node,
        name: str,
        is_transposed: bool,
    ) -> None:
        """Connect ``weights_node`` to the operation at ``port`` in place of a marked matrix."""
        consumer = port.get_node()
        attributes = consumer.get_attributes()
        is_product = consumer.get_type_name() == "MatMul" and port.get_index() == 1 and not attributes["transpose_a"]
        takes_rows = is_product and attributes["transpose_b"] != is_transposed
        is_plain = not isinstance(weights, PackedWeights) or (weights.column_order is None and weights.offsets is None)
        is_stack = len(weights_node.get_output_shape(0)) > 2
        if (not is_plain and not takes_rows) or (is_stack and (is_transposed or not takes_rows)):
            raise OvspecError(
                f"the quantised weights can't be exported unchanged, because the operation {consumer.get_type_name()} "
                f"in the OpenVINO graph uses {name}; export the unquantised checkpoint"
            )
        if is_plain and not (takes_rows and is_transposed):
            # Without a new product: the values of experts get their true width only once all are replaced.
            if is_transposed:
                weights_node = ops.transpose(weights_node, np.array([1, 0]))
            port.replace_source_output(weights_node.output(0))
            return
        values = consumer.input_value(0)
        if isinstance(weights, PackedWeights):
            product = make_product(values, weights, weights_node, self._changed_values)
        else:
            product = ops.matmul(values, weights_node, False, True)
        product.set_friendly_name(consumer.get_friendly_name())
        consumer.output(0).replace(product.output(0))


def get_first_matrix(constant: ov.Node) -> np.ndarray:
    """Return the values of a constant; for a stack of matrices, of the first."""
    values: np.ndarray = constant.data  # type: ignore[attr-defined]
    return values[0] if values.ndim == 3 and len(values) else values


# ---------------------------------------------------------------- products


def make_product(
    values: ov.Output,
    weights: PackedWeights,
    weights_node: ov.Node | None = None,
    changed_values: dict[tuple[str | int | bytes, ...], ov.Node] | None = None,
) -> ov.Node:
    """Return the product of values, (..., columns), with the rows of ``weights``.

    weights_node: the result of ``make_weights_node`` for them, if already made.
    changed_values: values reordered or summed for other products; more may be added.
    """
    changed_values = {} if changed_values is None else changed_values
    weights_node = weights_node or make_weights_node(weights)
    if weights.column_order is not None:
        values = reorder_values(values, weights.column_order, changed_values).output(0)
    product = ops.matmul(values, weights_node, False, True)
    if weights.offsets is None:
        return product
    group_sums = sum_groups(values, weights.offsets.shape[1], changed_values)
    offsets = ops.convert(make_constant(weights.offsets), "f32")
    return ops.add(product, ops.matmul(group_sums, offsets, False, True))


def sum_groups(
    values: ov.Output, group_count: int, changed_values: dict[tuple[str | int | bytes, ...], ov.Node]
) -> ov.Node:
    """Return the sum of each group of the values, (..., groups)."""
    key = ("sum", values.get_node().get_name(), values.get_index(), group_count)
    if key not in changed_values:
        outer_axes = len(values.get_partial_shape()) - 1
        groups = ops.reshape(values, np.array([0] * outer_axes + [group_count, -1], np.int64), True)
        changed_values[key] = ops.reduce_sum(groups, np.array([outer_axes + 1], np.int64))
    return changed_values[key]


def reorder_values(
    values: ov.Output, order: np.ndarray, changed_values: dict[tuple[str | int | bytes, ...], ov.Node]
) -> ov.Node:
    """Return the values with their last axis in this order."""
    key = ("order", values.get_node().get_name(), values.get_index(), order.tobytes())
    if key not in changed_values:
        changed_values[key] = ops.gather(values, order.astype(np.int32), np.int64(-1))
    return changed_values[key]


def make_float_node(values: np.ndarray, expert_count: int | None = None) -> ov.Node:
    """Return a node in f32 of a matrix stored in f16, in bf16 as uint16, or in f32.

    expert_count: see ``make_weights_node``.
    """
    if expert_count is not None:
        values = values.reshape(expert_count, -1, values.shape[1])
    if values.dtype != np.uint16:
        constant = make_constant(values)
        return constant if values.dtype == np.float32 else ops.convert(constant, "f32")
    tensor = ov.Tensor(np.ascontiguousarray(values).reshape(-1), list(values.shape), ov.Type.bf16)
    return ops.convert(ov.op.Constant(tensor, shared_memory=False), "f32")
