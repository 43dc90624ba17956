"""The API: OpenAI's endpoints, and those of llama.cpp and vLLM that tell how the server is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ovspec import __version__
from ovspec.serving import schemas
from ovspec.serving.bodies import read_fields
from ovspec.serving.errors import ApiError, error_body
from ovspec.serving.models import ChatRequest, CompletionRequest, DetokenizeRequest, ErrorAnswer, TokenizeRequest
from ovspec.serving.requests import decode, encode
from ovspec.serving.schemas import answered
from ovspec.serving.service import Service
from ovspec.serving.wording import NO_OBJECT, TEXTS

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
    429: "Too many requests are waiting.",
    500: "An inference failed.",
    503: "The server is shutting down, or the request has waited for too long.",
    504: "The request took too long.",
}
LARGE = 100_000  # bytes of a body
# Reads large bodies, one at a time, so that they don't take much memory at once.
READER = ThreadPoolExecutor(1, "ovspec bodies")
NOWHERE = {404: "There is no such path; /openapi.json lists them.", 405: ERRORS[405]}
CHATS, COMPLETIONS = answered(schemas.ChatCompletion, streams=True), answered(schemas.Completion, streams=True)
REQUESTS = {**TEXTS, "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest}
READY: dict[int | str, Any] = {status: {"model": schemas.Ready, "description": "Its state."} for status in (200, 503)}


class JsonRoute(APIRoute):
    """A route whose bodies are read by ``read_fields``; large ones in a thread, so that other requests go on."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler = super().get_route_handler()

        class JsonRequest(Request):
            async def json(self) -> Any:
                body, request = await self.body(), REQUESTS[self.url.path]
                if len(body) <= LARGE:
                    return read_fields(body, request)
                return await asyncio.get_running_loop().run_in_executor(READER, read_fields, body, request)

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


def make_app(service: Service) -> FastAPI:
    """Return the application."""

    app = FastAPI(
        title="ovspec",
        version=__version__,
        summary="OpenAI's API on OpenVINO; a request's text doesn't depend on who else is asking.",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # clients of APIs don't follow it with a body
        responses={status: {"model": ErrorAnswer, "description": told} for status, told in ERRORS.items()},
    )
    app.router.route_class = JsonRoute
    app.openapi = lambda: described(app)  # type: ignore[method-assign]
    add_endpoints(app, service)
    add_errors(app)
    return app


def described(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, in which errors are those of this API, not FastAPI's."""
    if not app.openapi_schema:
        made = FastAPI.openapi(app)
        for path in made["paths"].values():
            for operation in path.values():
                if "requestBody" in operation:
                    operation["responses"]["422"] = operation["responses"]["400"] | {"description": ERRORS[422]}
        for name in ("HTTPValidationError", "ValidationError"):
            made["components"]["schemas"].pop(name, None)
    return app.openapi_schema or {}


def add_endpoints(app: FastAPI, service: Service) -> None:
    lm = service.lm

    @app.post("/v1/chat/completions", tags=["texts"], summary="Answer a chat.", response_model=None, responses=CHATS)
    async def chat(body: ChatRequest, http: Request) -> Response:  # type: ignore[valid-type]
        return await service.answer("chat", body, http)

    @app.post("/v1/completions", tags=["texts"], summary="Continue texts.", response_model=None, responses=COMPLETIONS)
    async def completions(body: CompletionRequest, http: Request) -> Response:  # type: ignore[valid-type]
        return await service.answer("completion", body, http)

    @app.get(
        "/v1/models", tags=["model"], summary="List the one model that is served.", responses=answered(schemas.Models)
    )
    async def models() -> dict[str, Any]:
        context = lm.target.ir.context_length
        entry = {"id": service.name, "object": "model", "created": service.began, "owned_by": "ovspec"}
        return {"object": "list", "data": [entry | {"max_model_len": context}]}

    @app.get("/v1/models/{name:path}", tags=["model"], summary="Describe the model.", responses=answered(schemas.Model))
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return (await models())["data"][0]

    @app.head("/health", include_in_schema=False)
    @app.get("/health", tags=["server"], summary="Tell whether the server lives.")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @app.get(
        "/ready",
        tags=["server"],
        summary="Tell whether a request would be taken, and what is promised.",
        responses=READY,
    )
    async def ready() -> Response:
        try:
            service.check_open()
            status, reason = 200, "ready"
        except ApiError as error:
            status, reason = 503, error.detail
        body = {"status": reason, "arithmetic": lm.target.promise, "deterministic": lm.target.promise == "exact"}
        return JSONResponse(body, status)

    @app.get("/metrics", tags=["server"], summary="Report metrics in Prometheus' format.")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.post(
        "/tokenize",
        tags=["tokens"],
        summary="Return the tokens of a text or a chat.",
        responses=answered(schemas.Tokens),
    )
    async def tokenize(body: TokenizeRequest, http: Request) -> dict[str, Any]:
        service.check_model(body.model)
        tokens = await service.translate(http, encode, lm, body)
        return {"count": len(tokens), "max_model_len": lm.target.ir.context_length, "tokens": tokens}

    @app.post("/detokenize", tags=["tokens"], summary="Return the text of tokens.", responses=answered(schemas.Text))
    async def detokenize(body: DetokenizeRequest, http: Request) -> dict[str, Any]:
        service.check_model(body.model)
        text = await service.translate(http, decode, lm, body.tokens)
        return {"prompt": text, "content": text}


def add_errors(app: FastAPI) -> None:
    """Answer every error in OpenAI's shape."""

    @app.exception_handler(RequestValidationError)  # what remains of them: there is no body
    async def empty(_: Request, __: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body(400, NO_OBJECT), 400)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        param, code = getattr(error, "param", None), getattr(error, "code", None)
        told = error.detail if isinstance(error, ApiError) else NOWHERE.get(error.status_code, error.detail)
        return JSONResponse(error_body(error.status_code, told, param, code), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body(500, f"The server failed ({type(error).__name__})."), 500)
