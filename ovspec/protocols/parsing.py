"""Makes the body of a request from a JSON value, and errors for invalid values."""

from functools import cache
from itertools import islice
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ovspec.base.json_types import JsonValue
from ovspec.params.option import suggest_name
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

NOT_AN_OBJECT = "The body must be a JSON object."
B = TypeVar("B", bound=BaseModel)
# The requests whose fields an error on another request's unknown field names.
BODIES_WITH_FIELDS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@cache
def fields_of_other_requests(body: type[BaseModel]) -> dict[str, str]:
    """Return the fields that a request for texts lacks and another request has, with the path of that request."""
    if not issubclass(body, TextRequestBody) or body is BatchLineBody:
        return {}
    return {
        name: path
        for path, other in reversed(BODIES_WITH_FIELDS.items())  # of several, the first is named
        for name, field in other.model_fields.items()
        if name not in body.model_fields and field.description not in (HAS_NO_EFFECT, NOT_SUPPORTED)
    }


def drop_unknown_fields(value: JsonValue, body: type[BaseModel]) -> tuple[JsonValue, list[str]]:
    """Return a request's JSON without the fields that no request has, and the names of the first such fields."""
    if not isinstance(value, dict):
        return value, []
    known = body.model_fields.keys() | fields_of_other_requests(body).keys()
    fields = {name: field for name, field in value.items() if name in known}
    unknown = (name for name, field in value.items() if name not in known and field is not None)
    ignored = [*islice(unknown, MAX_NAMED_FIELDS)]
    if "stream_options" in fields:  # the only field with fields of its own
        fields["stream_options"], ignored_options = drop_unknown_fields(fields["stream_options"], StreamOptions)
        ignored += [f"stream_options.{name}" for name in ignored_options]
    if isinstance(fields.get("messages"), list) and issubclass(body, (ChatBody, BatchLineBody, TokenizeRequest)):
        ignored_in_messages = dict[str, None]()
        messages = [drop_unknown_message_fields(message, ignored_in_messages) for message in fields["messages"]]
        fields["messages"] = messages
        ignored += ignored_in_messages
    return fields, ignored[:MAX_NAMED_FIELDS]


def drop_unknown_message_fields(message: JsonValue, ignored: dict[str, None]) -> JsonValue:
    """Return a message without the fields that no message has, whose names go to ``ignored``."""
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


def validate_body(value: JsonValue, body: type[B]) -> B:
    """Return a request's JSON as a ``body``; raises RequestError for the first field that is wrong."""
    try:
        return body.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise RequestError(*describe_invalid_field(first, body)) from None


def describe_invalid_field(error: ErrorDetails, body: type[BaseModel]) -> tuple[str, str | None]:
    """Return the message for one of pydantic's errors on a body, and the name of the field."""
    path = [str(key)[:MAX_NAME_LENGTH] for key in error["loc"]]
    if not path:
        return NOT_AN_OBJECT, None
    name = path[0]
    full_name = name
    leaf = name
    if name == "stream_options" and len(path) > 1:
        body = StreamOptions
        leaf = path[1]
        full_name = f"{name}.{leaf}"
    if error["type"] == "extra_forbidden":
        return f"{full_name} is not a field of this request{suggest_field(leaf, body)}", name
    if error["type"] == "missing":
        return f"{name} is missing.", name
    if error["type"] == "too_short":
        return f"{full_name} must not be empty.", name
    if error["type"] in ("problem", "unmet"):
        return f"{full_name} {error['msg']}.", name
    return f"{full_name} must be {describe_type(body.model_fields[leaf].annotation)}.", name


def suggest_field(name: str, body: type[BaseModel]) -> str:
    """Return the advice for a field that a body doesn't have, as the end of a sentence."""
    if path := fields_of_other_requests(body).get(name):
        instead = getattr(body, "instead", {}).get(name)
        return f", but of {path}; {f'give {instead}' if instead else 'leave it out'}."
    known = [known_name for known_name, field in body.model_fields.items() if field.description != NOT_SUPPORTED]
    return f"; {suggest_name(name, known) or 'leave it out.'}"
