"""The sizes of a new head, derived from its target's."""

from __future__ import annotations

from collections.abc import Sequence

from ovspec.base.json_types import JsonObject
from ovspec.ir.config import CONTEXT_KEYS, LAYER_KEYS
from ovspec_export.head_layout import LAYER_IDS_ENTRY, HeadLayout, build_head_layout, choose_default_tap_layers


def make_head_config(
    target_config: JsonObject, vocab_size: int, hidden_size: int, tap_layers: list[int], draft_vocab_size: int
) -> JsonObject:
    """Return the config.json of a new head, with the target's sizes as far as its config has them."""
    target_config = target_config.get("text_config") or target_config
    attention_heads = find_positive_number(target_config, ("num_attention_heads", "n_head")) or max(
        1, hidden_size // 64
    )
    # In a mixture of experts, perhaps a single expert's.
    intermediate_size = find_positive_number(target_config, ("intermediate_size",)) or 0
    if not hidden_size <= intermediate_size <= 6 * hidden_size:
        intermediate_size = 3 * hidden_size
    rope_config = target_config.get("rope_parameters") or {}
    rope_base = target_config.get("rope_theta") or rope_config.get("rope_theta") or 10_000.0
    layer_count = find_positive_number(target_config, LAYER_KEYS) or 0
    head_config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": attention_heads,
        "num_key_value_heads": find_positive_number(target_config, ("num_key_value_heads",)) or attention_heads,
        "head_dim": find_positive_number(target_config, ("head_dim",)) or hidden_size // attention_heads,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "max_position_embeddings": find_positive_number(target_config, CONTEXT_KEYS) or 2048,
        "rms_norm_eps": target_config.get("rms_norm_eps") or 1e-6,
        "rope_theta": rope_base,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{
            name: target_config[name]
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
            if name in target_config
        },
    }
    if tap_layers != choose_default_tap_layers(layer_count):
        head_config[LAYER_IDS_ENTRY] = tap_layers
    return head_config


def find_positive_number(config: JsonObject, keys: Sequence[str]) -> int | None:
    """Return the first positive number among these entries."""
    return next((config[key] for key in keys if type(config.get(key)) is int and config[key] > 0), None)


def make_head_layout(config: JsonObject, tap_layers: list[int]) -> HeadLayout:
    """Return the layout of a new head, by its config. The head has no embedding of its own."""
    hidden_size = config["hidden_size"]
    return build_head_layout(
        config, {"fc.weight": [hidden_size, len(tap_layers) * hidden_size], "lm_head.weight": []}, is_speculators=False
    )
