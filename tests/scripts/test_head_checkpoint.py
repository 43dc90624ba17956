"""scripts/train/head_checkpoint.py writes the checkpoint that a head's int8 IR was made of."""

from __future__ import annotations

from pathlib import Path

import openvino as ov
import pytest
import torch
from conftest import ROOT
from distilling import made_head
from head_checkpoint import write_checkpoint
from ovspec_export.heads import load_head_checkpoint

from ovspec.base.errors import OvspecError
from ovspec.ir.compile import read_openvino_model, read_target_ids


def test_only_a_head_in_int8_gives_back_its_checkpoint(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.raises(OvspecError, match=r"ir: its weights aren't in int8; export it with --draft-weight-format int8"):
        write_checkpoint(made_head(tmp_path_factory) / "ir", tmp_path / "head")
    with pytest.raises(OvspecError, match="draft: not a head"):
        write_checkpoint(ROOT / "models" / "demo" / "draft", tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_an_ir_gives_back_its_checkpoint(tmp_path: Path) -> None:
    """The head in torch computes what the IR computes in f32."""
    shipped = ROOT / "models" / "smollm2-head"
    write_checkpoint(shipped, tmp_path / "head")
    head, model = load_head_checkpoint(tmp_path / "head"), read_openvino_model(shipped)
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}
    request = ov.Core().compile_model(model, "CPU", exact).create_infer_request()
    tokens, states, taps = torch.randn(1, 5, 576), torch.randn(1, 5, 576), torch.randn(1, 5, 3 * 576)
    ones = torch.ones(1, 5, dtype=torch.int64)
    given = {"inputs_embeds": tokens, "hidden_states": states, "target_hidden_states": taps, "attention_mask": ones}
    given |= {"position_ids": ones.cumsum(1) - 1, "beam_idx": torch.zeros(1, dtype=torch.int32)}
    request.infer({name: value.numpy() for name, value in given.items()})
    logits, hidden, fused, *_ = head(tokens, states, ones, ones.cumsum(1) - 1, taps, *head.make_empty_cache())
    for name, expected in {"logits": logits, "hidden": hidden, "fused": fused}.items():
        found = torch.from_numpy(request.get_tensor(name).data.copy())
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert read_target_ids(model).tolist() == (torch.arange(len(head.d2t)) + head.d2t).tolist()  # type: ignore[union-attr]
