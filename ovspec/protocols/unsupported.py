"""Unsupported fields in requests of OpenAI, llama.cpp and vLLM: ignored or refused."""

from ovspec.base.json_types import JsonValue

# Accepted and ignored, also in batch files: OpenAI's fields without effect on the text.
FIELDS_WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
# Accepted and ignored by the server.
FIELDS_IGNORED_BY_SERVER = (
    # OpenAI's, and fields that its agents add
    *("client_metadata", "prediction", "prompt_cache_options", "prompt_cache_retention"),
    # llama.cpp's: slots, progress, and settings of disabled samplers
    *("backend_sampling", "cache_prompt", "id_slot", "n_cache_reuse", "n_discard", "n_keep", "reasoning_control"),
    *("return_progress", "slot_id", "sse_ping_interval", "timings_per_token"),
    *("adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("dynatemp_exponent", "mirostat_eta", "mirostat_tau", "t_max_prompt_ms", "xtc_threshold"),
    # vLLM's
    *("ec_transfer_params", "guided_decoding_backend", "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs"),
    *("priority", "request_id", "return_mm_kwargs", "return_token_offsets", "session_id", "stream_interval"),
    "truncation_side",
)
# Refused by the server, except with these values without effect: ovspec doesn't support other values.
REFUSED_PROMPT_FIELDS: dict[str, tuple[JsonValue, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
}
REFUSED_TEXT_FIELDS: dict[str, tuple[JsonValue, ...]] = {
    # OpenAI's
    **dict.fromkeys(("audio", "moderation", "web_search_options"), ()),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    # llama.cpp's
    **dict.fromkeys(("dry_multiplier", "dynatemp_range", "min_keep", "mirostat", "n_probs", "xtc_probability"), (0,)),
    **dict.fromkeys(("grammar_lazy", "penalize_nl", "post_sampling_probs", "return_tokens", "verbose"), (False,)),
    **dict.fromkeys(("grammar_triggers", "lora"), ([],)),
    **dict.fromkeys(("repeat_penalty", "tfs_z", "typ_p"), (1,)),
    "adaptive_target": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "repeat_last_n": (64, -1),
    "response_fields": ([], [""]),  # llama.cpp applies it only to its own answers
    "samplers": (
        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        # Of llama.cpp's editors. "infill" has no effect.
        ["top_k", "top_p", "infill"],
        ["min_p", "temperature"],
        [],
    ),
    "top_n_sigma": (-1, 0),
    # vLLM's
    **dict.fromkeys(("cache_salt", "prompt_embeds", "prompt_logprobs", "repetition_detection", "vllm_xargs"), ()),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), ()),
    **dict.fromkeys(("guided_whitespace_pattern", "structured_outputs", "truncate_prompt_tokens"), ()),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "logits_processors", "logprob_token_ids"), ([],)),
    **dict.fromkeys(("early_stopping", "include_stop_str_in_output", "use_beam_search", "watermarking"), (False,)),
    **dict.fromkeys(("return_prompt_text", "return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("include_reasoning", "skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    "length_penalty": (1,),
}
# The advice for refused fields.
FIELD_TO_USE_INSTEAD = {
    "functions": "use the field `tools` instead",
    "function_call": "use the field `tool_choice` instead",
    "n_probs": "use the field `logprobs` instead",
    "repeat_penalty": "use the field `repetition_penalty` instead",
    "typ_p": "use the field `typical_p` instead",
    "guided_choice": "use the field `choice` instead",
    "guided_grammar": "use the field `grammar` (Lark) or `gbnf` instead",
    "guided_json": "use the field `json_schema` instead",
    "guided_regex": "use the field `regex` instead",
    "structured_outputs": "use the field `json_schema`, `regex`, `choice` or `grammar` instead",
    "conversation": "send the whole chat in the field `input`",
    "previous_response_id": "send the whole chat in the field `input`",
    "prompt": "use the fields `instructions` and `input` instead",
}
REFUSED_TOKENIZE_FIELDS: dict[str, tuple[JsonValue, ...]] = {
    "parse_special": (True,),
    "return_token_strs": (False,),
}
REFUSED_STREAM_FIELDS: dict[str, tuple[JsonValue, ...]] = {"continuous_usage_stats": (False,)}
