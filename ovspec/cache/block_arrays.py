"""Memory for the blocks of a layer's keys or values: in this process, or on the model's device.

Blocks are only copied, so numpy sees their values as raw bits: it has no bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import openvino as ov
from numpy.typing import DTypeLike

from ovspec.ir.device import openvino_core

RAW_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32}  # by size of a value in bytes


class BlockArray(Protocol):
    """Blocks of the same shape and type, numbered from 0."""

    shape: list[int]  # of a block
    dtype: np.dtype[Any]  # of its bits

    @property
    def nbytes(self) -> int: ...

    @property
    def tensor(self) -> ov.Tensor | ov.RemoteTensor:
        """All blocks, as input of an infer request."""
        ...

    def read_bits(self, blocks: list[int]) -> np.ndarray:
        """Return the bits of ``blocks``, (len(blocks), *shape)."""
        ...

    def write_bits(self, blocks: list[int], values: np.ndarray) -> None:
        """Set the bits of ``blocks`` to ``values``, a result of ``read_bits``."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy block ``source`` over block ``target``."""
        ...

    def with_capacity(self, capacity: int) -> BlockArray:
        """Return an array of ``capacity`` blocks, with a copy of these at its beginning."""
        ...


class HostBlockArray:
    """Blocks in this process's memory. The memory of unused blocks is reserved but not committed."""

    def __init__(self, capacity: int, shape: list[int], element_type: ov.Type, dtype: DTypeLike | None = None) -> None:
        self.element_type = element_type
        self.shape = shape
        self.dtype = np.dtype(dtype or RAW_DTYPES[element_type.size])
        self.values = np.zeros((capacity, *shape), self.dtype)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def tensor(self) -> ov.Tensor:
        return ov.Tensor(self.values, ov.Shape(list(self.values.shape)), self.element_type)

    def read_bits(self, blocks: list[int]) -> np.ndarray:
        return self.values[blocks]

    def write_bits(self, blocks: list[int], values: np.ndarray) -> None:
        self.values[blocks] = values

    def copy_block(self, source: int, target: int) -> None:
        self.values[target] = self.values[source]

    def with_capacity(self, capacity: int) -> HostBlockArray:
        larger_array = HostBlockArray(capacity, self.shape, self.element_type, self.dtype)
        larger_array.values[: len(self.values)] = self.values
        return larger_array


class DeviceBlockArray:
    """Blocks in the memory of a device such as a GPU, copied there without the host."""

    def __init__(self, capacity: int, shape: list[int], element_type: ov.Type, device: str) -> None:
        self.element_type = element_type
        self.device = device
        self.shape = shape
        self.dtype = np.dtype(RAW_DTYPES[element_type.size])
        self._context = openvino_core().get_default_context(device)
        self._tensor = self._create_tensor(capacity)

    @property
    def nbytes(self) -> int:
        return self._tensor.get_byte_size()

    @property
    def tensor(self) -> ov.RemoteTensor:
        return self._tensor

    def read_bits(self, blocks: list[int]) -> np.ndarray:
        values = np.zeros((len(blocks), *self.shape), self.dtype)
        for begin, end, first_block in split_into_consecutive_runs(blocks):
            host_tensor = ov.Tensor(self.element_type, ov.Shape([end - begin, *self.shape]))
            self._view_blocks(self._tensor, first_block, end - begin).copy_to(host_tensor)
            values[begin:end] = host_tensor.data.view(self.dtype)
        return values

    def write_bits(self, blocks: list[int], values: np.ndarray) -> None:
        # A view of a tensor accepts values only from another tensor on the device.
        staging_tensor = self._create_tensor(len(blocks))
        staging_tensor.copy_from(
            ov.Tensor(np.ascontiguousarray(values), ov.Shape(list(values.shape)), self.element_type)
        )
        for begin, end, first_block in split_into_consecutive_runs(blocks):
            staged_blocks = self._view_blocks(staging_tensor, begin, end - begin)
            self._view_blocks(self._tensor, first_block, end - begin).copy_from(staged_blocks)

    def copy_block(self, source: int, target: int) -> None:
        self._view_blocks(self._tensor, target, 1).copy_from(self._view_blocks(self._tensor, source, 1))

    def with_capacity(self, capacity: int) -> DeviceBlockArray:
        larger_array = DeviceBlockArray(capacity, self.shape, self.element_type, self.device)
        block_count = self._tensor.get_shape()[0]
        self._view_blocks(larger_array._tensor, 0, block_count).copy_from(
            self._view_blocks(self._tensor, 0, block_count)
        )
        return larger_array

    def _create_tensor(self, capacity: int) -> ov.RemoteTensor:
        return self._context.create_tensor(self.element_type, ov.Shape([capacity, *self.shape]), {})

    def _view_blocks(self, tensor: ov.RemoteTensor, first_block: int, block_count: int) -> ov.RemoteTensor:
        """Return a view of ``block_count`` blocks of ``tensor``, from ``first_block`` on."""
        begin_coordinate = [first_block, *[0] * len(self.shape)]
        return ov.RemoteTensor(
            tensor, ov.Coordinate(begin_coordinate), ov.Coordinate([first_block + block_count, *self.shape])
        )


def split_into_consecutive_runs(blocks: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, first block) of each run of consecutive numbers in ``blocks``."""
    begin = 0
    for end in range(1, len(blocks) + 1):
        if end == len(blocks) or blocks[end] != blocks[end - 1] + 1:
            yield begin, end, blocks[begin]
            begin = end
