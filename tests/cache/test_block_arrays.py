"""Blocks in this process; those on a device are tested in tests/gpu."""

from __future__ import annotations

import itertools

import numpy as np
import openvino as ov
from hypothesis import given
from hypothesis import strategies as st

from ovspec.cache.block_arrays import HostBlockArray, split_into_consecutive_runs


@given(st.lists(st.integers(0, 9)))
def test_runs_are_what_follows_one_another(blocks: list[int]) -> None:
    parts = list(split_into_consecutive_runs(blocks))
    assert [block for begin, end, first in parts for block in range(first, first + end - begin)] == blocks
    for (begin, end, first), (following, _, other) in itertools.pairwise(parts):
        assert end == following
        assert other != first + end - begin, "else they would be one"


def test_blocks_are_copied_kept_and_read() -> None:
    blocks = HostBlockArray(2, [3], ov.Type.bf16)
    blocks.write_bits([1], np.array([[1, 2, 3]], np.uint16))
    blocks.copy_block(1, 0)
    larger = blocks.with_capacity(5)
    assert larger.read_bits([0, 1, 4]).tolist() == [[1, 2, 3], [1, 2, 3], [0, 0, 0]]
    assert list(larger.tensor.get_shape()) == [5, 3]
    assert larger.tensor.get_element_type() == ov.Type.bf16
