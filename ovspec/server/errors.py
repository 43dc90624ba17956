"""Errors of the API, and their replies."""

import asyncio
import re
from contextlib import suppress

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ovspec.api.model import LanguageModel
from ovspec.base.errors import InferenceError, OvspecError, PromptError, UnavailableError
from ovspec.protocols.errors import CONTEXT_LENGTH_EXCEEDED, RequestFailure, make_anthropic_error, make_openai_error

ANTHROPIC_PATH = re.compile(r"(/v1)*/messages(/|$)")  # with a wrong base URL, too
REQUEST_ID = "request_id"  # the field of a request's state with its id
LINGER_SECONDS = 5.0  # for dropping the rest of an unread body
PYTHON_ONLY_CLAUSE = ", or a Path for a file"  # in a message on a grammar


class ServerEndedError(OvspecError):
    """The server ends before a request does."""

    def __init__(self) -> None:
        super().__init__("The server was stopped before the text was finished.")


class ApiError(HTTPException):
    """An error as the answer to a request.

    param: the wrong field.
    code: a code for programs, such as "model_not_found".
    retry_after: seconds until the client may try again.
    close_connection: whether to close the connection, with the rest of the body unread.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        close_connection: bool = False,
    ) -> None:
        headers = dict[str, str]()
        if retry_after is not None:
            headers["Retry-After"] = str(retry_after)
        if status in (501, 504):  # OpenAI's client would do the same work again
            headers["X-Should-Retry"] = "false"
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if close_connection:
            headers["Connection"] = "close"
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


def message_for_clients(error: OvspecError, lm: LanguageModel) -> str:
    """Return an error's message without the folder of the model, and without advice for Python only."""
    return str(error).replace(str(lm.folder), "the model's folder").replace(PYTHON_ONLY_CLAUSE, "")


def make_prompt_error(error: PromptError, lm: LanguageModel, field: str) -> ApiError:
    """Return the error for an invalid prompt; ``field``: the field with the prompt."""
    message = re.sub("^messages: ", f"{field}: ", message_for_clients(error, lm))
    return ApiError(400, message, field, CONTEXT_LENGTH_EXCEEDED if error.too_long else None)


def make_text_error(error: OvspecError, lm: LanguageModel) -> ApiError:
    """Return the error for a failed text."""
    status = 422
    if isinstance(error, (ServerEndedError, UnavailableError)):
        status = 503
    elif isinstance(error, InferenceError):
        status = 500
    return ApiError(status, message_for_clients(error, lm))


def make_timeout_error(timeout_seconds: float) -> ApiError:
    return ApiError(
        504, f"The request took longer than {timeout_seconds:g} seconds, the server's time limit.", code="timeout"
    )


def to_request_failure(error: HTTPException) -> RequestFailure:
    return RequestFailure(error.status_code, error.detail, getattr(error, "param", None), getattr(error, "code", None))


def make_error_body(error: HTTPException, path: str = "", request_id: str | None = None) -> bytes:
    """Return the body of an error, in the form of the API of ``path``."""
    failure = to_request_failure(error)
    if is_anthropic_path(path):
        return make_anthropic_error(failure, request_id).model_dump_json().encode()
    return make_openai_error(failure).model_dump_json().encode()


def is_anthropic_path(path: str) -> bool:
    """Return whether a path belongs to Anthropic's API."""
    return bool(ANTHROPIC_PATH.match(path))


def make_error_response(error: HTTPException, scope: Scope) -> Response:
    """Return the response for an error."""
    body = make_error_body(error, scope["path"], scope["state"].get(REQUEST_ID))
    response_type = ClosingResponse if "Connection" in (error.headers or {}) else Response
    return response_type(body, error.status_code, error.headers, "application/json")


class ClosingResponse(Response):
    """A response followed by closing the connection, with the request's body unread.

    Further data from the client is dropped for a while: closing a connection during incoming data resets it, and the
    client may never see the response.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        body_message = {"type": "http.response.body", "more_body": True}
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({**body_message, "body": self.body})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (await receive()).get("more_body"):
                    pass
        await send({**body_message, "more_body": False})
