"""The list of models in OpenAI's form, with fields for the clients of Anthropic, llama.cpp and Codex."""

from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from ovspec.api.model import LanguageModel
from ovspec.base.json_types import JsonObject
from ovspec.protocols.reply import ReplyModel

CODEX_INSTRUCTIONS = (
    "You are a coding agent: use your tools to read, change and run code until the user's task is done."
)


class LlamaCppModelMeta(ReplyModel):
    """llama.cpp's."""

    n_ctx: int | None = Field(description="Limit for prompt and text together, in tokens; null if unknown.")
    n_ctx_train: int | None = Field(description="The same as n_ctx.")
    n_vocab: int = Field(description="Tokens of the vocabulary.")
    size: int = Field(description="Bytes of the weights.")


class ModelEntry(ReplyModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ovspec"
    max_model_len: int | None = Field(description="Limit for prompt and text together, in tokens; null if unknown.")
    sampling: dict[str, int | float] = Field(description="Default sampling of requests; empty for greedy decoding.")
    meta: LlamaCppModelMeta
    type: Literal["model"] = Field("model", description="This field and the following fields are Anthropic's.")
    display_name: str
    created_at: datetime
    max_input_tokens: int | None
    lifecycle: Literal["active"] = "active"


class ModelList(ReplyModel):
    object: Literal["list"] = "list"
    data: list[ModelEntry]
    has_more: bool = False  # this field and the next two are Anthropic's
    first_id: str
    last_id: str
    models: list[JsonObject] = Field(description="The same models, for clients of llama.cpp and for OpenAI's Codex.")


def make_model_entry(lm: LanguageModel, model_name: str, created: int, sampling: dict[str, int | float]) -> ModelEntry:
    """Return a model in the form of OpenAI's API; ``sampling``: the default of requests."""
    context_length = lm.target.ir.context_length
    meta = LlamaCppModelMeta(
        n_ctx=context_length,
        n_ctx_train=context_length,
        n_vocab=lm.tokenizer.known_ids.size or lm.target.ir.logits_width,
        size=lm.runtime.target_weights_size,
    )
    return ModelEntry(
        id=model_name,
        created=created,
        max_model_len=context_length,
        sampling=sampling,
        meta=meta,
        type="model",
        display_name=model_name,
        created_at=datetime.fromtimestamp(created, UTC),
        max_input_tokens=context_length,
    )


def make_catalogue_entry(lm: LanguageModel, model_name: str) -> JsonObject:
    """Return a model in the form of both llama.cpp's server and the catalogue of OpenAI's Codex."""
    model_family = lm.target.ir.config.model_type or ""
    return {
        # llama.cpp's, with Ollama's fields
        **dict.fromkeys(("modified_at", "size", "digest", "description", "parameters"), ""),
        "name": model_name,
        "model": model_name,
        "type": "model",
        "tags": [""],
        "capabilities": ["completion"],
        "details": {
            **dict.fromkeys(("parent_model", "parameter_size", "quantization_level"), ""),
            "format": "openvino",
            "family": model_family,
            "families": [model_family],
        },
        # Codex's
        "slug": model_name,
        "display_name": model_name,
        "supported_reasoning_levels": [],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "upgrade": None,
        "base_instructions": CODEX_INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": lm.target.ir.context_length,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }
