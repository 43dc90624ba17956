"""Reads requests of Anthropic's API: from a body to a chat and options as all others have them."""

import re
from collections.abc import Iterator
from typing import Any

from ovspec.params.limits import LARGEST_NUMBER
from ovspec.protocols.bodies import RequestError, only_known
from ovspec.protocols.messages.body import MessageRequest
from ovspec.protocols.requests import (
    Ignored,
    Overrides,
    TextRequest,
    ignore,
    left_out,
    overrides_of,
    template_chat,
    wrong,
)
from ovspec.text.chat_template import Message

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# The blocks that each role may have.
ROLES = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
ANY = ("type", "cache_control")
# The fields of each block, with those that have no effect.
BLOCKS: dict[str, tuple[str, ...]] = {
    "text": (*ANY, "text", "citations"),
    "thinking": (*ANY, "thinking", "signature"),
    "redacted_thinking": (*ANY, "data"),
    "tool_use": (*ANY, "id", "name", "input", "caller", "toolset_name"),
    "tool_result": (*ANY, "tool_use_id", "content", "is_error", "toolset_name"),
}
OF_TOOLS = (
    *ANY, "name", "description", "input_schema", "allowed_callers", "defer_loading", "eager_input_streaming", "strict",
)  # fmt: skip
SERVERS_TOOL = re.compile(r"\w+_20\d{6}", re.ASCII)  # the type of a tool that comes with Anthropic's API
# Claude Code's first block of the system prompt. It changes with each request, so that nothing behind it is cached.
BILLING = "x-anthropic-billing-header"


def read_messages(body: MessageRequest) -> TextRequest:
    """Return the request in a body; raises RequestError for what can't be met."""
    overrides, ignored = overrides_of(body), Ignored()
    if overrides.values.get("max_tokens") == 0:
        raise RequestError("`max_tokens` is 0; it must be at least 1, or -1.", "max_tokens")
    if body.stop_sequences:
        overrides.set("stop", body.stop_sequences, "stop_sequences")
    read_tools(body, overrides, ignored)
    read_thinking(body, overrides, ignored)
    read_format(body, overrides, ignored)
    chat = read_chat(body, ignored)
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


def read_tools(body: MessageRequest, overrides: Overrides, ignored: Ignored) -> None:
    """Set the options of tools."""
    if body.tools:
        overrides.values["tools"] = [made for tool in body.tools if (made := tool_of(tool, ignored))]
    if (given := body.tool_choice) is None:
        return
    choice = only_known(given, ("type", "name", "disable_parallel_tool_use"), "tool_choice", ignored)
    kind, alone = choice.get("type"), choice.get("disable_parallel_tool_use")
    if kind == "tool" and isinstance(choice.get("name"), str):
        overrides.values["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    elif isinstance(kind, str) and kind in CHOICES:
        overrides.values["tool_choice"] = CHOICES[kind]
    else:
        told = '{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": …} or {"type": "none"}'
        raise RequestError(f"`tool_choice` must be {told}.", "tool_choice")
    if kind == "any" and not overrides.values.get("tools"):
        raise RequestError("`tool_choice` is any, which needs `tools` that can be called here.", "tool_choice")
    if not isinstance(alone, (bool, type(None))):
        raise RequestError("`tool_choice`: disable_parallel_tool_use must be true or false.", "tool_choice")
    if alone:
        overrides.values["parallel_tool_calls"] = False


def tool_of(tool: dict[str, Any], ignored: Ignored) -> dict[str, Any] | None:
    """Return a tool as OpenAI's API has it; None for one that only Anthropic's servers have."""
    kind = tool.get("type") or "custom"
    if isinstance(kind, str) and SERVERS_TOOL.fullmatch(kind):
        ignore(f"tools.{kind}", ignored)
        return None
    if kind != "custom":
        raise RequestError(f"`tools` has a tool of the type {kind!s:.40}; only custom ones can be called.", "tools")
    tool = only_known(tool, OF_TOOLS, "tools", ignored)
    if not isinstance(schema := tool.get("input_schema"), dict):
        told = f"`tools`: {tool.get('name')!s:.80} needs an input_schema, which is a JSON schema of an object."
        raise RequestError(told, "tools")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    return {"type": "function", "function": {name: each for name, each in function.items() if each is not None}}


def read_thinking(body: MessageRequest, overrides: Overrides, ignored: Ignored) -> None:
    """Set how much the model thinks."""
    effort, kind = (body.output_config or {}).get("effort"), None
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        told = f"`output_config` has an effort of {effort!r:.40}; it must be one of {', '.join(EFFORTS)}."
        raise RequestError(told, "output_config")
    if body.thinking is not None:
        thinking = only_known(body.thinking, ("type", "budget_tokens", "display"), "thinking", ignored)
        kind, budget = thinking.get("type"), thinking.get("budget_tokens")
        if kind not in ("enabled", "adaptive", "disabled"):
            told = '{"type": "enabled", "budget_tokens": …}, {"type": "adaptive"} or {"type": "disabled"}'
            raise RequestError(f"`thinking` must be {told}.", "thinking")
        if kind == "enabled" and budget is not None:
            if type(budget) is not int or not 0 < budget <= LARGEST_NUMBER:
                raise RequestError("`thinking`: budget_tokens must be a whole number of 1 or more.", "thinking")
            overrides.set("max_thinking_tokens", budget, "thinking")
    if kind == "disabled":
        overrides.set("reasoning_effort", "none", "thinking")
    elif effort is not None:
        overrides.set("reasoning_effort", EFFORTS[effort], "output_config")
    elif kind == "enabled":  # which switches thinking on where a chat template has a switch
        overrides.values.setdefault("reasoning_effort", "medium")


def read_format(body: MessageRequest, overrides: Overrides, ignored: Ignored) -> None:
    """Set the schema that the text must match."""
    config = only_known(body.output_config or {}, ("effort", "format"), "output_config", ignored)
    for field, format in (("output_config", config.get("format")), ("output_format", body.output_format)):
        if format is None:
            continue
        schema = format.get("schema") if isinstance(format, dict) and format.get("type") == "json_schema" else None
        if not isinstance(schema, dict):
            told = f'The format in `{field}` must be {{"type": "json_schema", "schema": …}}.'
            raise RequestError(told, field)
        only_known(format, ("type", "schema"), field, ignored)
        overrides.set_schema({"name": "output", "schema": schema}, field)  # as other response formats


# ---------------------------------------------------------------- messages


def read_chat(body: MessageRequest, ignored: Ignored) -> list[Message]:
    """Return the messages as chat templates take them."""
    chat = [*messages_of({"role": "system", "content": body.system}, ignored)] if body.system else []
    last = max((at for at, message in enumerate(body.messages) if asks(message)), default=-1)
    for at, message in enumerate(body.messages):
        chat += messages_of(message, ignored, at == last)
    return template_chat(chat, ignored)


def asks(message: Message) -> bool:
    """Return whether the user says something in a message, which doesn't only have results of tools."""
    content = message.get("content")
    blocks = content if isinstance(content, list) and content else [{}]
    results = [isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks]
    return message.get("role") == "user" and not all(results)


def messages_of(message: Message, ignored: Ignored, strict: bool = False) -> Iterator[Message]:
    """Yield a message as OpenAI's API has it: the results of tools are messages of their own.

    All but these must be readable if ``strict``.
    """
    message = only_known(message, ("role", "content"), "messages", ignored)
    role, content = message.get("role"), message.get("content")
    if role == "developer":
        role = "system"
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"a role is {role!r:.40}; it must be user, assistant or system.")
    blocks = blocks_of(content, ROLES[role], ignored, strict or role == "system")
    if role == "system" and isinstance(content, list):
        blocks = without_billing(blocks, ignored)
    results = [block for block in blocks if block["type"] == "tool_result"]
    for block in results:
        if block.get("is_error"):  # no chat template tells it
            ignore("tool_result.is_error", ignored)
        text = joined(blocks_of(block.get("content"), ("text",), ignored), "text")
        yield {"role": "tool", "tool_call_id": text_in(block, "tool_use_id"), "content": text}
    if len(results) == len(blocks) and (results or role == "system"):
        return
    made: Message = {"role": role, "content": joined(blocks, "text")}
    if thinking := joined(blocks, "thinking"):
        made["reasoning_content"] = thinking
    if calls := [call_of(block) for block in blocks if block["type"] == "tool_use"]:
        made["tool_calls"] = calls
    yield made


def without_billing(blocks: list[dict[str, Any]], ignored: Ignored) -> list[dict[str, Any]]:
    """Return the blocks of a system prompt without Claude Code's billing header."""
    kept = [block for block in blocks if not text_in(block, "text").startswith(BILLING)]
    if len(kept) < len(blocks):
        ignore(f"system.{BILLING}", ignored)
    return kept


def blocks_of(content: Any, kinds: tuple[str, ...], ignored: Ignored, strict: bool = False) -> list[dict[str, Any]]:
    """Return the blocks of a content, a string or blocks, without unknown fields.

    Raises:
        RequestError: it isn't that, or a block isn't of these ``kinds``, and is of another role or ``strict``.
    """
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not content and not strict and (content is None or isinstance(content, list)):
        return []
    if not isinstance(content, list) or not content or not all(isinstance(block, dict) for block in content):
        raise wrong("each needs content, which is a string or a list of blocks.")
    return [block_of(block, kinds, ignored, strict) for block in content]


def block_of(block: dict[str, Any], kinds: tuple[str, ...], ignored: Ignored, strict: bool) -> dict[str, Any]:
    """Return a block without unknown fields, or with what the model is told instead of it; see ``blocks_of``."""
    if (kind := str(block.get("type"))) in kinds:
        return only_known(block, BLOCKS[kind], kind, ignored)
    if strict or kind in BLOCKS:
        told = f" here; only {', '.join(kinds)} can" if kind in BLOCKS else "; only text can"
        raise wrong(f"content of the type {kind:.40} can't be read{told}.")
    return {"type": "text", "text": left_out(kind, ignored)}


def joined(blocks: list[dict[str, Any]], kind: str) -> str:
    """Return the text of the blocks of a kind."""
    return "\n".join(text_in(block, kind) for block in blocks if block["type"] == kind)


def text_in(block: dict[str, Any], name: str) -> str:
    if not isinstance(text := block.get(name), str):
        raise wrong(f"a block of the type {block['type']} needs a {name}, which is a string.")
    return text


def call_of(block: dict[str, Any]) -> dict[str, Any]:
    """Return a call as OpenAI's API has it."""
    function = {"name": text_in(block, "name"), "arguments": block.get("input")}
    return {"id": text_in(block, "id"), "type": "function", "function": function}
