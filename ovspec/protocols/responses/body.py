"""The body of a request to the Responses API."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, create_model

from ovspec.protocols import unsupported as foreign
from ovspec.protocols.bodies import FIRST, OPTIONS, TOPS, Continued, Foreign, TextBody, idle, options_but, unmet

# Accepted and ignored: what doesn't affect the text, and limits that are never reached here.
WITHOUT_EFFECT = (*foreign.WITHOUT_EFFECT, "context_management", "max_tool_calls", "stream_options", "truncation")
# Refused, unless the value is one of these, which ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "multi_agent": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
}
# What the API has in another form, or not at all.
ELSEWHERE = ("max_tokens", "n", "reasoning_effort")
ITEMS = Annotated[list[dict[str, Any]], FIRST]


OWN = options_but(*ELSEWHERE) | {"max_output_tokens": OPTIONS["max_tokens"]} | idle(*WITHOUT_EFFECT) | unmet(REFUSED)


class ResponseRequest(Continued, create_model("Options", __base__=TextBody, **OWN), Foreign):
    """A chat to be continued, as items."""

    instead: ClassVar = {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }

    input: str | ITEMS = Field(description="The chat so far: a text, or items such as messages and calls.")
    instructions: str | None = Field(None, description="The system prompt, which comes first.")
    reasoning: dict[str, Any] | None = Field(
        None, description='How much the model thinks: {"effort": …}, from "none" to "xhigh".'
    )
    text: dict[str, Any] | None = Field(
        None,
        description='The format of the text: {"format": {"type": "text"}}, "json_object", or "json_schema" with a '
        '"schema" beside it.',
    )
    include: Annotated[list[str], FIRST] | None = Field(
        None, description='What else to report: "message.output_text.logprobs".'
    )
    top_logprobs: TOPS = Field(None, description="Report log-probabilities, and those of this many likely tokens.")
