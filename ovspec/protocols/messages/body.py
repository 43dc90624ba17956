"""The body of a request of Anthropic's API."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, create_model

from ovspec.protocols.bodies import CHAT, FIRST, TextBody, idle, options_but, unmet

# Accepted and ignored: fields that don't affect the text.
WITHOUT_EFFECT = (
    "stream_options",
    *("anthropic_beta", "anthropic_version", "betas", "billing_policy", "cache_control", "diagnostics"),
    *("fallback_credit_token", "fallbacks", "inference_geo", "metadata", "service_tier", "speed"),
    *("user_profile_id", "workspace_id"),
)
# Refused, unless the value is one of these, which ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "n": (1,)}
# Our options that Anthropic's API has in other fields, or can't have.
ELSEWHERE = ("stop", "n", "tools", "tool_choice", "parallel_tool_calls")


class MessageRequest(
    create_model("Settings", __base__=TextBody, **options_but(*ELSEWHERE), **idle(*WITHOUT_EFFECT), **unmet(REFUSED))
):
    """A conversation to be continued."""

    instead: ClassVar = {
        "stop": "stop_sequences",
        "response_format": "output_config",
    }
    messages: CHAT = Field(
        description="The conversation so far: objects with role (user, assistant or system) and content, a string or "
        "blocks of the types text, thinking, tool_use and tool_result."
    )
    system: str | Annotated[list[dict[str, Any]], FIRST] | None = Field(
        None, description="The system prompt: a string, or blocks of the type text."
    )
    stop_sequences: Annotated[list[str], FIRST] | None = Field(None, description="Strings that end the text.")
    tools: Annotated[list[dict[str, Any]], FIRST] | None = Field(
        None,
        description="What the model may call: objects with name, description and input_schema. Tools that Anthropic's "
        "servers run are left out.",
    )
    tool_choice: dict[str, Any] | None = Field(
        None,
        description='What may be called: an object with the type "auto", "any", "none", or "tool" and a name; with '
        "disable_parallel_tool_use an answer has one call at most.",
    )
    thinking: dict[str, Any] | None = Field(
        None,
        description='Whether the model thinks: an object with the type "enabled" and budget_tokens, "adaptive" or '
        '"disabled".',
    )
    output_config: dict[str, Any] | None = Field(
        None, description='How much the model thinks, "effort"; and a "format" of the type "json_schema" with a schema.'
    )
    output_format: dict[str, Any] | None = Field(None, description="An older name of the format in output_config.")
