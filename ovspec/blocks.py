"""The KV cache of the paged decoder: which blocks hold the tokens of which row.

A block holds the keys and values of a fixed number of tokens, in all layers. A row's blocks need not lie beside
each other, and rows that begin alike share blocks until one of them writes (Kwon et al., arXiv 2309.06180).
"""

from __future__ import annotations

from collections import Counter

from ovspec.sequence import EMPTY


class Blocks:
    """Bookkeeping only; the tensors belong to the decoder.

    Args:
        rows: empty rows to begin with.
        size: tokens that a block holds.
    """

    def __init__(self, rows: int, size: int) -> None:
        self.size = size
        self.tables: list[list[int]] = [[] for _ in range(rows)]  # each row's blocks, in order of the text
        self.version = 0  # of the tables; another one where they may have changed
        self._holders: Counter[int] = Counter()  # rows that hold a block
        self._free: list[int] = []  # below ``_unused``
        self._unused = 0  # this block and all behind it were never used

    @property
    def used(self) -> int:
        """Blocks that some row holds."""
        return self._unused - len(self._free)

    @property
    def needed(self) -> int:
        """Blocks that the tensors must have room for."""
        return self._unused

    def extend(self, row: int, held: int, new: int) -> list[tuple[int, int]]:
        """Make room for ``new`` tokens behind the ``held`` ones of ``row``, in blocks that no other row holds.

        Returns (from, to) pairs of blocks that have to be copied first: at most one, the last that is partly full.
        """
        table, copies = self.tables[row], []
        if new and held % self.size and self._holders[table[-1]] > 1:
            shared, table[-1] = table[-1], self._take()
            self._release(shared)
            copies.append((shared, table[-1]))
        for _ in range(len(table), -(-(held + new) // self.size)):
            table.append(self._take())
        return copies

    def truncate(self, row: int, length: int) -> None:
        """Give back the blocks behind the first ``length`` tokens of ``row``."""
        table = self.tables[row]
        while len(table) > -(-length // self.size):
            self._release(table.pop())

    def reorder(self, rows: list[int]) -> None:
        """New row i holds the blocks of old row ``rows[i]``, or none where that is EMPTY.

        An index may come twice (fork) or not at all (drop).
        """
        old, self.tables = self.tables, [[] if row == EMPTY else list(self.tables[row]) for row in rows]
        self.version += 1
        for table in self.tables:
            self._holders.update(table)
        for table in old:
            for block in table:
                self._release(block)

    def _take(self) -> int:
        self.version += 1
        if self._free:
            block = self._free.pop()
        else:
            block, self._unused = self._unused, self._unused + 1
        self._holders[block] = 1
        return block

    def _release(self, block: int) -> None:
        self.version += 1
        self._holders[block] -= 1
        if not self._holders[block]:
            self._free.append(block)
