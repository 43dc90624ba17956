"""The tensors behind the blocks of a paged cache: memory of our own that inferences read and write."""

from __future__ import annotations

import threading

import numpy as np
import openvino as ov

from ovspec.decoders.blocks import Pool
from ovspec.ir.compile import CompiledIR

FIRST_BLOCKS = 8


class BlockTensors:
    """Keys and values of all layers, for one decoder or for several that were forked from each other.

    ``lock`` is held while blocks change hands or an inference runs: decoders that share blocks take turns.
    """

    def __init__(self, ir: CompiledIR, names: list[str]) -> None:
        self.ports = {name: ir.compiled.input(name) for name in names}
        self.arrays: dict[str, np.ndarray] = {}  # name -> (blocks, heads, block size, width), raw
        self.pool = Pool()
        self.lock = threading.RLock()
        self.version = 0  # of the arrays: another one where they are others
        self.block_size = self.ports["value_cache.0"].get_partial_shape()[2].get_length()
        self.capacity = 0  # blocks that the arrays hold

    def make_room(self) -> None:
        """Double the arrays until they hold what the pool needs."""
        capacity = max(FIRST_BLOCKS, self.capacity)
        while capacity < self.pool.needed:
            capacity *= 2
        if capacity > self.capacity:
            self._allocate(capacity)

    def free(self) -> int:
        """Give up the arrays, where no row holds a block; their bytes."""
        if not self.pool.used and self.capacity > FIRST_BLOCKS:
            freed = sum(array.nbytes for array in self.arrays.values())
            self.pool.reset()
            self.arrays = {}
            self._allocate(FIRST_BLOCKS)
            return freed
        return 0

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks: (from, to)."""
        for source, target in pairs:
            for array in self.arrays.values():
                array[target] = array[source]

    def tensor(self, name: str) -> ov.Tensor:
        """What an inference is given."""
        array = self.arrays[name]
        return ov.Tensor(array, ov.Shape(list(array.shape)), self.ports[name].get_element_type())

    def _allocate(self, capacity: int) -> None:
        """Layer by layer. Memory that no block has used is reserved, not taken."""
        for name, port in self.ports.items():
            # bf16 is no type of numpy; blocks are only ever copied, so their bits will do.
            bits = {1: np.uint8, 2: np.uint16, 4: np.uint32}[port.get_element_type().size]
            shape = [capacity, *(length.get_length() for length in list(port.get_partial_shape())[1:])]
            array = np.zeros(shape, bits)
            if name in self.arrays:
                array[: self.capacity] = self.arrays[name]
            self.arrays[name] = array
        self.capacity = capacity
        self.version += 1
