"""The config of a GGUF file's original Hugging Face checkpoint, reconstructed from its metadata.

transformers' own reader omits unknown entries (scaled rotary embeddings, soft caps, widths of experts), so its model
may be wrong. Here an unknown entry is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec_export.gguf_file import CHECKPOINT_ADVICE, GgufHeaders

# Entry of the metadata, without the architecture's name -> entry of config.json.
COMMON_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.freq_base": "rope_theta",
}
RMS_NORM_KEYS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
HEAD_SIZE_KEYS = {"attention.key_length": "head_dim"}
EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
GEMMA_KEYS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
TOKEN_ROLES = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
# Keys read elsewhere in this file, or redundant.
KEYS_READ_ELSEWHERE = re.compile(r"vocab_size|attention\.value_length|rope\.(dimension_count|scaling\..*)|pooling_type")
# Kinds of files that aren't whole models (general.type) -> advice.
PARTIAL_MODEL_KINDS = {
    "mmproj": "the vision or audio part of a model; give the file with the text model",
    "adapter": "an adapter; merge it into its model, and export the merged model",
    "imatrix": "an importance matrix, not a model; give the model's file",
}
# Entries of general.sampling.* -> entries of generation_config.json.
SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True)
class GgufArchitecture:
    """The derivation of a family's config from ggml's metadata.

    model_type: transformers' name of the family.
    config_keys: entries of the metadata in addition to ``COMMON_KEYS``, and their names in config.json.
    derive_entries: derives entries from other entries or from the tensors.
    rotates_whole_heads: all values of a head are rotated; otherwise the metadata has their number.
    """

    model_type: str
    config_keys: dict[str, str] = field(default_factory=dict)
    derive_entries: Callable[[GgufHeaders, JsonObject], JsonObject] = lambda *_: {}
    rotates_whole_heads: bool = True


def derive_llama_entries(headers: GgufHeaders, config: JsonObject) -> JsonObject:
    head_width = config.get("head_dim") or headers.get_architecture_entry("rope.dimension_count")
    return {
        "attention_bias": "blk.0.attn_q.bias" in headers.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in headers.tensors,
        "head_dim": head_width or compute_head_width(config),
    }


def derive_qwen2_moe_entries(headers: GgufHeaders, config: JsonObject) -> JsonObject:
    shared_width = headers.tensors["blk.0.ffn_gate_shexp.weight"].shape[0]
    return {
        "moe_intermediate_size": headers.tensors["blk.0.ffn_gate_exps.weight"].shape[1],
        "shared_expert_intermediate_size": shared_width,
        "intermediate_size": config.get("intermediate_size") or shared_width,
    }


def derive_phi3_entries(headers: GgufHeaders, config: JsonObject) -> JsonObject:
    return {
        "original_max_position_embeddings": headers.get_architecture_entry("rope.scaling.original_context_length"),
        "partial_rotary_factor": headers.get_architecture_entry("rope.dimension_count") / compute_head_width(config),
        "sliding_window": headers.get_architecture_entry("attention.sliding_window") or None,
    }


def derive_gemma_entries(headers: GgufHeaders, config: JsonObject) -> JsonObject:
    # Only the 27B models divide by another width than a head's; llama.cpp recognises them by their layers, too.
    largest_layer_count, rope_base = {"gemma2": (46, 1e4), "gemma3": (62, 1e6)}[headers.architecture]
    if config["num_hidden_layers"] == largest_layer_count:
        attention_scalar = config["hidden_size"] // config["num_attention_heads"]
    else:
        attention_scalar = config["head_dim"]
    return {"query_pre_attn_scalar": attention_scalar, "rope_theta": config.get("rope_theta", rope_base)}


def derive_stablelm_entries(headers: GgufHeaders, config: JsonObject) -> JsonObject:
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in headers.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in headers.tensors,
        "partial_rotary_factor": headers.get_architecture_entry("rope.dimension_count") / compute_head_width(config),
        "rope_theta": config.get("rope_theta", 1e4),
    }


def derive_lfm2_entries(_headers: GgufHeaders, config: JsonObject) -> JsonObject:
    head_counts = config["num_key_value_heads"]  # 0 in a layer with a convolution
    return {
        "num_key_value_heads": max(head_counts),
        "layer_types": ["full_attention" if count else "conv" for count in head_counts],
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": config["intermediate_size"],
    }


GGUF_ARCHITECTURES = {
    "llama": GgufArchitecture("llama", RMS_NORM_KEYS | HEAD_SIZE_KEYS, derive_llama_entries),
    "qwen2": GgufArchitecture("qwen2", RMS_NORM_KEYS),
    "qwen2moe": GgufArchitecture("qwen2_moe", RMS_NORM_KEYS | EXPERT_KEYS, derive_qwen2_moe_entries),
    "qwen3": GgufArchitecture("qwen3", RMS_NORM_KEYS | HEAD_SIZE_KEYS),
    "qwen3moe": GgufArchitecture(
        "qwen3_moe", RMS_NORM_KEYS | HEAD_SIZE_KEYS | EXPERT_KEYS, lambda *_: {"norm_topk_prob": True}
    ),
    "phi3": GgufArchitecture(
        "phi3",
        RMS_NORM_KEYS | {"attention.sliding_window": "sliding_window"},
        derive_phi3_entries,
        rotates_whole_heads=False,
    ),
    "gemma2": GgufArchitecture("gemma2", RMS_NORM_KEYS | HEAD_SIZE_KEYS | GEMMA_KEYS, derive_gemma_entries),
    "gemma3": GgufArchitecture("gemma3_text", RMS_NORM_KEYS | HEAD_SIZE_KEYS | GEMMA_KEYS, derive_gemma_entries),
    "gpt2": GgufArchitecture(
        "gpt2",
        {
            "context_length": "n_ctx",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            "feed_forward_length": "n_inner",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        lambda _, config: {"n_positions": config["n_ctx"]},
    ),
    "starcoder2": GgufArchitecture(
        "starcoder2",
        {"attention.layer_norm_epsilon": "norm_epsilon", "attention.sliding_window": "sliding_window"},
        lambda headers, _: {"use_bias": "blk.0.attn_q.bias" in headers.tensors},
    ),
    "stablelm": GgufArchitecture(
        "stablelm",
        {"attention.layer_norm_epsilon": "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
        derive_stablelm_entries,
        rotates_whole_heads=False,
    ),
    "lfm2": GgufArchitecture(
        "lfm2",
        {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
        derive_lfm2_entries,
    ),
}


def build_config(headers: GgufHeaders) -> JsonObject:
    """Return the entries of config.json for the model in a GGUF file.

    Raises:
        OvspecError: the family is unknown, the file isn't a language model, or its metadata has an unknown entry.
    """
    check_model_kind(headers)
    architecture = GGUF_ARCHITECTURES[headers.architecture]
    config_keys = COMMON_KEYS | architecture.config_keys
    key_prefix = f"{headers.architecture}."
    architecture_entries = {
        key.removeprefix(key_prefix): entry for key, entry in headers.metadata.items() if key.startswith(key_prefix)
    }
    unknown_keys = sorted(
        key for key in architecture_entries if key not in config_keys and not KEYS_READ_ELSEWHERE.fullmatch(key)
    )
    if unknown_keys:
        unknown_key = f"{key_prefix}{unknown_keys[0]}"
        raise OvspecError(f"{headers.path}: its metadata has the unknown entry {unknown_key}; {CHECKPOINT_ADVICE}.")
    try:
        config = {config_keys[key]: entry for key, entry in architecture_entries.items() if key in config_keys}
        config |= architecture.derive_entries(headers, config)
        rotated_width = architecture_entries.get("rope.dimension_count")
        if architecture.rotates_whole_heads and rotated_width not in (None, head_width := compute_head_width(config)):
            raise ValueError(f"RoPE rotates {rotated_width} values of each head, but heads have {head_width} values")
        config |= {"vocab_size": headers.tensors["token_embd.weight"].shape[0]}
        token_count = len(headers.metadata.get("tokenizer.ggml.tokens", []))
        if token_count > config["vocab_size"]:
            raise ValueError(f"there are {token_count} tokens, but embeddings for only {config['vocab_size']}")
        config |= {"tie_word_embeddings": "output.weight" not in headers.tensors}
        config |= read_rope_scaling(headers, config)
        role_token_ids = {
            name: headers.metadata.get(f"tokenizer.ggml.{role}_token_id") for name, role in TOKEN_ROLES.items()
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError) as error:
        raise OvspecError(
            f"{headers.path}: its metadata is incomplete or not supported ({error}); {CHECKPOINT_ADVICE}."
        ) from None
    known_entries = {name: entry for name, entry in config.items() if entry is not None}
    # All ids are written, because a family's default for a token would be wrong.
    return known_entries | role_token_ids | {"model_type": architecture.model_type}


def check_model_kind(headers: GgufHeaders) -> None:
    """Raise OvspecError if the file isn't a language model, or the model's family is unknown."""
    model_kind = str(headers.metadata.get("general.type") or "model")
    advice = PARTIAL_MODEL_KINDS.get("mmproj" if headers.architecture == "clip" else model_kind)
    if advice:
        raise OvspecError(f"{headers.path}: contains {advice}.")
    is_embedding = (
        headers.get_architecture_entry("pooling_type") or headers.get_architecture_entry("attention.causal") is False
    )
    if is_embedding or re.search("bert|embedding|encoder", headers.architecture):
        raise OvspecError(f"{headers.path}: contains an embedding model; only text generation models can be exported.")
    if headers.architecture not in GGUF_ARCHITECTURES:
        problem = f"{headers.architecture!r}, but GGUF files are supported only for {', '.join(GGUF_ARCHITECTURES)}"
        raise OvspecError(f"{headers.path}: its architecture is {problem}; {CHECKPOINT_ADVICE}.")


def compute_head_width(config: JsonObject) -> int:
    """Return the number of values in an attention head."""
    hidden_size: int = config["n_embd"] if "n_embd" in config else config["hidden_size"]
    head_count: int = config["n_head"] if "n_head" in config else config["num_attention_heads"]
    return config.get("head_dim") or hidden_size // head_count


def read_rope_scaling(headers: GgufHeaders, config: JsonObject) -> JsonObject:
    """Return ``rope_scaling`` if the rotary embedding is scaled; raises ValueError for an unknown method."""
    if "rope_freqs.weight" in headers.tensors:
        return {"rope_scaling": read_llama3_scaling(headers, config)}
    if "rope_factors_long.weight" in headers.tensors:
        factors = {
            f"{length}_factor": headers.tensors[f"rope_factors_{length}.weight"].read_values().tolist()
            for length in ("long", "short")
        }
        return {"rope_scaling": {"rope_type": "longrope"} | factors}
    scaling_method = headers.get_architecture_entry("rope.scaling.type") or "none"
    if scaling_method == "none":
        return {}
    scaling = {"rope_type": scaling_method, "factor": headers.get_architecture_entry("rope.scaling.factor")}
    if scaling_method == "yarn":
        original_length = headers.get_architecture_entry("rope.scaling.original_context_length")
        scaling |= {"original_max_position_embeddings": original_length}
        yarn_option_names = {
            "attn_factor": "attention_factor",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
        yarn_options = {
            name: headers.get_architecture_entry(f"rope.scaling.{key}") for key, name in yarn_option_names.items()
        }
        scaling |= {name: option for name, option in yarn_options.items() if option is not None}
    elif scaling_method != "linear":
        raise ValueError(f"the RoPE scaling {scaling_method!r} is unknown")
    if headers.architecture == "gemma3":  # in this form, layers with a window aren't scaled
        local_rope_base = config.get("rope_local_base_freq", 1e4)
        full_attention = {"rope_theta": config["rope_theta"], **scaling}
        return {
            "rope_parameters": {"full_attention": full_attention, "sliding_attention": {"rope_theta": local_rope_base}}
        }
    return {"rope_scaling": scaling}


def read_llama3_scaling(headers: GgufHeaders, config: JsonObject) -> JsonObject:
    """Return the scaling of Llama 3.1 and later; the file has only the resulting factor of each frequency.

    The factors are recomputed from the parameters shared by all these models, and must be the same.
    """
    stored_factors = headers.tensors["rope_freqs.weight"].read_values()
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored_factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    head_width = compute_head_width(config)
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, head_width, 2) / head_width)
    smoothing = np.clip((8192 / wavelengths - 1.0) / 3.0, 0, 1)
    if not np.allclose(stored_factors, 1 / ((1 - smoothing) / scaling["factor"] + smoothing), rtol=1e-3):
        raise ValueError("the RoPE factors in rope_freqs.weight aren't Llama 3's")
    return scaling


def build_generation_config(headers: GgufHeaders, eos_ids: list[int]) -> JsonObject:
    """Return the entries of generation_config.json: the EOS and BOS tokens, and the recommended sampling."""
    generation_config: JsonObject = {
        "eos_token_id": eos_ids,
        "bos_token_id": headers.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    sampling_options = {name: headers.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING_KEYS.items()}
    if any(option is not None for option in sampling_options.values()):
        generation_config |= sampling_options | {"do_sample": True}
    return {name: entry for name, entry in generation_config.items() if entry is not None}
