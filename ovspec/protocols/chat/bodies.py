"""The bodies of OpenAI's chats and completions, and of batch files."""

from typing import Annotated, Any

from pydantic import Field, create_model

from ovspec.params.limits import NOT_NEGATIVE
from ovspec.protocols.bodies import (
    CHAT_MESSAGES,
    OPTION_FIELDS,
    PROMPT_OR_PROMPTS,
    TOP_LOGPROBS,
    ChatEndingFields,
    OtherServersFields,
    RequestBody,
    TextRequestBody,
    define_ignored_fields,
    define_refused_fields,
    make_option_validator,
)
from ovspec.protocols.unsupported import FIELDS_WITHOUT_EFFECT, REFUSED_STREAM_FIELDS


class StreamOptions(
    create_model(
        "Stream",
        __base__=RequestBody,
        **define_ignored_fields("include_obfuscation"),
        **define_refused_fields(REFUSED_STREAM_FIELDS),
    )
):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="Send the token counts (usage) in a final chunk.")


class OpenAIBody(
    create_model("Options", __base__=TextRequestBody, **OPTION_FIELDS, **define_ignored_fields(*FIELDS_WITHOUT_EFFECT))
):
    """The common fields of requests in OpenAI's older APIs."""

    response_format: dict[str, Any] | None = Field(
        None,
        description='OpenAI\'s response format, of the type "text", "json_object" or "json_schema". A '
        '"schema" next to the type works too, as in llama.cpp. Can\'t be combined with grammar options.',
    )
    stream_options: StreamOptions | None = Field(None, description='{"include_usage": true} adds token counts.')


class InsideFields(RequestBody):
    """How a text came about."""

    return_token_sources: bool | None = Field(
        None, description="Add each token of a text with its source: the drafter, or the model itself."
    )
    timings_per_token: bool | None = Field(
        None, description="Add token counts and times in llama.cpp's format, also to each chunk of a stream."
    )


class ChatBody(ChatEndingFields, OpenAIBody):
    """A chat to be continued."""

    messages: CHAT_MESSAGES = Field(description="The chat: messages with role and content.")
    logprobs: bool | None = Field(None, description="Report each token's log-probability.")
    top_logprobs: TOP_LOGPROBS = Field(None, description="Also report this many top alternatives at each position.")


class CompletionBody(OpenAIBody):
    """Texts to be continued."""

    prompt: PROMPT_OR_PROMPTS = Field(description="A prompt as a string or as token ids, or a list of prompts.")
    echo: bool | None = Field(None, description="Return the prompt in front of each text.")
    logprobs: TOP_LOGPROBS = Field(
        None, description="Report each token's log-probability, and this many top alternatives."
    )


class BatchLineBody(ChatEndingFields, OpenAIBody):
    """A line of a batch file other than a request of OpenAI's API."""

    messages: CHAT_MESSAGES | None = None
    prompt: PROMPT_OR_PROMPTS | None = None
    echo: bool | None = None
    logprobs: Annotated[Any, make_option_validator(bool | int, NOT_NEGATIVE)] = None
    top_logprobs: TOP_LOGPROBS = None


class ChatRequest(ChatBody, InsideFields, OtherServersFields):
    """A chat to be continued."""


class CompletionRequest(CompletionBody, InsideFields, OtherServersFields):
    """Texts to be continued."""

    suffix: str | None = Field(
        None,
        description="Text after the gap, for fill-in-the-middle; the prompt is the text before it. Can't be combined "
        "with echo, several prompts or token ids.",
    )
