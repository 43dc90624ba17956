"""Parses the body of a request from a JSON value, with errors for invalid values."""

from functools import cache
from itertools import islice
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ovspec.base.json_types import JsonValue
from ovspec.params.option import make_did_you_mean
from ovspec.params.values import describe_type
from ovspec.protocols.bodies import (
    HAS_NO_EFFECT,
    MAX_NAME_LENGTH,
    MAX_NAMED_FIELDS,
    MESSAGE_FIELDS,
    NOT_SUPPORTED,
    TEXT_PART_FIELDS,
    RequestError,
    TextRequestBody,
    keep_known_fields,
)
from ovspec.protocols.chat.bodies import BatchLineBody, ChatBody, ChatRequest, CompletionRequest, StreamOptions
from ovspec.protocols.tokenize import DetokenizeRequest, TokenizeRequest

NOT_AN_OBJECT = "The request's body must be a JSON object."
B = TypeVar("B", bound=BaseModel)
# The requests mentioned in errors about unknown fields of other requests.
BODIES_WITH_FIELDS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@cache
def map_foreign_fields_to_paths(body_type: type[BaseModel]) -> dict[str, str]:
    """Return other requests' fields, missing in this request for texts -> the path of the other request."""
    if not issubclass(body_type, TextRequestBody) or body_type is BatchLineBody:
        return {}
    return {
        field_name: request_path
        for request_path, other_body_type in reversed(BODIES_WITH_FIELDS.items())  # of several paths, the first stays
        for field_name, field in other_body_type.model_fields.items()
        if field_name not in body_type.model_fields and field.description not in (HAS_NO_EFFECT, NOT_SUPPORTED)
    }


def drop_unknown_fields(body_json: JsonValue, body_type: type[BaseModel]) -> tuple[JsonValue, list[str]]:
    """Return a request's JSON without fields unknown to all requests, and the names of the first such fields."""
    if not isinstance(body_json, dict):
        return body_json, []
    known_fields = body_type.model_fields.keys() | map_foreign_fields_to_paths(body_type).keys()
    fields = {name: field for name, field in body_json.items() if name in known_fields}
    unknown_fields = (name for name, field in body_json.items() if name not in known_fields and field is not None)
    ignored = [*islice(unknown_fields, MAX_NAMED_FIELDS)]
    if "stream_options" in fields:  # the only field with subfields
        fields["stream_options"], ignored_options = drop_unknown_fields(fields["stream_options"], StreamOptions)
        ignored += [f"stream_options.{name}" for name in ignored_options]
    if isinstance(fields.get("messages"), list) and issubclass(body_type, (ChatBody, BatchLineBody, TokenizeRequest)):
        ignored_in_messages = dict[str, None]()
        messages = [drop_unknown_message_fields(message, ignored_in_messages) for message in fields["messages"]]
        fields["messages"] = messages
        ignored += ignored_in_messages
    return fields, ignored[:MAX_NAMED_FIELDS]


def drop_unknown_message_fields(message: JsonValue, ignored: dict[str, None]) -> JsonValue:
    """Return a message without unknown fields; their names go to ``ignored``."""
    if not isinstance(message, dict):
        return message
    message = keep_known_fields(message, MESSAGE_FIELDS, "messages", ignored)
    if isinstance(content := message.get("content"), list):
        message["content"] = [drop_unknown_part_fields(part, ignored) for part in content]
    return message


def drop_unknown_part_fields(part: JsonValue, ignored: dict[str, None]) -> JsonValue:
    """Return a part of a message's content; if it is text, without unknown fields."""
    if isinstance(part, dict) and part.get("type") == "text":
        return keep_known_fields(part, TEXT_PART_FIELDS, "content", ignored)
    return part


def validate_body(body_json: JsonValue, body_type: type[B]) -> B:
    """Return a request's JSON as a ``body_type``; raises RequestError for the first wrong field."""
    try:
        return body_type.model_validate(body_json)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise RequestError(*describe_invalid_field(first_error, body_type)) from None


def describe_invalid_field(error: ErrorDetails, body_type: type[BaseModel]) -> tuple[str, str | None]:
    """Return the message for one of pydantic's errors on a body, and the name of the field."""
    field_path = [str(path_part)[:MAX_NAME_LENGTH] for path_part in error["loc"]]
    if not field_path:
        return NOT_AN_OBJECT, None
    field = field_path[0]
    full_field_name = field
    leaf_field = field
    if field == "stream_options" and len(field_path) > 1:
        body_type = StreamOptions
        leaf_field = field_path[1]
        full_field_name = f"{field}.{leaf_field}"
    if error["type"] == "extra_forbidden":
        return f"{full_field_name} is not a field of this request{suggest_field(leaf_field, body_type)}", field
    if error["type"] == "missing":
        return f"{field} is missing.", field
    if error["type"] == "too_short":
        return f"{full_field_name} must not be empty.", field
    if error["type"] in ("problem", "unmet"):
        return f"{full_field_name} {error['msg']}.", field
    return f"{full_field_name} must be {describe_type(body_type.model_fields[leaf_field].annotation)}.", field


def suggest_field(field_name: str, body_type: type[BaseModel]) -> str:
    """Return the advice for an unknown field of a body, as the end of a sentence."""
    if request_path := map_foreign_fields_to_paths(body_type).get(field_name):
        replacement = getattr(body_type, "replacement_by_field", {}).get(field_name)
        return f", but of {request_path}; {f'use {replacement} instead' if replacement else 'leave it out'}."
    names = [name for name, field in body_type.model_fields.items() if field.description != NOT_SUPPORTED]
    return f"; {make_did_you_mean(field_name, names) or 'leave it out.'}"
