"""Tiny models with recurrent states, because the pinned optimum-intel can't export a hybrid model.

A short gated convolution (as in LFM2), a linear recurrence (the core of an SSM) and, for a hybrid, attention.
In torch, the same module computes from scratch what its IR computes step by step with states.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from conftest import ROOT
from kept import kept_model
from torch import nn

WIDTH, HEADS, HEAD, KERNEL = 48, 4, 12, 3


class Hybrid(nn.Module):
    """A recurrent model. ``attention``: "mask" (can skip dead slots), "alibi" (uses slot indices, can't) or None."""

    def __init__(self, vocab: int, attention: str | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.attention = attention
        self.embed = nn.Parameter(torch.randn(vocab, WIDTH))
        self.head = nn.Parameter(torch.randn(WIDTH, vocab))
        self.short = nn.Parameter(torch.randn(WIDTH, 1, KERNEL))
        self.decay = nn.Parameter(torch.linspace(0.3, 0.95, WIDTH))
        self.mix = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(7))
        self.slopes = torch.tensor([0.5, 0.25, 0.1, 0.05])[:, None, None]

    def forward(
        self, input_ids: Any, attention_mask: Any, conv: Any, ssm: Any, key: Any = None, value: Any = None
    ) -> tuple[Any, ...]:
        x = self.embed[input_ids]  # (batch, new, WIDTH)
        new = torch.arange(x.shape[1])
        held = torch.cat((conv, (x @ self.mix[0]).transpose(1, 2)), dim=2)  # (batch, WIDTH, KERNEL - 1 + new)
        x = x + torch.tanh(nn.functional.conv1d(held, self.short, groups=WIDTH)).transpose(1, 2)
        conv = held[:, :, -(KERNEL - 1) :]
        apart = new[:, None] - new[None]  # h_t = decay * h_{t-1} + u_t, unrolled
        powers = torch.where(apart >= 0, self.decay[:, None, None] ** apart.clamp(min=0), torch.zeros(()))
        u = x @ self.mix[1]
        h = torch.einsum("eij,bje->bie", powers, u) + self.decay ** (new[:, None] + 1) * ssm[:, None]
        ssm = h[:, -1]
        x = x + torch.tanh(h) @ self.mix[2]
        if not self.attention:
            return x @ self.head, conv, ssm
        query, k, v = ((x @ self.mix[i]).unflatten(2, (HEADS, HEAD)).transpose(1, 2) for i in (3, 4, 5))
        key, value = torch.cat((key, k), dim=2), torch.cat((value, v), dim=2)
        slots = torch.arange(key.shape[2])
        behind = (slots[-x.shape[1] :][:, None] - slots[None])[None, None]  # (1, 1, new, slots)
        seen = (behind >= 0) & (attention_mask[:, None, None] > 0)
        bias = torch.where(seen, torch.zeros(()), torch.tensor(-1e9))
        if self.attention == "alibi":
            bias = bias - self.slopes * behind
        out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + torch.tanh(out.transpose(1, 2).flatten(2) @ self.mix[6])
        return x @ self.head, conv, ssm, key, value

    def nothing(self, past: int = 0, batch: int = 1) -> tuple[Any, ...]:
        """Return the states before the first token. ``past``: KV slots, for an example input to trace."""
        recurrent = (torch.zeros(batch, WIDTH, KERNEL - 1), torch.zeros(batch, WIDTH))
        return recurrent + ((torch.zeros(batch, HEADS, past, HEAD),) * 2 if self.attention else ())

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits after each token, (len(tokens), vocab), computed from scratch."""
        with torch.no_grad():
            ids = torch.tensor([tokens])
            return self(ids, torch.ones_like(ids), *self.nothing())[0][0].numpy()

    def generate(self, tokens: list[int], count: int) -> list[int]:
        """Return the greedy continuation of ``count`` tokens."""
        text = list(tokens)
        for _ in range(count):
            text.append(int(self.logits(text)[-1].argmax()))
        return text[len(tokens) :]


def shared_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model with attention that can skip dead slots, which is made once for all workers."""
    return kept_model(
        tmp_path_factory, "hybrid", lambda folder: export(Hybrid(4096, "mask"), folder, ROOT / "models" / "demo")
    )


def export(model: Hybrid, folder: Path, tokenizer_folder: Path) -> Path:
    """Export to ``folder`` as optimum-cli would, made stateful by optimum's own transformation for hybrid models."""
    from optimum.exporters.openvino.stateful import patch_stateful_hybrid_ssm

    names = ["conv.0", "ssm.0", "key.0", "value.0"][: 4 if model.attention else 2]
    ids = torch.zeros((2, 3), dtype=torch.int64)
    example = (ids, torch.ones((2, 3 + 2 * bool(model.attention)), dtype=torch.int64), *model.nothing(2, 2))
    ir = ov.convert_model(model.eval(), example_input=example)
    shapes = [[-1, -1], [-1, -1], [-1, WIDTH, KERNEL - 1], [-1, WIDTH], *[[-1, HEADS, -1, HEAD]] * 2]
    for port, name, shape in zip(
        ir.inputs, ["input_ids", "attention_mask", *(f"cache_params.past.{n}" for n in names)], shapes, strict=False
    ):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(ov.PartialShape(shape))  # type: ignore[attr-defined]
    for port, name in zip(ir.outputs, ["logits", *(f"cache_params.present.{n}" for n in names)], strict=True):
        port.get_tensor().set_names({name})
    ir.validate_nodes_and_infer_types()
    patch_stateful_hybrid_ssm(ir)
    folder.mkdir(parents=True)
    ov.save_model(ir, folder / "openvino_model.xml", compress_to_fp16=False)
    (folder / "config.json").write_text(json.dumps({"model_type": "hybrid", "max_position_embeddings": 512}))
    copy_tokenizer(tokenizer_folder, folder)
    return folder


def copy_tokenizer(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and "token" in file.name:
            shutil.copy(file, folder)
