"""Bookkeeping for the paged KV cache: which blocks hold the tokens of which row.

A block holds the keys and values of a fixed number of tokens, in all layers. A row's blocks need not be adjacent, and
forked rows share blocks until one of them writes (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

from collections import Counter

from ovspec.decoders.sequence import EMPTY


class Pool:
    """Numbered blocks: how many rows hold each one, and which are free. Forked decoders share a pool."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()  # block -> number of rows that hold it
        self._free: list[int] = []  # free blocks, all below ``needed``
        self.needed = 0  # number of blocks that the tensors must have room for; higher ones were never used

    @property
    def used(self) -> int:
        """Number of blocks that at least one row holds."""
        return self.needed - len(self._free)

    def take(self) -> int:
        """Return a block that no row holds, and mark it as held by one."""
        if self._free:
            block = self._free.pop()
        else:
            block, self.needed = self.needed, self.needed + 1
        self._holders[block] = 1
        return block

    def hold(self, blocks: list[int]) -> None:
        """Note that one more row holds ``blocks``."""
        self._holders.update(blocks)

    def release(self, blocks: list[int]) -> None:
        """Note that one row fewer holds ``blocks``, and free those that no row holds."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def reset(self) -> None:
        """Start over with no blocks in use."""
        self._holders.clear()
        self._free, self.needed = [], 0

    def shared(self, block: int) -> bool:
        """Return whether more than one row holds ``block``."""
        return self._holders[block] > 1


class Blocks:
    """The blocks of a decoder's rows. Bookkeeping only; the tensors belong to the decoder.

    Args:
        rows: number of rows to start with, all empty.
        size: tokens per block.
        pool: the source of blocks; a new one by default.
    """

    def __init__(self, rows: int, size: int, pool: Pool | None = None) -> None:
        self.size, self.pool = size, pool or Pool()
        self.tables: list[list[int]] = [[] for _ in range(rows)]  # each row's blocks, in text order
        self.version = 0  # changes whenever the tables may have changed

    def extend(self, row: int, begin: int, new: int) -> list[tuple[int, int]]:
        """Make room for ``new`` tokens from position ``begin`` of ``row`` on, in blocks that no other row holds.

        Returns the (from, to) pairs of blocks to copy first: those that exist and are shared.
        """
        table = self.tables[row]
        copies: list[tuple[int, int]] = []
        for index in range(begin // self.size, len(table)) if new else ():
            if self.pool.shared(table[index]):
                shared, table[index] = table[index], self._take()
                self._release([shared])
                copies.append((shared, table[index]))
        for _ in range(len(table), -(-(begin + new) // self.size)):
            table.append(self._take())
        return copies

    def truncate(self, row: int, length: int) -> None:
        """Release the blocks of ``row`` that its first ``length`` tokens don't need."""
        table, kept = self.tables[row], -(-length // self.size)
        if len(table) > kept:
            self._release(table[kept:])
            del table[kept:]

    def reorder(self, rows: list[int]) -> None:
        """Let new row i hold the blocks of old row ``rows[i]``, or none if ``rows[i]`` is EMPTY."""
        old, self.tables = self.tables, [[] if row == EMPTY else list(self.tables[row]) for row in rows]
        for table in self.tables:
            self.pool.hold(table)
        for table in old:
            self._release(table)
        self.version += 1

    def fork(self) -> Blocks:
        """Return a copy whose rows hold the same blocks."""
        other = Blocks(0, self.size, self.pool)
        other.tables = [list(table) for table in self.tables]
        for table in other.tables:
            self.pool.hold(table)
        return other

    def _take(self) -> int:
        self.version += 1
        return self.pool.take()

    def _release(self, blocks: list[int]) -> None:
        self.version += 1
        self.pool.release(blocks)
