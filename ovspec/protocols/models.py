"""What is told of the model: OpenAI's list of models, and what llama.cpp's clients and Codex read beside it."""

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field

from ovspec import __version__
from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError
from ovspec.params import Params
from ovspec.protocols.chat.reply import Answer

INSTRUCTIONS = "You are a coding agent: use your tools to read, change and run code until the user's task is done."


class ModelMeta(Answer):
    """llama.cpp's."""

    n_ctx: int | None = Field(description="Tokens that a prompt and its text may have; null if unknown.")
    n_ctx_train: int | None = Field(description="The same.")
    n_vocab: int = Field(description="Tokens of the vocabulary.")
    size: int = Field(description="Bytes of the weights.")


class Model(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ovspec"
    max_model_len: int | None = Field(description="Tokens that a prompt and its text may have; null if unknown.")
    sampling: dict[str, int | float] = Field(description="Sampling of requests that set none; empty: greedy.")
    meta: ModelMeta
    type: Literal["model"] = Field("model", description="This and the next are Anthropic's.")
    display_name: str
    created_at: datetime
    max_input_tokens: int | None
    lifecycle: Literal["active"] = "active"


class Models(Answer):
    object: Literal["list"] = "list"
    data: list[Model]
    has_more: bool = False  # this and the next two are Anthropic's
    first_id: str
    last_id: str
    models: list[dict[str, Any]] = Field(description="The same as llama.cpp's clients and OpenAI's Codex read it.")


class DefaultSettings(Answer):
    n_ctx: int | None = Field(description="Tokens that a prompt and its text may have; null if unknown.")
    params: dict[str, Any] = Field(description="What requests get that don't set it.")


class Modalities(Answer):
    vision: bool
    audio: bool


class Props(Answer):
    default_generation_settings: DefaultSettings
    total_slots: int = Field(description="Texts that are generated at a time.")
    model_alias: str
    model_path: str = Field(description="The folder's name.")
    modalities: Modalities
    chat_template: str = Field(description="Empty if there is none.")
    bos_token: str
    eos_token: str
    build_info: str
    endpoint_slots: bool
    endpoint_props: bool = Field(description="Whether POST can change something.")
    endpoint_metrics: bool
    is_sleeping: bool


def model_of(lm: LanguageModel, name: str, created: int, sampling: dict[str, int | float]) -> Model:
    """Return a model as OpenAI's API has it; ``sampling``: of requests that set none."""
    context, known = lm.target.ir.context_length, lm.tokenizer.known.size
    width, size = known or lm.target.ir.logits_width, lm.runtime.weights_size
    meta = ModelMeta(n_ctx=context, n_ctx_train=context, n_vocab=width, size=size)
    told = {"display_name": name, "created_at": datetime.fromtimestamp(created, UTC), "max_input_tokens": context}
    return Model(id=name, created=created, max_model_len=context, sampling=sampling, meta=meta, **told)


def catalogue_entry(lm: LanguageModel, name: str) -> dict[str, Any]:
    """Return a model as llama.cpp's server and the catalogue of OpenAI's Codex describe it, in one."""
    kind, context = lm.target.ir.config.model_type or "", lm.target.ir.context_length
    return {
        # llama.cpp's, whose fields are Ollama's
        **dict.fromkeys(("modified_at", "size", "digest", "description", "parameters"), ""),
        "name": name,
        "model": name,
        "type": "model",
        "tags": [""],
        "capabilities": ["completion"],
        "details": {
            **dict.fromkeys(("parent_model", "parameter_size", "quantization_level"), ""),
            "format": "openvino",
            "family": kind,
            "families": [kind],
        },
        # Codex's
        "slug": name,
        "display_name": name,
        "supported_reasoning_levels": [],
        "shell_type": "default",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "upgrade": None,
        "base_instructions": INSTRUCTIONS,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": None,
        "truncation_policy": {"mode": "tokens", "limit": 10_000},
        "supports_parallel_tool_calls": True,
        "context_window": context,
        "experimental_supported_tools": [],
        "input_modalities": ["text"],
    }


def props_of(lm: LanguageModel, name: str, defaults: Params, rows: int) -> Props:
    """Return the server's properties as llama.cpp's has them; ``rows``: texts that are generated at a time."""
    tokens = lm.runtime.prompts.special_tokens
    try:
        template = lm.runtime.prompts.chat_format.template.source
    except OvspecError:
        template = ""
    settings = settings_of(lm.runtime.row_maker.complete_params(defaults))
    if defaults.max_tokens is None:
        settings |= dict.fromkeys(("n_predict", "max_tokens"), int(lm.runtime.row_maker.token_limit(defaults)))
    return Props(
        default_generation_settings=DefaultSettings(n_ctx=lm.target.ir.context_length, params=settings),
        total_slots=rows,
        model_alias=name,
        model_path=lm.folder.name,
        modalities=Modalities(vision=False, audio=False),
        chat_template=template,
        bos_token=tokens.get("bos_token", ""),
        eos_token=tokens.get("eos_token", ""),
        build_info=f"ovspec {__version__}",
        endpoint_slots=False,
        endpoint_props=False,
        endpoint_metrics=True,
        is_sleeping=False,
    )


def settings_of(params: Params) -> dict[str, Any]:
    """Return sampling options under llama.cpp's names."""
    most = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_predict": most,
        "max_tokens": most,
        "n_indent": params.min_indent,
        "t_max_predict_ms": params.max_predict_ms,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repeat_penalty": 1.0 if params.repetition_penalty is None else params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": params.stop_strings,
        "ignore_eos": params.ignore_eos,
    }
