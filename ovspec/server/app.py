"""The API: the text endpoints of OpenAI, Anthropic and llama.cpp, and reports on the server."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ovspec import __version__
from ovspec.base.json_types import JsonObject
from ovspec.protocols.apis import BODY_TYPES, COUNT_PATHS, TEXT_APIS, TokenCount
from ovspec.protocols.llamacpp.props import Props, make_server_props
from ovspec.protocols.models import ModelEntry, ModelList, make_catalogue_entry, make_model_entry
from ovspec.protocols.parsing import NOT_AN_OBJECT
from ovspec.protocols.reply import ReplyModel
from ovspec.protocols.requests import IgnoredNames
from ovspec.protocols.tokenize import DetokenizeRequest, TokenizeRequest
from ovspec.server.body_limits import BoundedRoute
from ovspec.server.context import ServerContext
from ovspec.server.endpoints import TextEndpoints
from ovspec.server.errors import ApiError, make_error_response
from ovspec.server.openapi import ERROR_DESCRIPTIONS, describe_error_responses, make_openapi_document
from ovspec.server.tokenize import DetokenizeReply, TokenizeReply, detokenize_body, tokenize_body

T = TypeVar("T")
B = TypeVar("B", TokenizeRequest, DetokenizeRequest)
ROUTING_ERRORS = {404: "There is no such path; see the paths in /openapi.json.", 405: ERROR_DESCRIPTIONS[405]}
# An event; its data is JSON, or [DONE].
EVENT_SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "data")}}
STREAM_CONTENT = {"text/event-stream": {"schema": {**EVENT_SCHEMA, "description": "With stream: an event of the API."}}}


class ReadyReply(ReplyModel):
    status: str
    arithmetic: str = Field(description="exact, or the probe's findings.")
    deterministic: bool = Field(description="Whether texts are independent of the load.")
    prefix_cache: Literal["exact", "may change bits", "off"] = Field(
        description="The effect of a cached prompt on its text."
    )


READY_MODEL: JsonObject = {"model": ReadyReply, "description": "The server's state."}
READY_RESPONSES: dict[int | str, JsonObject] = {200: READY_MODEL, 503: READY_MODEL}


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


def add_model_endpoints(app: FastAPI, context: ServerContext) -> None:
    """Add the endpoints for describing the model and the server."""
    lm = context.lm
    model_names = context.model_names

    @app.get("/v1/models", tags=["model"], summary="List the served model's names.")
    async def models() -> ModelList:
        entries = [await model(name) for name in model_names]
        catalogue = [make_catalogue_entry(lm, name) for name in model_names]
        return ModelList(data=entries, first_id=model_names[0], last_id=model_names[-1], models=catalogue)

    @app.get("/v1/models/{name:path}", tags=["model"], summary="Describe the model.")
    async def model(name: str) -> ModelEntry:
        context.admission.check_model_name(name)
        return make_model_entry(lm, name, context.started_at, context.sampling)

    @app.get("/v1/props", include_in_schema=False)
    @app.get("/props", tags=["model"], summary="Describe the server, in llama.cpp's format.")
    async def props() -> Props:
        return await context.threads.run_in_thread(
            make_server_props, lm, model_names[0], context.defaults, context.options.batch_size
        )


def add_monitoring_endpoints(app: FastAPI, context: ServerContext) -> None:
    """Add the endpoints for monitoring the server."""
    lm = context.lm

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["server"], summary="Liveness check.")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(
        "/ready", tags=["server"], summary="Readiness check, with the server's guarantees.", responses=READY_RESPONSES
    )
    async def ready(response: Response) -> ReadyReply:
        status = "ready"
        try:
            context.admission.check_capacity()
        except ApiError as error:
            response.status_code = 503
            status = error.detail
        arithmetic_note = lm.target.arithmetic_note
        is_exact = arithmetic_note == "exact"
        prefix_cache = "off"
        if lm.runtime.models.prefix_caches:
            prefix_cache = "exact" if is_exact else "may change bits"
        return ReadyReply(status=status, arithmetic=arithmetic_note, deterministic=is_exact, prefix_cache=prefix_cache)

    @app.get("/metrics", tags=["server"], summary="Report metrics in Prometheus' format.")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(context.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def add_token_endpoints(app: FastAPI, context: ServerContext) -> None:
    """Add the endpoints for encoding texts and chats, and for decoding tokens."""

    async def run_token_request(function: Callable[[B], T], body: B, http: Request) -> T:
        context.admission.check_requested_model(body.model)
        with context.admission.admit():
            return await context.threads.run_in_thread_for_body(http, function, body)

    @app.post("/tokenize", tags=["tokens"], summary="Return the tokens of a text or a chat.")
    async def tokenize(body: TokenizeRequest, http: Request) -> TokenizeReply:
        ignored = IgnoredNames()
        reply = await run_token_request(partial(tokenize_body, context, ignored), body, http)
        context.preparer.report_ignored(ignored, http)
        return reply

    @app.post("/detokenize", tags=["tokens"], summary="Return the text of tokens.")
    async def detokenize(body: DetokenizeRequest, http: Request) -> DetokenizeReply:
        text = await run_token_request(partial(detokenize_body, context.lm), body, http)
        return DetokenizeReply(prompt=text, content=text)


def make_text_endpoint(function: Callable[[Any, Request], Awaitable[Any]], body: type[BaseModel]) -> Callable[..., Any]:
    """Return an endpoint for a function; FastAPI reads the type of its body from its signature."""

    async def endpoint(body: Any, http: Request) -> Any:
        return await function(body, http)

    endpoint.__annotations__["body"] = body
    return endpoint


def suggest_base_url(path: str) -> str | None:
    """Return the advice for a client with a wrong base URL, judged by this path, or None."""
    if path.startswith("/v1/v1/"):
        return "There is no such path: the client adds /v1 by itself; leave it out of its base URL."
    if f"/v1{path}" in BODY_TYPES or path == "/models":
        return "There is no such path: the client doesn't add /v1 by itself; end its base URL with /v1."
    return None


async def handle_error(http_request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):  # no body at all; an invalid body gives an ApiError
        error = ApiError(400, NOT_AN_OBJECT)
    elif not isinstance(error, HTTPException):
        error = ApiError(500, f"The server failed ({type(error).__name__}).")
    elif not isinstance(error, ApiError):  # Starlette's own
        error.detail = ROUTING_ERRORS.get(error.status_code, error.detail)
        if error.status_code == 404:
            error.detail = suggest_base_url(http_request.url.path) or error.detail
    return make_error_response(error, http_request.scope)
