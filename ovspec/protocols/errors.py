"""Errors in the shapes of OpenAI's and of Anthropic's API."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
KINDS |= {501: "not_supported_error"}  # llama.cpp's
ANTHROPICS = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # OpenAI's
TOO_LONG = "context_length_exceeded"  # OpenAI's code
TOO_LONG_HERE = "Prompt is too long"  # Anthropic's words, at which agents make their conversations shorter


@dataclass(frozen=True)
class Failure:
    """Why a request can't be met.

    status: HTTP's.
    message: a sentence that says what to do.
    param: the field that is wrong.
    code: a word for programs, such as "model_not_found".
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None


class ErrorText(BaseModel):
    message: str = Field(description="A sentence that says what to do.")
    type: str = Field(description='The kind of error, such as "invalid_request_error".')
    param: str | None = Field(description="The field that is wrong.")
    code: str | None = Field(description='A word for programs, such as "model_not_found".')


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error, but of /v1/messages."""

    error: ErrorText


class MessageErrorText(BaseModel):
    type: str = Field(description='The kind of error, such as "invalid_request_error".')
    message: str = Field(description="A sentence that says what to do.")


class MessageError(BaseModel):
    """The body of an answer of /v1/messages that is an error."""

    type: Literal["error"]
    error: MessageErrorText
    request_id: str | None = None


def openai_error(failure: Failure) -> ErrorAnswer:
    """Return an error as OpenAI's API has it."""
    status = failure.status
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    code = failure.code or CODES.get(status)
    return ErrorAnswer(error=ErrorText(message=failure.message, type=kind, param=failure.param, code=code))


def anthropic_error(failure: Failure, request_id: str | None = None) -> MessageError:
    """Return an error as Anthropic's API has it."""
    status = failure.status
    kind = (KINDS | ANTHROPICS).get(status, "invalid_request_error" if status < 500 else "api_error")
    message = f"{TOO_LONG_HERE}: {failure.message}" if failure.code == TOO_LONG else failure.message
    error = MessageError(type="error", error=MessageErrorText(type=kind, message=message))
    return error if request_id is None else error.model_copy(update={"request_id": request_id})
