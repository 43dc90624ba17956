"""The requests that the API takes, as pydantic models made from the options' declarations."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, WrapValidator, create_model, model_validator

from ovspec.integrations.openai_batch import WITHOUT_EFFECT
from ovspec.options import GENERATE
from ovspec.options.option import LARGEST, Option

# Options that a batch file sets for all of its lines, and a request to the server for itself.
OF_SERVER = ("accept", "lookahead")
PART = 100


def in_parts(value: Any, check: Any) -> Any:
    """Check a list or object part by part, up to the first wrong one: pydantic keeps an error for each wrong item."""
    if not isinstance(value, (list, dict)) or len(value) <= PART:
        return check(value)
    items = iter(value.items() if isinstance(value, dict) else value)
    while part := type(value)(islice(items, PART)):
        check(part)
    return value


LONG = WrapValidator(in_parts)
CHAT = Annotated[list[dict[str, Any]], Field(min_length=1), LONG]
IDS = Annotated[list[int], LONG]


class Fields(BaseModel):
    """The fields of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: Any) -> Any:
        """Leave one field that is unknown: pydantic would keep an error for each."""
        unknown = [name for name in given if name not in cls.model_fields] if isinstance(given, dict) else []
        if len(unknown) < 2:
            return given
        return {name: value for name, value in given.items() if name in cls.model_fields or name == unknown[0]}

    def given(self) -> dict[str, Any]:
        """Return the fields that the client has set."""
        values = {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}
        return {name: each.given() if isinstance(each, Fields) else each for name, each in values.items()}


class StreamOptions(Fields):
    """What a stream tells besides the text."""

    include_usage: bool | None = Field(None, description="Send the usage in a last chunk.")


class ErrorText(BaseModel):
    """What went wrong."""

    message: str = Field(description="A sentence that says what to do.")
    type: str = Field(description='The kind of error, such as "invalid_request_error".')
    param: str | None = Field(description="The field that is wrong.")
    code: str | None = Field(description='A word for programs, such as "model_not_found".')


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorText


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


def in_json(kind: Any) -> Any:
    """Return the type that a value of an option has in JSON."""
    origin: Any = get_origin(kind)
    inner = get_args(kind)
    if origin in (Union, types.UnionType):
        made = in_json(inner[0])
        for each in inner[1:]:
            made = made | in_json(each)
        return made
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Annotated[dict[str, inner[1]] if inner[0] is int else dict[inner], LONG]  # type: ignore[misc, valid-type]
    if isinstance(origin, type) and issubclass(origin, Collection):
        return Annotated[list[inner[0]], LONG]  # type: ignore[valid-type]
    return kind


def field_of(kind: Any, option: Option) -> tuple[Any, Any]:
    """Return the type and the field of an option; every field may be left out or null."""
    shown = option.help + f" Default: {option.initially}." * bool(option.initially)
    limits, bounds = option.limits, dict[str, Any]()
    if limits and limits.special is None and limits.least > -LARGEST:
        bounds["gt" if limits.above else "ge"] = limits.least
        if limits.most < LARGEST:
            bounds["le"] = limits.most
    wanted = in_json(kind if option.request in (True, False) else option.request)
    if bounds and get_origin(wanted) in (Union, types.UnionType):  # only its numbers have bounds
        bounds = {}
    return wanted | None, Field(None, description=shown, **bounds)


def fields_of_options() -> dict[str, tuple[Any, Any]]:
    """Return the fields for all options that a request may set, under all of their names."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, (kind, option) in GENERATE.items():
        if option.request or name in OF_SERVER:
            for spelling in (name, *option.aliases):
                found[spelling] = field_of(kind, option)
    return found


COMMON: dict[str, Any] = {
    **fields_of_options(),
    "model": (str | None, Field(None, description="The model's name, as GET /v1/models tells it.")),
    "stream": (bool | None, Field(None, description="Send the text as server-sent events while it is generated.")),
    "stream_options": (StreamOptions | None, Field(None, description="What a stream tells besides the text.")),
    "response_format": (
        dict[str, Any] | None,
        Field(
            None,
            description='OpenAI\'s response format: {"type": "text"}, "json_object" or "json_schema". '
            'Beside "json_object" a "schema" may be given, as in llama.cpp. Not with a grammar option.',
        ),
    ),
    "draft": (
        str | None,
        Field(None, description='What may propose tokens: "none", or some of what the server was started with.'),
    ),
    "return_record": (
        bool | None,
        Field(
            None, description="Add to each choice the record that 'ovspec verify' checks; it names the model's folder."
        ),
    ),
    **{name: (Any, Field(None, description="Has no effect.")) for name in sorted(WITHOUT_EFFECT - {"model"})},
}
ChatRequest = create_model(
    "ChatRequest",
    __base__=Fields,
    __doc__="A chat to be continued.",
    **COMMON,
    messages=(CHAT, Field(description="The chat so far: objects with role and content.")),
    logprobs=(bool | None, Field(None, description="Report each token's log-probability.")),
    top_logprobs=(int | None, Field(None, ge=0, le=100, description="And those of this many of the most likely ones.")),
)
CompletionRequest = create_model(
    "CompletionRequest",
    __base__=Fields,
    __doc__="Texts to be continued.",
    **COMMON,
    prompt=(
        str | Annotated[list[str], LONG] | IDS | Annotated[list[IDS], LONG],
        Field(description="A text or token ids, or a list of these."),
    ),
    echo=(bool | None, Field(None, description="Repeat the prompt in front of each text.")),
    logprobs=(
        int | None,
        Field(None, ge=0, le=100, description="Report each token's log-probability, and those of this many others."),
    ),
)
