"""The blocks of each row of a paged decoder, and the tensors that they are in.

A block holds the keys and values of a fixed number of tokens, in all layers. A row's blocks need not be adjacent, and
forked rows share blocks until one of them writes (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import numpy as np
import openvino as ov

from ovspec.cache.block_arrays import BlockArray, DeviceBlockArray, HostBlockArray
from ovspec.cache.block_pool import BlockPool
from ovspec.cache.sequence import EMPTY_ROW
from ovspec.ir.compile import CompiledIR
from ovspec.ir.device import is_gpu
from ovspec.ir.heads import FEATURES_OUTPUT
from ovspec.ir.paged_attention import CACHE_INPUT

INITIAL_CAPACITY = 8


class BlockTables:
    """The blocks of a decoder's ``rows``, which start empty."""

    def __init__(self, rows: int, pool: BlockPool) -> None:
        self.block_size, self.pool = pool.block_size, pool
        self.tables: list[list[int]] = [[] for _ in range(rows)]  # each row's blocks, in text order
        self.version = 0  # changes whenever the tables may have changed

    def extend(self, row: int, begin: int, new_tokens: int) -> list[tuple[int, int]]:
        """Make room for ``new`` tokens from position ``begin`` of ``row`` on, in blocks that no other row holds.

        Returns the (from, to) pairs of blocks to copy first, in this order: those that exist and are shared.
        """
        table = self.tables[row]
        copies: list[tuple[int, int]] = []
        for index in reversed(range(begin // self.block_size, len(table)) if new_tokens else ()):
            if self.pool.is_shared(table[index]):
                shared, table[index] = table[index], self._allocate()
                self.release([shared])
                copies.append((shared, table[index]))
        for _ in range(len(table), -(-(begin + new_tokens) // self.block_size)):
            table.append(self._allocate())
        return copies

    def truncate(self, row: int, length: int) -> None:
        """Release the blocks that the first ``length`` tokens of ``row`` don't need."""
        table, kept = self.tables[row], -(-length // self.block_size)
        if len(table) > kept:
            self.release(table[kept:])
            del table[kept:]

    def reorder(self, rows: list[int]) -> None:
        """Let new row i hold the blocks of old row ``rows[i]``, or none if that is EMPTY."""
        old, self.tables = self.tables, [[] if row == EMPTY_ROW else list(self.tables[row]) for row in rows]
        for table in self.tables:
            self.pool.add_references(table)
        for table in old:
            self.release(table)
        self.version += 1

    def fork(self) -> BlockTables:
        """Return a copy whose rows hold the same blocks."""
        other = BlockTables(0, self.pool)
        other.tables = [list(table) for table in self.tables]
        for table in other.tables:
            self.pool.add_references(table)
        return other

    def replace_blocks(self, row: int, blocks: list[int]) -> None:
        """Let ``row`` hold these blocks instead of its own."""
        self.pool.add_references(blocks)
        self.release(self.tables[row])
        self.tables[row] = list(blocks)

    def keep_prefix(self, row: int, tokens: np.ndarray, owner: Hashable) -> None:
        """Keep what ``row`` holds of ``tokens`` (n,), to be found by other texts."""
        self.pool.keep_prefix(tokens, owner, self.tables[row])
        self.version += 1

    def release(self, blocks: list[int]) -> None:
        self.version += 1
        self.pool.release(blocks)

    def _allocate(self) -> int:
        self.version += 1
        return self.pool.allocate()


class BlockTensors:
    """Keys and values of all layers, for one decoder or several of the same compiled model.

    They are where the model computes. Features, which a head on any device reads, are always in this process.

    ``lock`` is held while blocks change owners or an inference runs, so decoders that share blocks take turns.
    ``most_tokens``: how many may be cached until blocks that no row holds give way; with 0, none of these are kept.
    """

    def __init__(self, ir: CompiledIR, most_tokens: float = 0) -> None:
        self.cache_inputs = {name: ir.compiled_model.input(name) for name in ir.inputs if CACHE_INPUT.fullmatch(name)}
        self._device = ir.device
        self._feature_width = ir.output_width(FEATURES_OUTPUT)
        # By name; a block's shape is (heads, block size, width) or, of features, (block size, width).
        self.arrays: dict[str, BlockArray] = {}
        self.lock = threading.RLock()
        self.version = 0  # changes whenever the arrays are reallocated
        self.block_size = self.cache_inputs["value_cache.0"].get_partial_shape()[2].get_length()
        self.pool = BlockPool(self.block_size)
        self.limit_tokens(most_tokens)
        self.capacity = 0  # number of blocks that the arrays have room for

    def limit_tokens(self, most_tokens: float) -> None:
        self.pool.used_limit = int(most_tokens // self.block_size)

    @property
    def idle_bytes(self) -> float:
        """The bytes of blocks that no row holds."""
        return sum(array.nbytes for array in list(self.arrays.values())) * self.pool.idle_count / max(self.capacity, 1)

    def free_idle_blocks(self) -> None:
        """Free the blocks that no row holds."""
        with self.lock:
            self.pool.free_idle_blocks()

    @property
    def feature_blocks(self) -> np.ndarray:
        """The features of each block's tokens, (blocks, block size, width) float32."""
        array = self.arrays[FEATURES_OUTPUT]
        assert isinstance(array, HostBlockArray)
        return array.values

    def grow(self) -> None:
        """Double the arrays until they have room for all blocks of the pool."""
        capacity = max(INITIAL_CAPACITY, self.capacity)
        while capacity < self.pool.needed_capacity:
            capacity *= 2
        if capacity > self.capacity:
            self._reallocate(capacity)

    def shrink_if_unused(self) -> int:
        """Shrink the arrays if no block is in use; return the size of the old arrays in bytes, or 0."""
        if self.pool.used_count or self.capacity <= INITIAL_CAPACITY:
            return 0
        freed = sum(array.nbytes for array in self.arrays.values())
        self.pool.restart_numbering()
        self.arrays = {}
        self._reallocate(INITIAL_CAPACITY)
        return freed

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for array in self.arrays.values():
                array.copy_block(source, target)

    def _create_array(self, name: str, capacity: int) -> BlockArray:
        if name == FEATURES_OUTPUT:
            return HostBlockArray(capacity, [self.block_size, self._feature_width], ov.Type.f32, np.float32)
        port = self.cache_inputs[name]
        shape = [length.get_length() for length in list(port.get_partial_shape())[1:]]
        kind = port.get_element_type()
        if is_gpu(self._device):
            return DeviceBlockArray(capacity, shape, kind, self._device)
        return HostBlockArray(capacity, shape, kind)

    def _reallocate(self, capacity: int) -> None:
        """Enlarge the arrays one by one, keeping the blocks."""
        for name in [*self.cache_inputs, *([FEATURES_OUTPUT] if self._feature_width else [])]:
            array = self.arrays.get(name)
            self.arrays[name] = array.with_capacity(capacity) if array else self._create_array(name, capacity)
        self.capacity = capacity
        self.version += 1
