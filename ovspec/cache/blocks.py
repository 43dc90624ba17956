"""The blocks of each row of a paged decoder, and the tensors that they are in.

A block holds the keys and values of a fixed number of tokens, in all layers. A row's blocks need not be adjacent, and
forked rows share blocks until one of them writes (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import numpy as np
import openvino as ov

from ovspec.cache.block_arrays import BlockArray, DeviceBlocks, HostBlocks
from ovspec.cache.block_pool import BlockPool
from ovspec.cache.sequence import EMPTY
from ovspec.ir.compile import CompiledIR
from ovspec.ir.device import is_gpu
from ovspec.ir.heads import FEATURES_OUTPUT
from ovspec.ir.paged_attention import CACHE_INPUT

FIRST_BLOCKS = 8


class Blocks:
    """The blocks of a decoder's ``rows``, which start empty."""

    def __init__(self, rows: int, pool: BlockPool) -> None:
        self.size, self.pool = pool.size, pool
        self.tables: list[list[int]] = [[] for _ in range(rows)]  # each row's blocks, in text order
        self.version = 0  # changes whenever the tables may have changed

    def extend(self, row: int, begin: int, new: int) -> list[tuple[int, int]]:
        """Make room for ``new`` tokens from position ``begin`` of ``row`` on, in blocks that no other row holds.

        Returns the (from, to) pairs of blocks to copy first, in this order: those that exist and are shared.
        """
        table = self.tables[row]
        copies: list[tuple[int, int]] = []
        for index in reversed(range(begin // self.size, len(table)) if new else ()):
            if self.pool.shared(table[index]):
                shared, table[index] = table[index], self._take()
                self.release([shared])
                copies.append((shared, table[index]))
        for _ in range(len(table), -(-(begin + new) // self.size)):
            table.append(self._take())
        return copies

    def truncate(self, row: int, length: int) -> None:
        """Release the blocks that the first ``length`` tokens of ``row`` don't need."""
        table, kept = self.tables[row], -(-length // self.size)
        if len(table) > kept:
            self.release(table[kept:])
            del table[kept:]

    def reorder(self, rows: list[int]) -> None:
        """Let new row i hold the blocks of old row ``rows[i]``, or none if that is EMPTY."""
        old, self.tables = self.tables, [[] if row == EMPTY else list(self.tables[row]) for row in rows]
        for table in self.tables:
            self.pool.hold(table)
        for table in old:
            self.release(table)
        self.version += 1

    def fork(self) -> Blocks:
        """Return a copy whose rows hold the same blocks."""
        other = Blocks(0, self.pool)
        other.tables = [list(table) for table in self.tables]
        for table in other.tables:
            self.pool.hold(table)
        return other

    def adopt(self, row: int, blocks: list[int]) -> None:
        """Let ``row`` hold these blocks instead of its own."""
        self.pool.hold(blocks)
        self.release(self.tables[row])
        self.tables[row] = list(blocks)

    def keep(self, row: int, tokens: np.ndarray, owner: Hashable) -> None:
        """Keep what ``row`` holds of ``tokens`` (n,), to be found by other texts."""
        self.pool.keep(tokens, owner, self.tables[row])
        self.version += 1

    def release(self, blocks: list[int]) -> None:
        self.version += 1
        self.pool.release(blocks)

    def _take(self) -> int:
        self.version += 1
        return self.pool.take()


class BlockTensors:
    """Keys and values of all layers, for one decoder or several of the same compiled model.

    They are where the model computes. Features, which a head on any device reads, are always in this process.

    ``lock`` is held while blocks change owners or an inference runs, so decoders that share blocks take turns.
    ``most_tokens``: how many may be cached until blocks that no row holds give way; with 0, none of these are kept.
    """

    def __init__(self, ir: CompiledIR, most_tokens: float = 0) -> None:
        self.ports = {name: ir.compiled_model.input(name) for name in ir.inputs if CACHE_INPUT.fullmatch(name)}
        self._device = ir.device
        self._features = ir.output_width(FEATURES_OUTPUT)
        # By name; a block's shape is (heads, block size, width) or, of features, (block size, width).
        self.arrays: dict[str, BlockArray] = {}
        self.lock = threading.RLock()
        self.version = 0  # changes whenever the arrays are reallocated
        self.block_size = self.ports["value_cache.0"].get_partial_shape()[2].get_length()
        self.pool = BlockPool(self.block_size)
        self.limit(most_tokens)
        self.capacity = 0  # number of blocks that the arrays have room for

    def limit(self, most_tokens: float) -> None:
        self.pool.most = int(most_tokens // self.block_size)

    @property
    def spare(self) -> float:
        """The bytes of blocks that no row holds."""
        return sum(array.nbytes for array in list(self.arrays.values())) * self.pool.idle / max(self.capacity, 1)

    def give_way(self) -> None:
        """Free the blocks that no row holds."""
        with self.lock:
            self.pool.forget()

    @property
    def features(self) -> np.ndarray:
        """The features of each block's tokens, (blocks, block size, width) float32."""
        array = self.arrays[FEATURES_OUTPUT]
        assert isinstance(array, HostBlocks)
        return array.values

    def make_room(self) -> None:
        """Double the arrays until they have room for all blocks of the pool."""
        capacity = max(FIRST_BLOCKS, self.capacity)
        while capacity < self.pool.needed:
            capacity *= 2
        if capacity > self.capacity:
            self._allocate(capacity)

    def free(self) -> int:
        """Shrink the arrays if no block is in use; return the size of the old arrays in bytes, or 0."""
        if self.pool.used or self.capacity <= FIRST_BLOCKS:
            return 0
        freed = sum(array.nbytes for array in self.arrays.values())
        self.pool.reset()
        self.arrays = {}
        self._allocate(FIRST_BLOCKS)
        return freed

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for array in self.arrays.values():
                array.copy(source, target)

    def _new(self, name: str, capacity: int) -> BlockArray:
        if name == FEATURES_OUTPUT:
            return HostBlocks(capacity, [self.block_size, self._features], ov.Type.f32, np.float32)
        port = self.ports[name]
        shape = [length.get_length() for length in list(port.get_partial_shape())[1:]]
        kind = port.get_element_type()
        if is_gpu(self._device):
            return DeviceBlocks(capacity, shape, kind, self._device)
        return HostBlocks(capacity, shape, kind)

    def _allocate(self, capacity: int) -> None:
        """Enlarge the arrays one by one, keeping the blocks."""
        for name in [*self.ports, *([FEATURES_OUTPUT] if self._features else [])]:
            array = self.arrays.get(name)
            self.arrays[name] = array.grown(capacity) if array else self._new(name, capacity)
        self.capacity = capacity
        self.version += 1
