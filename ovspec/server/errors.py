"""Errors of the API, in OpenAI's shape."""

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ovspec.api.model import LanguageModel
from ovspec.base.errors import InferenceError, OvspecError, PromptError
from ovspec.server.engine_thread import ServerEnded

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}  # OpenAI's
FOR_PYTHON = ", or a Path for a file"  # in a message on a grammar


class ApiError(HTTPException):
    """A request that is answered with an error.

    param: the field that is wrong.
    code: a word for programs, such as "model_not_found".
    retry_after: seconds after which the client may try again.
    close: whether the connection is closed, because the rest of the body isn't read.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        headers |= {"X-Should-Retry": "false"} if status == 504 else {}  # OpenAI's client would do the same work again
        headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        headers |= {"Connection": "close"} if close else {}
        super().__init__(status, message, headers)
        self.param, self.code = param, code


def for_clients(error: OvspecError, lm: LanguageModel) -> str:
    """Return an error's message without the folder of the model, and without what only Python can be given."""
    return str(error).replace(str(lm.folder), "the model's folder").replace(FOR_PYTHON, "")


def about_prompt(error: PromptError, lm: LanguageModel, field: str) -> ApiError:
    """Return the answer to a prompt that can't be used; ``field``: where it was given."""
    code = "context_length_exceeded" if error.too_long else None  # OpenAI's
    return ApiError(400, for_clients(error, lm), field, code)


def as_api_error(error: OvspecError, lm: LanguageModel) -> ApiError:
    """Return the answer to a request whose text has failed."""
    status = 503 if isinstance(error, ServerEnded) else 500 if isinstance(error, InferenceError) else 422
    return ApiError(status, for_clients(error, lm))


def too_long(seconds: float) -> ApiError:
    return ApiError(504, f"The request took longer than {seconds:g} seconds.", code="timeout")


class ErrorText(BaseModel):
    message: str = Field(description="A sentence that says what to do.")
    type: str = Field(description='The kind of error, such as "invalid_request_error".')
    param: str | None = Field(description="The field that is wrong.")
    code: str | None = Field(description='A word for programs, such as "model_not_found".')


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorText


def error_body(error: HTTPException) -> bytes:
    """Return the body of an error's answer."""
    status, param, code = error.status_code, getattr(error, "param", None), getattr(error, "code", None)
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    text = ErrorText(message=error.detail, type=kind, param=param, code=code or CODES.get(status))
    return ErrorAnswer(error=text).model_dump_json().encode()


def error_answer(error: HTTPException) -> Response:
    """Return the answer that is an error."""
    return Response(error_body(error), error.status_code, error.headers, "application/json")
