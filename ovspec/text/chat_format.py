"""How a model's chats are written: its chat template with its tool format and its tags of thinking."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ovspec.base.errors import OvspecError, PromptError
from ovspec.text.answer import find_thinking
from ovspec.text.chat_template import ChatTemplate, Message
from ovspec.text.tool_formats import BY_NAME, FORMATS
from ovspec.text.tool_formats.generic import GENERIC
from ovspec.text.tool_formats.layout import ToolFormat, described, short_id, with_system

# A chat with a tool and a call of it, whose rendering shows the format.
PROBE, PROBE_ARGUMENTS = "probe", {"key": "value"}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}
PROBE_CHAT: list[Message] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "0" * 9, "type": "function", "function": {"name": PROBE, "arguments": PROBE_ARGUMENTS}},
        ],
    },
    {"role": "tool", "tool_call_id": "0" * 9, "name": PROBE, "content": "1"},
]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
# Variables of templates that switch thinking on or off.
SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class CallStyle:
    """How a template wants a message with calls: arguments as an object or as text, no content as "" or null."""

    arguments_as_text: bool = False
    null_content: bool = False

    def styled(self, message: Message) -> Message:
        """Return a message whose arguments are objects in this style."""
        if not message.get("tool_calls"):
            return message
        made = {**message, "content": message["content"] or (None if self.null_content else "")}
        if self.arguments_as_text:
            functions = [call["function"] for call in message["tool_calls"]]
            texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
            made["tool_calls"] = [
                {**call, "function": {**function, "arguments": text}}
                for call, function, text in zip(message["tool_calls"], functions, texts, strict=True)
            ]
        return made


STYLES = [CallStyle(*flags) for flags in itertools.product((False, True), repeat=2)]


class ChatFormat:
    """How a model's chats are written; ``tool_format`` is the name of its tool format, if it isn't to be found."""

    def __init__(self, template: ChatTemplate, tool_format: str | None = None) -> None:
        self.template, self.thinking, self._given = template, find_thinking(template.source), tool_format

    @property
    def tools(self) -> ToolFormat:
        """How the model calls tools."""
        return self._found[0]

    @functools.cached_property
    def _found(self) -> tuple[ToolFormat, CallStyle]:
        """The tool format, and how the template wants messages with calls."""
        found, style = found_format(self.template)
        return (BY_NAME[self._given], style) if self._given else (found, style)

    def prompt(
        self,
        messages: list[Message],
        tools: Sequence[Any] = (),
        effort: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for ``messages``.

        Args:
            messages: OpenAI's; arguments of calls may be JSON texts or objects.
            tools: OpenAI's.
            effort: how much to think, if the template can be told.
            variables: what else the template reads; see ``ChatTemplate.render``.

        Raises:
            OvspecError: the template can't render them.
        PromptError: a call's arguments aren't a JSON object.
        """
        given = dict(variables or {})
        if effort is not None:
            given = self._effort(effort) | given
        if not tools and not any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            return self.template.render(messages, variables=given)
        format, style = self._found
        messages = format.history(with_names(list(map(with_objects, messages)), format.id_length))
        messages = list(map(style.styled, messages))
        if tools and format.native and format.tools_variable in self.template.variables:
            given[format.tools_variable] = list(tools)
            try:
                return self.template.render(messages, variables=given)
            except OvspecError:  # some templates take a description for granted
                given[format.tools_variable] = [*map(with_description, tools)]
        elif tools:
            messages = with_system(messages, described(format, tools))
        return self.template.render(messages, variables=given)

    def _effort(self, effort: str) -> dict[str, Any]:
        """Return the variables that tell the template how much to think."""
        reads = self.template.variables
        if "reasoning_effort" in reads:
            return {"reasoning_effort": {"none": "low", "minimal": "low", "xhigh": "high"}.get(effort, effort)}
        return {name: effort != "none" for name in SWITCHES if name in reads}


def found_format(template: ChatTemplate) -> tuple[ToolFormat, CallStyle]:
    """Return the tool format of a template, and the style in which it takes calls.

    The template renders a call; what comes out shows how the model writes calls.
    """
    for format in FORMATS:
        if format.marks and all(mark in template.source for mark in format.marks):
            return format, CallStyle()
    for style in STYLES:
        try:
            sample = template.render([*map(style.styled, PROBE_CHAT)], variables={"tools": [PROBE_TOOL]}, strict=False)
        except OvspecError:
            continue
        for format in FORMATS:
            calls = (format.begin + text for text in format.spellings(PROBE, PROBE_ARGUMENTS))
            if not format.marks and format is not GENERIC and any(call in sample for call in calls):
                return format, style
    return GENERIC, CallStyle()


def with_description(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {"description": "", **tool["function"]}}


def with_objects(message: Message) -> Message:
    """Return a message whose calls have their arguments as objects; raises PromptError for what is no JSON object."""
    calls = list[Any]()
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            told = f"messages: the arguments of {function.get('name')!s:.80} must be a JSON object"
            raise PromptError(f"{told}; repeat those of the answer.")
        calls.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return {"content": "", **message, "tool_calls": calls} if calls else message


def with_names(messages: list[Message], id_length: int | None) -> list[Message]:
    """Give tool results the names of their tools, and calls ids of the length that the template demands."""
    names, made = dict[str, str](), list[Message]()
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            calls = [{"id": f"call_{len(made)}_{index}", **call} for index, call in enumerate(calls)]
            names |= {call["id"]: call["function"]["name"] for call in calls}
            message["tool_calls"] = [
                {**call, "id": short_id(call["id"], id_length) if id_length else call["id"]} for call in calls
            ]
        if message["role"] == "tool":
            id = message.get("tool_call_id") or next(reversed(names), "")
            if name := names.get(id):
                message = {"name": name, **message}
            message["tool_call_id"] = short_id(id, id_length) if id_length else id
        made.append(message)
    return made
