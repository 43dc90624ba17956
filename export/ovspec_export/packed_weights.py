"""Matrices of integers with scales, and OpenVINO graph constants of the same integers.

A weight is ``scale * (integer - zero point)``, computed in f32, so it equals the source's to the bit. OpenVINO
multiplies by such constants, and looks up their rows, without unpacking them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import openvino as ov
from openvino import opset13 as ops

INTEGER_RANGES = {"i4": (-8, 7), "u4": (0, 15), "i8": (-128, 127), "u8": (0, 255)}
# The value of each integer of OpenVINO's element type nf4: quantiles of the normal distribution (Dettmers et al.,
# "QLoRA", 2023, appendix E).
NF4_VALUES = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
ERROR_SAMPLE_ROWS = 512  # rows whose rounding is measured


@dataclass(frozen=True)
class PackedWeights:
    """A matrix of integers.

    integers: (rows, columns) int8 or uint8, in the range of ``element_type``, a key of ``INTEGER_RANGES``; for "nf4",
        indices into ``NF4_VALUES``, and the weights are multiples of its values.
    scales: (rows, groups) float16 or float32; a group is an equal share of a row.
    zero_points: (rows, groups), integers of ``element_type`` or float16; None for none.
    offsets: (rows, groups) float16, added to each weight of the group; None for none.
    column_order: (columns,), the model's column of each stored column; None if they have the model's order.
    is_requantised: the integers aren't the source's own.
    """

    integers: np.ndarray
    element_type: str
    scales: np.ndarray
    zero_points: np.ndarray | None = None
    offsets: np.ndarray | None = None
    column_order: np.ndarray | None = None
    is_requantised: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.integers.shape[0], self.integers.shape[1]

    @property
    def group_size(self) -> int:
        """The number of weights with a shared scale."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def form(self) -> str:
        """The storage of a weight, in words."""
        words = ["quantised anew to"] * self.is_requantised + [self.element_type]
        if self.scales.shape[1] > 1:
            words.append(f"in groups of {self.group_size}")
        if self.zero_points is not None:
            words.append(f"with {'f16' if self.zero_points.dtype == np.float16 else 'integer'} zero points")
        return " ".join([*words, *["and sums of groups"] * (self.offsets is not None)])

    def take_rows(self, rows: np.ndarray | slice) -> PackedWeights:
        """Return the matrix of these rows."""
        return replace(
            self,
            integers=self.integers[rows],
            scales=self.scales[rows],
            zero_points=None if self.zero_points is None else self.zero_points[rows],
            offsets=None if self.offsets is None else self.offsets[rows],
        )

    def unpack(self) -> np.ndarray:
        """Return the weights in the model's order, (rows, columns) float32."""
        rows, columns = self.shape
        values = NF4_VALUES[self.integers] if self.element_type == "nf4" else self.integers.astype(np.float32)
        weights = values.reshape(rows, -1, self.group_size)
        if self.zero_points is not None:
            weights -= self.zero_points[:, :, None].astype(np.float32)
        weights *= self.scales[:, :, None].astype(np.float32)
        if self.offsets is not None:
            weights += self.offsets[:, :, None].astype(np.float32)
        weights = weights.reshape(rows, columns)
        if self.column_order is None:
            return weights
        ordered_weights = np.empty_like(weights)
        ordered_weights[:, self.column_order] = weights
        return ordered_weights


def unpack_rows(weights: PackedWeights | np.ndarray, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Return ``rows`` of a matrix of integers, or of floats in f16, f32, or bf16 as uint16, in float32."""
    if isinstance(weights, PackedWeights):
        return weights.take_rows(rows).unpack()
    if weights.dtype == np.uint16:
        return (weights[rows].astype(np.uint32) << 16).view(np.float32)
    return weights[rows].astype(np.float32)


def measure_rounding(packed: PackedWeights, exact: PackedWeights) -> float:
    """Return the error of ``packed`` relative to ``exact``: its root mean square, as a share of the weights'."""
    step = max(1, exact.shape[0] // ERROR_SAMPLE_ROWS)
    rows = np.arange(0, exact.shape[0], step)
    exact_weights = exact.take_rows(rows).unpack()
    difference = packed.take_rows(rows).unpack() - exact_weights
    size = float(np.sqrt(np.mean(np.square(exact_weights, dtype=np.float64))))
    error = float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))
    return error / size if size else error


def round_to_f16_if_exact(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers in f16 if all conversions are exact, else in f32."""
    numbers = numbers.astype(np.float32)
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float16)
    return halves if np.array_equal(halves.astype(np.float32), numbers) else numbers


def make_weights_node(packed: PackedWeights, expert_count: int | None = None) -> ov.Node:
    """Return the weights' node, (rows, columns) f32, without offsets and in the stored order.

    expert_count: make it (experts, rows, columns); the matrix has the experts' rows one after another.
    """
    row_count, columns = packed.shape
    rows = [row_count] if expert_count is None else [expert_count, row_count // expert_count]
    groups = packed.scales.shape[1]
    shape = [*rows, columns] if groups == 1 else [*rows, groups, columns // groups]
    group_shape = [*rows, 1] if groups == 1 else [*rows, groups, 1]
    weights = ops.convert(make_integer_constant(packed.integers, shape, packed.element_type), "f32")
    if packed.zero_points is not None and packed.zero_points.dtype == np.float16:
        zero_points = make_constant(packed.zero_points.reshape(group_shape))
        weights = ops.subtract(weights, ops.convert(zero_points, "f32"))
    elif packed.zero_points is not None:
        zero_points = make_integer_constant(packed.zero_points, group_shape, packed.element_type)
        weights = ops.subtract(weights, ops.convert(zero_points, "f32"))
    scales = make_constant(packed.scales.reshape(group_shape))
    weights = ops.multiply(weights, scales if packed.scales.dtype == np.float32 else ops.convert(scales, "f32"))
    return weights if groups == 1 else ops.reshape(weights, np.array([*rows, columns], np.int64), False)


def make_integer_constant(integers: np.ndarray, shape: list[int], element_type: str) -> ov.Node:
    """Return a constant of integers; if they have four bits, two share a byte, the first in its lower half."""
    stored = np.ascontiguousarray(integers).reshape(-1).view(np.uint8)
    if element_type in ("i4", "u4", "nf4"):
        if stored.size % 2:
            stored = np.append(stored, np.uint8(0))
        stored = (stored[::2] & 15) | (stored[1::2] << 4)
    return ov.op.Constant(ov.Tensor(stored, shape, getattr(ov.Type, element_type)), shared_memory=False)


def make_constant(numbers: np.ndarray) -> ov.Node:
    return ov.op.Constant(ov.Tensor(np.ascontiguousarray(numbers)), shared_memory=False)
