"""The endpoints that describe the model and report the server's state."""

from dataclasses import asdict
from typing import Literal

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import Field
from starlette.responses import Response

from ovspec.base.json_types import JsonObject
from ovspec.protocols.reply import ReplyModel
from ovspec.server.context import ServerContext
from ovspec.server.errors import ApiError
from ovspec.server.models import ModelEntry, ModelList, make_catalogue_entry, make_model_entry
from ovspec.server.preparation import list_loaded_drafters
from ovspec.server.props import Props, make_server_props


class CacheState(ReplyModel):
    limit_bytes: int = Field(description="Memory limit of all KV caches.")
    reserved_bytes: int = Field(description="Bytes reserved by running texts, with room to grow.")
    used_bytes: int = Field(description="Bytes of running texts.")
    kept_bytes: int = Field(description="Bytes of the prefix cache.")
    set_back_count: int = Field(description="Texts set back so far for lack of memory, to be read again later.")


class ReadyReply(ReplyModel):
    status: str
    arithmetic: str = Field(description="exact, or the probe's findings.")
    deterministic: bool = Field(description="Whether texts are independent of the load.")
    prefix_cache: Literal["exact", "may change bits", "off"] = Field(
        description="The effect of a cached prompt on its text."
    )
    drafters: list[str] = Field(description="The drafters for the field draft.")
    device: str
    engine: str
    cache: CacheState = Field(description="The memory of KV caches.")


READY_MODEL: JsonObject = {"model": ReadyReply, "description": "The server's state."}
READY_RESPONSES: dict[int | str, JsonObject] = {200: READY_MODEL, 503: READY_MODEL}


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

    @app.get("/ready", tags=["server"], summary="Readiness check, with the server's state.", responses=READY_RESPONSES)
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
        usage = asdict(context.engine.measure_cache_usage())
        cache_state = CacheState(**{name: int(value) for name, value in usage.items()})
        return ReadyReply(
            status=status,
            arithmetic=arithmetic_note,
            deterministic=is_exact,
            prefix_cache=prefix_cache,
            drafters=list_loaded_drafters(lm),
            device=lm.target.ir.device,
            engine=lm.target.engine,
            cache=cache_state,
        )

    @app.get("/metrics", tags=["server"], summary="Report metrics in Prometheus' format.")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(context.metrics.registry), media_type=CONTENT_TYPE_LATEST)
