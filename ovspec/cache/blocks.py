"""The block tables of a paged decoder, and the tensors with the blocks.

A block has the keys and values of a fixed number of tokens, in all layers. A row's blocks need not be adjacent, and
forked rows share blocks until a row writes to them (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Hashable

import numpy as np
import openvino as ov

from ovspec.cache.block_arrays import BlockArray, DeviceBlockArray, HostBlockArray
from ovspec.cache.block_pool import BlockPool
from ovspec.cache.sequence import EMPTY_ROW
from ovspec.ir.compile import CompiledIR
from ovspec.ir.device import is_gpu
from ovspec.ir.heads import FEATURES_OUTPUT
from ovspec.ir.memory import kv_bytes_per_token
from ovspec.ir.paged_attention import CACHE_INPUT

INITIAL_CAPACITY = 8


class BlockTables:
    """The blocks of each row of a decoder; ``rows`` empty rows at first."""

    def __init__(self, rows: int, pool: BlockPool) -> None:
        self.block_size = pool.block_size
        self.pool = pool
        self.tables: list[list[int]] = [[] for _ in range(rows)]  # each row's blocks, in text order
        self.version = 0  # changes whenever the tables may have changed
        # A session may be dropped without being closed.
        weakref.finalize(self, pool.dropped_tables.append, self.tables).atexit = False

    def extend(self, row: int, begin: int, new_tokens: int) -> list[tuple[int, int]]:
        """Make room for ``new_tokens`` tokens from position ``begin`` of ``row`` on, in unshared blocks.

        Returns the shared blocks to copy before writing, as (from, to) pairs in this order.
        """
        table = self.tables[row]
        block_copies: list[tuple[int, int]] = []
        written_indices = range(begin // self.block_size, len(table) if new_tokens else 0)
        for index in reversed(written_indices):
            if self.pool.is_shared(table[index]):
                shared_block = table[index]
                table[index] = self._allocate()
                self.release_blocks([shared_block])
                block_copies.append((shared_block, table[index]))
        for _ in range(len(table), -(-(begin + new_tokens) // self.block_size)):
            table.append(self._allocate())
        return block_copies

    def truncate(self, row: int, length: int) -> None:
        """Release the blocks of ``row`` after its first ``length`` tokens."""
        table = self.tables[row]
        needed_blocks = -(-length // self.block_size)
        if len(table) > needed_blocks:
            self.release_blocks(table[needed_blocks:])
            del table[needed_blocks:]

    def reorder(self, rows: list[int]) -> None:
        """Give new row i the blocks of old row ``rows[i]``, or no blocks for EMPTY_ROW."""
        old_tables = self.tables[:]
        self.tables[:] = [[] if row == EMPTY_ROW else list(old_tables[row]) for row in rows]
        for table in self.tables:
            self.pool.add_references(table)
        for table in old_tables:
            self.release_blocks(table)
        self.version += 1

    def fork(self) -> BlockTables:
        """Return a copy with the same blocks, shared."""
        forked_tables = BlockTables(0, self.pool)
        forked_tables.tables[:] = [list(table) for table in self.tables]
        for table in forked_tables.tables:
            self.pool.add_references(table)
        return forked_tables

    def replace_blocks(self, row: int, blocks: list[int]) -> None:
        """Replace the blocks of ``row`` by ``blocks``, shared with their other users."""
        self.pool.add_references(blocks)
        self.release_blocks(self.tables[row])
        self.tables[row] = list(blocks)

    def keep_prefix(self, row: int, tokens: np.ndarray, owner: Hashable) -> None:
        """Keep the blocks of ``row``, with ``tokens`` (n,), in the prefix cache."""
        self.pool.keep_prefix(tokens, owner, self.tables[row])
        self.version += 1

    def release_blocks(self, blocks: list[int]) -> None:
        self.version += 1
        self.pool.release_blocks(blocks)

    def _allocate(self) -> int:
        self.version += 1
        return self.pool.allocate()


class BlockTensors:
    """Keys and values of all layers, for all decoders of a compiled model; also its prefix cache.

    The tensors are in the memory of the model's device. Only the features are in host memory, because the head may run
    on another device.

    ``lock`` is held while blocks change owners or a forward pass runs, so decoders with the same tensors take turns.
    ``max_cached_tokens``: number of cached tokens above which idle blocks are evicted; 0 keeps no idle blocks.
    """

    def __init__(self, ir: CompiledIR, max_cached_tokens: float = 0) -> None:
        self.cache_inputs = {name: ir.compiled_model.input(name) for name in ir.inputs if CACHE_INPUT.fullmatch(name)}
        self._device = ir.device
        self._feature_width = ir.output_width(FEATURES_OUTPUT)
        # By name. A block's shape is (heads, block size, width), or (block size, width) for features.
        self.arrays: dict[str, BlockArray] = {}
        self.lock = threading.RLock()
        self.version = 0  # changes whenever the arrays are reallocated
        self.block_size = self.cache_inputs["value_cache.0"].get_partial_shape()[2].get_length()
        self.pool = BlockPool(self.block_size)
        self._state_bytes = 0
        if ir.state_advance:
            self._state_bytes = 4 * sum(map(math.prod, ir.state_advance.shapes))
            self.pool.snapshot_size = self._state_bytes / (self.block_size * kv_bytes_per_token(ir))
        self.limit_cached_tokens(max_cached_tokens)
        self.capacity = 0  # in blocks

    def limit_cached_tokens(self, max_cached_tokens: float) -> None:
        self.pool.used_limit = int(max_cached_tokens // self.block_size)

    @property
    def min_snapshot_distance(self) -> float:
        """The size of a snapshot of the recurrent states, in tokens with equally large keys and values."""
        return self.pool.snapshot_size * self.block_size

    @property
    def idle_count(self) -> int:
        return self.pool.idle_count

    @property
    def evicted_count(self) -> int:
        return self.pool.evicted_count

    @property
    def idle_bytes(self) -> float:
        """Size of the idle blocks and of the snapshots, in bytes."""
        total_bytes = sum(array.nbytes for array in list(self.arrays.values()))
        return total_bytes * self.pool.idle_count / max(self.capacity, 1) + self.pool.snapshot_count * self._state_bytes

    def free_idle(self) -> None:
        """Free the idle blocks."""
        with self.lock:
            self.pool.free_idle_blocks()

    @property
    def feature_blocks(self) -> np.ndarray:
        """The features of each block's tokens, (blocks, block size, width) float32."""
        array = self.arrays[FEATURES_OUTPUT]
        assert isinstance(array, HostBlockArray)
        return array.values

    def grow(self) -> None:
        """Double the arrays until the pool's blocks fit, but up to the pool's limit if this is enough."""
        capacity = max(INITIAL_CAPACITY, self.capacity)
        while capacity < self.pool.needed_capacity:
            capacity *= 2
        if self.pool.needed_capacity <= self.pool.used_limit < capacity:
            capacity = max(self.capacity, self.pool.used_limit)
        if capacity > self.capacity:
            self._reallocate(capacity)

    def shrink_if_unused(self) -> int:
        """Shrink the arrays if no block is in use; return the old size in bytes, or 0 if nothing was done."""
        if self.pool.used_count or self.capacity <= INITIAL_CAPACITY:
            return 0
        freed_bytes = sum(array.nbytes for array in self.arrays.values())
        self.pool.restart_numbering()
        self.arrays = {}
        self._reallocate(INITIAL_CAPACITY)
        return freed_bytes

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for source, target in pairs:
            for array in self.arrays.values():
                array.copy_block(source, target)

    def _create_array(self, name: str, capacity: int) -> BlockArray:
        if name == FEATURES_OUTPUT:
            return HostBlockArray(capacity, [self.block_size, self._feature_width], ov.Type.f32, np.float32)
        cache_port = self.cache_inputs[name]
        shape = [length.get_length() for length in list(cache_port.get_partial_shape())[1:]]
        element_type = cache_port.get_element_type()
        if is_gpu(self._device):
            return DeviceBlockArray(capacity, shape, element_type, self._device)
        return HostBlockArray(capacity, shape, element_type)

    def _reallocate(self, capacity: int) -> None:
        """Enlarge the arrays one by one, keeping the blocks."""
        array_names = [*self.cache_inputs]
        if self._feature_width:
            array_names.append(FEATURES_OUTPUT)
        for array_name in array_names:
            array = self.arrays.get(array_name)
            self.arrays[array_name] = (
                array.with_capacity(capacity) if array else self._create_array(array_name, capacity)
            )
        self.capacity = capacity
        self.version += 1
