"""The weights of experts, stacked by transformers: a parameter has all experts' weights, for a product or two.

A graph has a constant (experts, rows, columns) per product. Its weights are read as a single matrix, with the experts'
rows one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ovspec_export.packed_weights import PackedWeights, unpack_rows

SKELETON_WIDTH = 2  # the experts' width in a model without the large weights
# Name of a parameter -> an expert's layers with its rows, concatenated.
STACKED_LAYERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class ExpertStack:
    """A parameter with the weights of all experts.

    matrices: the names of its matrices, one per product, with the rows of all experts.
    shape: shape of such a matrix in the graph, (experts, rows, columns).
    widens: its products go from the hidden size to the experts' own width, not back.
    """

    matrices: tuple[str, ...]
    shape: tuple[int, int, int]
    widens: bool

    @property
    def skeleton_shape(self) -> tuple[int, int, int]:
        """The same with ``SKELETON_WIDTH`` in place of the experts' own width."""
        expert_count, rows, columns = self.shape
        if self.widens:
            return expert_count, SKELETON_WIDTH, columns
        return expert_count, rows, SKELETON_WIDTH


def find_expert_stacks(shapes: dict[str, tuple[int, ...]]) -> dict[str, ExpertStack]:
    """Return the parameters with the weights of all experts among parameters with these ``shapes``."""
    stacks: dict[str, ExpertStack] = {}
    for name, shape in shapes.items():
        prefix, _, parameter = name.rpartition(".")
        layers = STACKED_LAYERS.get(parameter)
        if layers and prefix.endswith(".experts") and len(shape) == 3:
            expert_count, rows, columns = shape
            stacks[name] = ExpertStack(
                tuple(f"{prefix}.{layer}" for layer in layers),
                (expert_count, rows // len(layers), columns),
                widens=len(layers) > 1,
            )
    return stacks


def join_matrices(stack: ExpertStack, read_experts: Callable[[str], Iterable[np.ndarray]]) -> np.ndarray:
    """Return the values of a stack's parameter, (experts, rows, columns) float32.

    read_experts: returns each expert's rows of the matrix of this name.
    """
    expert_count, row_count, columns = stack.shape
    values = np.empty((expert_count, len(stack.matrices) * row_count, columns), np.float32)
    for start, matrix in zip(range(0, values.shape[1], row_count), stack.matrices, strict=True):
        for expert_values, rows in zip(values, read_experts(matrix), strict=True):
            expert_values[start : start + row_count] = rows
    return values


def unpack_experts(weights: PackedWeights | np.ndarray, expert_count: int) -> Iterator[np.ndarray]:
    """Yield the rows of each expert, float32, in a matrix with the rows of all."""
    for rows in np.split(np.arange(weights.shape[0]), expert_count):
        yield unpack_rows(weights, rows)


def list_expert_layers(matrix: str, expert_count: int) -> list[str]:
    """Return a checkpoint's names for the weights of each expert in a matrix of an ``ExpertStack``."""
    prefix, _, layer = matrix.rpartition(".")
    return [f"{prefix}.{number}.{layer}.weight" for number in range(expert_count)]


def join_experts(experts: list[PackedWeights]) -> PackedWeights:
    """Return the rows of all experts as a single matrix of the same weights.

    Raises:
        ValueError: they differ in their groups, or an expert has reordered columns.
    """
    if any(weights.column_order is not None for weights in experts):
        raise ValueError("the columns are reordered")
    if len({(weights.shape, weights.scales.shape) for weights in experts}) > 1:
        raise ValueError("the experts have groups of different sizes")
    if any(weights.zero_points is not None for weights in experts):
        experts = [add_zero_points(weights) for weights in experts]
    scales_dtype = np.result_type(*(weights.scales for weights in experts))
    zero_points = [weights.zero_points for weights in experts if weights.zero_points is not None]
    return replace(
        experts[0],
        integers=np.concatenate([weights.integers for weights in experts]),
        scales=np.concatenate([weights.scales.astype(scales_dtype) for weights in experts]),
        zero_points=np.concatenate(zero_points) if zero_points else None,
    )


def add_zero_points(weights: PackedWeights) -> PackedWeights:
    """Return the same weights as unsigned integers with zero points; unchanged if they have zero points already."""
    if weights.zero_points is not None:
        return weights
    center = {"i4": 8, "i8": 128}[weights.element_type]
    return replace(
        weights,
        integers=(weights.integers.astype(np.int16) + center).astype(np.uint8),
        element_type=f"u{weights.element_type[1:]}",
        zero_points=np.full(weights.scales.shape, center, np.uint8),
    )
