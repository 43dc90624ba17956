"""The bodies of requests: pydantic models made from the declarations of the options, and what is wrong, in words."""

import types
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from numbers import Number
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

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
from ovspec.params import GENERATE, NOT_NEGATIVE, RECOMMENDED, TOKENS, in_words, type_in_words, within
from ovspec.params.option import LARGEST, Limits, Option, hint

NO_OBJECT = "The body must be a JSON object."
LONGEST = 80  # characters of a client's name for a field
B = TypeVar("B", bound=BaseModel)
FIRST = Field(fail_fast=True)  # pydantic would keep an error for each wrong item
IDS = Annotated[list[int], FIRST]
CHAT = Annotated[list[dict[str, Any]], Field(min_length=1), FIRST]
# Fields that are accepted and ignored, because they don't affect the text.
WITHOUT_EFFECT = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
# Options that the command sets for all lines of a batch file, and a request to the server for itself.
OF_SERVER = ("accept", "lookahead")
# Our names and OpenAI's for the options that a request may set, and our name for each.
REQUESTED = {
    spelling: name
    for name, (_, option) in GENERATE.items()
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


class StreamOptions(Fields):
    """What a stream tells besides the text."""

    include_usage: bool | None = Field(None, description="Send the usage in a last chunk.")


class TokenizeRequest(Fields):
    """A text or chat to be encoded."""

    model: str | None = Field(None, description="The model's name.")
    prompt: str | None = Field(None, description="The text to encode.")
    content: str | None = Field(None, description="The text to encode, under llama.cpp's name.")
    messages: CHAT | None = Field(None, description="A chat, which the chat template renders.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template; only with messages."
    )
    add_special_tokens: bool | None = Field(
        None, description="Whether the text begins with the model's BOS; not with messages. Default: true."
    )


class DetokenizeRequest(Fields):
    """Tokens to be decoded."""

    model: str | None = Field(None, description="The model's name.")
    tokens: IDS = Field(description="Token ids.")


def bias_of(value: Any) -> dict[int, float]:
    """Return ``logit_bias`` with token ids as keys, which JSON can only write as strings."""
    try:
        found = {int(token): float(bias) for token, bias in value.items()}
        if all(type(bias) in (int, float) and bias == bias for bias in value.values()):  # neither true nor NaN
            return found
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise PydanticCustomError("bias", "must map token ids to numbers")


def limited(limits: Limits, value: Any) -> Any:
    """Return ``value`` if it is no number or in range; raises PydanticCustomError otherwise."""
    if isinstance(value, Number) and not within(limits, value):
        told = {"value": in_words(value), "words": limits.words}
        raise PydanticCustomError("limits", "is {value}; it must be {words}", told)
    return value


def in_json(kind: Any) -> Any:
    """Return the type that a value of an option has in JSON."""
    origin: Any = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, types.UnionType):
        return Union[tuple(map(in_json, inner))]  # noqa: UP007
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if inner[0] is int:
            return Annotated[dict[int, inner[1]], PlainValidator(bias_of, json_schema_input_type=dict[str, inner[1]])]  # type: ignore[valid-type]
        return dict[inner]  # type: ignore[misc, valid-type]
    if isinstance(origin, type) and issubclass(origin, Collection):
        return Annotated[list[inner[0]], FIRST]  # type: ignore[valid-type]
    return kind


def field_of(name: str, kind: Any, option: Option) -> tuple[Any, Any]:
    """Return the type and the field of an option; every field may be left out or null."""
    wanted = in_json(option.request_type or kind) | None
    bounds: dict[str, Any] = {}
    if limits := option.limits:
        if limits == TOKENS:
            limits = replace(limits, least=0)  # with echo a prompt's log-probabilities may be all that is wanted
        wanted = Annotated[wanted, AfterValidator(partial(limited, limits))]
        if limits.special is None and limits.least > -LARGEST:
            bounds["exclusiveMinimum" if limits.above else "minimum"] = limits.least
        if limits.most < LARGEST:
            bounds["maximum"] = limits.most
    usual = RECOMMENDED.get(name, option.initially)
    shown = option.help + f" Default: {usual}." * bool(usual)
    return wanted, Field(None, description=shown, json_schema_extra=bounds)


TOPS = Annotated[
    int | None,
    AfterValidator(partial(limited, Limits(0, 100, "from 0 to 100"))),
    Field(json_schema_extra={"minimum": 0, "maximum": 100}),
]
PROMPT = str | Annotated[list[str], FIRST] | IDS | Annotated[list[IDS], FIRST]
OPTIONS: dict[str, Any] = {spelling: field_of(name, *GENERATE[name]) for spelling, name in REQUESTED.items()}
IGNORED: dict[str, Any] = {name: (Any, Field(None, description="Has no effect.")) for name in WITHOUT_EFFECT}


class Common(create_model("Options", __base__=Fields, **OPTIONS, **IGNORED)):
    """The fields that all requests for texts have."""

    model: str | None = Field(None, description="The model's name, as GET /v1/models tells it.")
    response_format: dict[str, Any] | None = Field(
        None,
        description='OpenAI\'s response format: {"type": "text"}, "json_object" or "json_schema". '
        'Beside "json_object" a "schema" may be given, as in llama.cpp. Not with a grammar option.',
    )
    stream: bool | None = Field(None, description="Send the text as server-sent events while it is generated.")
    stream_options: StreamOptions | None = Field(None, description="What a stream tells besides the text.")
    draft: str | None = Field(
        None, description='What may propose tokens: "none", or some of what the server was started with.'
    )
    return_record: bool | None = Field(
        None, description="Add to each choice the record that 'ovspec verify' checks; it names the model's folder."
    )


class ChatBody(Common):
    """A chat to be continued."""

    messages: CHAT = Field(description="The chat so far: objects with role and content.")
    logprobs: bool | None = Field(None, description="Report each token's log-probability.")
    top_logprobs: TOPS = Field(None, description="And those of this many of the most likely ones.")


class CompletionBody(Common):
    """Texts to be continued."""

    prompt: PROMPT = Field(description="A text or token ids, or a list of these.")
    echo: bool | None = Field(None, description="Repeat the prompt in front of each text.")
    logprobs: TOPS = Field(None, description="Report each token's log-probability, and those of this many others.")


class OwnBody(Common):
    """A line of a batch file that isn't a request of OpenAI's API."""

    messages: CHAT | None = None
    prompt: PROMPT | None = None
    echo: bool | None = None
    logprobs: Annotated[bool | int | None, AfterValidator(partial(limited, NOT_NEGATIVE))] = None
    top_logprobs: TOPS = None


# ---------------------------------------------------------------- what is wrong, in words

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


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
    if name == "stream_options" and len(path) > 1:  # the only field with fields of its own
        inside, own, shown = StreamOptions, path[1], f"{name}.{path[1]}"
    if error["type"] == "extra_forbidden":
        return f"{shown} is not a field of this request{elsewhere(own, inside)}", name
    if error["type"] == "missing":
        return f"{name} is missing.", name
    if error["type"] == "too_short":
        return f"{shown} must not be empty.", name
    if error["type"] in ("limits", "bias"):
        return f"{shown} {error['msg']}.", name
    return f"{shown} must be {type_in_words(inside.model_fields[own].annotation)}.", name


def elsewhere(name: str, request: type[BaseModel]) -> str:
    """Return what to do about a field that ``request`` doesn't have, as the end of a sentence."""
    for path, other in BODIES.items():
        if request in (ChatBody, CompletionBody) and name in other.model_fields:
            return f", but of {path}; leave it out."
    return f"; {hint(name, request.model_fields) or 'leave it out.'}"
