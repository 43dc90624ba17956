"""scripts/train/bench_pair.py keeps a model's function, and every weight it adds has to be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bench_pair import Shape, check, make_checkpoint, spread
from conftest import CHECKPOINTS
from safetensors.torch import load_file


@pytest.mark.parametrize("attention", ["gqa", "mha"])
@pytest.mark.parametrize("name", [pytest.param("target", marks=pytest.mark.slow), "draft"])
def test_logits_are_unchanged(tmp_path: Path, name: str, attention: str) -> None:
    mlp = {"target": 2048, "draft": 1024}[name]
    count = make_checkpoint(CHECKPOINTS / name, tmp_path, Shape(2, mlp + 64, 6), 5000, attention)
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
    assert (keys == queries) == (attention == "mha") or wide == keys


def test_logits_are_unchanged_by_experts(tmp_path: Path) -> None:
    make_checkpoint(CHECKPOINTS / "draft", tmp_path, Shape(2, 1088, 3, experts=3), 5000, "gqa")
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
