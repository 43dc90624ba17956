"""Errors of the API, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

from ovspec.errors import OvspecError, PromptError
from ovspec.model import LanguageModel

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # OpenAI's
FOR_PYTHON = ", or a Path for a file"  # in a message on a grammar


class ApiError(HTTPException):
    """A request that is answered with an error.

    param: the field that is wrong.
    code: a word for programs, such as "model_not_found".
    retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        headers |= {"X-Should-Retry": "false"} if status == 504 else {}  # OpenAI's client would do the same work again
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def for_clients(error: OvspecError, lm: LanguageModel) -> str:
    """Return an error's message without the folder of the model, and without what only Python can be given."""
    return str(error).replace(str(lm.folder), "the model's folder").replace(FOR_PYTHON, "")


def about_prompt(error: PromptError, lm: LanguageModel, field: str) -> ApiError:
    """Return the answer to a prompt that can't be used; ``field``: where it was given."""
    code = "context_length_exceeded" if error.too_long else None  # OpenAI's
    return ApiError(400, for_clients(error, lm), field, code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error's answer."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or CODES.get(status)}}
