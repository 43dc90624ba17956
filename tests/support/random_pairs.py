"""Random pairs of other shapes than the demo pair, in which near-ties are common: any flipped bit shows."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hybrid
import pytest
import torch
from conftest import ROOT
from families import FAMILIES
from family_models import export_as_the_worker_does, warm_jobs
from heads import write_head
from kept import kept_model
from ovspec_export.draft_vocabulary import trim_ir
from safetensors.torch import load_file, save_file

VOCAB = 4096
SPECIAL = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@dataclass(frozen=True)
class RandomPair:
    """A transformers config class with its arguments; the draft is made of the target's first ``draft_layers``.

    bits: of a weight. later: how much the layers after the draft's contribute. With no ``draft_layers``, the draft is
    an EAGLE-3 head or, with ``mtp_layers``, as many MTP layers, and ``later`` how much all layers contribute. kept: ids
    that the draft proposes, of ``VOCAB``.
    family: the one in ``families.py``, if it is exported in an environment of its own.
    """

    config: str
    arguments: dict[str, Any]
    bits: int
    draft_layers: int
    later: float
    kept: int = VOCAB
    family: str = ""
    mtp_layers: int = 0


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
# Recurrent states: of gated delta nets and short convolutions.
DELTA_NET = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32}
DELTA_NET |= {"linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HYBRIDS = {
    "qwen3_5-int8": RandomPair(
        "Qwen3_5TextConfig",
        SPECIAL
        | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 640, "tie_word_embeddings": False}
        | DELTA_NET,
        8,
        2,
        0.3,
        family="qwen3_5_text",
    ),
    "lfm2-int8": RandomPair(
        "Lfm2Config",
        SPECIAL
        | {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "max_position_embeddings": 640, "tie_word_embeddings": False}
        | {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention", "conv"]},
        8,
        2,
        0.3,
        family="lfm2",
    ),
}
HEADS = {
    f"{name}-head": replace((PAIRS | HYBRIDS)[name], draft_layers=0, later=later)
    for name, later in {"qwen2-int8": 0.1, "gpt2-int4": 0.03, "qwen3_5-int8": 0.1, "lfm2-int8": 0.1}.items()
}
HEADS |= {
    "qwen2-int8-mtp": replace(HEADS["qwen2-int8-head"], mtp_layers=1),
    "qwen3_5-int8-mtp": replace(HEADS["qwen3_5-int8-head"], mtp_layers=2),
}
TRIMMED = {f"{name}-trimmed": replace(PAIRS[name], kept=3 * VOCAB // 4) for name in ("qwen2-int8", "gpt2-int4")}
PAIRS |= HEADS | TRIMMED | HYBRIDS


def shared_pair(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a pair of ``PAIRS``, which is made once for all workers."""
    return kept_model(tmp_path_factory, f"random-{name}", lambda folder: make_pair(PAIRS[name], folder))


def make_pair(pair: RandomPair, folder: Path) -> Path:
    """Export a random target to ``folder`` and its draft to ``folder / "draft"``; return ``folder``.

    Each token has a twin, whose weights in the lm_head differ in a single place.
    """
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
    if not pair.draft_layers:
        if pair.mtp_layers:
            return export_with_mtp(model, folder, pair.bits, pair.family, pair.mtp_layers)
        return export_with_head(model, folder, pair.bits, pair.family)
    few_layers = {"n_layer" if hasattr(config, "n_layer") else "num_hidden_layers": pair.draft_layers}
    if "layer_types" in pair.arguments:
        few_layers["layer_types"] = pair.arguments["layer_types"][: pair.draft_layers]
    few = getattr(transformers, pair.config)(**pair.arguments | few_layers)
    draft = transformers.AutoModelForCausalLM.from_config(few).eval()
    draft.load_state_dict(model.state_dict(), strict=False)
    export(model, folder, pair.bits, pair.family)
    export(draft, folder / "draft", pair.bits, pair.family)
    if pair.kept < VOCAB:
        trim_ir(folder / "draft", torch.randperm(VOCAB)[: pair.kept].sort().values.numpy(), "draft")
    return folder


def export_with_mtp(model: Any, folder: Path, bits: int, family: str, layer_count: int) -> Path:
    """Export a target and MTP layers that guess what would follow if the target had no layers."""
    from ovspec_export.mtp import make_new_mtp_layer, save_mtp_layer

    export(model, folder / "target", bits, family)
    config = json.loads((folder / "target" / "config.json").read_text(encoding="utf-8"))
    layer = make_new_mtp_layer(config)
    width = layer.layout.hidden_size
    layer.fc.weight.data = torch.cat((torch.eye(width), 0.005 * torch.randn(width, width)), 1)
    for name, weights in layer.layer.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(weights, std=0.01)
    save_mtp_layer(layer, config, folder / "layer")
    file = folder / "layer" / "model.safetensors"
    tensors = load_file(file)
    for depth in range(1, layer_count):
        own = [name for name in tensors if name.startswith("mtp.layers.0.")]
        tensors |= {name.replace(".0.", f".{depth}.", 1): 1.01 * tensors[name] for name in own}
    save_file(tensors, file, {"format": "pt"})
    return pair_up(folder, folder / "layer")


def export_with_head(model: Any, folder: Path, bits: int, family: str = "") -> Path:
    """Export a target and a head that guesses what would follow if the target had no layers."""
    width, target = model.config.hidden_size, folder / "target"
    export(model, target, bits, family)
    checkpoint = write_head(
        folder / "head",
        "speculators",
        target={"vocab_size": VOCAB, "hidden_size": width},
        draft_vocab=3 * VOCAB // 4,
        embedding=False,
        layer_ids=[0, 1, 2],
        norm_before_residual=True,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        max_position_embeddings=640,
    )
    tensors = load_file(checkpoint / "model.safetensors")
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    alike = torch.eye(width).repeat(1, 2) * torch.cat((torch.ones(width), torch.zeros(width)))
    layer = "layers.0.self_attn"
    tensors |= {
        "lm_head.weight": model.get_output_embeddings().weight.data[ids],
        "layers.0.hidden_norm.weight": torch.full((width,), 1e-3),
        "layers.0.mlp.down_proj.weight": 1e-6 * tensors["layers.0.mlp.down_proj.weight"],
        # An entry attends to those of the same token, and so gets the token's embedding.
        **{f"{layer}.{name}_proj.weight": size * alike for name, size in {"q": 2, "k": 2, "v": 1}.items()},
        f"{layer}.o_proj.weight": torch.eye(width),
        **{name: torch.ones_like(tensors[name]) for name in ("norm.weight", "layers.0.input_layernorm.weight")},
    }
    save_file({name: values.contiguous() for name, values in tensors.items()}, checkpoint / "model.safetensors")
    return pair_up(folder, checkpoint)


def pair_up(folder: Path, checkpoint: Path) -> Path:
    """Export the head in ``checkpoint`` with the IR in the folder "target" into ``folder``, and return that."""
    from ovspec_export import Compression, export_pair

    with pytest.MonkeyPatch.context() as patched:
        if hasattr(os, "fork"):
            warm_jobs(patched)
        export_pair(str(folder / "target"), str(checkpoint), folder / "pair", draft_compression=Compression("int8"))
    for file in (folder / "pair").iterdir():
        file.rename(folder / file.name)
    return folder


def export(model: Any, folder: Path, bits: int, family: str = "") -> None:
    import nncf
    import openvino as ov
    from optimum.exporters.openvino import main_export

    plain = folder / "uncompressed"
    model.save_pretrained(folder / "checkpoint")
    if family:
        failure = export_as_the_worker_does(family, FAMILIES[family], folder / "checkpoint", plain)
        assert not failure, failure
    else:
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
