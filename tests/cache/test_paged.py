"""What the paged decoder does not share with the stateful one (test_stateful.py tests both)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from compiling import AGREES, compile_once, trust_paged
from conftest import HAS_BF16, ROOT, STRICT, Reference

import ovspec
import ovspec.cache.paged
import ovspec.setup.paging
from ovspec.cache.decoder import FAST_GPU_RULE, FAST_RULE, FeedRule
from ovspec.cache.paged import PagedDecoder
from ovspec.ir.attention_mask import UNBOUNDED, find_narrowest_window
from ovspec.ir.crashes import choose_crash_free_options
from ovspec.ir.device import EXACT_KV_PRECISIONS, DeviceOptions
from ovspec.ir.paged_attention import rewrite_to_paged
from ovspec.ir.request import InferenceRequest
from ovspec.setup.engine_choice import load_compiled_model
from ovspec.setup.exactness import ExactnessTrial, probe_feed_rule
from ovspec.setup.paging import PagedCheck, check_paged, check_paged_logits, compile_paged

DEMO = ROOT / "models" / "demo"
SMALL = DEMO / "draft"  # which is compiled sooner
MakePaged = Callable[..., PagedDecoder]


def test_the_private_transformation_is_where_it_was() -> None:
    """Fails if a new OpenVINO moves it; then ``rewrite_to_paged`` needs another import, or everything gets slower."""
    module = importlib.import_module("openvino._offline_transformations")
    assert callable(module.paged_attention_transformation)
    model = ov.Core().read_model(DEMO / "openvino_model.xml")
    rewrite_to_paged(model)
    names = {port.get_any_name() for port in model.inputs}
    assert names >= {"input_ids", "position_ids", "past_lens", "subsequence_begins", "block_indices", "key_cache.0"}


def test_a_batch_computes_each_token_once(make_paged: MakePaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only attention gets a row's only token twice, with the bits of one pass; no block is kept for the second."""
    decoder = make_paged(FeedRule(queries=2, fewest=2))
    text = np.random.default_rng(1).integers(5, 1000, 80)
    expected = decoder.feed([text], [80])[0].copy()
    seen: list[tuple[int, int]] = []
    infer = decoder._request.infer

    def noting(arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        seen.append((len(arrays[0]), len(arrays[-2])))
        return infer(arrays, logits_idx)

    monkeypatch.setattr(decoder._request, "infer", noting)
    decoder.reset(3)
    starts = (0, 31, 40)
    decoder.feed([text[:start] for start in starts], [0, 0, 0])
    for step in range(40):
        logits = decoder.feed([text[start + step : start + step + 1] for start in starts], [1, 1, 1])
        assert all((logits[row][0] == expected[start + step]).all() for row, start in enumerate(starts))
        blocks = [-(-(start + step + 1) // decoder.block_size) for start in starts]
        assert decoder.blocks_used == sum(blocks)
    assert seen[1:] == [(3, 6)] * 40
    fork = decoder.fork()
    assert fork.feed([text[40:42], text[:0], text[:0]], [2, 0, 0])[0].tolist() == expected[40:42].tolist()
    assert decoder.feed([text[40:41]] * 3, [1, 0, 0])[0].tolist() == expected[40:41].tolist()


def test_a_texts_first_token_has_an_inference_of_its_own(
    make_paged: MakePaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of no row are later tokens computed without a past, as tokens or to fill an inference up."""
    text = np.random.default_rng(1).integers(5, 1000, 40)
    expected = make_paged(FeedRule(queries=2)).feed([text], [40])[0].copy()
    decoder = make_paged(FeedRule(queries=2, fewest=4, most=8, first_apart=True, fewest_logits=4))
    infer, begun, widths = decoder._request.infer, list[int](), list[int]()

    def noting(arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        widths.append(len(arrays[0]))
        begun.append(sum(bool(held) and not past for held, past in zip(holding, arrays[2], strict=False)))
        return infer(arrays, logits_idx)

    append = decoder._append_tokens

    def appending(tokens: list[np.ndarray], *rest: Any, **named: Any) -> list[np.ndarray]:
        holding[:] = [len(held) for held, new in zip(decoder.rows, tokens, strict=True) if len(new)]
        assert all(len(new) == 1 for held, new in zip(decoder.rows, tokens, strict=True) if len(new) and not len(held))
        return append(tokens, *rest, **named)

    holding: list[int] = []
    monkeypatch.setattr(decoder._request, "infer", noting)
    monkeypatch.setattr(decoder, "_append_tokens", appending)
    assert np.abs(decoder.feed([text], [40])[0] - expected).max() < 1e-3
    decoder.reset(3)
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, 20)):
        ends = (end, begin, min(2 * end, 40))  # one row begins later, one is ahead
        pieces = [text[len(held) : max(len(held), to)] for held, to in zip(decoder.rows, ends, strict=True)]
        found = decoder.feed(pieces, [len(piece) for piece in pieces])
        for held, logits in zip(decoder.rows, found, strict=True):
            if len(logits):
                assert np.abs(logits - expected[len(held) - len(logits) : len(held)]).max() < 1e-3
    decoder.truncate(0, 1)
    decoder.truncate(1, 0)
    found = decoder.feed([text[1:2], text[:3], text[:0]], [1, 3, 0])
    assert np.abs(found[0] - expected[1:2]).max() < 1e-3 and np.abs(found[1] - expected[:3]).max() < 1e-3
    decoder.reset(2)
    decoder.feed([text[:2], text[:20]], [0, 0])
    assert np.abs(decoder.feed([text[2:3], text[20:21]], [1, 1])[0] - expected[2:3]).max() < 1e-3
    decoder.reset(8)
    decoder.feed([text[:1]] * 8, [1] * 8)
    assert len(begun) > 10 and not any(begun)
    assert max(widths) == 8 > 4 == min(widths), "as the rule says"


def test_without_the_transformation_the_stateful_engine_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import openvino._offline_transformations as transformations

    monkeypatch.delattr(transformations, "paged_attention_transformation")
    lm = ovspec.load(SMALL, arithmetic="fast", cache_dir=tmp_path)
    stats = lm.generate("def f(", max_tokens=4).stats
    assert (stats.engine, stats.engine_reason) == (
        "stateful",
        "this OpenVINO has no paged-attention transformation",
    )
    with pytest.raises(ovspec.OvspecError, match=r"`engine='paged'` can't be used \(this OpenVINO has no"):
        ovspec.load(SMALL, engine="paged", arithmetic="fast", cache_dir=tmp_path)


def test_the_comparison_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compile_once(monkeypatch)
    monkeypatch.setattr(ovspec.setup.paging, "check_paged_logits", lambda *a: compared.append(a) or AGREES)
    for precision in ("f32", "f32", "bf16"):
        loaded = load_compiled_model(SMALL, DeviceOptions(precision=precision, cache_dir=tmp_path))
        assert (loaded.engine, loaded.engine_reason) == ("paged", AGREES.reason)
    assert len(compared) == 1
    assert load_compiled_model(SMALL, DeviceOptions(cache_dir=tmp_path), "stateful").engine == "stateful"
    for file in (tmp_path / "engines").iterdir():
        file.write_text("{", encoding="utf-8")
    assert check_paged(SMALL, DeviceOptions(cache_dir=tmp_path)) == AGREES
    assert len(compared) == 2


@pytest.fixture(scope="module")
def compiled_once() -> Iterator[None]:
    """Compile the stateful model once for all that compare it."""
    with pytest.MonkeyPatch.context() as patched:
        compile_once(patched)
        yield


@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("mistake", ["positions", "rollback", "sharing", "window"])
def test_a_paged_decoder_that_differs_is_not_used(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "positions":

        class Mistaken(InferenceRequest):
            def infer(self, input_arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
                no_positions = np.zeros_like(input_arrays[1])
                return super().infer((input_arrays[0], no_positions, *input_arrays[2:]), logits_idx)

        monkeypatch.setattr(ovspec.cache.paged, "InferenceRequest", Mistaken)
    elif mistake == "rollback":
        monkeypatch.setattr(PagedDecoder, "truncate", lambda *_: None)
    elif mistake == "sharing":
        monkeypatch.setattr(
            ovspec.cache.paged.BlockTables, "extend", without_copies(ovspec.cache.paged.BlockTables.extend)
        )
    else:
        monkeypatch.setattr(ovspec.setup.paging, "read_attention_windows", lambda _: {None, 77})
    assert check_paged_logits(SMALL, DeviceOptions()) == PagedCheck(
        False,
        f"the attention window is {UNBOUNDED} in the model, but 77 in the paged engine"
        if mistake == "window"
        else "the paged engine's logits differ from the stateful engine's",
    )


def without_copies(extend: Callable[..., Any]) -> Callable[..., Any]:
    def extended(self: Any, row: int, held: int, new: int) -> list[Any]:
        return extend(self, row, held, new) and []

    return extended


def test_compared_in_its_own_arithmetic_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_ir = ovspec.setup.paging.compile_ir

    def noting(folder: Path, options: DeviceOptions, *rest: Any) -> Any:
        compiled.append(options.fixed_properties.get("INFERENCE_PRECISION_HINT"))
        return compile_ir(folder, options, *rest)

    monkeypatch.setattr(ovspec.setup.paging, "compile_ir", noting)
    assert check_paged_logits(SMALL, DeviceOptions(precision="bf16")) == AGREES
    monkeypatch.setattr(ovspec.setup.paging, "weights_fit_into_memory", lambda *_: False)
    assert check_paged_logits(SMALL, DeviceOptions(precision="bf16")) == AGREES
    assert compiled == ["f32", "f32", "bf16", "bf16"]


def test_the_compile_cache_is_not_filled_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO can't read a paged model back from its cache."""
    trust_paged(monkeypatch)
    ovspec.load(SMALL, engine="paged", arithmetic="fast", cache_dir=tmp_path)
    assert not list(tmp_path.rglob("*.blob"))
    ovspec.load(SMALL, engine="stateful", arithmetic="fast", cache_dir=tmp_path)
    assert list(tmp_path.rglob("*.blob"))


def test_other_devices_are_stateful(tmp_path: Path) -> None:
    loaded = load_compiled_model(SMALL, DeviceOptions(device="AUTO:CPU", cache_dir=tmp_path))
    assert loaded.engine == "stateful"
    assert loaded.engine_reason == "the paged engine needs a CPU or a GPU, but the device is AUTO:CPU"
    with pytest.raises(ovspec.OvspecError, match=r"can't be used \(the paged engine needs a CPU or a GPU"):
        load_compiled_model(SMALL, DeviceOptions(device="AUTO:CPU", cache_dir=tmp_path), "paged")


def test_a_cache_that_openvino_refuses_when_paged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In f32, paged attention can't use a bf16 cache: "auto" falls back to the stateful engine, "paged" is refused."""
    trust_paged(monkeypatch)
    options = DeviceOptions(precision="f32", kv_precision="bf16", cache_dir=tmp_path)
    loaded = load_compiled_model(SMALL, options)
    assert loaded.engine == "stateful"
    assert loaded.engine_reason
    with pytest.raises(ovspec.OvspecError, match="`engine='paged'` can't be used"):
        load_compiled_model(SMALL, options, "paged")


def test_the_demo_pair_sees_everything(target_ir: Any) -> None:
    assert find_narrowest_window(target_ir) == UNBOUNDED


# ---------------------------------------------------------------- the cache


def test_chunks_give_the_same_logits(
    make_paged: MakePaged, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = np.random.default_rng(1).integers(3, 4096, 150)
    whole = make_paged()
    expected = whole.feed([text], [3])[0].copy()
    assert whole.inferences == 1
    monkeypatch.setattr("ovspec.cache.paged.MAX_INFERENCE_TOKENS", 40)
    chunked = make_paged()
    logits = chunked.feed([text], [3])[0]
    assert chunked.inferences == 4
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    np.testing.assert_allclose(logits, reference.logits(text.tolist())[-3:], atol=2e-3)
    # Rows of different lengths: one decodes while the other reads its prompt.
    batch = make_paged()
    batch.reset(2)
    batch.feed([text[:9], text[:1]], [0, 0])
    logits = batch.feed([text[9:10], text[1:]], [1, 2])
    np.testing.assert_allclose(logits[0][0], reference.logits(text[:10].tolist())[-1], atol=2e-3)
    np.testing.assert_allclose(logits[1], expected[1:], atol=1e-4)


def test_tensors_grow_and_keep_what_they_held(make_paged: MakePaged, reference: Reference) -> None:
    decoder = make_paged()
    text = np.random.default_rng(2).integers(3, 4096, 700)
    logits, capacities = np.empty(0), []
    for start in range(0, 700, 100):
        logits = decoder.feed([text[start : start + 100]], [1])[0]
        capacities.append(decoder._tensors.capacity)
    assert capacities == sorted(capacities)
    assert len(set(capacities)) == 3
    assert decoder.blocks_used == -(-700 // decoder._tensors.block_size)
    np.testing.assert_allclose(logits[0], reference.logits(text.tolist())[-1], atol=2e-3)
    decoder.truncate(0, 10)
    assert decoder.blocks_used == 1
    decoder.reset(1)
    assert decoder.blocks_used == 0


def test_forks_share_their_prefix(make_paged: MakePaged, reference: Reference) -> None:
    decoder = make_paged()
    text = np.random.default_rng(3).integers(3, 4096, 100)
    decoder.feed([text], [1])
    one = decoder.blocks_used
    decoder.reorder([0] * 4)
    assert decoder.blocks_used == one
    logits = decoder.feed([np.array([7 + row]) for row in range(4)], [1] * 4)
    assert decoder.blocks_used == one + 3, "three copies of the last block"
    for row in range(4):
        np.testing.assert_allclose(logits[row][0], reference.logits([*text, 7 + row])[-1], atol=2e-3)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_which_block_caches_are_exact_after_a_rollback(precision: str, cache_dir: Path) -> None:
    """The default is one of the types that give the same logits when the same tokens are fed again; u8 does not."""
    text, junk = np.split(np.random.default_rng(0).integers(3, 4096, 260), [200])
    moved = {}
    kinds = ("f32", "f16", "u8") if precision == "f32" else ("bf16" if HAS_BF16 else "f32", "u8")
    for kv_precision in kinds:
        options = DeviceOptions(precision=precision, kv_precision=kv_precision, cache_dir=cache_dir)
        decoder = PagedDecoder(compile_paged(SMALL, options), rule=STRICT)
        decoder.feed([text[:190]], [1])
        clean = decoder.feed([text[190:]], [10])[0].copy()
        decoder.truncate(0, 190)
        decoder.feed([junk], [1])
        decoder.truncate(0, 190)
        moved[kv_precision] = float(np.abs(decoder.feed([text[190:]], [10])[0] - clean).max() / clean.std())
    assert {kind for kind, most in moved.items() if most == 0} == set(kinds) & set(EXACT_KV_PRECISIONS), moved


@pytest.mark.parametrize("precision", ["f32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_token_has_the_same_bits_however_its_text_was_fed(precision: str, cache_dir: Path) -> None:
    """With quantised activations, where a token alone rounds differently. A filling is never seen by later tokens."""
    ir = compile_paged(SMALL, DeviceOptions(precision=precision, cache_dir=cache_dir))
    trial = ExactnessTrial((1, 30, 64, 200), (1, 1, 2, 3, 1, 5, 1, 8, 16, 1), (2, 9))
    found = probe_feed_rule(PagedDecoder(ir, rule=STRICT), ir.logits_width, trial)
    assert found.positions > 4 * 4 * 39 and found.is_exact, found
    assert not probe_feed_rule(PagedDecoder(ir), ir.logits_width, trial).is_exact, "the probe is blind"


def test_a_failed_inference_empties_the_cache(make_paged: MakePaged, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make_paged()
    decoder.feed([np.arange(5, 50)], [1])

    def fail(*_: object) -> None:
        raise RuntimeError("Check failed at x.cpp:1:\nOut of memory\n")

    monkeypatch.setattr(decoder._request, "infer", fail)
    with pytest.raises(ovspec.OvspecError, match="OpenVINO failed to run the model"):
        decoder.feed([np.array([7])], [1])
    assert len(decoder.rows[0]) == decoder.blocks_used == 0


@pytest.mark.parametrize("precision", ["bf16", "f32"])
def test_filling_up_changes_no_bit(pair: Path, cache_dir: Path, precision: Any) -> None:
    """Tokens computed once more, in a fork's shared blocks too, leave the logits of all rows as they are."""
    try:
        choose_crash_free_options(pair, DeviceOptions(precision=precision, cache_dir=cache_dir))
    except ovspec.OvspecError as error:
        pytest.skip(str(error))
    lm = ovspec.load(pair, "none", precision=precision, cache_dir=cache_dir, engine="paged")
    rng = np.random.default_rng(0)
    text = rng.integers(3, 4000, 80)
    plain, filled = lm.target.make_decoder(), lm.target.make_decoder()
    for decoder in (plain, filled):
        decoder.feed([text], [1])
        decoder.reorder([0, 0, 0])
        decoder.truncate(1, 50)
    other = filled.fork()
    for step in range(12):
        new = [rng.integers(3, 4000, size) for size in (1, 2, step % 2)]
        wanted = [len(each) for each in new]
        ours = filled.feed(new, wanted, 40 if step % 3 else 7)
        for mine, right in zip(ours, plain.feed(new, wanted), strict=True):
            assert (mine == right).all()
    assert (
        other.feed([text[:3], text[:1], text[:1]], [3, 1, 1])[0]
        == lm.target.make_decoder().feed([np.concatenate((text, text[:3]))], [3])[0]
    ).all(), "the fork's blocks are untouched"
    short = lm.target.make_decoder()
    assert short.feed([text[:3]], [1], 16)[0].shape == (1, filled.feed([text[:2]] * 3, [1] * 3)[0].shape[1])


def test_few_shapes_in_many_rounds(make_paged: MakePaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU makes kernels for each number of tokens and of logits; what fills them up changes no text."""
    decoder, plain = make_paged(FAST_GPU_RULE), make_paged(FAST_RULE)
    text = np.random.default_rng(2).integers(5, 1000, 600)
    random, shapes = np.random.default_rng(3), set[tuple[int, int]]()
    infer = decoder._request.infer

    def noting(arrays: Any, logits_idx: np.ndarray) -> np.ndarray:
        shapes.add((len(arrays[0]), len(logits_idx)))
        return infer(arrays, logits_idx)

    monkeypatch.setattr(decoder._request, "infer", noting)
    decoder.reset(3)
    plain.reset(3)
    seen = 0
    for _ in range(500):
        counts = [int(random.integers(0, 6)) for _ in range(3)]
        if not any(counts):
            continue
        begins = [len(row) for row in decoder.rows]
        pieces = [text[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
        ours, theirs = (
            each.feed(pieces, counts, width) for each, width in ((decoder, int(random.integers(0, 9))), (plain, 0))
        )
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.shape == other.shape
            seen += len(mine)
            np.testing.assert_allclose(mine, other, atol=2e-3)
        for row, count in enumerate(counts):
            kept = begins[row] + int(random.integers(0, count + 1))
            kept = kept if kept < 500 else 0
            decoder.truncate(row, kept)
            plain.truncate(row, kept)
    assert seen > 2000
    assert len(shapes) <= 15, shapes
    decoder.reset(1)
    decoder.feed([text], [3])
    assert {tokens for tokens, _ in shapes} <= {1 << power for power in range(9)}
