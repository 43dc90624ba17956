"""The API: the text endpoints of OpenAI, Anthropic and llama.cpp, reports on the server, and the page."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ovspec import __version__
from ovspec.protocols.apis import BODY_TYPES, COUNT_PATHS, TEXT_APIS, TokenCount
from ovspec.protocols.parsing import NOT_AN_OBJECT
from ovspec.server.body_limits import BoundedRoute
from ovspec.server.comparing import add_compare_endpoint
from ovspec.server.context import ServerContext
from ovspec.server.endpoints import TextEndpoints
from ovspec.server.errors import ApiError, make_error_response
from ovspec.server.openapi import ERROR_DESCRIPTIONS, STREAM_CONTENT, describe_error_responses, make_openapi_document
from ovspec.server.page_files import add_page
from ovspec.server.reports import add_model_endpoints, add_monitoring_endpoints
from ovspec.server.tokenize import add_token_endpoints
from ovspec.server.verifying import add_verify_endpoint

ROUTING_ERRORS = {404: "There is no such path; see the paths in /openapi.json.", 405: ERROR_DESCRIPTIONS[405]}


def make_app(context: ServerContext) -> FastAPI:
    """Return the application."""
    app = FastAPI(
        title="ovspec",
        version=__version__,
        summary="OpenAI's API on OpenVINO; a request's text is independent of other requests.",
        docs_url=None,  # its page loads scripts from other sites
        redoc_url=None,
        redirect_slashes=False,  # API clients don't resend bodies after a redirect
        responses=describe_error_responses(""),
    )
    app.state.strict_fields = context.options.strict_fields
    app.openapi = partial(make_openapi_document, app)
    app.router.route_class = BoundedRoute
    add_text_endpoints(app, context)
    add_model_endpoints(app, context)
    add_monitoring_endpoints(app, context)
    add_token_endpoints(app, context)
    add_compare_endpoint(app, context)
    add_verify_endpoint(app, context)
    add_page(app)
    for error_type in (RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(error_type, handle_error)
    return app


def add_text_endpoints(app: FastAPI, context: ServerContext) -> None:
    """Add the endpoints for texts, and for counting the tokens of their requests."""
    endpoints = TextEndpoints(context)
    for path, api in TEXT_APIS.items():
        reply_description = {"model": api.reply_model, "description": "The answer.", "content": STREAM_CONTENT}
        text_endpoint = make_text_endpoint(partial(endpoints.answer_request, api), api.body_type)
        app.post(
            path,
            tags=["texts"],
            summary=api.summary,
            response_model=None,
            responses={200: reply_description, **describe_error_responses(path)},
        )(text_endpoint)
    for path, api_path in COUNT_PATHS.items():
        api = TEXT_APIS[api_path]
        count_endpoint = make_text_endpoint(partial(endpoints.count_tokens, api), api.body_type)
        app.post(
            path,
            tags=["tokens"],
            summary=f"Count the tokens of a request to {api_path}.",
            response_model=TokenCount,
            response_model_exclude_unset=True,
            responses=describe_error_responses(path),
        )(count_endpoint)


def make_text_endpoint(function: Callable[[Any, Request], Awaitable[Any]], body: type[BaseModel]) -> Callable[..., Any]:
    """Return an endpoint for a function; FastAPI reads the type of its body from its signature."""

    async def endpoint(body: Any, http: Request) -> Any:
        return await function(body, http)

    endpoint.__annotations__["body"] = body
    return endpoint


def suggest_base_url(path: str) -> str | None:
    """Return the advice for a client with a wrong base URL, judged by this path, or None."""
    if path.startswith("/v1/v1/"):
        return "There is no such path: the client adds /v1 by itself; leave /v1 out of the client's base URL."
    if f"/v1{path}" in BODY_TYPES or path == "/models":
        return "There is no such path: the client doesn't add /v1 by itself; end the client's base URL with /v1."
    return None


async def handle_error(http_request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):  # no body at all; an invalid body gives an ApiError
        error = ApiError(400, NOT_AN_OBJECT)
    elif not isinstance(error, HTTPException):
        error = ApiError(500, f"The server failed ({type(error).__name__}); see the server's log.")
    elif not isinstance(error, ApiError):  # Starlette's own
        error.detail = ROUTING_ERRORS.get(error.status_code, error.detail)
        if error.status_code == 404:
            error.detail = suggest_base_url(http_request.url.path) or error.detail
    return make_error_response(error, http_request.scope)
