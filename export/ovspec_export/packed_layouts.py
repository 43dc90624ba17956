"""The layouts of GPTQ, AWQ, compressed-tensors and bitsandbytes for a layer's integers and scales.

Several integers share an int32, the first in its lowest bits. Each function takes a layer's tensors by their names,
and returns the integers with a row per output.
"""

from __future__ import annotations

import json

import numpy as np

from ovspec_export.packed_weights import NF4_VALUES, PackedWeights, round_to_f16_if_exact

# The columns in an int32 of AWQ, from its lowest bits on.
AWQ_ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])
BITS = (2, 4, 8)  # of integers that don't cross the ends of an int32


def unpack_integers(packed: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Return the unsigned integers of ``bits`` bits packed along an axis of ``packed``, a matrix of int32, as uint8."""
    rows, columns = packed.shape
    per_number = 32 // bits
    stored = np.ascontiguousarray(packed).astype("<i4").view(np.uint8).reshape(rows, columns, 4)
    if bits < 8:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        stored = (stored[..., None] >> shifts) & np.uint8(2**bits - 1)
    integers = stored.reshape(rows, columns, per_number)
    if axis == 1:
        return integers.reshape(rows, columns * per_number)
    return integers.transpose(0, 2, 1).reshape(rows * per_number, columns)


def read_gptq(tensors: dict[str, np.ndarray], bits: int, zero_shift: int) -> PackedWeights:
    """Return the weights of a layer of GPTQ: ``qweight``, ``qzeros``, ``scales`` and perhaps ``g_idx``.

    zero_shift: added to a stored zero point, 1 in the usual format; the sum wraps around.

    Raises:
        ValueError: the shapes don't fit together, or groups differ in size.
    """
    integers = unpack_integers(tensors["qweight"], bits, axis=0).T
    scales = tensors["scales"].T
    zero_points = (unpack_integers(tensors["qzeros"], bits, axis=1).T + np.uint8(zero_shift)) & np.uint8(2**bits - 1)
    column_order = find_column_order(tensors.get("g_idx"), integers.shape[1], scales.shape[1])
    if column_order is not None:
        integers = integers[:, column_order]
    return make_packed_weights(integers, bits, scales, zero_points, column_order)


def read_awq(tensors: dict[str, np.ndarray], bits: int) -> PackedWeights:
    """Return the weights of a layer of AWQ, version GEMM: ``qweight``, ``scales`` and perhaps ``qzeros``.

    Raises:
        ValueError: the shapes don't fit together.
    """
    integers = reorder_awq(unpack_integers(tensors["qweight"], bits, axis=1)).T
    scales = tensors["scales"].T
    if "qzeros" in tensors:
        zero_points = reorder_awq(unpack_integers(tensors["qzeros"], bits, axis=1)).T
    else:
        zero_points = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
    return make_packed_weights(integers, bits, scales, zero_points)


def reorder_awq(integers: np.ndarray) -> np.ndarray:
    """Return the columns in the model's order."""
    places = np.argsort(AWQ_ORDER)
    return integers.reshape(len(integers), -1, len(places))[..., places].reshape(integers.shape)


def read_compressed_tensors(tensors: dict[str, np.ndarray]) -> PackedWeights:
    """Return the weights of a layer of compressed-tensors, with packed integers (four or eight bits) or int8.

    Raises:
        ValueError: the shapes don't fit together, groups differ in size, or integers have other numbers of bits.
    """
    scales = tensors["weight_scale"]
    if "weight_packed" in tensors:
        rows, columns = (int(size) for size in tensors["weight_shape"])
        packed = tensors["weight_packed"]
        bits = next((bits for bits in BITS if packed.shape == (rows, -(-columns * bits // 32))), 0)
        if not bits:
            shape = " x ".join(map(str, packed.shape))
            raise ValueError(f"{shape} packed numbers can't hold {rows} x {columns} weights of 2, 4 or 8 bits")
        integers = unpack_integers(packed, bits, axis=1)[:, :columns]
    else:
        bits = 8
        integers = (tensors["weight"].astype(np.int16) + 128).astype(np.uint8)
        rows, columns = integers.shape
    scales = np.broadcast_to(
        scales.reshape(-1, 1) if scales.ndim < 2 else scales, (rows, scales.shape[-1] if scales.ndim > 1 else 1)
    )
    zero_points = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
    if (stored_zero_points := tensors.get("weight_zero_point")) is not None and stored_zero_points.dtype == np.int32:
        zero_points = unpack_integers(stored_zero_points, bits, axis=0)[:rows]
    elif stored_zero_points is not None:
        zero_points = np.broadcast_to(
            (stored_zero_points.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8).reshape(-1, scales.shape[1]),
            scales.shape,
        )
    column_order = find_column_order(tensors.get("weight_g_idx"), columns, scales.shape[1])
    if column_order is not None:
        integers = integers[:, column_order]
    return make_packed_weights(integers, bits, scales, zero_points, column_order)


def read_bitsandbytes_int8(tensors: dict[str, np.ndarray]) -> PackedWeights:
    """Return the weights of a layer of bitsandbytes in 8 bits: ``weight``, and ``SCB``, 127 times the rows' scales."""
    return PackedWeights(tensors["weight"].view(np.int8), "i8", tensors["SCB"].reshape(-1, 1) * np.float32(1 / 127))


def read_bitsandbytes_nf4(tensors: dict[str, np.ndarray]) -> PackedWeights:
    """Return the weights of a layer of bitsandbytes in NF4: ``weight``, two integers a byte, and their blocks' scales.

    The scales may be quantised, too: to 8 bits, indices into a map, in blocks with scales of their own.

    Raises:
        ValueError: the values aren't NF4's, the shapes don't fit together, or blocks cross the ends of rows.
    """
    state = json.loads(tensors["weight.quant_state.bitsandbytes__nf4"].tobytes())
    if not np.array_equal(tensors["weight.quant_map"], NF4_VALUES):
        raise ValueError("the values of quant_map aren't NF4's")
    rows, columns = state["shape"]
    block_size = state["blocksize"]
    if columns % block_size:
        raise ValueError(f"rows of {columns} weights can't be divided into blocks of {block_size}")
    scales = tensors["weight.absmax"].reshape(-1)
    if "weight.nested_absmax" in tensors:
        nested_scales = np.repeat(tensors["weight.nested_absmax"], state["nested_blocksize"])[: len(scales)]
        scales = tensors["weight.nested_quant_map"][scales] * nested_scales + np.float32(state["nested_offset"])
    if (stored := tensors["weight"].reshape(-1)).dtype != np.uint8:
        raise ValueError(f"the 4-bit weights are stored as {stored.dtype} instead of uint8")
    integers = np.stack([stored >> 4, stored & 15], axis=-1).reshape(rows, columns)  # the first in the upper half
    return PackedWeights(integers, "nf4", scales.reshape(rows, columns // block_size).astype(np.float32))


def find_column_order(group_numbers: np.ndarray | None, column_count: int, group_count: int) -> np.ndarray | None:
    """Return the columns sorted by their groups, (columns,), or None if they are in order.

    group_numbers: the group of each column; None, or all -1, for groups in order.

    Raises:
        ValueError: the groups differ in size.
    """
    if column_count % group_count:
        raise ValueError(f"{column_count} columns can't be divided into {group_count} equal groups")
    if group_numbers is None or (group_numbers < 0).all():
        return None
    if len(group_numbers) != column_count:
        raise ValueError(f"g_idx has {len(group_numbers)} group numbers for {column_count} columns")
    order = np.argsort(group_numbers, kind="stable")
    if not np.array_equal(group_numbers[order], np.repeat(np.arange(group_count), column_count // group_count)):
        raise ValueError("the groups have different sizes")
    return None if np.array_equal(order, np.arange(column_count)) else order


def make_packed_weights(
    integers: np.ndarray,
    bits: int,
    scales: np.ndarray,
    zero_points: np.ndarray,
    column_order: np.ndarray | None = None,
) -> PackedWeights:
    """Return weights of unsigned integers; signed and without zero points if all zero points are in the middle.

    Raises:
        ValueError: the shapes don't fit together.
    """
    rows, columns = integers.shape
    if scales.ndim != 2 or len(scales) != rows or columns % scales.shape[1] or zero_points.shape != scales.shape:
        scales_shape, zero_points_shape = (" x ".join(map(str, array.shape)) for array in (scales, zero_points))
        raise ValueError(
            f"{scales_shape} scales and {zero_points_shape} zero points don't fit {rows} x {columns} weights"
        )
    scales = round_to_f16_if_exact(scales)
    width = 8 if bits == 8 else 4
    if (zero_points == 2 ** (bits - 1)).all():
        signed = (integers.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)
        return PackedWeights(signed, f"i{width}", scales, column_order=column_order)
    return PackedWeights(
        np.ascontiguousarray(integers),
        f"u{width}",
        scales,
        np.ascontiguousarray(zero_points, np.uint8),
        column_order=column_order,
    )
