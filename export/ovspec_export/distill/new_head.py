"""The sizes of a new head, which follow from its target's."""

from __future__ import annotations

from collections.abc import Sequence

from ovspec.base.json_types import JsonObject
from ovspec.ir.config import CONTEXT_KEYS, LAYER_KEYS
from ovspec_export.head_layout import LAYER_IDS_ENTRY, HeadLayout, build_head_layout, default_tap_layers


def make_head_config(
    target: JsonObject, vocab: int, hidden: int, layers: list[int], draft_vocabulary: int
) -> JsonObject:
    """Return the config.json of a new head, which has the target's sizes where its config says them."""
    target = target.get("text_config") or target
    heads = find_positive_number(target, ("num_attention_heads", "n_head")) or max(1, hidden // 64)
    # Of a mixture of experts, perhaps that of one expert.
    intermediate_size = find_positive_number(target, ("intermediate_size",)) or 0
    if not hidden <= intermediate_size <= 6 * hidden:
        intermediate_size = 3 * hidden
    rope = target.get("rope_parameters") or {}
    base = target.get("rope_theta") or rope.get("rope_theta") or 10_000.0
    count = find_positive_number(target, LAYER_KEYS) or 0
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": find_positive_number(target, ("num_key_value_heads",)) or heads,
        "head_dim": find_positive_number(target, ("head_dim",)) or hidden // heads,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocabulary,
        "max_position_embeddings": find_positive_number(target, CONTEXT_KEYS) or 2048,
        "rms_norm_eps": target.get("rms_norm_eps") or 1e-6,
        "rope_theta": base,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{name: target[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in target},
    }
    if layers != default_tap_layers(count):
        config[LAYER_IDS_ENTRY] = layers
    return config


def find_positive_number(config: JsonObject, names: Sequence[str]) -> int | None:
    """Return the first of these entries that is a positive number."""
    return next((config[name] for name in names if type(config.get(name)) is int and config[name] > 0), None)


def make_head_layout(config: JsonObject, layers: list[int]) -> HeadLayout:
    """Return the layout of a new head, by its config. It has no embedding of its own."""
    hidden = config["hidden_size"]
    return build_head_layout(
        config, {"fc.weight": [hidden, len(layers) * hidden], "lm_head.weight": []}, is_speculators=False
    )
