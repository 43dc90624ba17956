"""The shape of answers, for the OpenAPI document; ``answers`` makes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptDetails(Answer):
    cached_tokens: int = Field(description="Tokens of the prompt that were in the KV cache already.")


class CompletionDetails(Answer):
    accepted_prediction_tokens: int = Field(description="Proposed tokens that were accepted.")
    rejected_prediction_tokens: int = Field(description="Proposed tokens that were rejected.")


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(Answer):
    """Times in milliseconds from when the request's first text joined the batch, as llama.cpp tells them."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int


class TokenLogprob(Answer):
    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ChatTokenLogprob]
    refusal: None


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Choice(Answer):
    index: int
    finish_reason: Literal["stop", "length"]
    record: dict[str, Any] = Field(default={}, description="With return_record: what 'ovspec verify' checks.")
    schema_errors: list[str] = Field(default=[], description="In the mode checked: how the text breaks its schema.")


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str


class ChatChoice(Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class Texts(Answer):
    id: str
    created: int
    model: str
    usage: Usage
    timings: Timings


class ChatCompletion(Texts):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(Texts):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None = Field(description="Tokens that a prompt and its text may have; null if unknown.")


class Models(Answer):
    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    count: int
    max_model_len: int | None
    tokens: list[int]


class Text(Answer):
    prompt: str
    content: str


class Ready(Answer):
    status: str
    arithmetic: str = Field(description="exact, or what the probe found.")
    deterministic: bool = Field(description="Whether texts are independent of the load.")


STREAM = {"text/event-stream": {"schema": {"type": "string", "description": "With stream: chunks, as OpenAI's."}}}


def answered(model: type[Answer], streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return what FastAPI's ``responses`` say of an endpoint that answers with ``model``."""
    return {200: {"model": model, "description": "The answer."} | ({"content": STREAM} if streams else {})}
