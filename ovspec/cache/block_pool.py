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

TOKEN_BYTES = 4


@dataclass(slots=True, eq=False)
class Entry:
    """A block and the tokens in it, as big-endian bytes, which sort as the tokens do. Roots have no block."""

    tokens: bytes
    block: int
    parent: Entry | None
    followers: list[Entry] = field(default_factory=list)  # by their tokens

    def place(self, tokens: bytes) -> int:
        return bisect_left(self.followers, tokens, key=lambda entry: entry.tokens)

    def follower(self, tokens: bytes) -> Entry | None:
        """Return the entry that follows with exactly these tokens."""
        place = self.place(tokens)
        found = self.followers[place] if place < len(self.followers) else None
        return found if found and found.tokens == tokens else None

    def nearest(self, tokens: bytes) -> tuple[Entry | None, int]:
        """Return the follower that shares the longest beginning with ``tokens``, and how many tokens that is."""
        place, best, longest = self.place(tokens), None, 0
        for entry in self.followers[max(0, place - 1) : place + 1]:
            shared = shared_tokens(entry.tokens, tokens)
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

    def __init__(self, size: int, most: int = 0) -> None:
        self.size, self.most = size, most
        self._holders: Counter[int] = Counter()  # block -> number of rows that hold it
        self._free: list[int] = []  # free blocks, all below ``needed``
        self._kept: dict[int, Entry] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._roots: dict[Hashable, Entry] = {}
        self.needed = 0  # number of blocks that the tensors must have room for; higher ones were never used
        self.evicted = 0  # blocks so far

    @property
    def used(self) -> int:
        """The number of blocks that rows hold or that are kept."""
        return self.needed - len(self._free)

    @property
    def idle(self) -> int:
        """The number of blocks that are kept though no row holds them."""
        return len(self._idle)

    # ------------------------------------------------------------ rows

    def take(self) -> int:
        """Return a free block, held by one row from now on."""
        if self._idle and self.used >= self.most:
            self._evict()
        if self._free:
            block = self._free.pop()
        else:
            block, self.needed = self.needed, self.needed + 1
        self._holders[block] = 1
        return block

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):  # so that the last of a text becomes idle first
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                if block in self._kept:
                    self._idle[block] = None
                else:
                    self._free.append(block)
        while self._idle and self.used > self.most:
            self._evict()

    def shared(self, block: int) -> bool:
        """Return whether others than one row need what the block holds."""
        return self._holders[block] > 1 or block in self._kept

    # ------------------------------------------------------------ beginnings of texts

    def find(self, tokens: np.ndarray, owner: Hashable) -> tuple[list[int], int]:
        """Return the blocks of the longest known beginning of ``tokens`` (n,), and how many tokens that is."""
        text, blocks, entry = encoded(tokens), list[int](), self._roots.get(owner)
        found, shared, width = 0, self.size, self.size * TOKEN_BYTES
        while entry and shared == self.size and found < len(tokens):
            at = found * TOKEN_BYTES
            entry, shared = entry.nearest(text[at : at + width])
            if entry:
                blocks.append(entry.block)
                found += shared
        return blocks, found

    def keep(self, tokens: np.ndarray, owner: Hashable, table: list[int]) -> None:
        """Keep the blocks ``table`` of a row with ``tokens`` (n,); those that are known already replace the row's."""
        if owner is UNSHARED:
            return
        text, width = encoded(tokens), self.size * TOKEN_BYTES
        entry = self._roots.setdefault(owner, Entry(b"", -1, None))
        for index, begin in enumerate(range(0, len(text), width)):
            part, block = text[begin : begin + width], table[index]
            known = entry.follower(part)
            if known and known.block != block:
                self.hold([known.block])
                table[index] = known.block
                self.release([block])
            elif not known:
                if block in self._kept:  # as the beginning of another text: this row has not written it
                    return
                place = entry.place(part)
                known = Entry(part, block, entry)
                entry.followers.insert(place, known)
                self._kept[block] = known
                before = entry.followers[place - 1] if place else None
                if before and before.block in self._idle and part.startswith(before.tokens):
                    self._drop(before.block)  # all of it is in the new one
            entry = known

    def forget(self) -> None:
        """Free all idle blocks."""
        while self._idle:
            self._drop(next(iter(self._idle)))
        self._roots = {owner: root for owner, root in self._roots.items() if root.followers}

    def reset(self) -> None:
        """Number the blocks anew, when none is in use."""
        self._free, self.needed = [], 0

    def _evict(self) -> None:
        self._drop(next(iter(self._idle)))
        self.evicted += 1

    def _drop(self, block: int) -> None:
        del self._idle[block]
        entry = self._kept.pop(block)
        assert entry.parent and not entry.followers, "the last blocks of a text come first"
        del entry.parent.followers[entry.parent.place(entry.tokens)]
        self._free.append(block)


def encoded(tokens: np.ndarray) -> bytes:
    return tokens.astype(">u4").tobytes()


def shared_tokens(a: bytes, b: bytes) -> int:
    """Return how many tokens two encoded texts begin with in common."""
    if a == b:
        return len(a) // TOKEN_BYTES
    length = min(len(a), len(b))
    differ = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    return (int(differ.argmax()) if differ.any() else length) // TOKEN_BYTES
