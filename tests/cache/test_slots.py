from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ovspec.cache.slots import SlotTables

# Extend each row by a count, truncate one row by a number of tokens, reorder to the picked rows, or compact.
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.lists(st.integers(0, 90), min_size=4, max_size=4)),
        st.tuples(st.just("truncate"), st.tuples(st.integers(0, 3), st.integers(0, 100))),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        st.tuples(st.just("compact"), st.none()),
    ),
    max_size=30,
)


@given(st.integers(1, 3), OPERATIONS)
def test_every_row_reads_back_what_it_holds(rows: int, operations: list) -> None:
    """Lists of numbers stand in for the KV cache: the live slots, in order, must give each row."""
    slots, held = SlotTables(rows), [[] for _ in range(rows)]
    cache = [[] for _ in range(rows)]  # by row, by slot
    name = 0
    for kind, argument in operations:
        if kind == "extend":
            counts = argument[: len(held)] + [0] * (len(held) - len(argument))
            if not max(counts):
                continue
            slots.extend(counts)
            for row, count in enumerate(counts):
                new = [name + i for i in range(count)]
                name += count
                held[row] += new
                cache[row] += new + [-1] * (max(counts) - count)
        elif kind == "truncate":
            row, drop = argument[0] % len(held), argument[1]
            length = max(0, len(held[row]) - drop)
            slots.truncate(row, length)
            held[row] = held[row][:length]
        elif kind == "reorder":
            picks = [pick % len(held) for pick in argument]
            slots.reorder(picks)
            held, cache = [list(held[p]) for p in picks], [list(cache[p]) for p in picks]
        elif slots.slot_count:
            old = slots.compact()
            cache = [[row[i] for i in index] for row, index in zip(cache, old, strict=True)]
            assert slots.is_contiguous
            assert slots.dead_count == 0
        mask = slots.attention_mask
        assert mask.shape == (len(held), slots.slot_count)
        assert slots.row_lengths == [len(row) for row in held]
        for row, alive in enumerate(mask):
            assert [cache[row][i] for i in np.flatnonzero(alive)] == held[row]
