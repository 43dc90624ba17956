"""The paged decoder of models with recurrent states: rolling back leaves no trace, and reads nothing again."""

from __future__ import annotations

from typing import Any

import hybrid
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_stateful import OPERATIONS

from ovspec.cache.blocks import BlockTensors
from ovspec.cache.decoder import FeedRule
from ovspec.cache.hybrid import MAX_SNAPSHOTS, MAX_UPDATES, HybridDecoder, RowStates, StateSnapshot
from ovspec.cache.sequence import EMPTY_ROW, Sequence
from ovspec.ir.compile import CompiledIR
from ovspec.ir.device import DeviceOptions
from ovspec.setup.paging import compile_paged

# The second computes tokens again, and copies of the last one, as processors with wide kernels demand.
RULES = [FeedRule(), FeedRule(queries=2, fewest=4, fewest_logits=4)]


@pytest.fixture(scope="module")
def model() -> hybrid.Hybrid:
    return hybrid.Hybrid(4096, "mask")


@pytest.fixture(scope="module")
def ir(tmp_path_factory: pytest.TempPathFactory) -> CompiledIR:
    return compile_paged(hybrid.shared_export(tmp_path_factory), DeviceOptions(precision="f32"))


@pytest.fixture(scope="module", params=RULES, ids=str)
def decoder(ir: CompiledIR, request: pytest.FixtureRequest) -> HybridDecoder:
    return HybridDecoder(ir, rule=request.param)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 3), operations=OPERATIONS.map(lambda ops: [op for op in ops if op[0] != "compact"]))
def test_random_use_gives_the_logits_of_a_fresh_run(
    decoder: HybridDecoder, model: hybrid.Hybrid, rows: int, operations: list[tuple[str, Any]]
) -> None:
    decoder.reset(rows)
    for kind, argument in operations:
        held = [row.tokens.tolist() for row in decoder.rows]
        if kind == "feed":
            new = [tokens or ([7] if not held[row] else []) for row, tokens in enumerate(argument[: len(held)])]
            if not any(new):
                continue
            before = decoder.inferences
            logits = decoder.feed([np.array(tokens, dtype=np.int64) for tokens in new], [len(t) for t in new])
            assert decoder.inferences - before == sum(map(bool, new)), "nothing is read again"
            for row, tokens in enumerate(new):
                expected = model.logits(held[row] + tokens)[len(held[row]) :] if tokens else np.empty((0, 4096))
                np.testing.assert_allclose(logits[row], expected, atol=2e-3)
        elif kind == "truncate":
            row = argument[0] % len(held)
            length = max(0, len(held[row]) - argument[1])
            decoder.truncate(row, length)
            left = decoder.rows[row].tokens.tolist()
            assert left == held[row][: len(left)]
        else:
            picks = [pick if pick == EMPTY_ROW else pick % len(held) for pick in argument]
            decoder.reorder(picks)
            assert [row.tokens.tolist() for row in decoder.rows] == [
                [] if pick == EMPTY_ROW else held[pick] for pick in picks
            ]


def test_every_token_of_the_last_inference_can_be_gone_back_to(decoder: HybridDecoder, model: hybrid.Hybrid) -> None:
    text = list(range(20, 45))
    decoder.reset(1)
    decoder.feed([np.array(text)], [1])
    for accepted in (0, 1, 3, 6, 7):
        guesses = [900 + accepted + index for index in range(7)]
        begin = len(decoder.rows[0])
        decoder.feed([np.array(guesses)], [7])
        decoder.truncate(0, begin + accepted)
        assert len(decoder.rows[0]) == begin + accepted
        text += guesses[:accepted]
        np.testing.assert_allclose(decoder.feed([np.array([7])], [1])[0], model.logits([*text, 7])[-1:], atol=2e-3)
        decoder.truncate(0, begin + accepted)


def test_forks_and_dumps_go_on_from_the_same_states(decoder: HybridDecoder, model: hybrid.Hybrid) -> None:
    text = list(range(20, 45))
    decoder.reset(1)
    decoder.feed([np.array([*text, 5, 6, 7])], [4])
    decoder.truncate(0, len(text))
    other = HybridDecoder(decoder._ir, rule=decoder.rule)
    other.restore(decoder.rows[0].tokens, decoder.dump())
    fork = decoder.fork()
    decoder.feed([np.array([8, 9])], [1])
    for copy in (fork, other):
        np.testing.assert_allclose(copy.feed([np.array([7])], [1])[0], model.logits([*text, 7])[-1:], atol=2e-3)
        copy.truncate(0, len(text))
        assert len(copy.rows[0]) == len(text)
    with pytest.raises(ValueError, match="states"):
        other.restore(np.array(text), {name: array for name, array in decoder.dump().items() if "state" not in name})


@pytest.mark.parametrize("end", [100, 128, 131])
def test_kept_prefixes_have_their_states(ir: CompiledIR, model: hybrid.Hybrid, end: int) -> None:
    tensors = BlockTensors(ir, max_cached_tokens=10_000)
    text = np.random.default_rng(end).integers(3, 4096, end)
    decoder = HybridDecoder(ir, tensors=tensors)
    decoder.feed([text[:70]], [1])
    for token in text[70:]:
        decoder.feed([np.array([token])], [1])
    decoder.reset(1)
    reader = HybridDecoder(ir, tensors=tensors)
    more = [*text.tolist(), *range(50, 100)]
    reader.reuse_prefixes([Sequence(more)])
    assert len(reader.rows[0]) == end, "the text's end"
    unread = np.array(more[end:])
    np.testing.assert_allclose(reader.feed([unread], [1])[0], model.logits(more)[-1:], atol=2e-3)
    edited = [*text[:90].tolist(), *range(50, 120)]
    reader.reset(1)
    reader.reuse_prefixes([Sequence(edited)])
    assert len(reader.rows[0]) == 69, "the prompt but its last token, which a repeated one feeds for its logits"
    np.testing.assert_allclose(reader.feed([np.array(edited[69:])], [1])[0], model.logits(edited)[-1:], atol=2e-3)
    reader.reset(1)
    reader.reuse_prefixes([Sequence([*text[:66].tolist(), *range(50, 120)])])
    assert not len(reader.rows[0]), "the next states are of a longer prefix"
    stranger = Sequence(more)
    stranger.owner = "another"
    reader.reset(1)
    reader.reuse_prefixes([stranger])
    assert not len(reader.rows[0])
    tensors.free_idle()
    assert not tensors.pool.snapshot_count


def test_states_count_as_memory_of_the_prefix_cache(ir: CompiledIR) -> None:
    tensors = BlockTensors(ir, max_cached_tokens=320)
    decoder = HybridDecoder(ir, tensors=tensors)
    decoder.feed([np.arange(10, 74)], [1])
    decoder.reset(1)
    kept = tensors.pool.idle_count
    assert kept and tensors.pool.snapshot_count and tensors.idle_bytes > 0
    tensors.pool.snapshot_size = 100.0  # in blocks
    decoder.feed([np.arange(1000, 1064)], [1])
    decoder.reset(1)
    assert tensors.pool.evicted_count >= kept
    assert tensors.pool.used_count + 100 * tensors.pool.snapshot_count <= 320 / tensors.block_size + 100


def test_a_row_goes_back_to_the_nearest_states(decoder: HybridDecoder, model: hybrid.Hybrid) -> None:
    text = np.random.default_rng(0).integers(3, 4096, 400).tolist()
    decoder.reset(1)
    for begin in range(0, 400, 40):
        decoder.feed([np.array(text[begin : begin + 40])], [1])
    decoder.truncate(0, 390)
    assert len(decoder.rows[0]) == 360, "40 tokens are too many to go back to each of them"
    decoder.truncate(0, 130)
    left = len(decoder.rows[0])
    assert left in range(40, 121, 40)
    np.testing.assert_allclose(
        decoder.feed([np.array(text[left:130])], [1])[0], model.logits(text[:130])[-1:], atol=2e-3
    )


def test_snapshots_are_denser_near_the_end() -> None:
    zero = StateSnapshot(0, [], [])
    states = RowStates(zero, zero, snapshots=[zero])
    for length in range(100, 10_001, 100):
        states.add_snapshot(StateSnapshot(length, [], []), min_distance=50)
    lengths = [snapshot.length for snapshot in states.snapshots]
    assert len(lengths) == MAX_SNAPSHOTS
    assert (lengths[0], lengths[-1]) == (0, 10_000)
    gaps = np.diff(lengths)
    assert gaps[0] > 4 * gaps[-1]
    for length in (10_010, 10_020, 10_030):  # of which only the last is worth its memory
        states.add_snapshot(StateSnapshot(length, [], []), min_distance=50)
    assert [snapshot.length for snapshot in states.snapshots][-2:] == [10_000, 10_030]


def test_proposals_after_a_long_prompt_can_be_rejected(decoder: HybridDecoder, model: hybrid.Hybrid) -> None:
    prompt = np.random.default_rng(0).integers(3, 4096, 3 * MAX_UPDATES).tolist()
    decoder.reset(1)
    decoder.feed([np.array([*prompt, 1000, 1001, 1002])], [4])
    decoder.truncate(0, len(prompt) + 1)
    assert len(decoder.rows[0]) == len(prompt) + 1
    expected = model.logits([*prompt, 1000, 7])[-1:]
    np.testing.assert_allclose(decoder.feed([np.array([7])], [1])[0], expected, atol=2e-3)
