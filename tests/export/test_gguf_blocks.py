"""Blocks of GGUF files as integers: the ``gguf`` package, which we didn't write, says which weights they hold."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from ovspec_export.gguf_blocks import BLOCK_READERS, MAX_ROUNDING, read_packed_weights
from ovspec_export.packed_weights import INTEGER_RANGES
from quantised_gguf import EXACT, NEARLY_EXACT, SCALES, random_blocks

SHAPE = (24, 512)


def blocks_of(kind: str, seed: int = 0) -> np.ndarray:
    if kind in SCALES or kind == "MXFP4":
        return random_blocks(kind, SHAPE, 0.05, seed)
    values = np.random.default_rng(seed).normal(0, 0.05, SHAPE).astype(np.float32)
    return quantize(values, GGMLQuantizationType[kind])


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def test_every_type_is_tested() -> None:
    assert sorted(BLOCK_READERS) == sorted((*EXACT, *NEARLY_EXACT))


@pytest.mark.parametrize("kind", BLOCK_READERS)
def test_integers_and_f32_scales_are_exact(kind: str) -> None:
    blocks = blocks_of(kind)
    exact = BLOCK_READERS[kind](blocks)
    assert np.array_equal(exact.unpack(), dequantize(blocks, GGMLQuantizationType[kind]))
    low, high = INTEGER_RANGES[exact.element_type]
    assert low <= exact.integers.min() < exact.integers.max() <= high


@pytest.mark.parametrize("with_offsets", [False, True])
@pytest.mark.parametrize("kind", BLOCK_READERS)
def test_what_is_kept_is_exact_or_nearly_so(kind: str, with_offsets: bool) -> None:
    blocks = blocks_of(kind)
    expected = dequantize(blocks, GGMLQuantizationType[kind])
    packed = read_packed_weights(blocks, kind, with_offsets)
    assert packed is not None and packed.scales.dtype == np.float16
    if kind in EXACT:
        assert np.array_equal(packed.unpack(), expected)
    else:
        assert rms(packed.unpack() - expected) < 0.5 * MAX_ROUNDING * rms(expected)
    assert (packed.offsets is not None) == (with_offsets and kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_1", "Q4_K", "Q5_K"])
def test_groups_of_equal_weights_are_kept(kind: str) -> None:
    """A group without a scale consists of its minimum, which no zero point of the scale 0 could make."""
    blocks = blocks_of(kind)
    places = list(SCALES.get(kind, (0, 2)))
    each = blocks.reshape(-1, {"Q4_1": 20, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176}[kind])
    each[::3, places[0] : places[0] + 2] = 0
    expected = dequantize(blocks, GGMLQuantizationType[kind])
    for with_offsets in (False, True):
        packed = read_packed_weights(blocks, kind, with_offsets)
        assert packed is not None and rms(packed.unpack() - expected) < MAX_ROUNDING * rms(expected)


def test_scales_that_f16_cannot_hold_are_not_kept_in_f16() -> None:
    blocks = random_blocks("MXFP4", SHAPE, 2.0**-30, 1)
    packed = read_packed_weights(blocks, "MXFP4")
    assert packed is not None and packed.scales.dtype == np.float32
    assert np.array_equal(packed.unpack(), dequantize(blocks, GGMLQuantizationType.MXFP4))
    large = random_blocks("Q6_K", SHAPE, 0.05, 1)
    large.reshape(-1, 210)[:, 208:] = np.array([6e4], np.float16).view(np.uint8)
    packed = read_packed_weights(large, "Q6_K")
    assert packed is not None and np.array_equal(packed.unpack(), dequantize(large, GGMLQuantizationType.Q6_K))


@pytest.mark.parametrize("with_offsets", [False, True])
def test_minima_that_f16_cannot_hold_are_not_kept(with_offsets: bool) -> None:
    blocks = random_blocks("Q4_K", (1024, 256), 0.05, 0)  # of which every other row's rounding is measured
    blocks[5, :4] = np.array([6e4, 6e4], np.float16).view(np.uint8)
    assert read_packed_weights(blocks, "Q4_K", with_offsets) is None


def test_types_without_integers_are_left_to_others() -> None:
    assert read_packed_weights(np.zeros((4, 110), np.uint8), "Q3_K") is None
