"""The prefix cache as a model of blocks: what is found, what gives way, and that kept blocks are never written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ovspec.cache.block_pool import BlockPool
from ovspec.cache.blocks import BlockTables
from ovspec.cache.sequence import EMPTY_ROW

SIZE = 4
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=18)


class Cache:
    """Blocks and what was written into each, as a decoder would use them."""

    def __init__(self, most: int) -> None:
        self.pool = BlockPool(SIZE, most)
        self.blocks = BlockTables(0, self.pool)
        self.written: dict[int, list[Any]] = {}
        self.texts: list[list[int]] = []

    def begin(self, text: list[int], owner: int | None = None) -> int:
        """Add a row with ``text`` but for its last token; return how much of it was found."""
        row = len(self.texts)
        self.blocks.reorder([*range(row), EMPTY_ROW])
        found, count = self.pool.find_prefix(np.array(text[:-1]), owner)
        self.blocks.replace_blocks(row, found)
        self.texts.append(text[:count])
        assert self.read(row) == text[:count], "what is found is what was written"
        self.write(row, count, text[count:-1])
        return count

    def write(self, row: int, begin: int, tokens: list[int]) -> None:
        copies = self.blocks.extend(row, begin, len(tokens))
        for source, target in copies:
            self.written[target] = list(self.written[source])
        for position, token in enumerate(tokens, begin):
            block = self.blocks.tables[row][position // SIZE]
            assert not self.pool.is_shared(block), "a shared block is written"
            self.written.setdefault(block, [None] * SIZE)[position % SIZE] = token
        self.texts[row] = [*self.texts[row][:begin], *tokens]

    def read(self, row: int) -> list[int]:
        table = self.blocks.tables[row]
        return [self.written[table[at // SIZE]][at % SIZE] for at in range(len(self.texts[row]))]

    def end(self, row: int, owner: int | None = None) -> None:
        self.blocks.keep_prefix(row, np.array(self.texts[row]), owner)
        rows = [other for other in range(len(self.texts)) if other != row]
        self.blocks.reorder(rows)
        del self.texts[row]


@given(most=st.integers(0, 12), data=st.data())
def test_what_is_found_was_written_and_nobody_writes_there(most: int, data: st.DataObject) -> None:
    cache = Cache(most)
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["begin", "begin", "write", "again", "truncate", "keep", "end"]))
        if action == "begin" or not cache.texts:
            cache.begin(data.draw(TEXT))
            continue
        row = data.draw(st.integers(0, len(cache.texts) - 1))
        length = len(cache.texts[row])
        if action == "write":
            cache.write(row, length, data.draw(TEXT))
        elif action == "again" and length:  # as an inference that is filled up with tokens of the cache
            begin = data.draw(st.integers(0, length - 1))
            cache.write(row, begin, cache.texts[row][begin:])
        elif action == "truncate":
            kept = data.draw(st.integers(0, length))
            cache.blocks.truncate(row, kept)
            cache.texts[row] = cache.texts[row][:kept]
        elif action == "keep":
            cache.blocks.keep_prefix(row, np.array(cache.texts[row], dtype=np.int64), None)
        elif action == "end":
            cache.end(row)
        for other in range(len(cache.texts)):
            assert cache.read(other) == cache.texts[other]
        held = {block for table in cache.blocks.tables for block in table}
        assert cache.pool.used_count - cache.pool.idle_count == len(held)
        assert cache.pool.used_count <= max(most, len(held))
    for row in range(len(cache.texts))[::-1]:
        cache.end(row)
    assert cache.pool.used_count == cache.pool.idle_count <= most
    cache.pool.free_idle_blocks()
    assert not cache.pool.used_count


def test_a_text_continues_in_a_block_that_is_half_full() -> None:
    cache = Cache(10)
    assert cache.begin([1, 2, 3, 4, 5, 6, 0]) == 0
    cache.end(0)
    assert cache.begin([1, 2, 3, 4, 5, 6, 7, 8]) == 6
    assert cache.begin([1, 2, 3, 4, 5, 9, 9]) == 5, "and up to the first difference in it"
    cache.end(1)
    cache.end(0)
    assert cache.begin([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 7


def test_owners_share_nothing() -> None:
    cache = Cache(10)
    text = [1, 2, 3, 4, 5, 6, 7]
    cache.begin(text, owner=1)
    cache.end(0, owner=1)
    assert [cache.pool.find_prefix(np.array(text), owner)[1] for owner in (None, 0, 1)] == [0, 0, 6]


def test_the_longest_idle_give_way_and_of_a_text_the_last() -> None:
    cache = Cache(4)
    for first in (1, 2):  # two blocks each
        cache.begin([first] * 8 + [0])
        cache.end(0)
    cache.begin([3] * 4 + [0])
    assert [cache.pool.find_prefix(np.array([first] * 8), None)[1] for first in (1, 2)] == [4, 8]
    cache.begin([4] * 12 + [0])
    assert [cache.pool.find_prefix(np.array([first] * 8), None)[1] for first in (1, 2)] == [0, 0], "rows come first"
    assert cache.pool.evicted_count == 4


def test_nothing_is_kept_without_room() -> None:
    cache = Cache(0)
    cache.begin([1, 2, 3, 4, 5])
    cache.end(0)
    assert not cache.pool.used_count and not cache.pool.find_prefix(np.array([1, 2, 3, 4]), None)[1]


def fill(pool: BlockPool, system: np.ndarray, count: int, random: np.random.Generator) -> None:
    """Let ``count`` texts begin with ``system`` and part within one block."""
    blocks = BlockTables(1, pool)
    for _ in range(count):
        text = np.concatenate((system, random.integers(0, 50_000, 20)))
        found, cached = pool.find_prefix(text, None)
        blocks.replace_blocks(0, found)
        blocks.extend(0, cached, len(text) - cached)
        blocks.keep_prefix(0, text, None)
        blocks.truncate(0, 0)


@pytest.mark.parametrize("shared", [320, pytest.param(2_000, marks=pytest.mark.slow)])
def test_ten_thousand_texts_are_found_fast(shared: int) -> None:
    random, pool = np.random.default_rng(0), BlockPool(32, 40_000)
    fill(pool, system := random.integers(0, 50_000, shared), 10_000, random)
    times = []
    for _ in range(200):
        text = np.concatenate((system, random.integers(0, 50_000, 20)))
        began = time.perf_counter()
        assert pool.find_prefix(text, None)[1] >= shared
        times.append(time.perf_counter() - began)
    assert np.median(times) < 5e-4


@pytest.mark.soak
def test_memory_stays_flat() -> None:
    random, pool, held = np.random.default_rng(0), BlockPool(32, 4_000), list[int]()
    for _ in range(10):
        for _ in range(20):  # systems that come and go
            fill(pool, random.integers(0, 50_000, 500), 500, random)
        held.append(psutil.Process().memory_info().rss)
        assert pool.needed_capacity <= 4_000 and len(pool._kept_nodes) <= 4_000
    assert max(held[3:]) < held[2] + 10e6


# ---------------------------------------------------------------- agents


def traffic(seed: int) -> Iterator[np.ndarray]:
    """Yield the prompts of two chats that take turns and of ten sub-agents with one long system prompt."""
    random = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return random.integers(0, 50_000, count).tolist()

    system, of_agents = tokens(5_000), tokens(3_000)
    chats = [system + tokens(100), system + tokens(150)]
    for turn in range(12):
        for number, chat in enumerate(chats):
            yield np.array(chat)
            chats[number] = chat + tokens(int(random.integers(100, 1_200)))
            if number == 0 and turn % 4 == 2:
                agents = [of_agents + tokens(200) for _ in range(10)]
                for _ in range(int(random.integers(2, 6))):
                    for other, agent in enumerate(agents):
                        yield np.array(agent)
                        agents[other] = agent + tokens(int(random.integers(200, 900)))


def read(pool: BlockPool, seed: int) -> float:
    """Return which share of all prompts' tokens had to be read."""
    blocks, new, total = BlockTables(1, pool), 0, 0
    for text in traffic(seed):
        found, count = pool.find_prefix(text[:-1], None)
        blocks.replace_blocks(0, found)
        blocks.extend(0, count, len(text) - count)
        blocks.keep_prefix(0, text, None)
        blocks.truncate(0, 0)
        new, total = new + len(text) - count, total + len(text)
    return new / total


class ByBlock(BlockPool):
    """Plain LRU: what a row lets go of is idle from its beginning on, so beginnings go first; what follows is lost."""

    def release_blocks(self, blocks: list[int]) -> None:
        super().release_blocks(blocks[::-1])

    def _free_idle_block(self, block: int) -> None:
        for follower in list(self._kept_nodes[block].children):
            self._free_idle_block(follower.block)
        super()._free_idle_block(block)


@pytest.mark.parametrize(
    "most", [8_000, *[pytest.param(more, marks=pytest.mark.slow) for more in (15_000, 25_000)], 40_000]
)
def test_agents_keep_what_memory_allows(most: int) -> None:
    """Giving way by chain reads less than plain LRU over blocks; with enough memory nothing is read twice."""
    ours, plain = (np.mean([read(kind(32, most // 32), seed) for seed in range(2)]) for kind in (BlockPool, ByBlock))
    assert ours <= plain, (ours, plain)
    if most == 40_000:
        assert ours < 1.01 * np.mean([read(BlockPool(32, 10_000), seed) for seed in range(2)])
