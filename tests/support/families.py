"""Tiny random models of many families, in two shapes each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB = 4096

SIZES = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
GROUPED = SIZES | {"intermediate_size": 128, "num_key_value_heads": 2}
HEADED = GROUPED | {"head_dim": 16}
DEEPER = HEADED | {"num_hidden_layers": 4}
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": VOCAB, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4}
DELTA_NET = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_value_heads": 4}
DELTA_NET |= {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
CONVOLUTIONS = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
GRANITE = {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 64}
GRANITE |= {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_head": 16, "mamba_chunk_size": 16}
GEMMA_3N = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 16, "laurel_rank": 8}
GEMMA_3N |= {"altup_num_inputs": 2, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4}
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LLAMA_4 = {"num_hidden_layers": 4, "intermediate_size_mlp": 128, "attention_chunk_size": 16, "num_local_experts": 4}
LLAMA_4 |= {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 0]}
LLAMA_4 |= {"layer_types": ["chunked_attention", "full_attention"] * 2}
MAMBA = {"vocab_size": VOCAB, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2}
MAMBA |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}

# The second shape: other widths and numbers of heads, and what a family changes besides.
SECOND = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 160}
SECOND |= {"head_dim": 24, "sliding_window": 30, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6}
SECOND |= {"n_embd": 96, "n_head": 6, "ffn_dim": 160, "word_embed_proj_dim": 96, "d_model": 96, "n_heads": 6}
SECOND |= {"linear_num_key_heads": 4, "linear_key_head_dim": 8, "attention_chunk_size": 20, "state_size": 6}


@dataclass(frozen=True)
class Family:
    """A transformers config class, its arguments, and how its states are expected to roll back.

    rollback: "{window}" stands for the width of its windows or chunks.
    second: arguments of the second shape that aren't in ``SECOND``.
    model_type: its name in the config, if that is not its name here.
    attention, use_cache: how transformers computes the reference.
    spread, embedding, norms: of the random weights, of those of the embeddings, and of those added to vectors such as
        the weights of norms. With tied embeddings, a small spread would repeat the input.
    """

    config: str
    arguments: dict[str, Any]
    rollback: str = "mask"
    note: str = ""
    spread: float = 0.25
    embedding: float = 1.0
    norms: float = 0.0
    second: dict[str, Any] = field(default_factory=dict)
    model_type: str = ""
    attention: str = "eager"
    use_cache: bool = True

    def expected_rollback(self, number: int) -> str:
        """Return the rollback that probing should find for shape 0 or 1."""
        shape = self.shape(number)
        return self.rollback.format(window=shape.get("sliding_window", shape.get("attention_chunk_size")))

    def shape(self, number: int) -> dict[str, Any]:
        """Return the config's arguments for shape 0 or 1."""
        if not number:
            return self.arguments
        return self.arguments | {n: v for n, v in SECOND.items() if n in self.arguments} | self.second


FAMILIES = {
    "llama": Family("LlamaConfig", GROUPED),
    "qwen2": Family("Qwen2Config", GROUPED),
    "qwen3": Family("Qwen3Config", HEADED),
    "qwen2_moe": Family("Qwen2MoeConfig", GROUPED | EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_moe": Family("Qwen3MoeConfig", HEADED | EXPERTS),
    "mistral": Family("MistralConfig", GROUPED | {"sliding_window": 24}, "mask until {window}", "one window"),
    "mixtral": Family("MixtralConfig", GROUPED | LOCAL_EXPERTS),
    "ministral": Family("MinistralConfig", DEEPER | WINDOWS, "mask until {window}", "two windows"),
    "ministral3": Family("Ministral3Config", HEADED),
    "gpt_oss": Family("GptOssConfig", DEEPER | WINDOWS | LOCAL_EXPERTS, "mask until {window}", "two windows, sinks"),
    "phi3": Family("Phi3Config", GROUPED),
    "phi3, longrope": Family(
        "Phi3Config",
        GROUPED | {"original_max_position_embeddings": 64, "rope_scaling": LONG_ROPE},
        note="texts cross the switch",
        model_type="phi3",
        use_cache=False,  # transformers 5.5 keeps the keys that it rotated for a short text; without a cache it doesn't
    ),
    "gemma": Family("GemmaConfig", HEADED, spread=0.7),
    "gemma2": Family(
        "Gemma2Config",
        DEEPER | {"sliding_window": 24, "query_pre_attn_scalar": 16},
        "mask until {window}",
        "two windows",
        spread=1.5,
        embedding=0.03,
        norms=0.5,
        attention="sdpa",  # as transformers does without being asked; it leaves out the soft cap of attention
    ),
    "gemma3_text": Family(
        "Gemma3TextConfig",
        DEEPER | WINDOWS | {"query_pre_attn_scalar": 16},
        "mask until {window}",
        "two windows",
        spread=1.5,
        embedding=0.02,
        norms=1.0,
    ),
    "gemma3n_text": Family(
        "Gemma3nTextConfig",
        DEEPER | WINDOWS | GEMMA_3N,
        "mask until {window}",
        "shared KV",
        spread=1.5,
        embedding=0.03,
        norms=0.5,
    ),
    "gemma4_text": Family(
        "Gemma4TextConfig",
        DEEPER
        | WINDOWS
        | {"global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 16}
        | {"vocab_size_per_layer_input": VOCAB},
        "mask until {window}",
        "two head sizes",
        second={"num_kv_shared_layers": 2},
        spread=1.5,
        embedding=0.03,
        norms=0.5,
    ),
    "gemma4_text, experts": Family(
        "Gemma4TextConfig",
        DEEPER
        | WINDOWS
        | {"global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
        "mask until {window}",
        model_type="gemma4_text",
        spread=1.5,
        embedding=0.03,
        norms=0.5,
    ),
    "gpt2": Family("GPT2Config", GPT2),
    "opt": Family("OPTConfig", SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 64}, spread=0.7),
    "gpt_neox": Family("GPTNeoXConfig", SIZES | {"intermediate_size": 128}),
    "bloom": Family("BloomConfig", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4}, spread=0.7),
    "falcon": Family("FalconConfig", SIZES, spread=0.7),
    "gpt_bigcode": Family("GPTBigCodeConfig", GPT2),
    "mpt": Family(
        "MptConfig",
        {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4},
        "trim",
        spread=1.5,
        norms=0.5,
        second={"n_heads": 8},
    ),
    "granite": Family("GraniteConfig", GROUPED),
    "granitemoe": Family("GraniteMoeConfig", GROUPED | LOCAL_EXPERTS),
    "granitemoehybrid": Family(
        "GraniteMoeHybridConfig",
        GROUPED | GRANITE | LOCAL_EXPERTS,
        "mask + replay",
        "no rope",
        second={"mamba_n_heads": 12},
    ),
    "granitemoehybrid, rope": Family(
        "GraniteMoeHybridConfig",
        GROUPED | GRANITE | {"num_local_experts": 0, "position_embedding_type": "rope"},
        "trim + replay",
        second={"num_local_experts": 0, "mamba_n_heads": 12},
        model_type="granitemoehybrid",
    ),
    "olmo2": Family("Olmo2Config", GROUPED),
    "olmo3": Family("Olmo3Config", GROUPED | {"num_hidden_layers": 4} | WINDOWS, "mask until {window}", "two windows"),
    "stablelm": Family("StableLmConfig", GROUPED),
    "starcoder2": Family("Starcoder2Config", GROUPED),
    "smollm3": Family("SmolLM3Config", GROUPED | {"num_hidden_layers": 4}),
    "cohere2": Family("Cohere2Config", DEEPER | WINDOWS, "mask until {window}", "two windows"),
    "arcee": Family("ArceeConfig", GROUPED),
    "hunyuan_v1_dense": Family("HunYuanDenseV1Config", HEADED),
    "glm": Family("GlmConfig", HEADED),
    "glm4": Family("Glm4Config", HEADED),
    "glm4_moe": Family(
        "Glm4MoeConfig",
        HEADED
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
        | {"n_group": 1, "topk_group": 1},
    ),
    "exaone4": Family(
        "Exaone4Config", DEEPER | WINDOWS | {"sliding_window_pattern": "LG"}, "mask until {window}", "two windows"
    ),
    "seed_oss": Family("SeedOssConfig", HEADED),
    "ernie4_5": Family("Ernie4_5Config", HEADED),
    "apertus": Family("ApertusConfig", HEADED, spread=0.7, norms=0.5),
    "qwen3_5_text": Family("Qwen3_5TextConfig", DEEPER | DELTA_NET, "mask + replay", "gated delta net"),
    "qwen3_5_moe_text": Family(
        "Qwen3_5MoeTextConfig", DEEPER | DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32}, "mask + replay"
    ),
    "qwen3_next": Family(
        "Qwen3NextConfig", DEEPER | DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32}, "trim + replay"
    ),
    "lfm2": Family(
        "Lfm2Config", GROUPED | CONVOLUTIONS | {"block_auto_adjust_ff_dim": False}, "trim + replay", "convolutions"
    ),
    "lfm2_moe": Family("Lfm2MoeConfig", GROUPED | EXPERTS | CONVOLUTIONS | {"num_dense_layers": 1}, "trim + replay"),
    "llama4_text": Family("Llama4TextConfig", HEADED | LLAMA_4, "trim", "chunks"),
    "mamba": Family(
        "MambaConfig",
        MAMBA,
        "replay",
        "SSM",
    ),
    "falcon_mamba": Family(
        "FalconMambaConfig",
        MAMBA,
        "replay",
        "SSM",
        spread=0.5,
        norms=0.5,
    ),
}
