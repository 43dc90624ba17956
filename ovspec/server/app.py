"""The API: the endpoints of OpenAI, Anthropic and llama.cpp that generate text, and those that tell of the server."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ovspec import __version__
from ovspec.protocols.apis import APIS, BODIES, COUNTS, TokenCount
from ovspec.protocols.bodies import (
    NO_OBJECT,
    UNMET,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
    fields_elsewhere,
)
from ovspec.protocols.chat.reply import Answer
from ovspec.protocols.errors import ErrorAnswer, MessageError
from ovspec.protocols.models import Model, Models, Props, catalogue_entry, model_of, props_of
from ovspec.protocols.requests import Ignored
from ovspec.server.admission import Service
from ovspec.server.bodies import BoundedRoute
from ovspec.server.endpoints import TextEndpoints, work_for
from ovspec.server.errors import ApiError, error_answer, is_anthropics
from ovspec.server.tokens import Text, Tokens, decode, tokens_of

ERRORS: dict[int | str, str] = {
    400: "A field or the body is wrong.",
    401: "The key is missing or wrong.",
    403: "The host isn't this machine, and the server has no key.",
    404: "There is no such model or path.",
    405: "The path doesn't take this method.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body isn't JSON.",
    422: "The text can't be continued within its grammar.",
    429: "Too many texts are waiting.",
    500: "An inference failed.",
    501: "The model can't do that.",
    503: "The server is shutting down, lacks memory or files, or the request has waited for too long.",
    504: "The request took too long.",
}
NOWHERE = {404: "There is no such path; /openapi.json lists them.", 405: ERRORS[405]}
# An event; its data is JSON, or [DONE].
EVENT = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "data")}}
STREAM = {"text/event-stream": {"schema": {**EVENT, "description": "With stream: an event of the API."}}}


class Ready(Answer):
    status: str
    arithmetic: str = Field(description="exact, or what the probe found.")
    deterministic: bool = Field(description="Whether texts are independent of the load.")
    prefix_cache: Literal["exact", "may change bits", "off"] = Field(
        description="What it means for a text that the beginning of its prompt was cached."
    )


READY: dict[int | str, Any] = {status: {"model": Ready, "description": "Its state."} for status in (200, 503)}


def make_app(service: Service) -> FastAPI:
    """Return the application."""
    app = FastAPI(
        title="ovspec",
        version=__version__,
        summary="OpenAI's API on OpenVINO; a request's text doesn't depend on who else is asking.",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # clients of APIs don't follow it with a body
        responses=errors_of(""),
    )
    app.state.strict_fields = service.options.strict_fields
    app.openapi = partial(document_of, app)
    app.router.route_class = BoundedRoute
    add_endpoints(app, service)
    for kind in (RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    return app


def errors_of(path: str) -> dict[int | str, dict[str, Any]]:
    """Return the answers of a path that are errors, for the OpenAPI document."""
    model = MessageError if is_anthropics(path) else ErrorAnswer
    return {status: {"model": model, "description": told} for status, told in ERRORS.items()}


def document_of(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, which also tells which unknown fields are refused."""
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    for body in (*BODIES.values(), StreamOptions):
        schema = schemas[body.__name__]
        schema["additionalProperties"] = not app.state.strict_fields
        for name in sorted(fields_elsewhere(body)):
            schema["properties"][name] = {"type": "null", "description": UNMET}
    return document


def add_endpoints(app: FastAPI, service: Service) -> None:
    lm, texts = service.lm, TextEndpoints(service)

    for path, api in APIS.items():
        answered = {"model": api.answer, "description": "The answer.", "content": STREAM}
        answers: Any = {200: answered, **errors_of(path)}
        described: Any = {"tags": ["texts"], "summary": api.summary, "response_model": None, "responses": answers}
        app.post(path, **described)(endpoint_of(partial(texts.answer, api), api.body))
    for path, name in COUNTS.items():
        described = {"tags": ["tokens"], "summary": f"Count the tokens of a request to {name}."}
        count = endpoint_of(partial(texts.count, APIS[name]), APIS[name].body)
        described |= {"response_model": TokenCount, "response_model_exclude_unset": True, "responses": errors_of(path)}
        app.post(path, **described)(count)

    @app.get("/v1/models", tags=["model"], summary="List the names of the one model that is served.")
    async def models() -> Models:
        entries = [catalogue_entry(lm, name) for name in service.names]
        data, ends = [await model(name) for name in service.names], (service.names[0], service.names[-1])
        return Models(data=data, first_id=ends[0], last_id=ends[1], models=entries)

    @app.get("/v1/models/{name:path}", tags=["model"], summary="Describe the model.")
    async def model(name: str) -> Model:
        service.check_name(name)
        return model_of(lm, name, service.began, service.sampling)

    @app.get("/v1/props", include_in_schema=False)
    @app.get("/props", tags=["model"], summary="Describe the server, as llama.cpp's does.")
    async def props() -> Props:
        return await service.apart(props_of, lm, service.names[0], service.defaults, service.options.batch_size)

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["server"], summary="Liveness check.")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", tags=["server"], summary="Readiness check, and what is promised.", responses=READY)
    async def ready(response: Response) -> Ready:
        promise, reason = lm.target.arithmetic_note, "ready"
        try:
            service.check_open()
        except ApiError as error:
            response.status_code, reason = 503, error.detail
        exact = promise == "exact"
        cache = ("exact" if exact else "may change bits") if lm.runtime.models.keeps_prefixes else "off"
        return Ready(status=reason, arithmetic=promise, deterministic=exact, prefix_cache=cache)

    @app.get("/metrics", tags=["server"], summary="Report metrics in Prometheus' format.")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def translated(function: Callable[..., Any], body: TokenizeRequest | DetokenizeRequest, http: Request) -> Any:
        """Return what a function makes of a body, in a thread."""
        service.check_model(body.model)
        with service.counted():
            return await service.apart(function, body, work=await work_for(http))

    @app.post("/tokenize", tags=["tokens"], summary="Return the tokens of a text or a chat.")
    async def tokenize(body: TokenizeRequest, http: Request) -> Tokens:
        ignored = Ignored()
        tokens = await translated(partial(tokens_of, service, ignored), body, http)
        service.note(ignored, http)
        return tokens

    @app.post("/detokenize", tags=["tokens"], summary="Return the text of tokens.")
    async def detokenize(body: DetokenizeRequest, http: Request) -> Text:
        text = await translated(partial(decode, lm), body, http)
        return Text(prompt=text, content=text)


def endpoint_of(function: Callable[[Any, Request], Awaitable[Any]], body: type[BaseModel]) -> Callable[..., Any]:
    """Return an endpoint that calls a function; FastAPI reads the type of its bodies from its signature."""

    async def endpoint(body: Any, http: Request) -> Any:
        return await function(body, http)

    endpoint.__annotations__["body"] = body
    return endpoint


def base_url_hint(path: str) -> str | None:
    """Return what is wrong with the base URL of a client that asks for this path, if that is it."""
    if path.startswith("/v1/v1/"):
        return "There is no such path: the client adds /v1 by itself; leave it out of its base URL."
    if f"/v1{path}" in BODIES or path == "/models":
        return "There is no such path: the client doesn't add /v1 by itself; end its base URL with /v1."
    return None


async def answer_error(http: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):  # no body at all; for what is wrong in it there are ApiErrors
        error = ApiError(400, NO_OBJECT)
    elif not isinstance(error, HTTPException):
        error = ApiError(500, f"The server failed ({type(error).__name__}).")
    elif not isinstance(error, ApiError):  # Starlette's own
        error.detail = NOWHERE.get(error.status_code, error.detail)
        if error.status_code == 404:
            error.detail = base_url_hint(http.url.path) or error.detail
    return error_answer(error, http.scope)
