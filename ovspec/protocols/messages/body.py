"""The body of a request of Anthropic's API."""

from typing import Annotated, ClassVar

from pydantic import Field, create_model

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.protocols.bodies import (
    CHAT_MESSAGES,
    FAIL_FAST,
    TextRequestBody,
    define_ignored_fields,
    define_refused_fields,
    option_fields_except,
)

# Accepted and ignored: fields without effect on the text.
MESSAGES_FIELDS_WITHOUT_EFFECT = (
    "stream_options",
    *("anthropic_beta", "anthropic_version", "betas", "billing_policy", "cache_control", "diagnostics"),
    *("fallback_credit_token", "fallbacks", "inference_geo", "metadata", "service_tier", "speed"),
    *("user_profile_id", "workspace_id"),
)
# Refused, except with these values without effect.
REFUSED_MESSAGES_FIELDS: dict[str, tuple[JsonValue, ...]] = {"mcp_servers": ([],), "n": (1,)}
# Our options in other fields of Anthropic's API, or missing there.
OPTIONS_OF_OTHER_NAME = ("stop", "n", "tools", "tool_choice", "parallel_tool_calls")


class MessagesRequest(
    create_model(
        "Settings",
        __base__=TextRequestBody,
        **option_fields_except(*OPTIONS_OF_OTHER_NAME),
        **define_ignored_fields(*MESSAGES_FIELDS_WITHOUT_EFFECT),
        **define_refused_fields(REFUSED_MESSAGES_FIELDS),
    )
):
    """A conversation to be continued."""

    replacement_by_field: ClassVar = {
        "stop": "stop_sequences",
        "response_format": "output_config",
    }
    messages: CHAT_MESSAGES = Field(
        description="The chat: messages with role (user, assistant or system) and content, a string or "
        "blocks of the types text, thinking, tool_use and tool_result."
    )
    system: str | Annotated[list[JsonObject], FAIL_FAST] | None = Field(
        None, description="The system prompt: a string, or blocks of the type text."
    )
    stop_sequences: Annotated[list[str], FAIL_FAST] | None = Field(None, description="Stop strings.")
    tools: Annotated[list[JsonObject], FAIL_FAST] | None = Field(
        None,
        description="Tools for the model to call: objects with name, description and input_schema. Anthropic's "
        "server tools are left out.",
    )
    tool_choice: JsonObject | None = Field(
        None,
        description='Allowed tool calls: an object with the type "auto", "any", "none", or "tool" and a name; '
        "disable_parallel_tool_use limits an answer to a single call.",
    )
    thinking: JsonObject | None = Field(
        None,
        description='Thinking: an object with the type "enabled" and budget_tokens, "adaptive" or "disabled".',
    )
    output_config: JsonObject | None = Field(
        None, description='An object with effort (reasoning effort) and format (type "json_schema", with a schema).'
    )
    output_format: JsonObject | None = Field(None, description="Same as the format in output_config (older name).")
