"""A tiny random gpt-oss whose experts are published in MXFP4, and the same weights in bf16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hybrid
import numpy as np
from conftest import ROOT
from families import FAMILIES

# The values of four bits, as in the specification of OCP Microscaling (E2M1); 32 of them share a power of two.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def dequantised(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the weights of experts, (experts, inputs, outputs); the lower half of a byte comes first."""
    values = VALUES[np.stack([blocks & 15, blocks >> 4], axis=-1)].reshape(*blocks.shape[:-1], -1)
    weights = values * np.exp2(scales.astype(np.float32) - 127)[..., None]
    return weights.reshape(*weights.shape[:2], -1).swapaxes(1, 2)


def make_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """Write both checkpoints into ``folder`` and return their folders: in MXFP4, and in bf16."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, GptOssConfig

    torch.manual_seed(0)
    family = FAMILIES["gpt_oss"]
    model = AutoModelForCausalLM.from_config(GptOssConfig(**family.arguments)).eval()
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=family.embedding if len(weights) > 1000 else family.spread)
    packed, plain = folder / "mxfp4", folder / "bf16"
    for where in (packed, plain):
        model.to(torch.bfloat16).save_pretrained(where)
        hybrid.copy_tokenizer(ROOT / "models" / "demo-hf" / "draft", where)
    tensors = load_file(plain / "model.safetensors")
    quantised = dict(tensors)
    random = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = random.integers(121, 125, blocks.shape[:-1], np.uint8)
        tensors[name] = torch.from_numpy(dequantised(blocks, scales).copy()).bfloat16()
        quantised |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        del quantised[name]
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(quantised, packed / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (packed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return packed, plain
