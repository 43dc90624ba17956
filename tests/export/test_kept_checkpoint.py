"""Exports that keep the weights of GPTQ, AWQ, compressed-tensors and bitsandbytes, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from exact_texts import check_texts_are_exact
from family_models import warm_jobs
from ovspec_export import Compression, export_pair
from ovspec_export.checkpoint_weights import CheckpointWeights, read_quantisation
from ovspec_export.mtp import make_new_mtp_layer, save_mtp_layer
from ovspec_export.packed_weights import PackedWeights
from ovspec_export.source_lookup import find_source
from packed_checkpoints import (
    Rounded,
    awq_tensors,
    bitsandbytes_int8_tensors,
    compressed_tensors,
    gptq_tensors,
    make_checkpoint,
    nf4_tensors,
    rounded,
)
from safetensors.torch import load_file, save_file
from test_gguf_checkpoint import logits
from test_kept_gguf import ir_logits, matrices_in, rms
from transformers import AutoModelForCausalLM

import ovspec
from ovspec.base.errors import OvspecError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def compressed(bits: int, form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "int"} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def int8_tensors(layer: Rounded) -> dict[str, torch.Tensor]:
    integers = torch.from_numpy((layer.integers - 128).astype(np.int8))
    return {"weight": integers, "weight_scale": torch.from_numpy(layer.scales.astype(np.float32))}


def pack_with(pack: Any, *options: Any, **more: Any) -> Any:
    """Return a function for ``make_checkpoint`` that rounds a layer, and packs it."""

    def make(weights: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        layer = rounded(weights, *options, **more)
        return pack(layer), layer.weights()

    return make


def bfloat(layer: Rounded) -> Rounded:
    """Return the layer with scales that bf16 holds."""
    bits = layer.scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return Rounded(layer.integers, bits.view(np.float32), layer.zeros, layer.groups)


def compressed_with(bits: int, group: int, symmetric: bool, shuffled: bool = False) -> Any:
    def make(weights: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        layer = bfloat(rounded(weights, bits, group, symmetric, shuffled, dtype=np.float32))
        return compressed_tensors(layer, bits, symmetric), layer.weights()

    return make


# Name -> the config, how layers are packed, and the form that they take.
KINDS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "gptq": (GPTQ, pack_with(lambda layer: gptq_tensors(layer, 4), 4, 64, False), "u4 in groups of 64 with integer"),
    "gptq, sym": (
        GPTQ | {"sym": True},
        pack_with(lambda layer: gptq_tensors(layer, 4), 4, 128, True),
        "i4 in groups of 128\n",
    ),
    "gptq, act-order": (
        GPTQ | {"desc_act": True},
        pack_with(lambda layer: gptq_tensors(layer, 4), 4, 32, False, shuffled=True),
        "u4 in groups of 32 with integer",
    ),
    "gptq, channel": (GPTQ | {"group_size": -1}, pack_with(lambda layer: gptq_tensors(layer, 4), 4, -1, True), "i4\n"),
    "gptq, 8 bits": (
        GPTQ | {"bits": 8},
        pack_with(lambda layer: gptq_tensors(layer, 8), 8, 64, False),
        "u8 in groups of 64",
    ),
    "gptq, 2 bits": (
        GPTQ | {"bits": 2},
        pack_with(lambda layer: gptq_tensors(layer, 2), 2, 32, False),
        "u4 in groups of 32",
    ),
    "gptq_v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        pack_with(lambda layer: gptq_tensors(layer, 4, shift=0), 4, 64, False),
        "u4 in groups of 64",
    ),
    "auto-round": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128},
        pack_with(lambda layer: gptq_tensors(layer, 4), 4, 128, True),
        "i4 in groups of 128\n",
    ),
    "auto-round, awq": (
        {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 64},
        pack_with(awq_tensors, 4, 64, False),
        "u4 in groups of 64",
    ),
    "awq": (AWQ, pack_with(awq_tensors, 4, 64, False), "u4 in groups of 64 with integer zero points\n"),
    "compressed-tensors": (compressed(4, symmetric=True), compressed_with(4, 128, True), "i4 in groups of 128\n"),
    "compressed-tensors, asym": (compressed(4), compressed_with(4, 32, False), "u4 in groups of 32 with integer"),
    "compressed-tensors, 8 bits": (compressed(8), compressed_with(8, 128, False), "u8 in groups of 128 with integer"),
    "compressed-tensors, channel": (compressed(8), compressed_with(8, -1, True), "i8\n"),
    "compressed-tensors, act-order": (compressed(4), compressed_with(4, 64, True, True), "i4 in groups of 64\n"),
    "bitsandbytes, nf4": (NF4, lambda weights: nf4_tensors(weights, nested=True), "nf4 in groups of 64\n"),
    "bitsandbytes, nf4, scales in f32": (
        NF4,
        lambda weights: nf4_tensors(weights, nested=False),
        "nf4 in groups of 64",
    ),
    "bitsandbytes, int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        bitsandbytes_int8_tensors,
        "i8\n",
    ),
    "compressed-tensors, int8": (compressed(8, "int-quantized"), pack_with(int8_tensors, 8, -1, True), "i8\n"),
}
EXPORTED = ("gptq, act-order", "bitsandbytes, nf4")


def layers_of(folder: Path, config: dict[str, Any]) -> CheckpointWeights:
    plain = folder.with_name("plain")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return CheckpointWeights(folder, read_quantisation(config), model)


@pytest.mark.parametrize("name", KINDS)
def test_layers_are_read_to_the_bit(name: str, tmp_path: Path) -> None:
    config, pack, form = KINDS[name]
    packed = make_checkpoint(tmp_path, config, pack, num_hidden_layers=1)
    weights = layers_of(packed, config)
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    assert weights.list_shapes().keys() == expected.keys()
    for parameter, tensor in expected.items():
        assert np.array_equal(weights.read_values(parameter), tensor.numpy()), parameter
        if parameter.endswith("_proj.weight"):
            matrix = weights.read_matrix(parameter, False)
            assert isinstance(matrix, PackedWeights)
            assert f"{matrix.form}\n".startswith(form)
            assert np.array_equal(matrix.unpack(), tensor.numpy())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EXPORTED else pytest.mark.slow) for name in KINDS]
)
def test_checkpoint_is_exported_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    warm_jobs(monkeypatch)
    config, pack, form = KINDS[name]
    packed = make_checkpoint(tmp_path, config, pack)
    export_pair(str(packed), None, tmp_path / "ir")
    assert form in capsys.readouterr().err
    reference = logits(tmp_path / "plain")[0].numpy()
    assert rms(ir_logits(tmp_path / "ir")[0] - reference) < 1e-4 * reference.std()
    found = matrices_in(tmp_path / "ir")
    for parameter, tensor in load_file(tmp_path / "plain" / "model.safetensors").items():
        if tensor.ndim == 2 and "act-order" not in name:
            assert any(np.array_equal(matrix, tensor.numpy()) for matrix in found), parameter
    assert not (tmp_path / "ir" / "model.safetensors").exists()
    check_texts_are_exact(tmp_path / "ir", cache_dir)


def test_products_of_the_same_values_share_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ gives the columns of q, k and v the same order, as they read the same values."""
    warm_jobs(monkeypatch)
    config, pack, _ = KINDS["gptq, act-order"]
    packed = make_checkpoint(tmp_path, config, pack, num_key_value_heads=4, num_hidden_layers=1)
    export_pair(str(packed), None, tmp_path / "ir")
    model = ov.Core().read_model(tmp_path / "ir" / "openvino_model.xml")
    orders = [
        op
        for op in model.get_ops()
        if op.get_type_name() == "Gather"
        and op.input_value(1).get_node().get_type_name() == "Constant"
        and op.get_output_partial_shape(0).rank.get_length() == 3
        and op.input_value(1).get_partial_shape().get_max_shape()[0] in (256, 512)
    ]
    assert len(orders) == 4  # before q, k and v; o; gate and up; and down


@pytest.mark.slow
def test_draft_of_first_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    warm_jobs(monkeypatch)
    config, pack, _ = KINDS["awq"]
    export_pair(str(make_checkpoint(tmp_path, config, pack)), None, tmp_path / "pair", draft_layers=1)
    lm = ovspec.load(tmp_path / "pair", "draft", precision="f32", cache_dir=cache_dir)
    plain, drafted = (lm.generate([5, 9, 70], max_tokens=12, ignore_eos=True, lookahead=n) for n in (0, 3))
    assert drafted.token_ids == plain.token_ids and drafted.stats.proposed


@pytest.mark.parametrize(
    ("told", "config"),
    [
        (r"by gptq with 3 bits. This form can't be exported", GPTQ | {"bits": 3}),
        (r"by gptq in the format marlin", GPTQ | {"checkpoint_format": "marlin"}),
        (r"by awq in the version gemv with 4 bits", AWQ | {"version": "gemv"}),
        (r"by auto-round in an unsupported way", {"quant_method": "auto-round", "packing_format": "mx"}),
        (r"by bitsandbytes in fp4", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        (r"by compressed-tensors without config_groups", {"quant_method": "compressed-tensors"}),
        (r"by compressed-tensors with 3 bits", compressed(3)),
        (r"by compressed-tensors in the format float-quantized", compressed(8, "float-quantized")),
        (r"by compressed-tensors with sparsity", compressed(4) | {"sparsity_config": {"format": "sparse-24"}}),
    ],
)
def test_other_layouts_are_refused(told: str, config: dict[str, Any], tmp_path: Path) -> None:
    packed = make_checkpoint(tmp_path, config, KINDS["gptq"][1], num_hidden_layers=1)
    with pytest.raises(OvspecError, match=told):
        find_source(str(packed))


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, pack, _ = KINDS["awq"]
    return make_checkpoint(tmp_path_factory.mktemp("awq"), config, pack, num_hidden_layers=1)


def test_packed_weights_are_not_quantised_anew(awq: Path, tmp_path: Path) -> None:
    for options in (Compression("int8"), Compression("int4")):
        with pytest.raises(OvspecError, match="packed: the weights are already quantised"):
            export_pair(str(awq), None, tmp_path / "ir", options)


@pytest.mark.parametrize(
    ("told", "part", "change"),
    [
        ("its tensor .*q_proj has a NaN or infinite scale", "scales", lambda t: t.fill_(float("nan"))),
        (
            "the quantised layer .*q_proj is damaged or doesn't match config.json",
            "qweight",
            lambda t: t[:, :8].contiguous(),
        ),
        (
            "the quantised layer .*q_proj is damaged or doesn't match config.json",
            "scales",
            lambda t: t[:3].contiguous(),
        ),
        (
            "the quantised layer .*q_proj is damaged or doesn't match config.json",
            "qzeros",
            lambda t: t[:1].contiguous(),
        ),
    ],
)
def test_damaged_layers_are_refused(told: str, part: str, change: Any, awq: Path, tmp_path: Path) -> None:
    shutil.copytree(awq.parent, tmp_path / "its")
    file = tmp_path / "its" / "packed" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.self_attn.q_proj.{part}"
    tensors[name] = change(tensors[name])
    save_file(tensors, file)
    weights = layers_of(file.parent, AWQ)
    with pytest.raises(OvspecError, match=told):
        weights.read_matrix("model.layers.0.self_attn.q_proj.weight", False)


def test_groups_of_different_sizes_are_refused(tmp_path: Path) -> None:
    config, pack, _ = KINDS["gptq, act-order"]
    packed = make_checkpoint(tmp_path, config, pack, num_hidden_layers=1)
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.g_idx"][:] = 0
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(OvspecError, match=r"up_proj is damaged or .* config.json \(the groups have different sizes\)"):
        layers_of(packed, config).read_matrix("model.layers.0.mlp.up_proj.weight", False)


def test_unknown_and_missing_tensors_are_refused(awq: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_jobs(monkeypatch)
    for change, told in (
        ("more", "the tensor model.layers.0.extra.weight is unexpected"),
        ("less", "of the model's tensors, such as"),
    ):
        shutil.copytree(awq, tmp_path / change)
        tensors = load_file(awq / "model.safetensors")
        if change == "more":
            tensors["model.layers.0.extra.weight"] = torch.zeros(4)
        else:
            del tensors["model.layers.0.self_attn.q_proj.qweight"]
        for name in [name for name in tensors if change == "less" and "q_proj" in name]:
            del tensors[name]
        save_file(tensors, tmp_path / change / "model.safetensors")
        with pytest.raises(OvspecError, match=told):
            export_pair(str(tmp_path / change), None, tmp_path / "ir")


def test_tied_matrices_and_biases_of_zeros_may_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AutoGPTQ writes biases of zeros, and AutoAWQ the lm_head once more."""
    warm_jobs(monkeypatch)
    config, pack, _ = KINDS["gptq"]
    packed = make_checkpoint(tmp_path, config, pack, num_hidden_layers=1, tie_word_embeddings=True)
    tensors = load_file(packed / "model.safetensors")
    bias = "model.layers.0.self_attn.q_proj.bias"
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), bias: torch.zeros(256)}
    save_file(tensors | more, packed / "model.safetensors")
    export_pair(str(packed), None, tmp_path / "ir")
    reference = logits(tmp_path / "plain")[0].numpy()
    assert rms(ir_logits(tmp_path / "ir")[0] - reference) < 1e-4 * reference.std()
    save_file(tensors | more | {bias: torch.ones(256)}, packed / "model.safetensors")
    with pytest.raises(OvspecError, match=f"the tensor {bias} is unexpected in a model of the family"):
        layers_of(packed, config)


@pytest.mark.slow
def test_inputs_that_were_to_be_rounded_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warm_jobs(monkeypatch)
    config = json.loads(json.dumps(KINDS["compressed-tensors, int8"][0]))
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    packed = make_checkpoint(tmp_path, config, KINDS["compressed-tensors, int8"][1], num_hidden_layers=1)
    export_pair(str(packed), None, tmp_path / "ir")
    assert (
        "made to round the values that its weights are multiplied with, too, which isn't kept"
        in capsys.readouterr().err
    )


def test_an_mtp_layer_beside_kept_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes along if its own weights are floats, as makers of quantised checkpoints leave them."""
    warm_jobs(monkeypatch)
    quantisation, pack, _ = KINDS["gptq"]
    checkpoint = make_checkpoint(tmp_path, quantisation, pack)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    save_mtp_layer(make_new_mtp_layer(config), config, tmp_path / "layer")
    file, layer = checkpoint / "model.safetensors", load_file(tmp_path / "layer" / "model.safetensors")
    tensors = load_file(file)
    save_file(tensors | layer, file)
    manifest = export_pair(str(checkpoint), None, tmp_path / "out")
    assert manifest.target.weight_format == "keep" and manifest.draft
    assert (manifest.draft.source, manifest.draft.weight_format) == ("packed, MTP layer", "int8")
    lm = ovspec.load(tmp_path / "out", "mtp", cache_dir=tmp_path / "cache")
    plain, drafted = (lm.generate("a = 1", max_tokens=12, ignore_eos=True, lookahead=count) for count in (0, 2))
    assert drafted.token_ids == plain.token_ids and drafted.stats.drafters["mtp"]["proposed"]
    save_file(tensors | {name: tensor.to(torch.int8) for name, tensor in layer.items()}, file)
    with pytest.raises(OvspecError, match="has no MTP layer, or only a quantised MTP layer"):
        export_pair(str(checkpoint), "mtp", tmp_path / "again")
