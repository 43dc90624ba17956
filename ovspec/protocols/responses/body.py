"""The body of a request to the Responses API."""

from typing import Annotated, ClassVar

from pydantic import Field, create_model

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.protocols import unsupported as foreign
from ovspec.protocols.bodies import (
    FAIL_FAST,
    OPTION_FIELDS,
    TOP_LOGPROBS,
    ChatEndingFields,
    OtherServersFields,
    TextRequestBody,
    define_ignored_fields,
    define_refused_fields,
    option_fields_except,
)

# Accepted and ignored: fields without effect on the text, and limits never reached here.
RESPONSES_FIELDS_WITHOUT_EFFECT = (
    *foreign.FIELDS_WITHOUT_EFFECT,
    "context_management",
    "max_tool_calls",
    "stream_options",
    "truncation",
)
# Refused, except with these values without effect.
REFUSED_RESPONSES_FIELDS: dict[str, tuple[JsonValue, ...]] = {
    "background": (False,),
    "conversation": (),
    "multi_agent": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
}
# Options in another form in this API, or missing in it.
RESPONSES_OWN_OPTIONS = ("max_tokens", "n", "reasoning_effort")
INPUT_ITEMS = Annotated[list[JsonObject], FAIL_FAST]


RESPONSES_FIELDS = (
    option_fields_except(*RESPONSES_OWN_OPTIONS)
    | {"max_output_tokens": OPTION_FIELDS["max_tokens"]}
    | define_ignored_fields(*RESPONSES_FIELDS_WITHOUT_EFFECT)
    | define_refused_fields(REFUSED_RESPONSES_FIELDS)
)


class ResponsesRequest(
    ChatEndingFields, create_model("Options", __base__=TextRequestBody, **RESPONSES_FIELDS), OtherServersFields
):
    """A chat to be continued, as items."""

    replacement_by_field: ClassVar = {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: str | INPUT_ITEMS = Field(description="The chat: a string, or items such as messages and function calls.")
    instructions: str | None = Field(None, description="System prompt, put before the input.")
    reasoning: JsonObject | None = Field(None, description='Reasoning effort: {"effort": …}, from "none" to "xhigh".')
    text: JsonObject | None = Field(
        None,
        description='The format of the text: {"format": {"type": "text"}}, "json_object", or "json_schema" with a '
        '"schema" next to the type.',
    )
    include: Annotated[list[str], FAIL_FAST] | None = Field(
        None, description='["message.output_text.logprobs"] adds log-probabilities to the text.'
    )
    top_logprobs: TOP_LOGPROBS = Field(None, description="Report log-probabilities, with this many top alternatives.")
