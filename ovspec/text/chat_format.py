"""A model's chat format: its chat template with its tool format and its tags of thinking."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ovspec.base.errors import PromptError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.base.surrogates import replace_half_surrogates
from ovspec.params.tool_formats import TOOL_FORMATS, TOOL_FORMATS_BY_NAME
from ovspec.params.tool_formats.generic import GENERIC
from ovspec.params.tool_formats.layout import (
    ToolFormat,
    add_to_system_prompt,
    append_user_text_to_results,
    describe_tools,
    join_consecutive_messages,
    join_system_messages,
    shorten_call_id,
    split_calls,
)
from ovspec.text.answer import detect_thinking_format
from ovspec.text.chat_template import ChatTemplate, Message, TemplateError

# A chat with a tool and two calls of it; its rendering shows the template's format.
PROBE_NAME = "probe"
PROBE_SYSTEM = "You probe."
PROBE_CALLS: list[tuple[str, JsonObject]] = [(PROBE_NAME, {"key": "value", "count": 1}), (PROBE_NAME, {})]
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {
                "key": {"type": "string", "description": "A key."},
                "count": {"type": "integer", "description": "A number."},
            },
        },
    },
}
PROBE_CHAT: list[Message] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "0" * 9, "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in PROBE_CALLS
        ],
    },
    *({"role": "tool", "tool_call_id": "0" * 9, "name": name, "content": "1"} for name, _ in PROBE_CALLS),
]
PROBE_PARTS = [{"type": "text", "text": text} for text in ("First part.", "Second part.")]
PROBE_SYSTEMS: list[Message] = [
    {"role": role, "content": f"You {role} {index}."}
    for index, role in enumerate(("system", "system", "user", "assistant", "system", "user"))
]
CUT_OFF_ARGUMENTS = '{"probe": "'  # not an object
ANSWER_END_MARK = "\uf8fe\uf8ff"  # end of an answer to continue; private characters, never in real text
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
# Template variables for switching thinking on or off.
THINKING_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class CallStyle:
    """The style in which a template takes messages with calls.

    arguments_as_text: arguments as JSON texts, not as objects.
    null_content: no content is null, not ""; the text before calls is in a separate message.
    """

    arguments_as_text: bool = False
    null_content: bool = False

    def restyle_calls(self, messages: list[Message]) -> list[Message]:
        """Return messages in this style; their arguments are objects or can't be parsed."""
        styled_messages: list[Message] = []
        for message in messages:
            if calls := message.get("tool_calls"):
                if self.null_content:
                    if text := message["content"]:
                        styled_messages.append({"role": message["role"], "content": text})
                    message = {**message, "content": None}
                if self.arguments_as_text:
                    message = {**message, "tool_calls": list(map(write_arguments_as_text, calls))}
            styled_messages.append(message)
        return styled_messages


def write_arguments_as_text(call: JsonObject) -> JsonObject:
    """Return a call with its arguments as a JSON text."""
    if has_unparsable_arguments(call):
        return call
    return replace_arguments(call, json.dumps(call["function"]["arguments"], ensure_ascii=False))


def replace_arguments(call: JsonObject, arguments: JsonValue) -> JsonObject:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def has_unparsable_arguments(call: JsonObject) -> bool:
    """Return whether the arguments of a call are a text, not an object."""
    return isinstance(call["function"]["arguments"], str)


CALL_STYLES = [CallStyle(*flags) for flags in itertools.product((False, True), repeat=2)]


class ChatFormat:
    """A model's chat format; ``tool_format``: the name of its tool format, None to detect it."""

    def __init__(self, template: ChatTemplate, tool_format: str | None = None) -> None:
        self.template = template
        self.thinking_format = detect_thinking_format(template.source)
        self._tool_format_name = tool_format

    @property
    def tool_format(self) -> ToolFormat:
        """The format of the model's tool calls."""
        return self._detected_format[0]

    @functools.cached_property
    def _detected_format(self) -> tuple[ToolFormat, CallStyle]:
        """The tool format, and the template's style of messages with calls."""
        tool_format, call_style = detect_tool_format_and_style(self.template)
        if self._tool_format_name:
            tool_format = TOOL_FORMATS_BY_NAME[self._tool_format_name]
        return tool_format, call_style

    @functools.cached_property
    def takes_system(self) -> bool:
        """Whether the template takes a system prompt."""
        return self._shows_all_messages([{"role": "system", "content": PROBE_SYSTEM}, *PROBE_CHAT[:1]])

    @functools.cached_property
    def _takes_further_systems(self) -> bool:
        """Whether the template takes further system messages, anywhere."""
        return self._shows_all_messages(PROBE_SYSTEMS)

    @functools.cached_property
    def _takes_text_arguments(self) -> bool:
        """Whether the template renders text arguments unchanged."""
        tool_format, call_style = self._detected_format
        calls = [replace_arguments(call, CUT_OFF_ARGUMENTS) for call in PROBE_CHAT[1]["tool_calls"]]
        chat = [PROBE_CHAT[0], {**PROBE_CHAT[1], "tool_calls": calls}, *PROBE_CHAT[2:]]
        return CUT_OFF_ARGUMENTS in render_or_empty(
            self.template, call_style.restyle_calls(tool_format.adapt_messages(chat))
        )

    @functools.cached_property
    def _opens_after_thinking(self) -> bool:
        """Whether the template begins a new answer after an answer with nothing but thinking."""
        chat = [PROBE_CHAT[0], {"role": "assistant", "content": "", "reasoning_content": "?"}]
        return render_or_empty(self.template, chat, tools=False) != render_or_empty(
            self.template, chat, tools=False, opens_answer=False
        )

    def _shows_all_messages(self, chat: list[Message]) -> bool:
        """Return whether the template renders a whole chat, with and without tools."""
        renderings = (render_or_empty(self.template, chat, tools) for tools in (False, True))
        return any(all(message["content"] in rendering for message in chat) for rendering in renderings)

    def render_prompt(
        self,
        messages: list[Message],
        tools: Sequence[JsonObject] = (),
        effort: str | None = None,
        variables: Mapping[str, JsonValue] | None = None,
        opens_answer: bool = True,
    ) -> str:
        """Return the prompt for ``messages``.

        Args:
            messages: OpenAI's; arguments of calls may be JSON texts or objects.
            tools: OpenAI's.
            effort: how much to think, if the template supports it.
            variables: further variables for the template; see ``ChatTemplate.render``.
            opens_answer: end at the start of the assistant's answer, or continue a last message of the assistant's.

        Raises:
            OvspecError: the template can't render them.
            PromptError: a message is invalid.
        """
        if invalid_messages := [message for message in messages if not isinstance(message, Mapping)]:
            raise PromptError(
                f'messages: {invalid_messages[0]!r:.60} is not a message; append {{"role": …, "content": …}}, or '
                "result.message."
            )
        if opens_answer and find_begun_answer(messages) is not None:
            return self._render_continuation(messages, tools, effort, variables)
        if opens_answer and messages and only_thinks(messages[-1]) and not self._opens_after_thinking:
            return self.render_prompt(messages[:-1], tools, effort, variables)
        messages = list(map(self._join_parts, messages))
        template_variables = dict(variables or {})
        if effort is not None:
            template_variables = self._effort_variables(effort) | template_variables
        if not tools and not any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            return self._render_messages(messages, template_variables, opens_answer)
        tool_format, call_style = self._detected_format
        messages = add_tool_names_and_ids(
            order_tool_results(list(map(normalize_message, messages))), tool_format.id_length
        )
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        if any(map(has_unparsable_arguments, calls)) and not self._takes_text_arguments:
            messages = list(map(wrap_unparsable_arguments, messages))
        messages = call_style.restyle_calls(tool_format.adapt_messages(messages))
        if tools and tool_format.template_has_tools and tool_format.tools_variable in self.template.variables:
            template_variables[tool_format.tools_variable] = list(tools)
            try:
                return self._render_messages(messages, template_variables, opens_answer)
            except TemplateError:
                template_variables[tool_format.tools_variable] = [*map(add_missing_tool_fields, tools)]
        elif tools:
            messages = add_to_system_prompt(messages, describe_tools(tool_format, tools), self.takes_system)
        return self._render_messages(messages, template_variables, opens_answer)

    def _render_continuation(self, messages: list[Message], *other_arguments: Any) -> str:
        """Return a prompt with the last message at its end, open; ``other_arguments``: as in ``render_prompt``."""
        *earlier_messages, last_message = messages
        if not (begun_answer := find_begun_answer([last_message])):
            return self.render_prompt(earlier_messages, *other_arguments)
        with contextlib.suppress(TemplateError):
            rendered_chat = self.render_prompt(
                [*earlier_messages, {**last_message, "content": begun_answer + ANSWER_END_MARK}],
                *other_arguments,
                opens_answer=False,
            )
            rendered_start, end_mark, _ = rendered_chat.rpartition(ANSWER_END_MARK)
            if end_mark:  # keep the template's text before an answer, such as a header
                return rendered_start
        opened_prompt = self.render_prompt(earlier_messages, *other_arguments)
        if self.thinking_format and opened_prompt.rstrip().endswith(self.thinking_format.open_tag.rstrip()):
            opened_prompt += f"{self.thinking_format.close_tag}\n\n"
        return opened_prompt + begun_answer

    @functools.cached_property
    def _roles_with_parts(self) -> frozenset[str]:
        """The roles for which the template renders all text parts, and a single part like a string."""

        def render_content(role: str, content: JsonValue) -> str:
            question = {"role": "user", "content": "?"}
            chat = [question, {"role": role, "content": content}, question]
            return render_or_empty(self.template, {"system": chat[1:], "user": chat[1:2]}.get(role, chat), tools=False)

        part_texts = [part["text"] for part in PROBE_PARTS]
        roles_with_parts = set[str]()
        for role in ("system", "user", "assistant"):
            single_rendering = render_content(role, PROBE_PARTS[:1])
            both_rendering = render_content(role, PROBE_PARTS)
            if (
                single_rendering
                and single_rendering == render_content(role, part_texts[0])
                and all(part_text in both_rendering for part_text in part_texts)
            ):
                roles_with_parts.add(role)
        return frozenset(roles_with_parts)

    def _join_parts(self, message: Message) -> Message:
        """Return a message with its text parts joined, unless the template takes parts.

        Raises PromptError for other parts, because they would be lost.
        """
        content: JsonValue = message.get("content")
        if not isinstance(content, list):
            return message
        takes_parts = message.get("role") in self._roles_with_parts
        other_parts = [part for part in content if not is_text_part(part)]
        if not other_parts and not (takes_parts and all(part.get("type") == "text" for part in content)):
            return {**message, "content": join_text_parts(content)}
        if other_parts and not takes_parts:
            part_type = other_parts[0].get("type") if isinstance(other_parts[0], Mapping) else other_parts[0]
            raise PromptError(f"messages: content of the type {part_type!r:.40} is not supported; send text.")
        return message

    def _render_messages(self, messages: list[Message], variables: Mapping[str, JsonValue], opens_answer: bool) -> str:
        """Render messages. Agents send system messages anywhere, and several in a row; not all templates accept this.

        Raises:
            OvspecError: the template can't render them.
        """
        is_system = [message.get("role") == "system" for message in messages]
        are_plain_texts = all(isinstance(message.get("content") or "", str) for message in messages)
        refuses_systems = (any(is_system[:1]) and not self.takes_system) or (
            any(is_system[1:]) and not self._takes_further_systems
        )
        if are_plain_texts and refuses_systems:
            messages = join_system_messages(messages, self.takes_system)
        try:
            return self.template.render(messages, opens_answer, variables)
        except TemplateError:
            if not are_plain_texts:
                raise
            for join_messages in (join_consecutive_messages, append_user_text_to_results):
                joined_messages = join_messages(messages)
                if joined_messages != messages:
                    with contextlib.suppress(TemplateError):  # the first error is about the messages as received
                        return self.template.render(joined_messages, opens_answer, variables)
                messages = joined_messages
            raise

    def _effort_variables(self, effort: str) -> JsonObject:
        """Return the template's variables for how much to think."""
        known_variables = self.template.variables
        if "reasoning_effort" in known_variables:
            return {"reasoning_effort": {"none": "low", "minimal": "low", "xhigh": "high"}.get(effort, effort)}
        return {switch: effort != "none" for switch in THINKING_SWITCHES if switch in known_variables}


def detect_tool_format_and_style(template: ChatTemplate) -> tuple[ToolFormat, CallStyle]:
    """Return the tool format of a template, and its style of calls.

    The template renders two calls; the output shows the model's format.
    """
    for tool_format in TOOL_FORMATS:
        if tool_format.template_marks and all(mark in template.source for mark in tool_format.template_marks):
            return tool_format, CallStyle()
    # Two calls in a message show the text between them; but some templates take only a single call per message.
    for probe_chat, call_groups in (
        (PROBE_CHAT, [PROBE_CALLS]),
        (split_calls(PROBE_CHAT), [[call] for call in PROBE_CALLS]),
    ):
        renderings = {style: render_or_empty(template, style.restyle_calls(probe_chat)) for style in CALL_STYLES}
        for tool_format in TOOL_FORMATS:
            if (
                tool_format.template_marks
                or not tool_format.template_has_tools
                or (len(call_groups) == 1 and tool_format.between_calls is None)
            ):
                continue
            if fitting_styles := [
                style for style in CALL_STYLES if contains_calls(renderings[style], tool_format, call_groups)
            ]:
                # A longer rendering has a "None", or a separate empty text.
                return tool_format, min(fitting_styles, key=lambda style: len(renderings[style]))
    return GENERIC, CallStyle()


def add_missing_tool_fields(tool: JsonObject) -> JsonObject:
    """Return a tool with a description and properties, because some templates require them."""
    function = {"description": "", **tool["function"]}
    return {**tool, "function": {**function, "parameters": {"properties": {}, **function["parameters"]}}}


def render_or_empty(
    template: ChatTemplate, messages: list[Message], tools: bool = True, opens_answer: bool = True
) -> str:
    """Return a template's text of a chat, with the probe tool unless ``tools`` is false; "" if it fails."""
    try:
        return template.render(messages, opens_answer, {"tools": [PROBE_TOOL]} if tools else {}, strict=False)
    except TemplateError:
        return ""


def contains_calls(rendering: str, tool_format: ToolFormat, call_groups: list[list[tuple[str, JsonValue]]]) -> bool:
    """Return whether each part of the calls is in ``rendering``, in the format ``tool_format``."""
    layout_indices = range(len(tool_format.calls))
    return any(
        all(tool_format.write_calls(calls, layout_index) in rendering for calls in call_groups)
        for layout_index in layout_indices
    )


def is_text_part(part: JsonValue) -> bool:
    """Return whether a part of a message's content is a text."""
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def join_text_parts(content: JsonValue) -> JsonValue:
    """Return content of text parts alone as a single text, other content unchanged."""
    if isinstance(content, list) and all(map(is_text_part, content)):
        return "\n".join(part["text"] for part in content)
    return content


def normalize_message(message: Message) -> Message:
    """Return a message with text as its content, and the arguments of its calls as objects if possible.

    Raises:
        PromptError: it is invalid.
    """
    role = message.get("role")
    content = join_text_parts(message.get("content"))
    calls = message.get("tool_calls") or ()
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise PromptError(
            f"messages: {message!r:.80} lacks a role or a text as content; with tools, each message needs both."
        )
    if not isinstance(calls, (list, tuple)):
        raise PromptError("messages: the field tool_calls of a message must be a list, as in result.message.")
    message = {**message, "content": content}
    if calls:
        message["tool_calls"] = list(map(normalize_call, calls))
    else:
        message.pop("tool_calls", None)
    return message


def normalize_call(call: JsonValue) -> JsonObject:
    """Return a call with its arguments as an object if possible; raises PromptError for an invalid call."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise PromptError(
            f"messages: {call!r:.80} is not a tool call; use {{'type': 'function', 'function': {{'name': …}}}}."
        )
    if not isinstance(call.get("id", ""), str):
        raise PromptError(f"messages: the id of a tool call to {function['name']:.80} must be a string.")
    return replace_arguments(
        {**call, "type": "function", "function": function}, parse_call_arguments(function.get("arguments"))
    )


def parse_call_arguments(arguments: JsonValue) -> JsonValue:
    """Return arguments as an object, or else as a text: the arguments of a truncated call aren't an object."""
    parsed_arguments = arguments
    with contextlib.suppress(ValueError, RecursionError):
        while isinstance(parsed_arguments, str):  # some clients quote them twice
            parsed_arguments = (
                json.loads(replace_half_surrogates(parsed_arguments)) if parsed_arguments.strip() else None
            )
    if isinstance(parsed_arguments, Mapping) or not parsed_arguments:
        return dict(parsed_arguments or {})
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False, default=str)


def wrap_unparsable_arguments(message: Message) -> Message:
    """Return a message with objects as arguments of all calls; other arguments are wrapped in an object."""
    calls = [
        replace_arguments(call, {"arguments": call["function"]["arguments"]})
        if has_unparsable_arguments(call)
        else call
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    return {**message, "tool_calls": calls}


def find_begun_answer(messages: Sequence[Message]) -> str | None:
    """Return the last message's text if it begins an answer: an assistant's message without calls; else None.

    A message with nothing but thinking doesn't count: a new answer begins after it.
    """
    if not messages:
        return None
    last_message = messages[-1]
    if last_message.get("role") != "assistant" or last_message.get("tool_calls") or only_thinks(last_message):
        return None
    content = join_text_parts(last_message.get("content"))
    return content if isinstance(content, str) else None


def only_thinks(message: Message) -> bool:
    """Return whether an answer was cut off before any text or call."""
    visible_content = join_text_parts(message.get("content")) or message.get("tool_calls")
    return message.get("role") == "assistant" and not visible_content and bool(message.get("reasoning_content"))


def order_tool_results(messages: list[Message]) -> list[Message]:
    """Put tool results in the order of their calls: most templates don't render the id of a result's call."""
    ordered_messages: list[Message] = []
    call_positions: dict[str, int] = {}  # of the calls, by their ids
    for are_results, message_group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        group_messages = list(message_group)
        if are_results:
            group_messages.sort(
                key=lambda tool_result: call_positions.get(tool_result.get("tool_call_id", ""), len(call_positions))
            )
        ordered_messages += group_messages
        call_positions = {
            call.get("id", ""): index for index, call in enumerate(group_messages[-1].get("tool_calls") or ())
        }
    return ordered_messages


def add_tool_names_and_ids(messages: list[Message], id_length: int | None) -> list[Message]:
    """Add the tools' names to tool results, and ids of the template's length to calls."""
    tool_names: dict[str, str] = {}
    completed_messages: list[Message] = []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            calls = [{"id": f"call_{len(completed_messages)}_{index}", **call} for index, call in enumerate(calls)]
            tool_names |= {call["id"]: call["function"]["name"] for call in calls}
            message["tool_calls"] = [{**call, "id": shorten_call_id(call["id"], id_length)} for call in calls]
        if message["role"] == "tool":
            call_id = message.get("tool_call_id") or next(reversed(tool_names), "")
            if tool_name := tool_names.get(call_id):
                message = {"name": tool_name, **message}
            message["tool_call_id"] = shorten_call_id(call_id, id_length)
        completed_messages.append(message)
    return completed_messages
