"""scripts/train/bench_pair.py keeps a model's function, and every weight it adds has to be read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_pair import Shape, check, make_checkpoint, make_head, shape_of, spread
from conftest import CHECKPOINTS
from heads import write_head
from ovspec_export.mtp import make_new_mtp_layer, save_mtp_layer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.parametrize("name", [pytest.param("target", marks=pytest.mark.slow), "draft"])
def test_logits_are_unchanged(tmp_path: Path, name: str) -> None:
    mlp = {"target": 2048, "draft": 1024}[name]
    count = make_checkpoint(CHECKPOINTS / name, tmp_path, Shape(2, mlp + 64, 6), 5000)
    assert count > 2e6
    assert check(CHECKPOINTS / name, tmp_path) < 1e-4
    made = load_file(tmp_path / "model.safetensors")
    for tensor, weights in made.items():
        if weights.ndim == 2:
            assert weights.abs().sum(1).min() > 0, f"{tensor} has rows of zeros"
    queries, keys = (made[f"model.layers.0.self_attn.{part}_proj.weight"].shape[0] for part in "qk")
    original = load_file(CHECKPOINTS / name / "model.safetensors")
    wide = original["model.layers.0.self_attn.q_proj.weight"].shape[0]
    assert queries == 2 * wide
    key_rows = original["model.layers.0.self_attn.k_proj.weight"].shape[0]
    assert keys == 2 * key_rows


def test_logits_are_unchanged_by_experts(tmp_path: Path) -> None:
    make_checkpoint(CHECKPOINTS / "draft", tmp_path, Shape(2, 1088, 3, experts=3), 5000)
    assert check(CHECKPOINTS / "draft", tmp_path) < 1e-4
    made = load_file(tmp_path / "model.safetensors")
    first, second = (made[f"model.layers.0.block_sparse_moe.experts.{i}.w1.weight"] for i in range(2))
    assert not torch.equal(first, second)  # or OpenVINO would store them once


def test_copies_add_up_exactly_and_differ() -> None:
    weights = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    made = spread(weights, 4, torch.Generator().manual_seed(1))
    copies = made.view(64, 4, 32).to(torch.float64)
    assert torch.equal(copies.sum(1), weights.to(torch.float64))
    shares = (copies / weights.to(torch.float64)[:, None] * 4).numpy()
    assert np.abs(shares - 1).max() < 0.51
    assert (copies[:, 0] != copies[:, 1]).double().mean() > 0.9


def small_llama(folder: Path, **config: Any) -> None:
    """Save a random Llama checkpoint in f32 with the demo pair's tokenizer; its config names no head size."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "vocab_size": 4096}
    sizes |= {"num_attention_heads": 6, "num_key_value_heads": 3, "initializer_range": 0.3}
    model = LlamaForCausalLM(LlamaConfig(**sizes | config))
    model.save_pretrained(folder)
    about = json.loads((folder / "config.json").read_text("utf-8"))
    about.pop("head_dim")
    (folder / "config.json").write_text(json.dumps(about), "utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINTS / "target" / file, folder)


@pytest.mark.parametrize("tied", [True, False])
def test_any_llama_can_be_widened(tmp_path: Path, tied: bool) -> None:
    """Like SmolLM2's: in f32, four times as wide but with twice the MLP units, and with its own vocabulary."""
    small_llama(tmp_path / "small", tie_word_embeddings=tied)
    shape = shape_of(tmp_path / "small")
    assert shape == Shape(4, 160, 2)
    make_checkpoint(tmp_path / "small", tmp_path / "wide", shape, 1000)
    assert check(tmp_path / "small", tmp_path / "wide") < 1e-4
    made = load_file(tmp_path / "wide" / "model.safetensors")
    assert made["lm_head.weight"].shape == (4096, 192)
    assert made["model.layers.0.mlp.down_proj.weight"].shape == (192, 160)
    assert (tmp_path / "wide" / "tokenizer.json").exists()


def test_a_wrong_widening_moves_the_logits(tmp_path: Path) -> None:
    small_llama(tmp_path / "small", tie_word_embeddings=True)
    make_checkpoint(tmp_path / "small", tmp_path / "wide", Shape(4, 160, 2), 4096)
    file = tmp_path / "wide" / "model.safetensors"
    made = load_file(file)
    made["model.layers.1.mlp.down_proj.weight"] *= 2
    save_file(made, file, {"format": "pt"})
    assert check(tmp_path / "small", tmp_path / "wide") > 1e-3


def test_what_is_not_llama_is_refused(tmp_path: Path) -> None:
    small_llama(tmp_path / "small", attention_bias=True)
    with pytest.raises(ValueError, match=r"_proj\.bias is not a weight of Llama"):
        make_checkpoint(tmp_path / "small", tmp_path / "wide", Shape(4, 160, 2), 4096)
    with pytest.raises(ValueError, match="at least twice the MLP units"):
        make_checkpoint(CHECKPOINTS / "draft", tmp_path / "wide", Shape(4, 600, 2), 4096)


def test_an_mtp_layer_is_widened_with_its_model(tmp_path: Path) -> None:
    """Its output, which its target's lm_head reads, is that of before; and it keeps the ids that it proposes."""
    small_llama(tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text("utf-8"))
    layer = make_new_mtp_layer(config)
    torch.nn.init.normal_(layer.norm.weight)
    save_mtp_layer(layer, config, tmp_path / "layer")
    (tmp_path / "layer" / "draft_vocabulary.json").write_text('{"ids": [1, 2]}')
    assert make_head(tmp_path / "layer", tmp_path / "wide", 4, 2) < 1e-4
    made = load_file(tmp_path / "wide" / "model.safetensors")
    assert made["mtp.fc.weight"].shape == (192, 2 * 192)
    assert made["mtp.layers.0.mlp.down_proj.weight"].shape == (192, 160)
    assert (tmp_path / "wide" / "draft_vocabulary.json").is_file()


def test_a_head_is_widened_with_its_model(tmp_path: Path) -> None:
    """It reads hidden states of three layers, each of which was widened, and proposes the same tokens."""
    target = {"vocab_size": 600, "hidden_size": 64}
    write_head(tmp_path / "head", "specforge", target=target, embedding=False)
    assert make_head(tmp_path / "head", tmp_path / "wide", 4, 2) < 1e-4
    before, made = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "wide"))
    assert torch.equal(before["d2t"], made["d2t"])
    assert made["fc.weight"].shape == (256, 3 * 256) and made["lm_head.weight"].shape == (256, 256)
    assert made["midlayer.mlp.down_proj.weight"].shape == (256, 256)
    finer = {name: 1.003 * weight.float() if weight.ndim == 2 else weight for name, weight in before.items()}
    save_file(finer, tmp_path / "head" / "model.safetensors")
    assert make_head(tmp_path / "head", tmp_path / "wide", 4, 2) < 1e-4  # bf16 does not hold its weights
    write_head(tmp_path / "other", "specforge", target=target)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is not a weight of a head that can be widened"):
        make_head(tmp_path / "other", tmp_path / "wide", 4, 2)
