"""The blocks of the paged KV cache: which are in use, and which are kept to be found by the text that is in them.

That is the prefix cache. A text's blocks are a path in a tree: below each block are those that have followed it, in the
order of their tokens, so that the neighbours of a new text share the longest beginning with it (like Zheng et al.'s
radix tree, arXiv 2312.07104). Every owner has a tree, because time would tell one what another wrote.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
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

    def child_position(self, token_bytes: bytes) -> int:
        return bisect_left(self.children, token_bytes, key=lambda entry: entry.token_bytes)

    def find_child(self, token_bytes: bytes) -> PrefixNode | None:
        """Return the entry that follows with exactly these tokens."""
        place = self.child_position(token_bytes)
        found = self.children[place] if place < len(self.children) else None
        return found if found and found.token_bytes == token_bytes else None

    def find_longest_match(self, token_bytes: bytes) -> tuple[PrefixNode | None, int]:
        """Return the follower that shares the longest beginning with ``tokens``, and how many tokens that is."""
        place, best, longest = self.child_position(token_bytes), None, 0
        for entry in self.children[max(0, place - 1) : place + 1]:
            shared = common_prefix_length(entry.token_bytes, token_bytes)
            if shared > longest:
                best, longest = entry, shared
        return best, longest


class BlockPool:
    """Numbered blocks: which rows hold them, which are kept because they begin texts, and which are free.

    A kept block is never written, so what a row adds to one goes into a copy. Kept blocks that no row holds are idle.
    They give way to new ones once ``most`` blocks are in use: the longest idle first, and of a text the last first, so
    that what is left of it can still be found.

    Args:
        size: tokens in a block.
        most: number of blocks in use from which idle ones give way; rows may use more.
    """

    def __init__(self, block_size: int, used_limit: int = 0) -> None:
        self.block_size, self.used_limit = block_size, used_limit
        self._reference_counts: Counter[int] = Counter()  # block -> number of rows that hold it
        self._free_blocks: list[int] = []  # free blocks, all below ``needed``
        self._kept_nodes: dict[int, PrefixNode] = {}
        self._idle_blocks: OrderedDict[int, None] = OrderedDict()
        self._roots: dict[Hashable, PrefixNode] = {}
        self.needed_capacity = 0  # number of blocks that the tensors must have room for; higher ones were never used
        self.evicted_count = 0  # blocks so far

    @property
    def used_count(self) -> int:
        """The number of blocks that rows hold or that are kept."""
        return self.needed_capacity - len(self._free_blocks)

    @property
    def idle_count(self) -> int:
        """The number of blocks that are kept though no row holds them."""
        return len(self._idle_blocks)

    # ------------------------------------------------------------ rows

    def allocate(self) -> int:
        """Return a free block, held by one row from now on."""
        if self._idle_blocks and self.used_count >= self.used_limit:
            self._evict_block()
        if self._free_blocks:
            block = self._free_blocks.pop()
        else:
            block, self.needed_capacity = self.needed_capacity, self.needed_capacity + 1
        self._reference_counts[block] = 1
        return block

    def add_references(self, blocks: list[int]) -> None:
        for block in blocks:
            self._reference_counts[block] += 1
            self._idle_blocks.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # so that the last of a text becomes idle first
            self._reference_counts[block] -= 1
            if not self._reference_counts[block]:
                del self._reference_counts[block]
                if block in self._kept_nodes:
                    self._idle_blocks[block] = None
                else:
                    self._free_blocks.append(block)
        while self._idle_blocks and self.used_count > self.used_limit:
            self._evict_block()

    def is_shared(self, block: int) -> bool:
        """Return whether others than one row need what the block holds."""
        return self._reference_counts[block] > 1 or block in self._kept_nodes

    # ------------------------------------------------------------ beginnings of texts

    def find_prefix(self, tokens: np.ndarray, owner: Hashable) -> tuple[list[int], int]:
        """Return the blocks of the longest known beginning of ``tokens`` (n,), and how many tokens that is."""
        text, blocks, entry = encode_tokens(tokens), list[int](), self._roots.get(owner)
        found, shared, width = 0, self.block_size, self.block_size * BYTES_PER_TOKEN
        while entry and shared == self.block_size and found < len(tokens):
            at = found * BYTES_PER_TOKEN
            entry, shared = entry.find_longest_match(text[at : at + width])
            if entry:
                blocks.append(entry.block)
                found += shared
        return blocks, found

    def keep_prefix(self, tokens: np.ndarray, owner: Hashable, table: list[int]) -> None:
        """Keep the blocks ``table`` of a row with ``tokens`` (n,); those that are known already replace the row's."""
        if owner is UNSHARED:
            return
        text, width = encode_tokens(tokens), self.block_size * BYTES_PER_TOKEN
        entry = self._roots.setdefault(owner, PrefixNode(b"", -1, None))
        for index, begin in enumerate(range(0, len(text), width)):
            part, block = text[begin : begin + width], table[index]
            known = entry.find_child(part)
            if known and known.block != block:
                self.add_references([known.block])
                table[index] = known.block
                self.release([block])
            elif not known:
                if block in self._kept_nodes:  # as the beginning of another text: this row has not written it
                    return
                place = entry.child_position(part)
                known = PrefixNode(part, block, entry)
                entry.children.insert(place, known)
                self._kept_nodes[block] = known
                before = entry.children[place - 1] if place else None
                if before and before.block in self._idle_blocks and part.startswith(before.token_bytes):
                    self._free_idle_block(before.block)  # all of it is in the new one
            entry = known

    def free_idle_blocks(self) -> None:
        """Free all idle blocks."""
        while self._idle_blocks:
            self._free_idle_block(next(iter(self._idle_blocks)))
        self._roots = {owner: root for owner, root in self._roots.items() if root.children}

    def restart_numbering(self) -> None:
        """Number the blocks anew, when none is in use."""
        self._free_blocks, self.needed_capacity = [], 0

    def _evict_block(self) -> None:
        self._free_idle_block(next(iter(self._idle_blocks)))
        self.evicted_count += 1

    def _free_idle_block(self, block: int) -> None:
        del self._idle_blocks[block]
        entry = self._kept_nodes.pop(block)
        assert entry.parent and not entry.children, "the last blocks of a text come first"
        del entry.parent.children[entry.parent.child_position(entry.token_bytes)]
        self._free_blocks.append(block)


def encode_tokens(tokens: np.ndarray) -> bytes:
    return tokens.astype(">u4").tobytes()


def common_prefix_length(a: bytes, b: bytes) -> int:
    """Return how many tokens two encoded texts begin with in common."""
    if a == b:
        return len(a) // BYTES_PER_TOKEN
    length = min(len(a), len(b))
    differ = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    return (int(differ.argmax()) if differ.any() else length) // BYTES_PER_TOKEN
