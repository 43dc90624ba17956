"""Fields of OpenAI's, llama.cpp's and vLLM's requests that ovspec doesn't have: the ignored and the refused ones."""

from typing import Any

# Accepted and ignored, in batch files, too: OpenAI's that don't affect the text.
WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
# Accepted and ignored by the server.
IGNORED_BY_SERVER = (
    # OpenAI's, and what its agents add
    *("client_metadata", "prediction", "prompt_cache_options", "prompt_cache_retention"),
    # llama.cpp's: its slots, its progress, and settings of samplers that are off
    *("backend_sampling", "cache_prompt", "id_slot", "n_cache_reuse", "n_discard", "n_keep", "reasoning_control"),
    *("return_progress", "slot_id", "sse_ping_interval", "timings_per_token"),
    *("adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("dynatemp_exponent", "mirostat_eta", "mirostat_tau", "t_max_prompt_ms", "xtc_threshold"),
    # vLLM's
    *("ec_transfer_params", "guided_decoding_backend", "kv_transfer_params", "media_io_kwargs", "mm_processor_kwargs"),
    *("priority", "request_id", "return_mm_kwargs", "return_token_offsets", "session_id", "stream_interval"),
    "truncation_side",
)
# Refused by the server, unless the value is one of these, which ask for nothing: what they change can't be had here.
OF_PROMPTS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
}
OF_TEXTS: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # llama.cpp's
    "adaptive_target": (-1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_probs": (0,),
    "penalize_nl": (False,),
    "post_sampling_probs": (False,),
    "reasoning_format": ("auto", "deepseek"),
    "repeat_last_n": (64, -1),
    "repeat_penalty": (1,),
    "response_fields": ([], [""]),  # llama.cpp applies it only to its own answers
    "return_tokens": (False,),
    "samplers": (
        ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
        ["top_k", "typ_p", "top_p", "min_p", "temperature"],
        # Those of llama.cpp's editors. "infill" has no effect.
        ["top_k", "top_p", "infill"],
        ["min_p", "temperature"],
        [],
    ),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "typ_p": (1,),
    "verbose": (False,),
    "xtc_probability": (0,),
    # vLLM's
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "cache_salt": (),
    "early_stopping": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    "watermarking": (False,),
}
# What to do instead of giving a field that is refused.
INSTEAD = {
    "functions": "give them in tools",
    "function_call": "give tool_choice",
    "n_probs": "give logprobs",
    "repeat_penalty": "give repetition_penalty",
    "typ_p": "give typical_p",
    "guided_choice": "give choice",
    "guided_grammar": "give grammar, or gbnf",
    "guided_json": "give json_schema",
    "guided_regex": "give regex",
    "structured_outputs": "give json_schema, regex, choice or grammar",
    "conversation": "send the whole chat in input",
    "previous_response_id": "send the whole chat in input",
    "prompt": "send instructions and input",
}
OF_TOKENIZE: dict[str, tuple[Any, ...]] = {
    "parse_special": (True,),
    "return_token_strs": (False,),
}
OF_STREAMS: dict[str, tuple[Any, ...]] = {"continuous_usage_stats": (False,)}
