"""Checkpoints with quantised weights: gpt-oss in MXFP4 is exported, and what can't be kept is refused at once."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TARGET
from family_models import run
from mxfp4 import make_gpt_oss
from ovspec_export import Compression, export_pair
from ovspec_export import export as exporting
from ovspec_export.quantised import check_quantisation, load_checkpoint_model
from ovspec_export.source_lookup import find_source
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ovspec
from ovspec.base.errors import OvspecError

PROMPT = list(range(5, 4000, 170))
TOKENS = 24
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_gpt_oss(tmp_path_factory.mktemp("gpt_oss"))


def generated(folder: Path) -> list[int]:
    """Return the tokens that transformers generates in f32."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(PROMPT) :].tolist()


def test_mxfp4_is_read_as_its_specification_says(gpt_oss: tuple[Path, Path]) -> None:
    packed, plain = (load_checkpoint_model(str(folder), False).state_dict() for folder in gpt_oss)
    assert packed.keys() == plain.keys()
    assert all(torch.equal(packed[name], plain[name]) for name in plain)
    experts = packed["model.layers.0.mlp.experts.down_proj"]
    assert experts.dtype == torch.bfloat16
    assert len(experts.unique()) > 20
    counted = [find_source(str(folder)).parameter_count for folder in gpt_oss]
    assert counted[1] <= counted[0] < 1.05 * counted[1]  # the first counts its scales, too


@pytest.mark.slow
def test_gpt_oss_in_mxfp4_is_exported(gpt_oss: tuple[Path, Path], tmp_path: Path, cache_dir: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 5, encoding="utf-8")
    export_pair(str(gpt_oss[0]), None, tmp_path / "pair", Compression("fp32"), draft_layers=2, evaluate=text)
    lm = ovspec.load(tmp_path / "pair", "draft", precision="f32", cache_dir=cache_dir)
    expected = generated(gpt_oss[1])
    assert len(set(expected)) > 8
    for lookahead in (0, 3):
        result = lm.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, lookahead=lookahead)
        assert result.token_ids == expected
        assert bool(result.stats.proposed) == bool(lookahead)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("fp8", {"quantization_config": FP8}),
        ("gptq", {"quantization_config": GPTQ | {"bits": 3}}),
        ("awq", {"quantization_config": AWQ | {"version": "gemv"}}),
        ("gptq", {"text_config": {"model_type": "ministral3", "quantization_config": GPTQ}, "model_type": "mistral3"}),
        ("bitnet", {"quantization_config": {"quant_method": "bitnet", "quantization_mode": "online"}}),
        ("bitsandbytes", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}),
        ("compressed-tensors", {"quantization_config": {"quant_method": "compressed-tensors"}}),
        ("mxfp4", {"quantization_config": {"quant_method": "mxfp4"}}),  # not of gpt_oss
        ("None", {"quantization_config": {}}),
        ("unknown", {"quantization_config": "fp8"}),
        ("sparse", {"compression_config": {"quant_method": "sparse"}}),
        ("fp8", {"text_config": {"model_type": "ministral3", "quantization_config": FP8}, "model_type": "mistral3"}),
    ],
)
def test_other_quantised_checkpoints_are_refused_at_once(
    kind: str, found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "convert_source", lambda *_: pytest.fail("it was converted"))
    shutil.copytree(TARGET, tmp_path / "its")
    config = json.loads((TARGET / "config.json").read_text(encoding="utf-8")) | found
    (tmp_path / "its" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(OvspecError, match=rf"its: its weights are quantised by {kind} .*; export the unquantised"):
        export_pair(str(tmp_path / "its"), None, tmp_path / "pair")


def test_checkpoints_with_usual_weights_pass() -> None:
    check_quantisation({"model_type": "llama", "quantization_config": None}, "llama")
    check_quantisation({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "gemma3")
    check_quantisation({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "gpt_oss")


@pytest.mark.slow
def test_gpt_oss_is_compared_before_optimum_compresses_it(gpt_oss: tuple[Path, Path], tmp_path: Path) -> None:
    """optimum compresses gpt-oss to int4 inside of its export, and other models after it."""
    from optimum.exporters.openvino import main_export

    right, other = tmp_path / "any-name", tmp_path / "other"
    for folder in (right, other):
        shutil.copytree(gpt_oss[0], folder)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.3.self_attn.o_proj.weight"] *= 1.6
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    told = {}
    for source in (right, other):
        arguments = ["--model", str(right), "--task", "text-generation-with-past", "--weight-format", "int4"]
        arguments += ["--disable-convert-tokenizer", str(tmp_path / "ir" / source.name)]
        options = {"source": str(source), "model_type": "gpt_oss", "trust_remote_code": False}
        told[source.name] = run(None, "export_with_optimum", arguments=arguments, **options)
    assert not told["any-name"]
    found = re.search(r"logits for a text differ from the checkpoint's by ([0-9.]+)", told["other"])
    assert found, told["other"]
    assert float(found[1]) < 0.5  # less than what int4 itself may cost
    main_export(str(right), tmp_path / "ir" / "optimum", "text-generation-with-past", ov_config=four_bits())
    ours, theirs = ((tmp_path / "ir" / name / "openvino_model.bin").read_bytes() for name in ("any-name", "optimum"))
    assert ours == theirs


def four_bits() -> Any:
    """Return what optimum-cli compresses gpt-oss with."""
    from optimum.intel.openvino.configuration import OVConfig, get_default_quantization_config

    return OVConfig(quantization_config=get_default_quantization_config("openai/gpt-oss-20b", "int4"))
