"""Random pairs of other shapes than the demo pair, in which near-ties are common: any flipped bit shows."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hybrid
import pytest
from conftest import ROOT, made_once

VOCAB = 4096
SPECIAL = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@dataclass(frozen=True)
class RandomPair:
    """A transformers config class with its arguments; the draft is made of the target's first ``draft_layers``.

    bits: of a weight. later: how much the layers after the draft's contribute.
    """

    config: str
    arguments: dict[str, Any]
    bits: int
    draft_layers: int
    later: float


PAIRS = {
    "qwen2-int8": RandomPair(
        "Qwen2Config",
        SPECIAL
        | {"hidden_size": 160, "intermediate_size": 384, "num_hidden_layers": 5, "num_attention_heads": 5}
        | {"num_key_value_heads": 1, "max_position_embeddings": 640, "tie_word_embeddings": False},
        8,
        2,
        0.3,
    ),
    # Learned positions, and one key and value head for each head.
    "gpt2-int4": RandomPair(
        "GPT2Config",
        SPECIAL | {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 640, "tie_word_embeddings": False},
        4,
        1,
        0.3,
    ),
}


def shared_pair(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a pair of ``PAIRS``, which is made once for all workers."""
    return made_once(tmp_path_factory, f"random-{name}", lambda folder: make_pair(PAIRS[name], folder))


def make_pair(pair: RandomPair, folder: Path) -> Path:
    """Export a random target to ``folder`` and its draft to ``folder / "draft"``; return ``folder``.

    Each token has a twin, whose weights in the lm_head differ in a single place.
    """
    import torch
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, pair.config)(**pair.arguments)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, weights in model.named_parameters():
        if weights.ndim > 1:
            layer = next((int(part) for part in name.split(".") if part.isdigit()), 0)
            spread = 1.0 if len(weights) >= VOCAB else 0.25 * (pair.later if layer >= pair.draft_layers else 1)
            torch.nn.init.normal_(weights, std=spread)
    head = model.get_output_embeddings().weight.data
    head[1::2] = head[::2]
    rows = torch.arange(VOCAB // 2)
    head[1::2][rows, rows % head.shape[1]] += head.abs().max() / 127  # a step or two of an int8 weight
    layers = "n_layer" if hasattr(config, "n_layer") else "num_hidden_layers"
    few = getattr(transformers, pair.config)(**pair.arguments | {layers: pair.draft_layers})
    draft = transformers.AutoModelForCausalLM.from_config(few).eval()
    draft.load_state_dict(model.state_dict(), strict=False)
    export(model, folder, pair.bits)
    export(draft, folder / "draft", pair.bits)
    return folder


def export(model: Any, folder: Path, bits: int) -> None:
    import nncf
    import openvino as ov
    from optimum.exporters.openvino import main_export

    plain = folder / "uncompressed"
    model.save_pretrained(folder / "checkpoint")
    task = "text-generation-with-past"
    main_export(str(folder / "checkpoint"), plain, task=task, convert_tokenizer=False)
    ir = ov.Core().read_model(plain / "openvino_model.xml")
    if bits == 4:
        compressed = nncf.compress_weights(ir, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=32, all_layers=False)
    else:
        compressed = nncf.compress_weights(ir, mode=nncf.CompressWeightsMode.INT8_ASYM)
    ov.save_model(compressed, folder / "openvino_model.xml")
    shutil.copy(plain / "config.json", folder)
    hybrid.copy_tokenizer(ROOT / "models" / "demo", folder)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
