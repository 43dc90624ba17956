"""The bodies of requests: pydantic models made from the declarations of the options, and what is wrong, in words."""

import json
import types
from collections.abc import Collection, Mapping
from functools import cache, partial
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ovspec.base.errors import OvspecError
from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.limits import LARGEST_NUMBER, NOT_NEGATIVE, Limits
from ovspec.params.option import Option, suggest_name
from ovspec.params.sampling import RECOMMENDED_DEFAULT_TEXTS
from ovspec.params.values import describe_problem, describe_type
from ovspec.protocols.unsupported import (
    IGNORED_BY_SERVER,
    INSTEAD,
    OF_PROMPTS,
    OF_STREAMS,
    OF_TEXTS,
    OF_TOKENIZE,
    WITHOUT_EFFECT,
)

NO_OBJECT = "The body must be a JSON object."
LONGEST = 80  # characters of a client's name for a field
MOST_NAMED = 16  # fields that an answer names
B = TypeVar("B", bound=BaseModel)
FIRST = Field(fail_fast=True)  # pydantic would keep an error for each wrong item
IDS = Annotated[list[int], FIRST]
CHAT = Annotated[list[dict[str, Any]], Field(min_length=1), FIRST]
# Fields of a message: OpenAI's, and what chat templates read. The last is refused.
OF_MESSAGES = {
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking",
    "function_call",
}  # fmt: skip
OF_PARTS = {"type", "text"}  # of a message's content
# Descriptions of fields that other servers have.
IDLE, UNMET = "Has no effect.", "Not supported."
# Options that the command sets for all lines of a batch file, and a request to the server for itself.
OF_SERVER = ("accept", "lookahead")
# Our names and OpenAI's for the options that a request may set, and our name for each.
REQUESTED = {
    spelling: name
    for name, option in GENERATE_OPTIONS.items()
    if option.request or name in OF_SERVER
    for spelling in (name, *option.aliases)
}


class RequestError(OvspecError):
    """A request can't be met. ``param``: the field that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Fields(BaseModel):
    """The fields of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        """Leave out fields that are null, which clients send for those not set, and all unknown ones but the first."""
        if not isinstance(body, dict):
            return body
        given = {name: value for name, value in body.items() if value is not None}
        unknown = next((name for name in given if name not in cls.model_fields), None)
        return {name: value for name, value in given.items() if name in cls.model_fields or name == unknown}


def neutral(values: tuple[Any, ...], instead: str, value: Any) -> Any:
    """Return ``value`` if it is one of ``values``; raises PydanticCustomError otherwise."""
    if value in values:
        return value
    short = [json.dumps(each) for each in values if not isinstance(each, list)]
    but = f", except as {' or '.join(short)}" if short else ""
    raise PydanticCustomError("unmet", "is not supported{but}; {instead}", {"but": but, "instead": instead})


def idle(*names: str) -> dict[str, Any]:
    """Return the fields that are accepted and ignored."""
    return {name: (Any, Field(None, description=IDLE)) for name in names}


def unmet(table: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the fields that are refused unless they have one of the values in ``table``."""
    return {
        name: (
            Annotated[Any, AfterValidator(partial(neutral, values, INSTEAD.get(name, "leave it out")))],
            Field(None, description=UNMET, json_schema_extra={"enum": [*values, None]}),
        )
        for name, values in table.items()
    }


class StreamOptions(create_model("Stream", __base__=Fields, **idle("include_obfuscation"), **unmet(OF_STREAMS))):
    """What a stream tells besides the text."""

    include_usage: bool | None = Field(None, description="Send the usage in a last chunk.")


class Continued(Fields):
    """How the prompt of a chat ends."""

    continue_final_message: bool | None = Field(
        None,
        description="Continue the last message, which must be the assistant's, without calls. Default: whether it is.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin an answer. False only where the last message is continued."
    )


class TokenizeRequest(Continued, create_model("Prompts", __base__=Fields, **unmet(OF_PROMPTS | OF_TOKENIZE))):
    """A text or chat to be encoded."""

    model: str | None = Field(None, description="The model's name.")
    prompt: str | None = Field(None, description="The text to encode.")
    content: str | None = Field(None, description="The text to encode, under llama.cpp's name.")
    messages: CHAT | None = Field(None, description="A chat, which the chat template renders.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template; only with messages."
    )
    tools: list[dict[str, Any]] | None = Field(None, description="The chat's tools; only with messages.")
    add_special_tokens: bool | None = Field(
        None, description="Whether the text begins with the model's BOS; not with messages. Default: true."
    )
    add_special: bool | None = Field(None, description="llama.cpp's name for add_special_tokens.")
    with_pieces: bool | None = Field(None, description="Return each token as an object with its id and its piece.")


class DetokenizeRequest(Fields):
    """Tokens to be decoded."""

    model: str | None = Field(None, description="The model's name.")
    tokens: IDS = Field(description="Token ids.")


def checked_as(kind: Any, limits: Limits | None = None) -> PlainValidator:
    """Return the validator of a field whose values are checked as those of options are."""
    return PlainValidator(partial(checked_value, kind, limits), json_schema_input_type=in_json(kind) | None)


def checked_value(kind: Any, limits: Limits | None, value: Any) -> Any:
    """Return a value; raises PydanticCustomError if it isn't of the type ``kind`` or is out of range."""
    if get_origin(kind) is Mapping and get_args(kind)[0] is int:
        value = with_whole_keys(value)
    if wrong := describe_problem(value, kind, limits):
        raise PydanticCustomError("problem", "{wrong}", {"wrong": wrong})
    return value


def with_whole_keys(value: Any) -> Any:
    """Return a mapping of token ids, which are strings as keys in JSON; other values as they are."""
    try:
        return {int(token): bias for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        return value


def in_json(kind: Any) -> Any:
    """Return the type that a value of an option has in JSON."""
    origin: Any = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, types.UnionType):
        return Union[tuple(map(in_json, inner))]  # noqa: UP007
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict[str, inner[1]]  # type: ignore[valid-type]
    if isinstance(origin, type) and issubclass(origin, Collection):
        return list[inner[0]]  # type: ignore[valid-type]
    return kind


def field_of(option: Option) -> tuple[Any, Any]:
    """Return the type and the field of an option."""
    limits = option.limits or Limits()
    bounds: dict[str, Any] = {}
    if limits.special_value is None and limits.minimum > -LARGEST_NUMBER:
        bounds["exclusiveMinimum" if limits.excludes_minimum else "minimum"] = limits.minimum
    if limits.maximum < LARGEST_NUMBER:
        bounds["maximum"] = limits.maximum
    usual = RECOMMENDED_DEFAULT_TEXTS.get(option.name, option.default_text)
    description = option.help + f" Default: {usual}." * bool(usual)
    validator = checked_as(option.request_type or option.value_type, option.limits)
    return Annotated[Any, validator], Field(None, description=description, json_schema_extra=bounds)


TOPS = Annotated[
    Any, checked_as(int, Limits(0, 100, "from 0 to 100")), Field(json_schema_extra={"minimum": 0, "maximum": 100})
]
PROMPT = str | Annotated[list[str], FIRST] | IDS | Annotated[list[IDS], FIRST]
OPTIONS: dict[str, Any] = {spelling: field_of(GENERATE_OPTIONS[name]) for spelling, name in REQUESTED.items()}


def options_but(*names: str) -> dict[str, Any]:
    """Return the fields of all options but those with these names of ours, which an API has in another form."""
    return {spelling: each for spelling, each in OPTIONS.items() if REQUESTED[spelling] not in names}


class TextBody(Fields):
    """The fields that all requests for texts have, in any API.

    instead: other APIs' fields, and what to give instead.
    """

    instead: ClassVar[dict[str, str]] = {}
    model: str | None = Field(None, description="The model's name; any will do, unless the server is strict.")
    stream: bool | None = Field(None, description="Send the text as server-sent events while it is generated.")
    draft: str | None = Field(
        None, description='What may propose tokens: "none", or some of what the server was started with.'
    )
    return_record: bool | None = Field(
        None, description="Add to each text the record that 'ovspec verify' checks; it names the model's folder."
    )


class Common(create_model("Options", __base__=TextBody, **OPTIONS, **idle(*WITHOUT_EFFECT))):
    """The fields that all requests of OpenAI's older APIs have."""

    response_format: dict[str, Any] | None = Field(
        None,
        description='OpenAI\'s response format: {"type": "text"}, "json_object" or "json_schema". '
        'A "schema" may also be given beside the type, as in llama.cpp. Not with a grammar option.',
    )
    stream_options: StreamOptions | None = Field(None, description="What a stream tells besides the text.")


class ChatBody(Continued, Common):
    """A chat to be continued."""

    messages: CHAT = Field(description="The chat so far: objects with role and content.")
    logprobs: bool | None = Field(None, description="Report each token's log-probability.")
    top_logprobs: TOPS = Field(None, description="And those of this many of the most likely ones.")


class CompletionBody(Common):
    """Texts to be continued."""

    prompt: PROMPT = Field(description="A text or token ids, or a list of these.")
    echo: bool | None = Field(None, description="Repeat the prompt in front of each text.")
    logprobs: TOPS = Field(None, description="Report each token's log-probability, and those of this many others.")


class OwnBody(Continued, Common):
    """A line of a batch file that isn't a request of OpenAI's API."""

    messages: CHAT | None = None
    prompt: PROMPT | None = None
    echo: bool | None = None
    logprobs: Annotated[Any, checked_as(bool | int, NOT_NEGATIVE)] = None
    top_logprobs: TOPS = None


class Foreign(create_model("Others", __base__=Fields, **idle(*IGNORED_BY_SERVER), **unmet(OF_PROMPTS | OF_TEXTS))):
    """The fields that clients of other servers send; a batch file doesn't have them."""


class ChatRequest(ChatBody, Foreign):
    """A chat to be continued."""


class CompletionRequest(CompletionBody, Foreign):
    """Texts to be continued."""

    suffix: str | None = Field(
        None,
        description="What comes behind the text, which is generated between the prompt and this; for models whose "
        "vocabulary has fill-in-the-middle tokens. Not with echo, several prompts or token ids.",
    )


# ---------------------------------------------------------------- what is wrong, in words

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


@cache
def fields_elsewhere(body: type[BaseModel]) -> dict[str, str]:
    """Return the fields that a request for texts doesn't have, but another request, and the path of that one."""
    if not issubclass(body, TextBody) or body is OwnBody:
        return {}
    return {
        name: path
        for path, other in reversed(BODIES.items())  # of several, the first is named
        for name, field in other.model_fields.items()
        if name not in body.model_fields and field.description not in (IDLE, UNMET)
    }


def without_unknown(value: Any, body: type[BaseModel]) -> tuple[Any, list[str]]:
    """Return ``value``, made from JSON, without the fields that no request has, and the names of the first of them."""
    if not isinstance(value, dict):
        return value, []
    known = body.model_fields.keys() | fields_elsewhere(body).keys()
    kept = {name: each for name, each in value.items() if name in known}
    unknown = (name for name, each in value.items() if name not in known and each is not None)
    names = [*islice(unknown, MOST_NAMED)]
    if "stream_options" in kept:  # the only field with fields of its own
        kept["stream_options"], inner = without_unknown(kept["stream_options"], StreamOptions)
        names += [f"stream_options.{name}" for name in inner]
    if isinstance(kept.get("messages"), list) and issubclass(body, (ChatBody, OwnBody, TokenizeRequest)):
        inner = dict[str, None]()
        kept["messages"] = [without_unknown_of_message(message, inner) for message in kept["messages"]]
        names += inner
    return kept, names[:MOST_NAMED]


def without_unknown_of_message(message: Any, names: dict[str, None]) -> Any:
    """Return a message without the fields that no message has; add their names to ``names``."""
    if not isinstance(message, dict):
        return message
    message = only_known(message, OF_MESSAGES, "messages", names)
    if isinstance(content := message.get("content"), list):
        parts = (only_known(part, OF_PARTS, "content", names) if is_text(part) else part for part in content)
        message["content"] = [*parts]
    return message


def only_known(given: dict[str, Any], fields: Collection[str], where: str, names: dict[str, None]) -> dict[str, Any]:
    """Return ``given`` without the fields that aren't known; add their names, inside of ``where``, to ``names``."""
    unknown = (name for name, each in given.items() if name not in fields and each not in (None, []))
    names.update((f"{where}.{name[:LONGEST]}", None) for name in islice(unknown, MOST_NAMED - len(names)))
    return {name: each for name, each in given.items() if name in fields}


def is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def read_body(value: Any, body: type[B]) -> B:
    """Return ``value``, made from JSON, as a ``body``; raises RequestError for the first field that is wrong."""
    try:
        return body.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise RequestError(*wrong_field(first, body)) from None


def wrong_field(error: Any, request: type[BaseModel]) -> tuple[str, str | None]:
    """Return what is wrong with a field of ``request``, and its name, from one of pydantic's errors."""
    path = [str(each)[:LONGEST] for each in error["loc"]]
    if not path:
        return NO_OBJECT, None
    name = shown = path[0]
    inside, own = request, name
    if name == "stream_options" and len(path) > 1:
        inside, own, shown = StreamOptions, path[1], f"{name}.{path[1]}"
    if error["type"] == "extra_forbidden":
        return f"{shown} is not a field of this request{elsewhere(own, inside)}", name
    if error["type"] == "missing":
        return f"{name} is missing.", name
    if error["type"] == "too_short":
        return f"{shown} must not be empty.", name
    if error["type"] in ("problem", "unmet"):
        return f"{shown} {error['msg']}.", name
    return f"{shown} must be {describe_type(inside.model_fields[own].annotation)}.", name


def elsewhere(name: str, request: type[BaseModel]) -> str:
    """Return what to do about a field that ``request`` doesn't have, as the end of a sentence."""
    if path := fields_elsewhere(request).get(name):
        instead = getattr(request, "instead", {}).get(name)
        return f", but of {path}; {f'give {instead}' if instead else 'leave it out'}."
    known = [each for each, field in request.model_fields.items() if field.description != UNMET]
    return f"; {suggest_name(name, known) or 'leave it out.'}"
