"""Reads requests of Anthropic's API: from a body to a chat and options in the common form."""

import re
from collections.abc import Iterator

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.params.limits import LARGEST_NUMBER
from ovspec.protocols.bodies import RequestError, keep_known_fields
from ovspec.protocols.chat.request import describe_omitted_part, make_message_error, to_template_messages
from ovspec.protocols.messages.body import MessagesRequest
from ovspec.protocols.requests import IgnoredNames, Overrides, TextRequest, add_ignored, read_overrides
from ovspec.text.chat_template import Message

MESSAGES_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# The types of blocks allowed in each kind of message, and in a tool result.
BLOCKS_OF_PLACE = {
    "user message": ("text", "tool_result"),
    "assistant message": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system message": ("text",),
    "tool result": ("text",),
}
COMMON_BLOCK_FIELDS = ("type", "cache_control")
# The fields of each block, including fields without effect.
FIELDS_OF_BLOCK: dict[str, tuple[str, ...]] = {
    "text": (*COMMON_BLOCK_FIELDS, "text", "citations"),
    "thinking": (*COMMON_BLOCK_FIELDS, "thinking", "signature"),
    "redacted_thinking": (*COMMON_BLOCK_FIELDS, "data"),
    "tool_use": (*COMMON_BLOCK_FIELDS, "id", "name", "input", "caller", "toolset_name"),
    "tool_result": (*COMMON_BLOCK_FIELDS, "tool_use_id", "content", "is_error", "toolset_name"),
}
TOOL_FIELDS = (
    *COMMON_BLOCK_FIELDS, "name", "description", "input_schema",
    "allowed_callers", "defer_loading", "eager_input_streaming", "strict",
)  # fmt: skip
SERVER_TOOL_TYPE = re.compile(r"\w+_20\d{6}", re.ASCII)  # the type of Anthropic's server tools
# Claude Code's first block of the system prompt. It changes with each request and would defeat the prefix cache.
BILLING_HEADER = "x-anthropic-billing-header"


def read_messages_request(body: MessagesRequest) -> TextRequest:
    """Return the request in a body; raises RequestError for an invalid request."""
    overrides = read_overrides(body)
    ignored = IgnoredNames()
    if overrides.values.get("max_tokens") == 0:
        raise RequestError("`max_tokens` is 0; it must be at least 1, or -1 for no limit.", "max_tokens")
    if body.stop_sequences:
        overrides.set_option("stop", body.stop_sequences, "stop_sequences")
    read_tool_options(body, overrides, ignored)
    read_thinking_options(body, overrides, ignored)
    read_output_format(body, overrides, ignored)
    chat = read_conversation(body, ignored)
    return TextRequest(
        "message",
        [chat],
        overrides,
        body.model,
        stream=bool(body.stream),
        return_record=bool(body.return_record),
        draft=body.draft,
        ignored=(*ignored,),
    )


# ---------------------------------------------------------------- options


def read_tool_options(body: MessagesRequest, overrides: Overrides, ignored: IgnoredNames) -> None:
    """Set the options of tools."""
    if body.tools:
        tools = [to_openai_tool(tool, ignored) for tool in body.tools]
        overrides.values["tools"] = [tool for tool in tools if tool]
    if body.tool_choice is None:
        return
    known_fields = ("type", "name", "disable_parallel_tool_use")
    tool_choice = keep_known_fields(body.tool_choice, known_fields, "tool_choice", ignored)
    choice_type = tool_choice.get("type")
    only_one_call = tool_choice.get("disable_parallel_tool_use")
    if choice_type == "tool" and isinstance(tool_choice.get("name"), str):
        overrides.values["tool_choice"] = {"type": "function", "function": {"name": tool_choice["name"]}}
    elif isinstance(choice_type, str) and choice_type in TOOL_CHOICES:
        overrides.values["tool_choice"] = TOOL_CHOICES[choice_type]
    else:
        allowed_choices = '{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": …} or {"type": "none"}'
        raise RequestError(f"`tool_choice` must be {allowed_choices}.", "tool_choice")
    if choice_type == "any" and not overrides.values.get("tools"):
        raise RequestError(
            "`tool_choice` is any, but `tools` has no custom tool; add a custom tool to `tools`.", "tool_choice"
        )
    if not isinstance(only_one_call, (bool, type(None))):
        raise RequestError("`tool_choice`: disable_parallel_tool_use must be true or false.", "tool_choice")
    if only_one_call:
        overrides.values["parallel_tool_calls"] = False


def to_openai_tool(tool: JsonObject, ignored: IgnoredNames) -> JsonObject | None:
    """Return a tool in the form of OpenAI's API; None for Anthropic's server tools."""
    tool_type = tool.get("type") or "custom"
    if isinstance(tool_type, str) and SERVER_TOOL_TYPE.fullmatch(tool_type):
        add_ignored(f"tools.{tool_type}", ignored)
        return None
    if tool_type != "custom":
        raise RequestError(
            f"`tools` has a tool of the type {tool_type!s:.40}; only the type custom is supported.", "tools"
        )
    tool = keep_known_fields(tool, TOOL_FIELDS, "tools", ignored)
    if not isinstance(schema := tool.get("input_schema"), dict):
        message = f"`tools`: the tool {tool.get('name')!s:.80} needs an input_schema, a JSON schema."
        raise RequestError(message, "tools")
    function_fields = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    return {
        "type": "function",
        "function": {field: value for field, value in function_fields.items() if value is not None},
    }


def read_thinking_options(body: MessagesRequest, overrides: Overrides, ignored: IgnoredNames) -> None:
    """Set the amount of thinking."""
    effort = (body.output_config or {}).get("effort")
    thinking_type = None
    if effort is not None and (not isinstance(effort, str) or effort not in MESSAGES_EFFORTS):
        message = f"`output_config`: the effort is {effort!r:.40}; it must be one of {', '.join(MESSAGES_EFFORTS)}."
        raise RequestError(message, "output_config")
    if body.thinking is not None:
        thinking = keep_known_fields(body.thinking, ("type", "budget_tokens", "display"), "thinking", ignored)
        thinking_type = thinking.get("type")
        thinking_budget = thinking.get("budget_tokens")
        if thinking_type not in ("enabled", "adaptive", "disabled"):
            allowed_types = '{"type": "enabled", "budget_tokens": …}, {"type": "adaptive"} or {"type": "disabled"}'
            raise RequestError(f"`thinking` must be {allowed_types}.", "thinking")
        if thinking_type == "enabled" and thinking_budget is not None:
            if type(thinking_budget) is not int or not 0 < thinking_budget <= LARGEST_NUMBER:
                raise RequestError("`thinking`: budget_tokens must be a whole number of 1 or more.", "thinking")
            overrides.set_option("max_thinking_tokens", thinking_budget, "thinking")
    if thinking_type == "disabled":
        overrides.set_option("reasoning_effort", "none", "thinking")
    elif effort is not None:
        overrides.set_option("reasoning_effort", MESSAGES_EFFORTS[effort], "output_config")
    elif thinking_type == "enabled":  # turns thinking on, if the chat template has a switch
        overrides.values.setdefault("reasoning_effort", "medium")


def read_output_format(body: MessagesRequest, overrides: Overrides, ignored: IgnoredNames) -> None:
    """Set the schema of the text."""
    output_config = keep_known_fields(body.output_config or {}, ("effort", "format"), "output_config", ignored)
    for field, output_format in (("output_config", output_config.get("format")), ("output_format", body.output_format)):
        if output_format is None:
            continue
        is_schema = isinstance(output_format, dict) and output_format.get("type") == "json_schema"
        schema = output_format.get("schema") if is_schema else None
        if not isinstance(schema, dict):
            message = f'The format in `{field}` must be {{"type": "json_schema", "schema": …}}.'
            raise RequestError(message, field)
        keep_known_fields(output_format, ("type", "schema"), field, ignored)
        overrides.set_schema({"name": "output", "schema": schema}, field)  # like other response formats


# ---------------------------------------------------------------- messages


def read_conversation(body: MessagesRequest, ignored: IgnoredNames) -> list[Message]:
    """Return the messages in the form for chat templates."""
    chat = list[Message]()
    if body.system:
        chat += to_openai_messages({"role": "system", "content": body.system}, ignored)
    user_turns = [index for index, message in enumerate(body.messages) if is_user_turn(message)]
    last_user_turn = max(user_turns, default=-1)
    for index, message in enumerate(body.messages):
        chat += to_openai_messages(message, ignored, index == last_user_turn)
    return to_template_messages(chat, ignored)


def is_user_turn(message: Message) -> bool:
    """Return whether a message is the user's, with more than tool results."""
    content = message.get("content")
    if message.get("role") != "user" or not isinstance(content, list) or not content:
        return message.get("role") == "user"
    return not all(isinstance(block, dict) and block.get("type") == "tool_result" for block in content)


def to_openai_messages(message: Message, ignored: IgnoredNames, text_only: bool = False) -> Iterator[Message]:
    """Yield a message in the form of OpenAI's API, with tool results as separate messages.

    With ``text_only``, everything except tool results must be readable.
    """
    message = keep_known_fields(message, ("role", "content"), "messages", ignored)
    role = message.get("role")
    content = message.get("content")
    if role == "developer":
        role = "system"
    if not isinstance(role, str) or f"{role} message" not in BLOCKS_OF_PLACE:
        raise make_message_error(f"the role of a message is {role!r:.40}; it must be user, assistant or system.")
    blocks = read_blocks(content, f"{role} message", ignored, text_only or role == "system")
    if role == "system" and isinstance(content, list):
        blocks = drop_billing_header(blocks, ignored)
    tool_results = [block for block in blocks if block["type"] == "tool_result"]
    for block in tool_results:
        if block.get("is_error"):  # chat templates have no place for it
            add_ignored("tool_result.is_error", ignored)
        text = join_block_texts(read_blocks(block.get("content"), "tool result", ignored), "text")
        yield {"role": "tool", "tool_call_id": read_block_string(block, "tool_use_id"), "content": text}
    if len(tool_results) == len(blocks) and (tool_results or role == "system"):
        return
    openai_message: Message = {"role": role, "content": join_block_texts(blocks, "text")}
    if thinking := join_block_texts(blocks, "thinking"):
        openai_message["reasoning_content"] = thinking
    if calls := [to_openai_call(block) for block in blocks if block["type"] == "tool_use"]:
        openai_message["tool_calls"] = calls
    yield openai_message


def drop_billing_header(blocks: list[JsonObject], ignored: IgnoredNames) -> list[JsonObject]:
    """Return the blocks of a system prompt without Claude Code's billing header."""
    kept_blocks = [block for block in blocks if not read_block_string(block, "text").startswith(BILLING_HEADER)]
    if len(kept_blocks) < len(blocks):
        add_ignored(f"system.{BILLING_HEADER}", ignored)
    return kept_blocks


def read_blocks(content: JsonValue, place: str, ignored: IgnoredNames, text_only: bool = False) -> list[JsonObject]:
    """Return the blocks of a content, a string or blocks, without unknown fields.

    Raises:
        RequestError: the content is neither, or a block belongs to another of ``BLOCKS_OF_PLACE`` than ``place``, or
            can't be left out because of ``text_only``.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not content and not text_only and (content is None or isinstance(content, list)):
        return []
    if not isinstance(content, list) or not content or not all(isinstance(block, dict) for block in content):
        raise make_message_error("each message needs content: a string, or a list of content blocks.")
    return [read_block(block, place, ignored, text_only) for block in content]


def read_block(block: JsonObject, place: str, ignored: IgnoredNames, text_only: bool) -> JsonObject:
    """Return a block without unknown fields, or a text as its placeholder; see ``read_blocks``."""
    block_type = str(block.get("type"))
    allowed_types = BLOCKS_OF_PLACE[place]
    if block_type in allowed_types:
        return keep_known_fields(block, FIELDS_OF_BLOCK[block_type], block_type, ignored)
    if block_type in FIELDS_OF_BLOCK:
        raise make_message_error(
            f"content of the type {block_type} is not supported in {place}s, only {' or '.join(allowed_types)}."
        )
    if text_only:
        raise make_message_error(f"content of the type {block_type:.40} is not supported; send text.")
    return {"type": "text", "text": describe_omitted_part(block_type, ignored)}


def join_block_texts(blocks: list[JsonObject], block_type: str) -> str:
    """Return the joined text of the blocks of a type."""
    return "\n".join(read_block_string(block, block_type) for block in blocks if block["type"] == block_type)


def read_block_string(block: JsonObject, field: str) -> str:
    if not isinstance(text := block.get(field), str):
        raise make_message_error(f"a content block of the type {block['type']} must have the field {field}, a string.")
    return text


def to_openai_call(block: JsonObject) -> JsonObject:
    """Return a call in the form of OpenAI's API."""
    function_fields = {"name": read_block_string(block, "name"), "arguments": block.get("input")}
    return {"id": read_block_string(block, "id"), "type": "function", "function": function_fields}
