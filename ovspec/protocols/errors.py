"""Errors in the shapes of OpenAI's and of Anthropic's API."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ERROR_TYPES |= {501: "not_supported_error"}  # llama.cpp's
ANTHROPIC_ERROR_TYPES = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
ERROR_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # OpenAI's
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"  # OpenAI's code
ANTHROPIC_TOO_LONG = "Prompt is too long"  # Anthropic's wording; agents react by shortening the conversation


@dataclass(frozen=True)
class RequestFailure:
    """The reason for refusing a request, or failing at it.

    status: the HTTP status.
    message: a sentence with the problem and the remedy.
    param: the wrong field.
    code: a code for programs, such as "model_not_found".
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None


class OpenAIErrorDetail(BaseModel):
    message: str = Field(description="The problem and the remedy.")
    type: str = Field(description='The kind of error, such as "invalid_request_error".')
    param: str | None = Field(description="The wrong field.")
    code: str | None = Field(description='A code for programs, such as "model_not_found".')


class OpenAIErrorBody(BaseModel):
    """The body of every error except for /v1/messages."""

    error: OpenAIErrorDetail


class AnthropicErrorDetail(BaseModel):
    type: str = Field(description='The kind of error, such as "invalid_request_error".')
    message: str = Field(description="The problem and the remedy.")


class AnthropicErrorBody(BaseModel):
    """The body of an error of /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None = None


def make_openai_error(failure: RequestFailure) -> OpenAIErrorBody:
    """Return an error in the form of OpenAI's API."""
    status = failure.status
    default_type = "invalid_request_error" if status < 500 else "server_error"
    error_type = ERROR_TYPES.get(status, default_type)
    error_code = failure.code or ERROR_CODES.get(status)
    return OpenAIErrorBody(
        error=OpenAIErrorDetail(message=failure.message, type=error_type, param=failure.param, code=error_code)
    )


def make_anthropic_error(failure: RequestFailure, request_id: str | None = None) -> AnthropicErrorBody:
    """Return an error in the form of Anthropic's API."""
    status = failure.status
    default_type = "invalid_request_error" if status < 500 else "api_error"
    error_type = (ERROR_TYPES | ANTHROPIC_ERROR_TYPES).get(status, default_type)
    message = f"{ANTHROPIC_TOO_LONG}: {failure.message}" if failure.code == CONTEXT_LENGTH_EXCEEDED else failure.message
    error = AnthropicErrorBody(type="error", error=AnthropicErrorDetail(type=error_type, message=message))
    return error if request_id is None else error.model_copy(update={"request_id": request_id})
