"""The comparison of an IR with its checkpoint passes what is right and finds what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TARGET
from ovspec_export.agreement import (
    LOGITS_TOLERANCE,
    check_ir_agrees_with_model,
    enable_f32_computation,
    measure_difference,
)
from transformers import AutoModelForCausalLM

from ovspec.base.errors import OvspecError
from ovspec.cache.slots import SlotTables


def model(**options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(TARGET, **{"dtype": "auto", **options}).eval()


def test_a_right_export_agrees(pair: Path) -> None:
    check_ir_agrees_with_model(model(), pair, LOGITS_TOLERANCE / 100)


def test_layers_are_converted_while_they_are_computed() -> None:
    ours, theirs = model(), model(dtype=torch.float32)
    assert ours.dtype == torch.bfloat16
    enable_f32_computation(ours)
    tokens = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)
    assert ours.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def one_layer_random(model: Any) -> None:
    for weights in model.model.layers[-1].parameters():
        torch.nn.init.normal_(weights, std=0.02)


def one_matrix_random(model: Any) -> None:
    torch.nn.init.normal_(model.model.layers[0].self_attn.k_proj.weight, std=0.02)


def other_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


def no_mask(model: Any) -> None:
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, inner=inner, **kwargs: inner(
            *args, **{**kwargs, "attention_mask": torch.zeros(1, 1, kwargs["hidden_states"].shape[1], 1)}
        )


@pytest.mark.parametrize("spoil", [one_layer_random, one_matrix_random, other_frequencies, no_mask])
def test_a_wrong_export_is_found(pair: Path, spoil: Callable[[Any], None]) -> None:
    spoiled = model()
    with torch.no_grad():
        spoil(spoiled)
    with pytest.raises(
        OvspecError,
        match=r"the exported model's logits for a text differ from the checkpoint's by [0-9.]+ standard "
        r"deviations, more than 0\.1, so the export was deleted",
    ):
        check_ir_agrees_with_model(spoiled, pair)


def test_padding_that_is_seen_in_a_batch_is_found(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SlotTables,
        "attention_mask",
        property(lambda slots: np.ones((len(slots.row_lengths), slots.slot_count), np.int64)),
    )
    with pytest.raises(
        OvspecError, match=r"the exported model's logits in a batch differ .* so the export was deleted"
    ):
        check_ir_agrees_with_model(model(), pair)


def test_all_but_a_tenth_of_the_positions_must_agree() -> None:
    right = np.random.default_rng(0).normal(size=(30, 50)).astype(np.float32)
    wrong = right.copy()
    wrong[:2] += np.arange(50)  # where two experts tie, a rounding error may choose another
    assert measure_difference([wrong], [right]) == 0
    wrong[:5] += np.arange(50)
    assert measure_difference([wrong], [right]) > 1
    later = np.tile(right, (6, 1))[:176]
    wrong_at_the_end = later.copy()
    wrong_at_the_end[-8:] += np.arange(50)  # the tokens that are read one by one
    assert measure_difference([wrong_at_the_end], [later]) > 1
    wrong[:20] = np.nan
    assert measure_difference([wrong, right], [right, right]) == np.inf
