"""The blocks of ggml's quantised types, read as integers with scales.

The layouts are from ggml-common.h and ggml-quants.c: a block has 32 weights of a row, or 256 in eight or sixteen
groups, with integers as scales, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ovspec_export.packed_weights import PackedWeights, measure_rounding

MAX_ROUNDING = 1e-3  # of weights, as a share of their root mean square
# The values of the sixteen codes of IQ4_NL and IQ4_XS, and of MXFP4 in halves.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def read_packed_weights(blocks: np.ndarray, type_name: str, with_offsets: bool = False) -> PackedWeights | None:
    """Return the weights in ``blocks``, (rows, bytes) uint8, as integers; None for a type without integers.

    Its scales are f16, and so are fractional zero points, unless rounding to f16 changes the weights by more than
    ``MAX_ROUNDING``; then the result is None, too, or the scales are f32.

    with_offsets: make offsets of the minimum of each group, in place of zero points.
    """
    if type_name not in BLOCK_READERS:
        return None
    exact = BLOCK_READERS[type_name](blocks)
    if exact.offsets is None:
        return round_scales(exact)
    rounded = center_integers(exact) if with_offsets else make_zero_points(exact)
    f16_parts = (rounded.scales, rounded.zero_points, rounded.offsets)
    if not all(np.isfinite(part).all() for part in f16_parts if part is not None):
        return None
    return rounded if measure_rounding(rounded, exact) <= MAX_ROUNDING else None


def round_scales(exact: PackedWeights) -> PackedWeights:
    """Return the same with scales in f16, if the conversion is exact or nearly so."""
    halves = convert_to_f16(exact.scales)
    rounded = replace(exact, scales=halves)
    if np.isfinite(halves).all() and measure_rounding(rounded, exact) <= MAX_ROUNDING:
        return rounded
    return exact


def make_zero_points(exact: PackedWeights) -> PackedWeights:
    """Return ``exact``, with zero points in f16 in place of its offsets."""
    assert exact.offsets is not None
    scales = convert_to_f16(exact.scales)
    # A group without a scale is only its offset, expressed by another scale and the zero point.
    is_constant = (scales == 0) & (exact.offsets != 0)
    scales[is_constant] = convert_to_f16(np.abs(exact.offsets[is_constant]) / 8)
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)
    integers = exact.integers.reshape(*scales.shape, -1)
    if is_constant.any():
        integers = np.where(is_constant[..., None], np.uint8(0), integers)
    zero_points = convert_to_f16(np.where(scales == 0, 0, -exact.offsets / divisors))
    return PackedWeights(integers.reshape(exact.shape), exact.element_type, scales, zero_points)


def center_integers(exact: PackedWeights) -> PackedWeights:
    """Return ``exact``, with its unsigned integers made signed, offsets adapted, and everything else in f16."""
    assert exact.offsets is not None
    center = 8 if exact.element_type == "u4" else 16
    integers = exact.integers.astype(np.int8) - np.int8(center)
    scales = convert_to_f16(exact.scales)
    offsets = convert_to_f16(exact.offsets + center * scales.astype(np.float32))
    return PackedWeights(integers, "i4" if center == 8 else "i8", scales, offsets=offsets)


def convert_to_f16(numbers: np.ndarray) -> np.ndarray:
    """Return the numbers in f16; infinity for numbers out of range."""
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16)


# ---------------------------------------------------------------- blocks of 32


def split_blocks(blocks: np.ndarray, block_bytes: int) -> np.ndarray:
    """Return the blocks of each row, (rows, blocks, bytes)."""
    return np.ascontiguousarray(blocks).reshape(len(blocks), -1, block_bytes)


def read_halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return the f16 numbers at byte ``start`` of each block, (rows, blocks) float32."""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0].astype(np.float32)


def read_nibbles(stored: np.ndarray) -> np.ndarray:
    """Return two values from each byte, the lower halves first, (..., 2 * bytes) uint8."""
    return np.concatenate([stored & 15, stored >> 4], -1)


def read_high_bits(stored: np.ndarray) -> np.ndarray:
    """Return the bits of four bytes, the lowest first, as the fifth bits of 32 values, (..., 32) uint8."""
    return np.unpackbits(stored, axis=-1, bitorder="little") << 4


def join_rows(integers: np.ndarray) -> np.ndarray:
    return integers.reshape(len(integers), -1)


def read_q4_0(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 18)
    integers = read_nibbles(split[..., 2:]).astype(np.int8) - np.int8(8)
    return PackedWeights(join_rows(integers), "i4", read_halves(split, 0))


def read_q4_1(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 20)
    integers = join_rows(read_nibbles(split[..., 4:]))
    return PackedWeights(integers, "u4", read_halves(split, 0), offsets=read_halves(split, 2))


def read_q5_0(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 22)
    integers = (read_nibbles(split[..., 6:]) | read_high_bits(split[..., 2:6])).astype(np.int8) - np.int8(16)
    return PackedWeights(join_rows(integers), "i8", read_halves(split, 0))


def read_q5_1(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 24)
    integers = join_rows(read_nibbles(split[..., 8:]) | read_high_bits(split[..., 4:8]))
    return PackedWeights(integers, "u8", read_halves(split, 0), offsets=read_halves(split, 2))


def read_q8_0(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 34)
    return PackedWeights(join_rows(split[..., 2:].view(np.int8)), "i8", read_halves(split, 0))


def read_iq4_nl(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 18)
    return PackedWeights(join_rows(IQ4_VALUES[read_nibbles(split[..., 2:])]), "i8", read_halves(split, 0))


def read_mxfp4(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 17)
    exponents = split[..., 0].astype(np.int32) - 128  # the values are doubled
    return PackedWeights(
        join_rows(MXFP4_VALUES[read_nibbles(split[..., 1:])]), "i8", np.ldexp(np.float32(1), exponents)
    )


# ---------------------------------------------------------------- blocks of 256


def read_k_scales(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the eight scales and the eight minima, of six bits each, in twelve bytes, (rows, blocks, 8) float32."""
    low, middle, high = stored[..., :4], stored[..., 4:8], stored[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], -1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], -1)
    return scales.astype(np.float32), minima.astype(np.float32)


def make_k_weights(split: np.ndarray, integers: np.ndarray, element_type: str) -> PackedWeights:
    """Return weights of Q4_K or Q5_K: their blocks begin with the scale of scales and the scale of minima."""
    scales, minima = read_k_scales(split[..., 4:16])
    scales *= read_halves(split, 0)[..., None]
    offsets = -minima * read_halves(split, 2)[..., None]
    return PackedWeights(join_rows(integers), element_type, join_rows(scales), offsets=join_rows(offsets))


def read_q4_k(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 144)
    stored = split[..., 16:].reshape(*split.shape[:2], 4, 32)
    return make_k_weights(split, read_nibbles(stored), "u4")


def read_q5_k(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 176)
    stored = split[..., 48:].reshape(*split.shape[:2], 4, 32)
    # Bit i of byte j is the fifth bit of value j in group i.
    high_bits = np.unpackbits(split[..., None, 16:48], axis=-2, bitorder="little") << 4
    return make_k_weights(split, read_nibbles(stored).reshape(*split.shape[:2], 8, 32) | high_bits, "u8")


def read_q6_k(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 210)
    low = split[..., :128].reshape(*split.shape[:2], 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & 15
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = split[..., 128:192].reshape(*split.shape[:2], 2, 1, 32) >> shifts & 3
    integers = (low.reshape(*split.shape[:2], 256) | high.reshape(*split.shape[:2], 256) << 4).astype(np.int8)
    scales = split[..., 192:208].view(np.int8).astype(np.float32) * read_halves(split, 208)[..., None]
    return PackedWeights(join_rows(integers - np.int8(32)), "i8", join_rows(scales))


def read_iq4_xs(blocks: np.ndarray) -> PackedWeights:
    split = split_blocks(blocks, 136)
    integers = IQ4_VALUES[read_nibbles(split[..., 8:].reshape(*split.shape[:2], 8, 16))]
    low = np.stack([split[..., 4:8] & 15, split[..., 4:8] >> 4], -1).reshape(*split.shape[:2], 8)
    high_pairs = np.ascontiguousarray(split[..., 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high_pairs << 4).astype(np.float32) - 32
    return PackedWeights(join_rows(integers), "i8", join_rows(scales * read_halves(split, 0)[..., None]))


BLOCK_READERS: dict[str, Callable[[np.ndarray], PackedWeights]] = {
    "Q4_0": read_q4_0,
    "Q4_1": read_q4_1,
    "Q5_0": read_q5_0,
    "Q5_1": read_q5_1,
    "Q8_0": read_q8_0,
    "Q4_K": read_q4_k,
    "Q5_K": read_q5_k,
    "Q6_K": read_q6_k,
    "IQ4_NL": read_iq4_nl,
    "IQ4_XS": read_iq4_xs,
    "MXFP4": read_mxfp4,
}
