"""Decoders under random use, compared with Hugging Face, which computes every row from scratch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
import pytest
from conftest import ROOT, Reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ovspec.cache.stateful
from ovspec.cache.decoder import FeedRule, RollbackMethod
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.prefill import copy_shared_prefixes
from ovspec.cache.sequence import EMPTY_ROW, Sequence, catch_up
from ovspec.cache.stateful import RowByRowDecoder, StatefulDecoder
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import EXACT_KV_PRECISIONS, DeviceOptions, make_compile_properties
from ovspec.ir.request import InferenceRequest
from ovspec.setup.rollback_probing import probe_rollback

TOKENS = st.lists(st.integers(3, 4095), max_size=6)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.lists(TOKENS, min_size=4, max_size=4)),
        st.tuples(st.just("truncate"), st.tuples(st.integers(0, 3), st.integers(0, 9))),
        st.tuples(st.just("reorder"), st.lists(st.integers(EMPTY_ROW, 3), min_size=1, max_size=4)),
        st.tuples(st.just("compact"), st.none()),
    ),
    min_size=2,
    max_size=12,
)


@pytest.mark.parametrize(
    "decoders",
    [
        pytest.param([{"rollback": "mask"}], marks=pytest.mark.slow),  # it is driven beside the paged one, too
        [{"rollback": "mask", "compact_at": 3}],
        [{"rollback": "trim"}],
        [{}, {"rollback": "mask"}],
        [{"rule": FeedRule(most=2)}],
    ],
    ids=["mask", "mask-compacted", "trim", "paged-and-mask", "paged-in-chunks"],
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 3), operations=OPERATIONS)
def test_random_use_gives_the_logits_of_a_fresh_run(
    make_decoder: Callable[..., StatefulDecoder],
    make_paged: Callable[..., PagedDecoder],
    reference: Reference,
    decoders: list[dict[str, Any]],
    rows: int,
    operations: list[tuple[str, Any]],
) -> None:
    driven = [make_decoder(**options) if "rollback" in options else make_paged(**options) for options in decoders]
    for decoder in driven:
        decoder.reset(rows)
    held: list[list[int]] = [[] for _ in range(rows)]
    for kind, argument in operations:
        if kind == "feed":
            new = argument[: len(held)]
            if not any(new):
                continue
            # Every other row wants all logits, the rest only the last: of a prompt, only the last logits are read.
            wanted = [len(tokens) if row % 2 else min(len(tokens), 1) for row, tokens in enumerate(new)]
            seen = [decoder.feed([np.array(t, dtype=np.int64) for t in new], wanted) for decoder in driven]
            for row, tokens in enumerate(new):
                held[row] += tokens
                assert all(logits[row].shape[0] == wanted[row] for logits in seen)
                if tokens:
                    expected = reference.logits(held[row])[-wanted[row] :]
                    np.testing.assert_allclose(seen[0][row], expected, atol=2e-3)
                    np.testing.assert_allclose(seen[-1][row], seen[0][row], atol=1e-3)
        elif kind == "truncate":
            row = argument[0] % len(held)
            length = max(0, len(held[row]) - argument[1])
            for decoder in driven:
                decoder.truncate(row, length)
            held[row] = held[row][:length]
        elif kind == "reorder":
            picks = [pick if pick == EMPTY_ROW else pick % len(held) for pick in argument]
            for decoder in driven:
                decoder.reorder(picks)
            held = [[] if pick == EMPTY_ROW else list(held[pick]) for pick in picks]
        else:
            for decoder in driven:
                if isinstance(decoder, StatefulDecoder):
                    decoder.compact()
        for decoder in driven:
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
    # Nothing is new, so the last token is fed again, because its logits are requested.
    assert catch_up(decoder, 0, edited).tolist() == [98]


def test_rows_that_are_compacted_when_they_are_empty(
    make_decoder: Callable[..., StatefulDecoder], reference: Reference
) -> None:
    """A grammar may force tokens before the prompt has been read, and a batch then starts with slots that are dead."""
    text = np.arange(20, 60)
    batch = make_decoder("mask", compact_at=1)
    batch.reset(2)
    batch.feed([text[5:], text[9:]], [0, 0])
    for row in range(2):
        batch.truncate(row, 0)
    found = batch.feed([text, text[:30]], [1, 1])
    for logits, tokens in zip(found, (text, text[:30]), strict=True):
        np.testing.assert_allclose(logits[0], reference.logits(tokens.tolist())[-1], atol=2e-3)


def test_a_request_is_reset_just_before_it_runs(make_decoder: Callable[..., StatefulDecoder]) -> None:
    decoder, told = make_decoder("mask"), list[str]()
    raw = decoder._request.openvino_request

    class Noting:
        def __getattr__(self, name: str) -> Any:
            if name in ("reset_state", "start_async"):
                told.append(name)
            return getattr(raw, name)

    decoder._request.openvino_request = Noting()  # type: ignore[assignment]
    for _ in range(2):
        decoder.reset(1)
        decoder.reset(1)
        assert not told
        decoder.feed([np.arange(5, 9)], [1])
        decoder.feed([np.arange(9, 12)], [1])
        assert told == ["reset_state", "start_async", "start_async"]
        told.clear()


def test_states_are_set_once_a_request_has_run(
    make_decoder: Callable[..., StatefulDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU demands, which ignores states that are set in a request that is new or was reset."""
    text = np.arange(20, 40)
    decoder, other = make_decoder("mask"), make_decoder("mask")
    expected = decoder.feed([text], [1])[0].copy()
    decoder.truncate(0, 19)
    rollback = replace(other.rollback, copies="run")
    write = ovspec.cache.stateful.write_states

    def ignoring(request: Any, values: dict[str, np.ndarray]) -> None:
        if other._request.has_run:
            write(request, values)

    monkeypatch.setattr(ovspec.cache.stateful, "write_states", ignoring)
    for choice, right in ((other.rollback, False), (rollback, True)):
        other.rollback = choice
        other.reset(1)
        decoder.copy_into(other)
        assert np.allclose(other.feed([text[19:]], [1])[0], expected, atol=2e-3) == right


def test_requests_of_the_same_width_are_parted_on_a_gpu(
    make_decoder: Callable[..., StatefulDecoder], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plugin would compute with the other request's states."""
    ran, infer = list[tuple[InferenceRequest, int]](), InferenceRequest.infer

    def noting(self: InferenceRequest, arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        ran.append((self, arrays[0].shape[1]))
        return infer(self, arrays, logits_idx)

    monkeypatch.setattr(InferenceRequest, "infer", noting)
    decoders, texts = [make_decoder("mask") for _ in range(2)], [np.arange(20, 30), np.arange(60, 70)]
    for decoder in decoders:
        decoder.on_gpu = True
    for cut in (slice(0, 7), slice(7, 8), slice(8, 10)):
        for decoder, text in zip(decoders, texts, strict=True):
            logits = decoder.feed([text[cut]], [1])[0]
            np.testing.assert_allclose(logits[0], reference.logits(text[: cut.stop].tolist())[-1], atol=2e-3)
    assert len(ran) == 9  # six, and one between each two of the same width
    assert all(one[0] is other[0] or one[1] != other[1] for one, other in pairwise(ran))


def test_texts_are_read_again_where_states_cannot_be_copied(
    make_decoder: Callable[..., StatefulDecoder], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("a state was copied")

    for name in ("gather_states", "read_states", "write_states"):
        monkeypatch.setattr(ovspec.cache.stateful, name, refused)
    decoder = make_decoder("mask", compact_at=4)
    decoder.rollback = replace(decoder.rollback, copies=None)
    decoder.feed([np.arange(20, 60)], [0])
    assert not len(decoder.fork().rows[0])
    decoder.reset(2)
    texts = [np.arange(20, 60), np.arange(40, 90)]
    for begin in range(0, 40, 4):
        pieces = [text[begin : begin + 4] for text in texts]
        logits = decoder.feed([np.concatenate((piece, piece)) for piece in pieces], [5, 5])
        for row, text in enumerate(texts):
            expected = reference.logits(text[: begin + 4].tolist())[-1]
            np.testing.assert_allclose(logits[row][0], expected, atol=2e-3)
            decoder.truncate(row, begin + 4)
    assert not decoder.compactions


def test_rejections_copy_no_state(
    make_decoder: Callable[..., StatefulDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[str] = []
    for name in ("gather_states", "read_states", "write_states"):
        monkeypatch.setattr(ovspec.cache.stateful, name, lambda *_, name=name: copies.append(name))
    decoder = make_decoder("mask", compact_at=256)
    for position in range(60):
        decoder.feed([np.arange(position, position + 4)], [4])
        decoder.truncate(0, position + 1)
    assert not copies, "180 rejected tokens"


def test_dropped_rows_and_joined_rows(make_decoder: Callable[..., StatefulDecoder], reference: Reference) -> None:
    decoder = make_decoder("mask")
    decoder.reset(2)
    decoder.feed([np.array([5, 6, 7]), np.array([8, 9])], [0, 0])
    decoder.reorder([1, 1, 0])  # fork row 1; the copy then gets a text of its own
    decoder.truncate(1, 0)
    logits = decoder.feed([np.array([10]), np.array([20, 21]), np.array([30])], [1, 1, 1])
    for row, text in enumerate(([8, 9, 10], [20, 21], [5, 6, 7, 30])):
        np.testing.assert_allclose(logits[row][0], reference.logits(text)[-1], atol=2e-3)


def test_rows_that_move_twice(make_decoder: Callable[..., StatefulDecoder], reference: Reference) -> None:
    """The next inference gathers them once, from where they were before both moves."""
    decoder = make_decoder("mask")
    decoder.reset(2)
    decoder.feed([np.array([5, 6, 7]), np.array([8, 9])], [0, 0])
    decoder.reorder([1, 0])
    decoder.reorder([1, 1])
    logits = decoder.feed([np.array([10]), np.array([20, 21])], [1, 1])
    for row, text in enumerate(([5, 6, 7, 10], [5, 6, 7, 20, 21])):
        np.testing.assert_allclose(logits[row][0], reference.logits(text)[-1], atol=2e-3)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 3), operations=OPERATIONS.map(lambda ops: [op for op in ops if op[0] != "compact"]))
@pytest.mark.parametrize("attention", ["mask", pytest.param("alibi", marks=pytest.mark.slow), None])
def test_random_use_with_recurrent_states(
    hybrids: Callable[..., tuple[hybrid.Hybrid, RowByRowDecoder]],
    attention: str | None,
    rows: int,
    operations: list[tuple[str, Any]],
) -> None:
    """Rolling back may go further than requested; what is left, and later logits, are those of a fresh run."""
    model, decoder = hybrids(attention)
    decoder.reset(rows)
    for kind, argument in operations:
        held = [row.tokens.tolist() for row in decoder.rows]
        if kind == "feed":
            new = [tokens or ([7] if not held[row] else []) for row, tokens in enumerate(argument[: len(held)])]
            if not any(new):
                continue
            logits = decoder.feed([np.array(tokens, dtype=np.int64) for tokens in new], [len(t) for t in new])
            for row, tokens in enumerate(new):
                if tokens:
                    expected = model.logits(held[row] + tokens)[-len(tokens) :]
                    np.testing.assert_allclose(logits[row], expected, atol=2e-3)
            assert [row.tokens.tolist() for row in decoder.rows] == [a + b for a, b in zip(held, new, strict=True)]
        elif kind == "truncate":
            row = argument[0] % len(held)
            length = max(0, len(held[row]) - argument[1])
            decoder.truncate(row, length)
            left = decoder.rows[row].tokens.tolist()
            assert len(left) <= length
            assert left == held[row][: len(left)]
        else:
            picks = [pick if pick == EMPTY_ROW else pick % len(held) for pick in argument]
            decoder.reorder(picks)
            expected = [[] if pick == EMPTY_ROW else held[pick] for pick in picks]
            assert [row.tokens.tolist() for row in decoder.rows] == expected


def test_recurrent_states_are_not_shared(hybrids: Callable[..., tuple[hybrid.Hybrid, RowByRowDecoder]]) -> None:
    """They can't be rolled back to every position, so a copy might be thrown away in every round."""
    _, decoder = hybrids("mask")
    decoder.reset(2)
    text = list(range(10, 110))
    decoder.feed([np.array(text), np.empty(0, dtype=np.int64)], [1, 0])
    copy_shared_prefixes(decoder, [Sequence([*text, 5]), Sequence([*text[:90], 6])])
    assert [len(row) for row in decoder.rows] == [100, 0]


def test_no_inference_after_a_compaction_has_the_shapes_of_the_last_one(
    hybrids: Callable[..., tuple[hybrid.Hybrid, RowByRowDecoder]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU demands, which then computes with the states of before."""
    model, rows = hybrids("alibi")
    decoder = rows._decoders[0]
    monkeypatch.setattr(decoder, "rollback", replace(decoder.rollback, copies="run"))
    seen: list[tuple[int, int] | str] = []
    infer, gather = decoder._request.infer, ovspec.cache.stateful.gather_states

    def noting(arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        seen.append((arrays[0].shape[1], arrays[1].shape[1]))
        return infer(arrays, logits_idx)

    def gathering(*given: Any) -> None:
        seen.append("compaction")
        gather(*given)

    monkeypatch.setattr(decoder._request, "infer", noting)
    monkeypatch.setattr(ovspec.cache.stateful, "gather_states", gathering)
    text = list(range(20, 30))
    decoder.reset(1)
    decoder.feed([np.array(text)], [1])
    for junk in (5, 50, 500):
        more = [junk + index for index in range(4)]
        logits = decoder.feed([np.array(more)], [4])[0]
        np.testing.assert_allclose(logits, model.logits(text + more)[-4:], atol=2e-3)
        decoder.truncate(0, 10)
    compactions = [index for index, each in enumerate(seen) if each == "compaction"]
    assert len(compactions) == 2
    assert all(seen[index - 1] != seen[index + 1] for index in compactions)


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[hybrid.Hybrid, RowByRowDecoder]]:
    @functools.cache
    def make(attention: str | None) -> tuple[hybrid.Hybrid, RowByRowDecoder]:
        model = hybrid.Hybrid(4096, attention)
        folder = hybrid.export(model, tmp_path_factory.mktemp("hybrid") / "ir", ROOT / "models" / "demo")
        ir = compile_ir(folder, DeviceOptions(precision="f32"))
        rollback = probe_rollback(ir).rollback
        assert rollback.replay
        return model, RowByRowDecoder(lambda: StatefulDecoder(ir, rollback))

    return make


@pytest.mark.parametrize("precision", [pytest.param("f32", marks=pytest.mark.slow), "bf16"])
def test_which_kv_precisions_survive(precision: str, cache_dir: Path) -> None:
    """The default is one of the types that masking, trimming, compacting, forking and copying leave unchanged."""
    rng = np.random.default_rng(0)
    text = rng.integers(3, 4096, 200)
    moved = {}
    for kv_precision in ("f32", "bf16", "f16", "u8"):
        options = DeviceOptions(precision=precision, kv_precision=kv_precision, cache_dir=cache_dir)
        ir = compile_ir(ROOT / "models" / "demo" / "draft", options)
        decoder, other = (StatefulDecoder(ir, RollbackMethod("mask")) for _ in range(2))

        def last(decoder: StatefulDecoder) -> np.ndarray:
            return decoder.feed([text[150:158]], [8])[0].copy()

        decoder.feed([text[:100]], [0])
        decoder.feed([text[100:150]], [0])
        clean = last(decoder)
        seen = {}
        decoder.truncate(0, 150)
        seen["mask"] = last(decoder)
        decoder.truncate(0, 150)
        decoder.compact()
        seen["trim"] = last(decoder)
        decoder.reset(1)
        decoder.feed([text[:100]], [0])
        decoder.feed([text[:20]], [0])
        decoder.truncate(0, 100)
        decoder.feed([text[100:150]], [0])
        with_dead = last(decoder)
        decoder.truncate(0, 150)
        decoder.compact()
        seen["compact"] = last(decoder) - with_dead + clean
        decoder.reset(1)
        decoder.feed([text[:100]], [0])
        decoder.feed([text[100:150]], [0])
        decoder.copy_into(other)
        seen["copy, which save will use"] = last(other)
        decoder.reset(1)
        decoder.feed([text[:100]], [0])
        decoder.feed([text[100:150]], [0])
        decoder.reorder([0, 0])
        seen["fork"] = decoder.feed([text[150:158]] * 2, [8, 8])[1]
        moved[kv_precision] = max(np.abs(logits - clean).max() for logits in seen.values()) / clean.std()
    exact = {kv_precision for kv_precision, most in moved.items() if most <= 1e-4}
    assert exact >= set(EXACT_KV_PRECISIONS), moved  # u8 changes by 4e-3 on most processors, but not on all


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
def test_the_default_kv_precision_is_an_exact_one(precision: str) -> None:
    assert make_compile_properties(DeviceOptions(precision=precision))["KV_CACHE_PRECISION"] in EXACT_KV_PRECISIONS


def test_feeding_nothing_is_refused(make_decoder: Callable[..., StatefulDecoder]) -> None:
    decoder = make_decoder("mask")
    with pytest.raises(ValueError, match="at least one token"):
        decoder.feed([np.empty(0, dtype=np.int64)], [0])
    with pytest.raises(ValueError, match="only for the tokens it feeds"):
        decoder.feed([np.array([5])], [2])
