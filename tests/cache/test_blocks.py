"""Blocks under random use: no two rows write into the same block, no block is lost, and forked rows share blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ovspec.cache.block_pool import BlockPool
from ovspec.cache.blocks import BlockTables
from ovspec.cache.sequence import EMPTY_ROW

SIZE = 4
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.tuples(st.integers(0, 3), st.integers(0, 9))),
        st.tuples(st.just("again"), st.tuples(st.integers(0, 3), st.integers(1, 9))),
        st.tuples(st.just("truncate"), st.tuples(st.integers(0, 3), st.integers(0, 12))),
        st.tuples(st.just("reorder"), st.lists(st.integers(EMPTY_ROW, 3), min_size=1, max_size=4)),
    ),
    max_size=40,
)


@given(st.integers(1, 3), OPERATIONS)
def test_what_a_row_reads_is_what_it_wrote(rows: int, operations: list) -> None:
    """Simulates the contents of blocks: every token is a unique number, written to (block, place).

    "again" writes the last token of the row once more, in front of the new ones.
    """
    blocks = BlockTables(rows, BlockPool(SIZE))
    memory: dict[tuple[int, int], int] = {}
    texts: list[list[int]] = [[] for _ in range(rows)]
    token = 0
    for kind, argument in operations:
        if kind in ("extend", "again"):
            row, count = argument[0] % len(texts), argument[1]
            begin = len(texts[row])
            if kind == "again" and begin:
                begin, count = begin - 1, count + 1
                texts[row].pop()
            for source, target in blocks.extend(row, begin, count):
                memory |= {(target, place): memory.get((source, place), -1) for place in range(SIZE)}
            for _ in range(count):
                place = len(texts[row])
                memory[blocks.tables[row][place // SIZE], place % SIZE] = token
                texts[row].append(token)
                token += 1
        elif kind == "truncate":
            row = argument[0] % len(texts)
            texts[row] = texts[row][: argument[1]]
            blocks.truncate(row, len(texts[row]))
        else:
            picks = [pick if pick == EMPTY_ROW else pick % len(texts) for pick in argument]
            blocks.reorder(picks)
            texts = [[] if pick == EMPTY_ROW else list(texts[pick]) for pick in picks]
        for text, table in zip(texts, blocks.tables, strict=True):
            assert len(table) == -(-len(text) // SIZE), "no more blocks than the text needs"
            assert [memory[table[i // SIZE], i % SIZE] for i in range(len(text))] == text
        held = {block for table in blocks.tables for block in table}
        assert blocks.pool.used_count == len(held), "a block that no row holds is free again"
        assert all(block < blocks.pool.needed_capacity for block in held)


def test_forks_share_until_they_part() -> None:
    blocks = BlockTables(1, BlockPool(SIZE))
    assert blocks.extend(0, 0, 10) == []
    blocks.reorder([0, 0, 0])
    assert blocks.pool.used_count == 3
    # The last block is partly full. Each row that writes into it copies it first, except the last row that holds it.
    assert blocks.extend(0, 10, 1) == [(2, 3)]
    assert blocks.extend(1, 10, 1) == [(2, 4)]
    assert blocks.extend(2, 10, 1) == []
    assert blocks.pool.used_count == 5
    blocks.truncate(0, 8)
    assert blocks.extend(0, 8, 1) == [], "a full block is never written into, so it stays shared"
    assert [table[:2] for table in blocks.tables] == [[0, 1]] * 3


def test_another_decoders_fork_holds_its_blocks() -> None:
    blocks = BlockTables(1, BlockPool(SIZE))
    blocks.extend(0, 0, 6)
    fork = blocks.fork()
    assert blocks.extend(0, 6, 1) == [(1, 2)], "the fork has the block, too"
    blocks.truncate(0, 0)
    assert blocks.pool.used_count == 2
    blocks.extend(0, 0, 8)
    assert fork.tables == [[0, 1]]
    assert not {0, 1}.intersection(blocks.tables[0])


def test_freed_blocks_are_used_again() -> None:
    blocks = BlockTables(2, BlockPool(SIZE))
    for _ in range(50):
        blocks.extend(0, 0, 9)
        blocks.extend(1, 0, 9)
        blocks.truncate(0, 0)
        blocks.truncate(1, 0)
    assert blocks.pool.needed_capacity == 6
    assert blocks.pool.used_count == 0
