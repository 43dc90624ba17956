"""Rows of an lm_head are cut out of an IR in every format of its weights, and nothing else changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from ovspec_export import draft_vocabulary
from ovspec_export.draft_vocabulary import DRAFT_VOCABULARY_FILE, read_proposed_ids, trim_ir, write_draft_vocabulary
from ovspec_export.sources import Source
from ovspec_export.worker import round_weights

from ovspec.base.errors import OvspecError
from ovspec.ir import lm_head
from ovspec.ir.compile import MODEL_FILE, read_target_ids, write_target_ids
from ovspec.ir.device import openvino_core
from ovspec.ir.lm_head import find_lm_head

VOCAB, WIDTH = 301, 64  # an odd number of rows
IDS = np.array([0, 3, 4, 77, 150, 299, 300])
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "CACHE_DIR": ""}
FORMATS = ["f32", "f16", "bf16", "int8_sym", "int8_asym", "int4_sym", "int4_asym", "int4_asym per channel"]
KINDS = ["tied", "own", "biased and capped", "transposed"]


def write_model(folder: Path, weight_format: str, kind: str) -> Path:
    """Write a model without layers, whose lm_head is the embedding, or has weights of its own, into ``folder``."""
    random = np.random.default_rng(0)
    tokens = ops.parameter([-1, -1], ov.Type.i64, name="input_ids")
    tokens.output(0).get_tensor().set_names({"input_ids"})
    table, rows = (ops.constant(random.standard_normal((VOCAB, WIDTH)).astype(np.float32)) for _ in range(2))
    hidden = ops.gather(table, tokens, ops.constant(0, dtype=ov.Type.i64))
    if kind == "transposed":
        rows = ops.transpose(rows, ops.constant([1, 0], dtype=ov.Type.i64))
    logits = ops.matmul(hidden, table if kind == "tied" else rows, False, kind != "transposed")
    if kind == "biased and capped":
        logits = ops.add(logits, ops.constant(random.standard_normal((1, 1, VOCAB)).astype(np.float32)))
        logits = ops.multiply(ops.tanh(ops.divide(logits, np.float32(9))), np.float32(9))
    logits.output(0).get_tensor().set_names({"logits"})
    model = ov.Model([ops.result(logits)], [tokens])  # type: ignore[misc]
    if weight_format == "bf16":
        round_weights(model)
    elif weight_format.startswith("int"):
        import nncf

        mode = nncf.CompressWeightsMode[weight_format.split()[0].upper()]
        groups: dict[str, Any] = {"group_size": -1 if "channel" in weight_format else 32, "all_layers": True}
        model = nncf.compress_weights(model, mode=mode, **groups if "4" in weight_format else {})
    folder.mkdir()
    ov.save_model(model, folder / MODEL_FILE, compress_to_fp16=weight_format == "f16")
    return folder


def weights(folder: Path) -> np.ndarray:
    """Return what the lm_head's MatMul multiplies with, a row for each logit, in f32."""
    product = find_lm_head(model := openvino_core().read_model(folder / MODEL_FILE))
    assert product
    by_row = product.get_attributes()["transpose_b"]
    alone = ov.Model([ops.result(product.input_value(1))], [])  # type: ignore[misc]
    found = openvino_core().compile_model(alone, "CPU", EXACT)([])[0]
    del model
    return found if by_row else found.T


def logits(folder: Path) -> np.ndarray:
    """Return the logits after each token of the whole vocabulary."""
    made = openvino_core().compile_model(openvino_core().read_model(folder / MODEL_FILE), "CPU", EXACT)
    return made([np.arange(VOCAB)[None]])[made.output("logits")][0]


def check(folder: Path, rows: np.ndarray, whole: np.ndarray) -> None:
    """Check that the IR in ``folder`` has the rows of ``IDS``, gives their logits after any token, and names them."""
    assert np.array_equal(weights(folder), rows[IDS])
    np.testing.assert_allclose(logits(folder), whole[:, IDS], rtol=1e-5, atol=1e-5)
    assert np.array_equal(np.asarray(read_target_ids(openvino_core().read_model(folder / MODEL_FILE))), IDS)


CASES = [(each, "tied") for each in FORMATS] + [("f32", kind) for kind in KINDS[1:]]
CASES += [("int8_asym", "biased and capped"), ("int4_sym", "biased and capped"), ("f16", "transposed")]
# Each of their formats and kinds is in another case of quick runs.
REPEATED = [("f32", "tied"), ("int8_asym", "tied"), ("int4_sym", "tied"), ("f16", "tied"), ("f32", "biased and capped")]
REPEATED += [("f32", "transposed")]


@pytest.mark.parametrize(
    ("weight_format", "kind"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case in REPEATED), id="-".join(case)) for case in CASES],
)
def test_rows_are_cut_in_every_format(weight_format: str, kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "ir", weight_format, kind)
    rows, whole = weights(folder), logits(folder)
    stored = {op.get_element_type().get_type_name() for op in openvino_core().read_model(folder / MODEL_FILE).get_ops()}
    expected = {"int8_sym": "i8", "int8_asym": "u8", "int4_sym": "i4"}.get(weight_format, weight_format)
    assert ("u4" if expected.startswith("int4") else expected) in stored, "the format is what is tested"
    trim_ir(folder, IDS, "draft")
    check(folder, rows, whole)
    assert sorted(file.name for file in folder.iterdir()) == ["openvino_model.bin", "openvino_model.xml"]


def swapped_halves(constant: ov.Node, axis: int, ids: np.ndarray) -> ov.Node:
    """Return entries of a constant of four bits, but with the halves of each byte in the wrong order."""
    made: Any = ENTRIES(constant, axis, ids)
    if constant.get_element_type().bitwidth != 4:
        return made
    stored = np.asarray(made.data)
    turned = ov.Tensor((stored << 4 | stored >> 4).astype(np.uint8), list(made.get_output_shape(0)), ov.Type.u4)
    return ov.op.Constant(turned, shared_memory=False)


ENTRIES = lm_head.select_constant_entries
BUGS: dict[str, tuple[ModuleType, str, Callable[..., Any]]] = {
    "next rows": (
        lm_head,
        "select_constant_entries",
        lambda constant, axis, ids: ENTRIES(constant, axis, np.minimum(ids + 1, VOCAB - 1)),
    ),
    "swapped halves": (lm_head, "select_constant_entries", swapped_halves),
    "other ids": (draft_vocabulary, "write_target_ids", lambda model, ids: write_target_ids(model, np.roll(ids, 1))),
    "bias of the first ids": (
        lm_head,
        "select_constant_entries",
        lambda constant, axis, ids: ENTRIES(constant, axis, np.arange(len(ids)) if axis == -1 else ids),
    ),
}


@pytest.fixture(scope="module")
def with_bias(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray, np.ndarray]:
    """Return the folder of a model with weights of four bits and a bias, its rows, and its logits."""
    folder = write_model(tmp_path_factory.mktemp("with-bias") / "ir", "int4_asym", "biased and capped")
    return folder, weights(folder), logits(folder)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(
    bug: str, with_bias: tuple[Path, np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, rows, whole = with_bias
    folder = shutil.copytree(made, tmp_path / "ir")
    monkeypatch.setattr(*BUGS[bug])
    trim_ir(folder, IDS, "draft")
    with pytest.raises(AssertionError):
        check(folder, rows, whole)


def test_an_unknown_lm_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written then."""
    folder = write_model(tmp_path / "ir", "int8_asym", "own")
    before = (folder / MODEL_FILE).read_bytes()
    monkeypatch.setattr(lm_head, "WEIGHT_OPERATIONS", {"Convert"})
    told = r"x: this draft's vocabulary can't be trimmed \(its lm_head is computed by the operation Multiply\); choose"
    with pytest.raises(OvspecError, match=told):
        trim_ir(folder, IDS, "x")
    monkeypatch.setattr(lm_head, "find_lm_head", lambda _: None)
    with pytest.raises(OvspecError, match=r"its lm_head can't be found in the graph\); choose another draft"):
        trim_ir(folder, IDS, "x")
    assert (folder / MODEL_FILE).read_bytes() == before and len([*folder.iterdir()]) == 2


WRONG = {
    "empty": ([], "trimmed vocabulary is empty"),
    "too high": ([0, 5, 4096], "has the token id 4096, but the target has 4096 tokens"),
    "below zero": ([-1, 5], "has the token id -1, but the target has 4096 tokens"),
    "twice": ([0, 5, 5], "has a duplicate token"),
    "no numbers": (["a"], "draft_vocabulary.json: invalid"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_ids_are_refused(wrong: str, tmp_path: Path) -> None:
    ids, told = WRONG[wrong]
    target, draft = (Source(name, tmp_path / name, False, "") for name in ("target", "draft"))
    for source, vocabulary in ((target, 4096), (draft, 5000)):
        source.path.mkdir()
        (source.path / "config.json").write_text(json.dumps({"vocab_size": vocabulary}), encoding="utf-8")
    assert read_proposed_ids(draft, target) is None
    (draft.path / DRAFT_VOCABULARY_FILE).write_text(json.dumps({"ids": ids}), encoding="utf-8")
    with pytest.raises(OvspecError, match=told):
        read_proposed_ids(draft, target)
    write_draft_vocabulary(draft.path, IDS)
    assert np.array_equal(np.asarray(read_proposed_ids(draft, target)), IDS)
