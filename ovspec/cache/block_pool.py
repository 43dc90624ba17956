"""The blocks of the paged KV cache: those that rows use, and those of the prefix cache, kept for texts to come.

A text's blocks are a path in a tree. The children of a block are the blocks that have followed it, in the order of
their tokens, so that the neighbours of a new text share the longest prefix with it (like Zheng et al.'s radix tree,
arXiv 2312.07104). Every owner has a tree, because latency would reveal one owner's text to another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from ovspec.cache.sequence import UNSHARED

BYTES_PER_TOKEN = 4


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A block and the tokens in it, as big-endian bytes, which sort as the tokens do. Roots have no block."""

    token_bytes: bytes
    block: int
    parent: PrefixNode | None
    children: list[PrefixNode] = field(default_factory=list)  # by their tokens

    def find_child_position(self, token_bytes: bytes) -> int:
        return bisect_left(self.children, token_bytes, key=lambda child: child.token_bytes)

    def find_child(self, token_bytes: bytes) -> PrefixNode | None:
        """Return the child with exactly these tokens."""
        position = self.find_child_position(token_bytes)
        children = self.children[position : position + 1]
        return next((child for child in children if child.token_bytes == token_bytes), None)

    def find_longest_match(self, token_bytes: bytes) -> tuple[PrefixNode | None, int]:
        """Return the child that shares the longest prefix with ``token_bytes``, and that prefix's length in tokens."""
        longest_child, length = None, 0
        position = self.find_child_position(token_bytes)
        for child in self.children[max(0, position - 1) : position + 1]:
            shared_length = count_common_encoded_tokens(child.token_bytes, token_bytes)
            if shared_length > length:
                longest_child, length = child, shared_length
        return longest_child, length


class BlockPool:
    """Numbered blocks: each is used by rows, kept as a part of a known prefix, or free.

    A kept block is never written; a row that adds tokens to one writes to a copy. Kept blocks that no row uses are
    idle. Once ``used_limit`` blocks are in use, idle ones are evicted: the longest idle first, and the last block of a
    text first, so that the rest of the text can still be found.

    Args:
        block_size: tokens in a block.
        used_limit: number of blocks in use from which idle ones are evicted; rows may use more.
    """

    def __init__(self, block_size: int, used_limit: int = 0) -> None:
        self.block_size = block_size
        self.used_limit = used_limit
        self.dropped_tables: deque[list[list[int]]] = deque()  # of deleted decoders, whose blocks are still in use
        self._reference_counts: Counter[int] = Counter()  # block -> number of rows that use it
        self._free_blocks: list[int] = []  # all below ``needed_capacity``
        self._kept_nodes: dict[int, PrefixNode] = {}
        self._idle_blocks: OrderedDict[int, None] = OrderedDict()
        self._roots_by_owner: dict[Hashable, PrefixNode] = {}
        # Block -> length of a text that ends in it -> the snapshot of its recurrent states.
        self._snapshots: dict[int, dict[int, object]] = {}
        self.snapshot_count = 0
        self.snapshot_size = 0.0  # of a snapshot, in blocks
        self.needed_capacity = 0  # number of blocks that the tensors must have room for; higher ones were never used
        self.evicted_count = 0  # evicted blocks so far

    @property
    def used_count(self) -> int:
        """The number of blocks that rows use or that are kept."""
        return self.needed_capacity - len(self._free_blocks)

    @property
    def idle_count(self) -> int:
        """The number of blocks that are kept though no row uses them."""
        return len(self._idle_blocks)

    # ------------------------------------------------------------ rows

    def allocate(self) -> int:
        """Return a free block, which one row uses from now on."""
        self.release_dropped_tables()
        if self._idle_blocks and self.used_count + self._snapshot_blocks >= self.used_limit:
            self._evict_block()
        if self._free_blocks:
            block = self._free_blocks.pop()
        else:
            block = self.needed_capacity
            self.needed_capacity += 1
        self._reference_counts[block] = 1
        return block

    def add_references(self, blocks: list[int]) -> None:
        for block in blocks:
            self._reference_counts[block] += 1
            self._idle_blocks.pop(block, None)

    def release_blocks(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # so that the last of a text becomes idle first
            self._reference_counts[block] -= 1
            if not self._reference_counts[block]:
                del self._reference_counts[block]
                if block in self._kept_nodes:
                    self._idle_blocks[block] = None
                else:
                    self._free_blocks.append(block)
        while self._idle_blocks and self.used_count + self._snapshot_blocks > self.used_limit:
            self._evict_block()

    def release_dropped_tables(self) -> None:
        """Release the blocks of deleted decoders; not at their deletion, which may happen in any thread."""
        while self.dropped_tables:
            for table in self.dropped_tables.popleft():
                self.release_blocks(table)

    def is_shared(self, block: int) -> bool:
        """Return whether several rows or the prefix cache need the block's contents."""
        return self._reference_counts[block] > 1 or block in self._kept_nodes

    # ------------------------------------------------------------ prefixes of texts

    def find_prefix(self, tokens: np.ndarray, owner: Hashable) -> tuple[list[int], int]:
        """Return the blocks of the longest known prefix of ``tokens`` (n,), and its length in tokens."""
        encoded_text = encode_tokens(tokens)
        block_bytes = self.block_size * BYTES_PER_TOKEN
        node = self._roots_by_owner.get(owner)
        blocks: list[int] = []
        length, shared_length = 0, self.block_size
        while node and shared_length == self.block_size and length < len(tokens):
            block_text_start = length * BYTES_PER_TOKEN
            node, shared_length = node.find_longest_match(
                encoded_text[block_text_start : block_text_start + block_bytes]
            )
            if node:
                blocks.append(node.block)
                length += shared_length
        return blocks, length

    def keep_prefix(self, tokens: np.ndarray, owner: Hashable, table: list[int]) -> None:
        """Keep the blocks ``table`` of a row with ``tokens`` (n,); blocks already kept replace the row's own."""
        if owner is UNSHARED:
            return
        encoded_text = encode_tokens(tokens)
        block_bytes = self.block_size * BYTES_PER_TOKEN
        node = self._roots_by_owner.setdefault(owner, PrefixNode(b"", -1, None))
        for block_index, block_text_start in enumerate(range(0, len(encoded_text), block_bytes)):
            token_bytes = encoded_text[block_text_start : block_text_start + block_bytes]
            block = table[block_index]
            child = node.find_child(token_bytes)
            if child and child.block != block:
                self.add_references([child.block])
                table[block_index] = child.block
                self.release_blocks([block])
            elif not child:
                if block in self._kept_nodes:  # as the beginning of another text: this row has not written it
                    return
                child = self._insert_child(node, token_bytes, block)
            node = child

    def keep_snapshot(self, block: int, length: int, snapshot: object) -> None:
        """Keep ``snapshot`` of a text of ``length`` tokens beside ``block``, its last one, if that is kept."""
        if block in self._kept_nodes:
            snapshots = self._snapshots.setdefault(block, {})
            self.snapshot_count += length not in snapshots
            snapshots[length] = snapshot

    def find_snapshot(self, blocks: list[int], length: int) -> object | None:
        """Return the snapshot of the longest text of at most ``length`` tokens that ends in ``blocks``, if any."""
        for block in reversed(blocks):
            lengths = [kept for kept in self._snapshots.get(block, ()) if kept <= length]
            if lengths:
                return self._snapshots[block][max(lengths)]
        return None

    @property
    def _snapshot_blocks(self) -> float:
        """How many blocks take as much memory as the snapshots."""
        return self.snapshot_size * self.snapshot_count

    def _insert_child(self, parent: PrefixNode, token_bytes: bytes, block: int) -> PrefixNode:
        """Keep a block below ``parent``; return its node. An idle sibling that the block contains is freed."""
        position = parent.find_child_position(token_bytes)
        child = PrefixNode(token_bytes, block, parent)
        parent.children.insert(position, child)
        self._kept_nodes[block] = child
        for sibling in parent.children[max(0, position - 1) : position]:
            if sibling.block in self._idle_blocks and token_bytes.startswith(sibling.token_bytes):
                for length, snapshot in self._snapshots.get(sibling.block, {}).items():
                    self.keep_snapshot(block, length, snapshot)
                self._free_idle_block(sibling.block)
        return child

    def free_idle_blocks(self) -> None:
        while self._idle_blocks:
            self._free_idle_block(next(iter(self._idle_blocks)))
        self._roots_by_owner = {owner: root for owner, root in self._roots_by_owner.items() if root.children}

    def restart_numbering(self) -> None:
        """Number the blocks from 0 again, when none is in use."""
        self._free_blocks = []
        self.needed_capacity = 0

    def _evict_block(self) -> None:
        self._free_idle_block(next(iter(self._idle_blocks)))
        self.evicted_count += 1

    def _free_idle_block(self, block: int) -> None:
        del self._idle_blocks[block]
        node = self._kept_nodes.pop(block)
        self.snapshot_count -= len(self._snapshots.pop(block, ()))
        assert node.parent and not node.children, "the last blocks of a text come first"
        del node.parent.children[node.parent.find_child_position(node.token_bytes)]
        self._free_blocks.append(block)


def encode_tokens(tokens: np.ndarray) -> bytes:
    return tokens.astype(">u4").tobytes()


def count_common_encoded_tokens(a: bytes, b: bytes) -> int:
    """Return the number of tokens in the common prefix of two encoded texts."""
    if a == b:
        return len(a) // BYTES_PER_TOKEN
    length = min(len(a), len(b))
    is_different = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    if is_different.any():
        length = int(is_different.argmax())
    return length // BYTES_PER_TOKEN
