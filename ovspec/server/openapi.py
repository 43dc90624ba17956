"""The OpenAPI document, with the errors of each path and the handling of unknown fields."""

from typing import Any

from fastapi import FastAPI

from ovspec.protocols.apis import BODY_TYPES
from ovspec.protocols.bodies import NOT_SUPPORTED
from ovspec.protocols.chat.bodies import StreamOptions
from ovspec.protocols.errors import AnthropicErrorBody, OpenAIErrorBody
from ovspec.protocols.parsing import map_foreign_fields_to_paths
from ovspec.server.errors import is_anthropic_path

ERROR_DESCRIPTIONS: dict[int | str, str] = {
    400: "The body or a field is invalid.",
    401: "The API key is missing or wrong.",
    403: "The server has no API key, and the Host header isn't localhost or 127.0.0.1.",
    404: "Unknown model or path.",
    405: "The path doesn't accept this method.",
    408: "The body didn't arrive in time.",
    413: "The body is too large.",
    415: "The body isn't JSON.",
    422: "The text can't be continued, for example because its grammar allows no further token.",
    429: "The queue is full.",
    500: "Inference failed.",
    501: "The model lacks this feature, such as fill-in-the-middle tokens.",
    503: "The server is starting or stopping, lacks memory or a model file, or the request timed out in the queue.",
    504: "The request ran into --request-timeout.",
}

# An event; its data is JSON, or [DONE].
EVENT_SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in ("event", "data")}}
STREAM_CONTENT = {"text/event-stream": {"schema": {**EVENT_SCHEMA, "description": "With stream: an event of the API."}}}


def describe_error_responses(path: str) -> dict[int | str, dict[str, Any]]:
    """Return the error responses of a path, for the OpenAPI document."""
    error_model = AnthropicErrorBody if is_anthropic_path(path) else OpenAIErrorBody
    return {
        status: {"model": error_model, "description": description} for status, description in ERROR_DESCRIPTIONS.items()
    }


def make_openapi_document(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, including refused unknown fields."""
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    for body_type in (*BODY_TYPES.values(), StreamOptions):
        schema = schemas[body_type.__name__]
        schema["additionalProperties"] = not app.state.strict_fields
        for field in sorted(map_foreign_fields_to_paths(body_type)):
            schema["properties"][field] = {"type": "null", "description": NOT_SUPPORTED}
    return document
