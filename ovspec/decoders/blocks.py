"""The KV cache of the paged decoder: which blocks hold the tokens of which row.

A block holds the keys and values of a fixed number of tokens, in all layers. A row's blocks need not lie beside
each other, and rows that begin alike share blocks until one of them writes (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

from collections import Counter

from ovspec.decoders.sequence import EMPTY


class Pool:
    """Blocks by number: how many rows hold each, and which are free. Forked decoders share a pool."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()  # rows that hold a block
        self._free: list[int] = []  # below ``needed``
        self.needed = 0  # blocks that the tensors must have room for; higher numbers were never used

    @property
    def used(self) -> int:
        """Blocks that some row holds."""
        return self.needed - len(self._free)

    def take(self) -> int:
        """A block that nobody holds."""
        if self._free:
            block = self._free.pop()
        else:
            block, self.needed = self.needed, self.needed + 1
        self._holders[block] = 1
        return block

    def hold(self, blocks: list[int]) -> None:
        """A further row holds ``blocks``."""
        self._holders.update(blocks)

    def release(self, blocks: list[int]) -> None:
        """A row gives ``blocks`` back."""
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)

    def reset(self) -> None:
        """Start over, with no row that holds a block."""
        self._holders.clear()
        self._free, self.needed = [], 0

    def shared(self, block: int) -> bool:
        """Whether several rows hold ``block``."""
        return self._holders[block] > 1


class Blocks:
    """The blocks of a decoder's rows. Bookkeeping only; the tensors belong to the decoder.

    Args:
        rows: empty rows to begin with.
        size: tokens that a block holds.
        pool: where blocks come from.
    """

    def __init__(self, rows: int, size: int, pool: Pool | None = None) -> None:
        self.size, self.pool = size, pool or Pool()
        self.tables: list[list[int]] = [[] for _ in range(rows)]  # each row's blocks, in order of the text
        self.version = 0  # of the tables; another one where they may have changed

    def extend(self, row: int, held: int, new: int) -> list[tuple[int, int]]:
        """Make room for ``new`` tokens after the ``held`` ones of ``row``, in blocks that no other row holds.

        Returns (from, to) pairs of blocks that have to be copied first: at most one, the last that is partly full.
        """
        table, copies = self.tables[row], []
        if new and held % self.size and self.pool.shared(table[-1]):
            shared, table[-1] = table[-1], self._take()
            self._release([shared])
            copies.append((shared, table[-1]))
        for _ in range(len(table), -(-(held + new) // self.size)):
            table.append(self._take())
        return copies

    def truncate(self, row: int, length: int) -> None:
        """Give back the blocks after the first ``length`` tokens of ``row``."""
        table, kept = self.tables[row], -(-length // self.size)
        if len(table) > kept:
            self._release(table[kept:])
            del table[kept:]

    def reorder(self, rows: list[int]) -> None:
        """New row i holds the blocks of old row ``rows[i]``, or none where that is EMPTY."""
        old, self.tables = self.tables, [[] if row == EMPTY else list(self.tables[row]) for row in rows]
        for table in self.tables:
            self.pool.hold(table)
        for table in old:
            self._release(table)
        self.version += 1

    def fork(self) -> Blocks:
        """The same rows once more, holding the same blocks."""
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
