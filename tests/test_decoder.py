"""A Decoder under random use, against Hugging Face computing every row from scratch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ovspec.decoder import StatefulDecoder, catch_up, probe_rollback
from ovspec.device import DeviceOptions
from ovspec.ir import CompiledIR, compile_ir
from ovspec.sequence import Sequence

TOKENS = st.lists(st.integers(3, 4095), max_size=6)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.lists(TOKENS, min_size=4, max_size=4)),
        st.tuples(st.just("truncate"), st.tuples(st.integers(0, 3), st.integers(0, 9))),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        st.tuples(st.just("compact"), st.none()),
    ),
    min_size=2,
    max_size=12,
)


@pytest.mark.parametrize(("rollback", "compact_at"), [("mask", 256), ("mask", 3), ("trim", 256)])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 3), operations=OPERATIONS)
def test_random_use_gives_the_logits_of_a_fresh_run(
    make_decoder: Callable[..., StatefulDecoder],
    reference: Reference,
    rollback: str,
    compact_at: int,
    rows: int,
    operations: list[tuple[str, Any]],
) -> None:
    decoder = make_decoder(rollback, compact_at)
    decoder.reset(rows)
    held: list[list[int]] = [[] for _ in range(rows)]
    for kind, argument in operations:
        if kind == "feed":
            new = [tokens or ([7] if not held[row] else []) for row, tokens in enumerate(argument[: len(held)])]
            if not any(new):
                continue
            logits = decoder.feed([np.array(tokens, dtype=np.int64) for tokens in new], [len(t) for t in new])
            for row, tokens in enumerate(new):
                held[row] += tokens
                assert logits[row].shape[0] == len(tokens)
                if tokens:
                    expected = reference.logits(held[row])[-len(tokens) :]
                    np.testing.assert_allclose(logits[row], expected, atol=2e-3)
        elif kind == "truncate":
            row = argument[0] % len(held)
            length = max(0, len(held[row]) - argument[1])
            decoder.truncate(row, length)
            held[row] = held[row][:length]
        elif kind == "reorder":
            picks = [pick % len(held) for pick in argument]
            decoder.reorder(picks)
            held = [list(held[pick]) for pick in picks]
        else:
            decoder.compact()
        assert [row.tokens.tolist() for row in decoder.rows] == held


def test_catch_up_follows_an_edited_sequence(
    make_decoder: Callable[..., StatefulDecoder], reference: Reference
) -> None:
    decoder = make_decoder("mask")
    decoder.feed([np.arange(10, 30)], [0])
    edited = Sequence([*range(10, 25), 99, 98])
    unseen = catch_up(decoder, 0, edited)
    assert unseen.tolist() == [99, 98]
    logits = decoder.feed([unseen], [1])[0]
    np.testing.assert_allclose(logits[0], reference.logits(edited.tokens.tolist())[-1], atol=2e-3)
    # Nothing new: the last token is fed again, because its logits are what is asked for.
    assert catch_up(decoder, 0, edited).tolist() == [98]


def test_dropped_rows_and_joined_rows(make_decoder: Callable[..., StatefulDecoder], reference: Reference) -> None:
    decoder = make_decoder("mask")
    decoder.reset(2)
    decoder.feed([np.array([5, 6, 7]), np.array([8, 9])], [0, 0])
    decoder.reorder([1, 1, 0])  # fork row 1; the copy then joins with a text of its own
    decoder.truncate(1, 0)
    logits = decoder.feed([np.array([10]), np.array([20, 21]), np.array([30])], [1, 1, 1])
    for row, text in enumerate(([8, 9, 10], [20, 21], [5, 6, 7, 30])):
        np.testing.assert_allclose(logits[row][0], reference.logits(text)[-1], atol=2e-3)


def test_rolling_back_by_mask_and_by_compaction_is_exact(pair: Path, cache_dir: Path) -> None:
    """The default KV cache, in each arithmetic: refeeding after a rollback moves no logit beyond rounding."""
    rng = np.random.default_rng(0)
    text = rng.integers(3, 4096, 200)
    for precision in ("f32", "bf16"):
        ir = compile_ir(pair, DeviceOptions(precision=precision, cache_dir=cache_dir))
        decoder = StatefulDecoder(ir, "mask")
        decoder.feed([text[:150]], [0])
        first = decoder.feed([text[150:154]], [4])[0].copy()
        for compacted in (False, True):
            decoder.truncate(0, 150)
            if compacted:
                decoder.compact()
            again = decoder.feed([text[150:154]], [4])[0]
            assert np.abs(again - first).max() <= 2e-5 * first.std()


def test_probe_finds_that_a_mask_suffices(target_ir: CompiledIR) -> None:
    assert probe_rollback(target_ir) == "mask"


def test_probe_falls_back_to_trim(target_ir: CompiledIR, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask that has no effect, dead slots are attended to: only cutting the state helps."""
    from ovspec.kv import Slots

    def all_alive(self: Slots) -> np.ndarray:
        return np.ones((len(self.lengths), self.used), dtype=np.int64)

    monkeypatch.setattr(Slots, "mask", property(all_alive))
    assert probe_rollback(target_ir) == "trim"


def test_feeding_nothing_is_refused(make_decoder: Callable[..., StatefulDecoder]) -> None:
    decoder = make_decoder("mask")
    with pytest.raises(ValueError, match="at least one token"):
        decoder.feed([np.empty(0, dtype=np.int64)], [0])
    with pytest.raises(ValueError, match="new tokens only"):
        decoder.feed([np.array([5])], [2])
