"""The blocks of the paged KV cache: in use by rows, or kept in the prefix cache for later texts.

The prefix cache is a tree (like Zheng et al.'s radix tree, arXiv 2312.07104): a text's blocks are a path in it, and a
block's children are its successors in known texts. Children are sorted by their tokens, so a new text's sorted
neighbours have the longest common prefix with it. Each owner has a separate tree, because latency would reveal a text
to another owner.
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
    """A kept block and its tokens, in big-endian bytes to sort them as numbers. A root has no block."""

    token_bytes: bytes
    block: int
    parent: PrefixNode | None
    children: list[PrefixNode] = field(default_factory=list)  # sorted by their tokens

    def find_child_position(self, token_bytes: bytes) -> int:
        return bisect_left(self.children, token_bytes, key=lambda child: child.token_bytes)

    def find_child(self, token_bytes: bytes) -> PrefixNode | None:
        """Return the child with exactly these tokens, or None."""
        position = self.find_child_position(token_bytes)
        children = self.children[position : position + 1]
        return next((child for child in children if child.token_bytes == token_bytes), None)

    def find_longest_match(self, token_bytes: bytes) -> tuple[PrefixNode | None, int]:
        """Return the child with the longest common prefix with ``token_bytes``, and the prefix's length in tokens."""
        longest_child, length = None, 0
        position = self.find_child_position(token_bytes)
        for child in self.children[max(0, position - 1) : position + 1]:
            shared_length = count_common_encoded_tokens(child.token_bytes, token_bytes)
            if shared_length > length:
                longest_child, length = child, shared_length
        return longest_child, length


class BlockPool:
    """Numbered blocks, each in use by rows, kept in the prefix cache, both, or free.

    Kept blocks are read-only: to append to a kept block, a row writes to a copy. A kept block without rows is idle.
    With more than ``used_limit`` blocks in use or kept, idle blocks are evicted, least recently used first. Within a
    text the last block is evicted first, so the rest remains a usable prefix.

    Args:
        block_size: tokens in a block.
        used_limit: number of blocks above which idle blocks are evicted; rows may use more.
    """

    def __init__(self, block_size: int, used_limit: int = 0) -> None:
        self.block_size = block_size
        self.used_limit = used_limit
        self.dropped_tables: deque[list[list[int]]] = deque()  # of deleted decoders; their blocks still count as used
        self._reference_counts: Counter[int] = Counter()  # block -> number of its rows
        self._free_blocks: list[int] = []  # below ``needed_capacity``
        self._kept_nodes: dict[int, PrefixNode] = {}
        self._idle_blocks: OrderedDict[int, None] = OrderedDict()
        self._roots_by_owner: dict[Hashable, PrefixNode] = {}
        # Block -> length of a text with its end in this block -> snapshot of the text's recurrent states.
        self._snapshots: dict[int, dict[int, object]] = {}
        self.snapshot_count = 0
        self.snapshot_size = 0.0  # of a snapshot, in blocks
        self.needed_capacity = 0  # number of blocks needed in the tensors: the highest number used so far, plus 1
        self.evicted_count = 0  # evicted blocks so far

    @property
    def used_count(self) -> int:
        """Number of blocks in use by rows or kept."""
        return self.needed_capacity - len(self._free_blocks)

    @property
    def idle_count(self) -> int:
        """Number of kept blocks without rows."""
        return len(self._idle_blocks)

    # ------------------------------------------------------------ rows

    def allocate(self) -> int:
        """Return a free block for a row, after evicting an idle block if the limit is reached."""
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
        for block in reversed(blocks):  # a text's last block becomes idle first, to be evicted first
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
        """Return whether the block must not be written: several rows use it, or it is kept."""
        return self._reference_counts[block] > 1 or block in self._kept_nodes

    # ------------------------------------------------------------ prefixes of texts

    def find_prefix(self, tokens: np.ndarray, owner: Hashable) -> tuple[list[int], int]:
        """Return the blocks of the longest kept prefix of ``tokens`` (n,), and its length in tokens."""
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
        """Keep the blocks ``table`` of a row with ``tokens`` (n,).

        If a block with the same tokens is kept already, it replaces the row's own in ``table``.
        """
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
                if block in self._kept_nodes:  # kept for another text, so this row has written nothing to it
                    return
                child = self._insert_child(node, token_bytes, block)
            node = child

    def keep_snapshot(self, block: int, length: int, snapshot: object) -> None:
        """Keep the ``snapshot`` of a text of ``length`` tokens, if its last block ``block`` is kept."""
        if block in self._kept_nodes:
            snapshots = self._snapshots.setdefault(block, {})
            self.snapshot_count += length not in snapshots
            snapshots[length] = snapshot

    def find_snapshot(self, blocks: list[int], length: int) -> object | None:
        """Return the snapshot of the longest text up to ``length`` tokens with its end in ``blocks``, or None."""
        for block in reversed(blocks):
            lengths = [kept for kept in self._snapshots.get(block, ()) if kept <= length]
            if lengths:
                return self._snapshots[block][max(lengths)]
        return None

    @property
    def _snapshot_blocks(self) -> float:
        """Size of all snapshots, in blocks."""
        return self.snapshot_size * self.snapshot_count

    def _insert_child(self, parent: PrefixNode, token_bytes: bytes, block: int) -> PrefixNode:
        """Add a block to the tree below ``parent``; return its node. An idle sibling with a prefix of it is freed."""
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
        """Number the blocks from 0 again; all blocks must be free."""
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
    """Return the length of the common prefix of two encoded texts, in tokens."""
    if a == b:
        return len(a) // BYTES_PER_TOKEN
    length = min(len(a), len(b))
    is_different = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    if is_different.any():
        length = int(is_different.argmax())
    return length // BYTES_PER_TOKEN
