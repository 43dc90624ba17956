"""Slots of the stateful KV cache: the slot of each position of a row, and dead slots."""

from __future__ import annotations

import numpy as np

from ovspec.cache.sequence import EMPTY_ROW


class SlotTables:
    """Maps positions to slots for each row of a batch. All rows share the slot axis."""

    def __init__(self, rows: int) -> None:
        self.slot_count = 0  # slots in the physical cache
        self.row_lengths = [0] * rows
        self._live_mask = np.zeros((rows, 256), dtype=np.int64)  # (rows, slots) 1 = attended to
        self._slot_by_position = np.zeros((rows, 256), dtype=np.int64)  # (rows, positions) -> slot

    @property
    def attention_mask(self) -> np.ndarray:
        """The model's attention mask: (rows, slots) int64, contiguous in memory."""
        return np.ascontiguousarray(self._live_mask[:, : self.slot_count])

    @property
    def dead_count(self) -> int:
        """Number of slots to be freed by a compaction."""
        return self.slot_count - max(self.row_lengths, default=0)

    @property
    def is_contiguous(self) -> bool:
        """Whether every row has the last slots, in order of its positions; required for attention by slot index."""
        return all(
            self._live_mask[row, self.slot_count - length : self.slot_count].all()
            for row, length in enumerate(self.row_lengths)
        )

    def extend(self, counts: list[int]) -> None:
        """Append max(counts) slots to all rows; in each row the first ``counts[row]`` of them are live."""
        slots_begin = self.slot_count
        slots_end = slots_begin + max(counts)
        if slots_end > self._live_mask.shape[1]:
            padding = ((0, 0), (0, 2 * slots_end - self._live_mask.shape[1]))
            self._live_mask = np.pad(self._live_mask, padding)
            self._slot_by_position = np.pad(self._slot_by_position, padding)
        for row, count in enumerate(counts):
            length = self.row_lengths[row]
            self._live_mask[row, slots_begin : slots_begin + count] = 1
            if slots_begin + count < slots_end:
                self._live_mask[row, slots_begin + count : slots_end] = 0
            self._slot_by_position[row, length : length + count] = np.arange(slots_begin, slots_begin + count)
            self.row_lengths[row] = length + count
        self.slot_count = slots_end

    def truncate(self, row: int, length: int) -> None:
        """Mark the slots of positions ``length`` and later dead."""
        self._live_mask[row, self._slot_by_position[row, length : self.row_lengths[row]]] = 0
        self.row_lengths[row] = length

    def reorder(self, rows: list[int]) -> None:
        """Make new row i a copy of old row ``rows[i]``, or an empty row for EMPTY_ROW."""
        self._live_mask = self._live_mask[rows]
        self._slot_by_position = self._slot_by_position[rows]
        self._live_mask[np.array(rows) == EMPTY_ROW] = 0
        self.row_lengths = [0 if row == EMPTY_ROW else self.row_lengths[row] for row in rows]

    def compact(self) -> np.ndarray:
        """Make every row contiguous; return the old slot of each new slot, (rows, slots) int64.

        Shorter rows get dead slots on the left; their old slot is given as 0.
        """
        width = max(self.row_lengths, default=0)
        old_slots = np.zeros((len(self.row_lengths), width), dtype=np.int64)
        self._live_mask[:] = 0
        for row, length in enumerate(self.row_lengths):
            old_slots[row, width - length :] = self._slot_by_position[row, :length]
            self._slot_by_position[row, :length] = np.arange(width - length, width)
            self._live_mask[row, width - length : width] = 1
        self.slot_count = width
        return old_slots
