"""Write random EAGLE-3 heads as AngelSlim, SpecForge and speculators do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

Style = Literal["angelslim", "specforge", "speculators"]
ARCHITECTURES = {
    "angelslim": "Eagle3LlamaForCausalLM",
    "specforge": "LlamaForCausalLMEagle3",
    "speculators": "Eagle3DraftModel",
}


def write_head(
    folder: Path,
    style: Style = "angelslim",
    *,
    target: dict[str, Any],
    draft_vocab: int | None = 256,
    embedding: bool | torch.Tensor = True,
    lm_head: bool = True,
    taps: int = 3,
    layer_ids: list[int] | None = None,
    biases: bool = False,
    pickled: bool = False,
    shards: int = 1,
    prefix: str = "",
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a head for a target with this config into ``folder``, and return it.

    draft_vocab: tokens that it can propose; None for all, without d2t. embedding: whether it has one, or which.
    taps: layers that it reads. layer_ids: as the style counts them. config: further entries of config.json.
    """
    draws = torch.Generator().manual_seed(seed)
    vocab, wide = target["vocab_size"], target["hidden_size"]
    layer = {
        "model_type": "llama",
        "hidden_size": wide,
        "intermediate_size": 2 * wide,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    own = {name: value for name, value in config.items() if name.startswith(("norm_", "fc_norm"))}
    layer |= {name: value for name, value in config.items() if name not in own}
    hidden, inner, heads, kv_heads, head_dim = (
        layer[name]
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    proposed = draft_vocab or vocab

    def weights(*shape: int) -> torch.Tensor:
        spread = shape[-1] ** -0.5 if len(shape) > 1 else 0.3
        return torch.randn(shape, generator=draws) * spread + (len(shape) == 1)

    name = "layers.0" if style == "speculators" else "midlayer"
    shapes = {
        f"{name}.self_attn.q_proj": (heads * head_dim, 2 * hidden),
        f"{name}.self_attn.k_proj": (kv_heads * head_dim, 2 * hidden),
        f"{name}.self_attn.v_proj": (kv_heads * head_dim, 2 * hidden),
        f"{name}.self_attn.o_proj": (hidden, heads * head_dim),
        f"{name}.mlp.gate_proj": (inner, hidden),
        f"{name}.mlp.up_proj": (inner, hidden),
        f"{name}.mlp.down_proj": (hidden, inner),
        **{f"{name}.{norm}": (hidden,) for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "fc": (hidden, taps * wide),
        "norm": (hidden,),
    }
    if layer["model_type"] == "qwen3":
        shapes |= {f"{name}.self_attn.{each}_norm": (head_dim,) for each in "qk"}
    shapes |= {"input_norm": (taps * wide,)} if own.get("norm_before_fc") else {}
    shapes |= {f"fc_norm.{i}": (wide,) for i in range(taps)} if own.get("fc_norm") else {}
    shapes |= {"lm_head": (proposed, hidden)} if lm_head else {}
    shapes |= {"embed_tokens": (vocab, hidden)} if embedding is True else {}
    tensors = {f"{each}.weight": weights(*shape).to(torch.bfloat16) for each, shape in shapes.items()}
    if biases:
        linear = [each for each in shapes if "self_attn" in each and each.endswith("proj")]
        tensors |= {f"{each}.bias": (weights(shapes[each][0]) - 1).to(torch.bfloat16) for each in linear}
    if isinstance(embedding, torch.Tensor):
        tensors["embed_tokens.weight"] = embedding
    if draft_vocab:
        ids = torch.randperm(vocab, generator=draws)[:draft_vocab].sort().values
        tensors |= {"d2t": ids - torch.arange(draft_vocab), "t2d": torch.isin(torch.arange(vocab), ids)}
    if style == "speculators":
        written = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, **own}
        written |= {"eagle_aux_hidden_state_layer_ids": layer_ids} if layer_ids else {}
    else:
        written = layer | own
        written |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}} if layer_ids else {}
    written |= {"architectures": [ARCHITECTURES[style]]}
    written |= {"draft_vocab_size": draft_vocab} if draft_vocab else {}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
    save({f"{prefix}{each}": tensor for each, tensor in tensors.items()}, folder, shards, pickled)
    return folder


def save(tensors: dict[str, torch.Tensor], folder: Path, shards: int, pickled: bool) -> None:
    """Save tensors as a checkpoint of so many files."""
    names = sorted(tensors)
    stem, end = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    where = {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05}-of-{shards:05}.{end}" if shards > 1 else f"{stem}.{end}"
        part = {name: tensors[name].contiguous() for name in names[i::shards]}
        torch.save(part, folder / file) if pickled else save_file(part, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    if shards > 1:
        index = json.dumps({"metadata": {}, "weight_map": where})
        (folder / f"{stem}.{end}.index.json").write_text(index, encoding="utf-8")
