"""Exports that keep the weights of experts: as integers, in the IR and in what OpenVINO makes of it."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from exact_texts import check_texts_are_exact
from family_models import warm_jobs
from openvino import opset13 as ops
from ovspec_export import convert, export_pair, quality
from ovspec_export.experts import join_experts
from ovspec_export.gguf_weights import GgufWeights
from ovspec_export.packed_weights import PackedWeights
from ovspec_export.skeleton import read_rounded_values
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import GgufSource
from packed_checkpoints import make_checkpoint
from quantised_gguf import EXACT, quantise_file
from safetensors.torch import load_file, save_file
from test_gguf_checkpoint import files as files  # the random models
from test_gguf_checkpoint import logits, unpack
from test_kept_checkpoint import KINDS as CHECKPOINT_KINDS
from test_kept_checkpoint import layers_of
from test_kept_gguf import ir_logits, rms
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.ir.compile import MODEL_FILE

# The experts of the first layer are in the types from the third on, those of the second in the last and the first two.
KINDS = ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "IQ4_NL", "MXFP4", "Q4_1", "Q5_1", "IQ4_XS", "F16", "Q3_K"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_hidden_layers": 1}
EXPERTS |= {"head_dim": 64}


def expert_weights(folder: Path) -> list[np.ndarray]:
    """Return the weights of experts that the products of an IR read, in their order, as OpenVINO computes them."""
    model = ov.Core().read_model(folder / MODEL_FILE)
    ports = [op.input_value(1) for op in model.get_ordered_ops() if op.get_type_name() == "MatMul"]
    weights = []
    for port in ports:
        if port.get_partial_shape().is_static and len(port.get_shape()) == 3:
            part = ov.Model([ops.result(port)], [])  # type: ignore[arg-type]
            weights.append(ov.Core().compile_model(part, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})()[0])
    return weights


def types_of_computed_experts(folder: Path) -> list[str]:
    """Return the types of the experts' weights in the graph that OpenVINO computes."""
    compiled = ov.Core().compile_model(folder / MODEL_FILE, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return [
        op.input_value(1).get_element_type().get_type_name()
        for op in compiled.get_runtime_model().get_ordered_ops()
        if op.get_rt_info()["layerType"].astype(str) == "GatherMatmul"
    ]


# ---------------------------------------------------------------- GGUF files


@pytest.fixture(scope="session")
def mixed(files: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a file with all types, and the type of each matrix."""
    path = tmp_path_factory.mktemp("mixed-experts") / "mixed.gguf"
    return path, quantise_file(files / "qwen2_moe.gguf", path, KINDS)


@pytest.fixture(scope="session")
def exported(mixed: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the file's default export, and what that printed."""
    folder = tmp_path_factory.mktemp("kept-experts") / "ir"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(printed):
        warm_jobs(patch)
        export_pair(str(mixed[0]), None, folder)
    return folder, printed.getvalue()


def test_weights_are_the_files(exported: tuple[Path, str], mixed: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """The IR has each expert's weights to the bit, or nearly, and computes what torch does with them."""
    unpack(mixed[0], tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    in_ir = iter(expert_weights(exported[0]))
    kinds = []
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up = tensors[f"{prefix}.gate_up_proj"].chunk(2, dim=1)
        for part, expected in (("gate", gate), ("up", up), ("down", tensors[f"{prefix}.down_proj"])):
            kinds.append(mixed[1][f"blk.{layer}.ffn_{part}_exps.weight"])
            error = rms(next(in_ir) - expected.numpy()) / rms(expected.numpy())
            assert error == 0 if kinds[-1] in EXACT else 0 < error < (0.02 if kinds[-1] == "Q3_K" else 1e-3), kinds
    assert sorted(kinds) == ["Q3_K", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0"]
    # Of the file's own weights, torch would choose another expert where two tie, so it gets them as the IR has them.
    source = find_source(str(mixed[0]))
    assert isinstance(source, GgufSource)
    weights = weights_of(source)
    products = {name for name in weights.list_matrices() if "_proj" in name and "experts." not in name}
    offset_names = frozenset(products if "sums of groups" in exported[1] else ())
    rounded = {name: read_rounded_values(weights, offset_names, name) for name in weights.list_shapes()}
    save_file({name: torch.from_numpy(values) for name, values in rounded.items()}, tmp_path / "hf/model.safetensors")
    reference = logits(tmp_path / "hf")[0].numpy()
    assert rms(ir_logits(exported[0])[0] - reference) < 1e-4 * reference.std()


def test_weights_stay_integers_in_memory(exported: tuple[Path, str]) -> None:
    types = types_of_computed_experts(exported[0])
    assert len(types) == 6 and set(types) <= {"i4", "u4", "i8", "u8"}


def test_forms_are_told(exported: tuple[Path, str]) -> None:
    """Each expert has a matrix of its own. The minima of experts become zero points."""
    assert "6 matrices in Q4_K: u4 in groups of 32 with f16 zero points" in exported[1]


def test_texts_are_exact(exported: tuple[Path, str], cache_dir: Path) -> None:
    check_texts_are_exact(exported[0], cache_dir)


@pytest.mark.slow
def test_draft_of_first_layers(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    warm_jobs(monkeypatch)
    monkeypatch.setattr(quality, "run_worker_job", convert.run_worker_job)
    quantise_file(files / "qwen3_moe.gguf", tmp_path / "exact.gguf", list(EXACT))
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 5, encoding="utf-8")
    export_pair(str(tmp_path / "exact.gguf"), None, tmp_path / "pair", draft_layers=1, evaluate=tmp_path / "text.txt")
    lm = ovspec.load(tmp_path / "pair", "draft", precision="f32", cache_dir=cache_dir)
    plain, drafted = (lm.generate("def f(", max_tokens=12, ignore_eos=True, lookahead=n) for n in (0, 3))
    assert drafted.token_ids == plain.token_ids and drafted.stats.proposed


def weights_of(source: GgufSource) -> GgufWeights:
    config = {name: entry for name, entry in source.config.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen2MoeConfig(**config))
    return GgufWeights(source.gguf_headers, model)


def test_ir_is_compared_with_its_own_rounding(
    exported: tuple[Path, str], mixed: tuple[Path, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the file's own weights, where two experts tie, rounding would choose another in one of them."""
    source = find_source(str(mixed[0]))
    assert isinstance(source, GgufSource)
    weights = weights_of(source)
    in_ir = iter(expert_weights(exported[0]))
    for layer in range(2):
        gate, up, down = (next(in_ir) for _ in range(3))
        prefix = f"model.layers.{layer}.mlp.experts"
        for name, expected in (("gate_up_proj", np.concatenate([gate, up], 1)), ("down_proj", down)):
            assert np.array_equal(read_rounded_values(weights, frozenset(), f"{prefix}.{name}"), expected)
    name = next(name for name in weights.list_matrices() if weights.describe_kind(name) == "Q4_0")
    assert np.array_equal(read_rounded_values(weights, frozenset(), name), weights.read_values(name))
    monkeypatch.setattr(weights, "read_kept_values", lambda name, _: weights.read_values(name)[::-1])
    with pytest.raises(OvspecError, match=f"exported weights of {name} differ from the source's"):
        read_rounded_values(weights, frozenset(), name)


def test_tensors_of_experts_are_checked(mixed: tuple[Path, dict[str, str]]) -> None:
    source = find_source(str(mixed[0]))
    assert isinstance(source, GgufSource)
    tensors = source.gguf_headers.tensors
    up = tensors.pop("blk.0.ffn_up_exps.weight")
    shapes = weights_of(source).list_shapes()
    assert "model.layers.0.mlp.experts.down_proj" in shapes and "model.layers.0.mlp.experts.gate_up_proj" not in shapes
    tensors["blk.0.ffn_up_exps.weight"] = replace(up, shape=(up.shape[0] - 1, *up.shape[1:]))
    with pytest.raises(OvspecError, match=r"ffn_up_exps\.weight has the shape \[5, 256, 256\], .* \[6, 256, 256\]"):
        weights_of(source)
    del tensors["blk.0.ffn_up_exps.weight"]
    tensors["blk.0.attn_exps.weight"] = up
    with pytest.raises(OvspecError, match=r"its tensor blk\.0\.attn_exps\.weight is unknown in the family"):
        weights_of(source)


# ---------------------------------------------------------------- checkpoints

EXPORTED = ("gptq", "gptq, sym", "awq", "compressed-tensors", "compressed-tensors, channel", "bitsandbytes, int8")


def make_experts(folder: Path, kind: str) -> tuple[dict[str, Any], Path]:
    config, pack, _ = CHECKPOINT_KINDS[kind]
    return config, make_checkpoint(folder, config, pack, Qwen3MoeConfig, **EXPERTS)


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors, asym", "bitsandbytes, int8"])
def test_experts_of_checkpoints_are_read_to_the_bit(kind: str, tmp_path: Path) -> None:
    config, packed = make_experts(tmp_path, kind)
    weights = layers_of(packed, config)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).state_dict()
    assert weights.list_shapes().keys() == plain.keys()
    for name, tensor in plain.items():
        assert np.array_equal(weights.read_values(name), tensor.numpy()), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXPORTED)
def test_checkpoint_is_exported_as_it_is(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_jobs(monkeypatch)
    _, packed = make_experts(tmp_path, kind)
    export_pair(str(packed), None, tmp_path / "ir")
    reference = logits(tmp_path / "plain")[0].numpy()
    assert rms(ir_logits(tmp_path / "ir")[0] - reference) < 1e-4 * reference.std()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).state_dict()
    gate, up = plain["model.layers.0.mlp.experts.gate_up_proj"].chunk(2, dim=1)
    expected = [gate, up, plain["model.layers.0.mlp.experts.down_proj"]]
    for weights, tensor in zip(expert_weights(tmp_path / "ir"), expected, strict=True):
        assert np.array_equal(weights, tensor.numpy())
    types = types_of_computed_experts(tmp_path / "ir")
    assert len(types) == 3 and set(types) <= {"i4", "u4", "i8", "u8"}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("gptq, act-order", "experts.gate_proj can't be exported unchanged: the columns are reordered"),
        ("bitsandbytes, nf4", "experts.gate_proj can't be exported unchanged: OpenVINO would convert NF4"),
    ],
)
def test_what_experts_cannot_have_is_refused(kind: str, told: str, tmp_path: Path) -> None:
    config, packed = make_experts(tmp_path, kind)
    with pytest.raises(OvspecError, match=told):
        layers_of(packed, config).read_matrix("model.layers.0.mlp.experts.gate_proj", False)


def test_experts_in_floats_stay_that(tmp_path: Path) -> None:
    """Makers of quantised checkpoints may leave out the experts, but not some of them."""
    config, packed = make_experts(tmp_path, "gptq")
    tensors = load_file(packed / "model.safetensors")
    prefix = "model.layers.0.mlp.experts"
    for layer in (*(f"{number}.down_proj" for number in range(4)), "0.up_proj"):
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{prefix}.{layer}.{part}"]
    for number in range(4):
        tensors[f"{prefix}.{number}.down_proj.weight"] = torch.full((256, 128), number + 0.5, dtype=torch.bfloat16)
    tensors[f"{prefix}.0.up_proj.weight"] = torch.zeros(128, 256, dtype=torch.float16)
    save_file(tensors, packed / "model.safetensors")
    weights = layers_of(packed, config)
    matrix = weights.read_matrix(f"{prefix}.down_proj", False)
    assert isinstance(matrix, np.ndarray) and matrix.shape == (4 * 256, 128) and matrix.dtype == np.uint16
    assert (weights.read_values(f"{prefix}.down_proj") == np.arange(4).reshape(4, 1, 1) + 0.5).all()
    assert weights.describe_kind(f"{prefix}.down_proj") == "BF16"
    with pytest.raises(OvspecError, match=r"only some of the experts .*up_proj are quantised"):
        weights.read_matrix(f"{prefix}.up_proj", False)


# ---------------------------------------------------------------- joining


def packed_weights(element_type: str, scale: Any, zero_point: int | None = None, **changes: Any) -> PackedWeights:
    dtype = np.int8 if element_type.startswith("i") else np.uint8
    integers = np.random.default_rng(0).integers(0, 8, (4, 8)).astype(dtype)
    scales = np.full((4, 2), scale)
    zero_points = None if zero_point is None else np.full((4, 2), zero_point, np.uint8)
    return PackedWeights(integers, element_type, scales, zero_points, **changes)


def test_experts_that_differ_are_joined() -> None:
    """Some layouts leave out zero points that are all in the middle, and round scales to f16 where that is exact."""
    experts = [packed_weights("i4", np.float16(0.5)), packed_weights("u4", np.float32(0.1), 3)]
    joined = join_experts(experts)
    assert (joined.element_type, joined.scales.dtype, joined.shape) == ("u4", np.float32, (8, 8))
    assert np.array_equal(joined.unpack(), np.concatenate([weights.unpack() for weights in experts]))
    alike = join_experts([packed_weights("i8", np.float16(0.5))] * 3)
    assert (alike.element_type, alike.zero_points, alike.shape) == ("i8", None, (12, 8))
    other_groups = replace(experts[0], scales=np.ones((4, 1), np.float16))
    with pytest.raises(ValueError, match="groups of different sizes"):
        join_experts([experts[0], other_groups])
