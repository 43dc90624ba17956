"""The tensors that hold the blocks of a paged KV cache. ovspec owns their memory; inferences read and write it."""

from __future__ import annotations

import threading

import numpy as np
import openvino as ov

from ovspec.decoders.blocks import Pool
from ovspec.ir.compile import CompiledIR

FIRST_BLOCKS = 8


class BlockTensors:
    """Keys and values of all layers, for one decoder or for several that were forked from each other.

    ``lock`` is held while blocks change owners or an inference runs, so decoders that share blocks take turns.
    """

    def __init__(self, ir: CompiledIR, names: list[str]) -> None:
        self.ports = {name: ir.compiled.input(name) for name in names}
        self.arrays: dict[str, np.ndarray] = {}  # name -> (blocks, heads, block size, width), as raw bits
        self.pool = Pool()
        self.lock = threading.RLock()
        self.version = 0  # changes whenever the arrays are reallocated
        self.block_size = self.ports["value_cache.0"].get_partial_shape()[2].get_length()
        self.capacity = 0  # number of blocks that the arrays have room for

    def make_room(self) -> None:
        """Double the arrays until they have room for all blocks of the pool."""
        capacity = max(FIRST_BLOCKS, self.capacity)
        while capacity < self.pool.needed:
            capacity *= 2
        if capacity > self.capacity:
            self._allocate(capacity)

    def free(self) -> int:
        """Shrink the arrays if no row holds a block; return the size of the old arrays in bytes, or 0."""
        if not self.pool.used and self.capacity > FIRST_BLOCKS:
            freed = sum(array.nbytes for array in self.arrays.values())
            self.pool.reset()
            self.arrays = {}
            self._allocate(FIRST_BLOCKS)
            return freed
        return 0

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, given as (from, to) pairs."""
        for source, target in pairs:
            for array in self.arrays.values():
                array[target] = array[source]

    def tensor(self, name: str) -> ov.Tensor:
        """Return the array ``name`` as an OpenVINO tensor."""
        array = self.arrays[name]
        return ov.Tensor(array, ov.Shape(list(array.shape)), self.ports[name].get_element_type())

    def _allocate(self, capacity: int) -> None:
        """Enlarge the arrays one by one, keeping the blocks. Memory that no block has used is only reserved."""
        for name, port in self.ports.items():
            # numpy has no bf16. Blocks are only copied, so an integer type of the same size will do.
            bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[port.get_element_type().size]
            shape = [capacity, *(length.get_length() for length in list(port.get_partial_shape())[1:])]
            array = np.zeros(shape, bits)
            if name in self.arrays:
                array[: self.capacity] = self.arrays[name]
            self.arrays[name] = array
        self.capacity = capacity
        self.version += 1
