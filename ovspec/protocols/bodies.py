"""The bodies of requests: pydantic models made from the declarations of options."""

import json
import types
from collections.abc import Collection, Mapping
from functools import partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.limits import LARGEST_NUMBER, NumberLimits
from ovspec.params.option import Option
from ovspec.params.sampling import REQUEST_DEFAULT_TEXTS
from ovspec.params.values import describe_value_problem
from ovspec.protocols.unsupported import (
    FIELD_TO_USE_INSTEAD,
    FIELDS_IGNORED_BY_SERVER,
    REFUSED_PROMPT_FIELDS,
    REFUSED_TEXT_FIELDS,
)

MAX_NAME_LENGTH = 80  # characters of an unknown field's name
MAX_NAMED_FIELDS = 16  # ignored fields listed in a reply
FieldDefinitions = dict[str, Any]  # of name -> (type, field), for pydantic's create_model
FAIL_FAST = Field(fail_fast=True)  # otherwise pydantic collects an error per wrong item
TOKEN_IDS = Annotated[list[int], FAIL_FAST]
CHAT_MESSAGES = Annotated[list[JsonObject], Field(min_length=1), FAIL_FAST]
# Fields of a message, from OpenAI's API and from chat templates. The last field is refused.
MESSAGE_FIELDS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking",
    "function_call",
}  # fmt: skip
TEXT_PART_FIELDS = {"type", "text"}  # of a message's content
# Descriptions of other servers' fields.
HAS_NO_EFFECT = "Has no effect."
NOT_SUPPORTED = "Not supported."
# Options set by the command for all lines of a batch file, but by each request on a server.
SERVER_OPTIONS = ("accept", "lookahead")
# Field -> option, for all options open to requests, under our names and OpenAI's.
OPTION_OF_FIELD = {
    field_name: name
    for name, option in GENERATE_OPTIONS.items()
    if option.request or name in SERVER_OPTIONS
    for field_name in (name, *option.aliases)
}


class RequestError(OvspecError):
    """A request can't be met. ``param``: the wrong field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestBody(BaseModel):
    """The fields of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_null_fields(cls, body: JsonValue) -> JsonValue:
        """Leave out null fields, sent by clients for unset fields, and all unknown fields but the first."""
        if not isinstance(body, dict):
            return body
        fields = {name: value for name, value in body.items() if value is not None}
        unknown_field = next((name for name in fields if name not in cls.model_fields), None)
        return {name: value for name, value in fields.items() if name in cls.model_fields or name == unknown_field}


def require_neutral_value(neutral_values: tuple[JsonValue, ...], advice: str, value: JsonValue) -> JsonValue:
    """Return ``value`` if it is neutral, without effect; raises PydanticCustomError otherwise."""
    if value in neutral_values:
        return value
    allowed_values = " or ".join(json.dumps(neutral) for neutral in neutral_values if not isinstance(neutral, list))
    refusal = f"is supported only with the value {allowed_values}" if allowed_values else "is not supported"
    problem = f"{refusal}; {advice}"
    raise PydanticCustomError("unmet", "{problem}", {"problem": problem})


def define_ignored_fields(*fields: str) -> FieldDefinitions:
    """Return accepted but ignored fields."""
    return {field: (JsonValue, Field(None, description=HAS_NO_EFFECT)) for field in fields}


def define_refused_fields(neutral_values: Mapping[str, tuple[JsonValue, ...]]) -> FieldDefinitions:
    """Return fields refused except with their neutral values in this table."""
    return {field: define_refused_field(field, values) for field, values in neutral_values.items()}


def define_refused_field(field: str, neutral_values: tuple[JsonValue, ...]) -> tuple[Any, Any]:
    advice = FIELD_TO_USE_INSTEAD.get(field, f"leave {field} out")
    field_type = Annotated[JsonValue, AfterValidator(partial(require_neutral_value, neutral_values, advice))]
    schema: JsonObject = {"enum": [*neutral_values, None]}
    return field_type, Field(None, description=NOT_SUPPORTED, json_schema_extra=schema)


class ChatEndingFields(RequestBody):
    """The fields for the end of a chat's prompt."""

    continue_final_message: bool | None = Field(
        None,
        description="Continue an assistant message at the end of the chat. Default: true if it has no tool calls; "
        "false is refused then.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin a new answer. False is refused unless the last message is continued."
    )


def make_option_validator(value_type: Any, limits: NumberLimits | None = None) -> PlainValidator:
    """Return a field's validator, with the checks of an option."""
    return PlainValidator(
        partial(check_option_value, value_type, limits), json_schema_input_type=json_type_of(value_type) | None
    )


def check_option_value(value_type: Any, limits: NumberLimits | None, value: JsonValue) -> JsonValue:
    """Return a value of an option; raises PydanticCustomError if its type or range is wrong."""
    if get_origin(value_type) is Mapping and get_args(value_type)[0] is int:
        value = with_integer_keys(value)
    if message := describe_value_problem(value, value_type, limits):
        raise PydanticCustomError("problem", "{message}", {"message": message})
    return value


def with_integer_keys(value: JsonValue) -> JsonValue:
    """Return a mapping with integer token ids in place of JSON's string keys; other values as they are."""
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        return value


def json_type_of(value_type: Any) -> Any:
    """Return the JSON type of an option's value."""
    origin: Any = get_origin(value_type)
    type_arguments = get_args(value_type)
    if origin in (Union, types.UnionType):
        return Union[tuple(map(json_type_of, type_arguments))]  # noqa: UP007
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, type_arguments[1]]  # type: ignore[valid-type]
    if isinstance(origin, type) and issubclass(origin, Collection):
        return list[type_arguments[0]]  # type: ignore[valid-type]
    return value_type


def define_option_field(option: Option) -> tuple[Any, Any]:
    """Return the type and the field of an option."""
    limits = option.limits or NumberLimits()
    schema_bounds: JsonObject = {}
    if limits.special_value is None and limits.minimum > -LARGEST_NUMBER:
        schema_bounds["exclusiveMinimum" if limits.excludes_minimum else "minimum"] = limits.minimum
    if limits.maximum < LARGEST_NUMBER:
        schema_bounds["maximum"] = limits.maximum
    default_text = REQUEST_DEFAULT_TEXTS.get(option.name, option.default_text)
    description = option.help + f" Default: {default_text}." * bool(default_text)
    validator = make_option_validator(option.request_type or option.value_type, option.limits)
    return Annotated[Any, validator], Field(None, description=description, json_schema_extra=schema_bounds)


TOP_LOGPROBS = Annotated[
    Any,
    make_option_validator(int, NumberLimits(0, 100, "from 0 to 100")),
    Field(json_schema_extra={"minimum": 0, "maximum": 100}),
]
PROMPT_OR_PROMPTS = str | Annotated[list[str], FAIL_FAST] | TOKEN_IDS | Annotated[list[TOKEN_IDS], FAIL_FAST]
OPTION_FIELDS: FieldDefinitions = {
    name: define_option_field(GENERATE_OPTIONS[option]) for name, option in OPTION_OF_FIELD.items()
}


def option_fields_except(*options: str) -> FieldDefinitions:
    """Return the fields of all options except ``options``, which have another form in an API."""
    return {name: field for name, field in OPTION_FIELDS.items() if OPTION_OF_FIELD[name] not in options}


class TextRequestBody(RequestBody):
    """The common fields of all requests for texts, in any API.

    replacement_by_field: other APIs' fields -> this API's.
    """

    replacement_by_field: ClassVar[dict[str, str]] = {}
    model: str | None = Field(None, description="The model's name. Any name is accepted, except with --strict-model.")
    stream: bool | None = Field(None, description="Stream the text as server-sent events.")
    draft: str | None = Field(
        None, description='Drafters for this request: "none", or some of the server\'s drafters, such as "lookup".'
    )
    return_record: bool | None = Field(
        None, description="Add a record for 'ovspec verify' to each text. It contains the path of the model's folder."
    )


class VerifyRequest(RequestBody):
    """A finished text to be checked."""

    model: str | None = Field(None, description="The model's name.")
    choice: JsonObject = Field(description="The choice, response or message to check, with its record.")


class OtherServersFields(
    create_model(
        "Others",
        __base__=RequestBody,
        **define_ignored_fields(*FIELDS_IGNORED_BY_SERVER),
        **define_refused_fields(REFUSED_PROMPT_FIELDS | REFUSED_TEXT_FIELDS),
    )
):
    """The fields of other servers' clients; not for batch files."""


def keep_known_fields(
    fields: JsonObject, known_fields: Collection[str], parent: str, ignored: dict[str, None]
) -> JsonObject:
    """Return an object without unknown fields; their names, with the prefix ``parent``, go to ``ignored``."""
    unknown_fields = (field for field, value in fields.items() if field not in known_fields and value not in (None, []))
    for field in islice(unknown_fields, MAX_NAMED_FIELDS - len(ignored)):
        ignored[f"{parent}.{field[:MAX_NAME_LENGTH]}"] = None
    return {field: value for field, value in fields.items() if field in known_fields}
