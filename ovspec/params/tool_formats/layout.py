"""The description of a tool format: tool calls in a model family's answers and in its chat template."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Message = dict[str, Any]
CALL_SLOTS = ("NAME", "ID", "INDEX", "ARGUMENTS")  # the variable parts of a call
SLOT_PATTERNS = {"ID": "[a-zA-Z0-9]{9}", "INDEX": "[0-9]{1,3}"}  # of slots with arbitrary text


class ParameterLayout(NamedTuple):
    """The texts around the names and values of separately written arguments, with strings unquoted."""

    before_name: str
    after_name: str
    after_value: str


@dataclass(frozen=True)
class ToolFormat:
    """A model family's format of tool calls. Special tokens are spelt out.

    name: the value of the option ``tool_format``.
    calls: the forms of a call, as texts and slots; the usual form comes first.
    triggers: texts at the beginning of calls in an answer: prefixes of ``before_calls`` plus a form in ``calls``. A
        trigger with {NAME} stands for a trigger per tool.
    before_calls, between_calls, after_calls: texts around all calls, and between calls; without ``between_calls`` an
        answer has at most a single call.
    calls_within_text: whether calls may be within text; otherwise they are the whole answer, or a message of it.
    parameters: for arguments in another form than a JSON object.
    tools_variable: the template's variable with the tools.
    adapt_messages: changes OpenAI's messages for the template; their arguments are objects.
    template_has_tools: whether the template renders tools; otherwise the system prompt describes them.
    id_length: the number of characters in a call's id, if the template demands a length.
    template_marks: texts in a chat template for detecting the format, if the template doesn't render calls.
    """

    name: str
    calls: tuple[tuple[str, ...], ...]
    triggers: tuple[str, ...]
    before_calls: str = ""
    between_calls: str | None = None
    after_calls: str = ""
    calls_within_text: bool = True
    parameters: ParameterLayout | None = None
    tools_variable: str = "tools"
    adapt_messages: Callable[[list[Message]], list[Message]] = list
    template_has_tools: bool = True
    id_length: int | None = None
    template_marks: tuple[str, ...] = ()

    def fixed_texts(self) -> Iterable[str]:
        """Yield all fixed texts around names and arguments."""
        yield from (self.before_calls, self.between_calls or "", self.after_calls, *self.triggers)
        yield from (call_part for call_parts in self.calls for call_part in call_parts if call_part not in CALL_SLOTS)
        yield from self.parameters or ()

    def write_calls(self, calls: Iterable[tuple[str, Any]], call_index: int = 0) -> str:
        """Return the text of calls, each (name, arguments as an object), in the form ``calls[call_index]``."""
        call_texts = list[str]()
        for call_number, (tool_name, call_arguments) in enumerate(calls):
            slot_values = {
                "NAME": tool_name,
                "ID": "0" * 9,
                "INDEX": str(call_number),
                "ARGUMENTS": self._write_arguments(call_arguments),
            }
            call_texts.append("".join(slot_values.get(call_part, call_part) for call_part in self.calls[call_index]))
        return self.before_calls + (self.between_calls or "").join(call_texts) + self.after_calls

    def _write_arguments(self, call_arguments: Any) -> str:
        layout = self.parameters
        if isinstance(call_arguments, str):  # a truncated call
            return call_arguments
        if not layout:
            return json.dumps(call_arguments, ensure_ascii=False)
        parameter_texts = list[str]()
        for parameter_name, argument in call_arguments.items():
            argument_text = argument if isinstance(argument, str) else json.dumps(argument, ensure_ascii=False)
            parameter_texts.append(
                f"{layout.before_name}{parameter_name}{layout.after_name}{argument_text}{layout.after_value}"
            )
        return "".join(parameter_texts)


TOOLS_PROMPT = """You may call functions to help with the user's request. These are their signatures:
<tools>
{tools}
</tools>

To call functions, write their names and arguments in this format, and nothing after it:
{example}"""


def describe_tools(format: ToolFormat, tools: Sequence[Any]) -> str:
    """Return the description of tools for the system prompt, for chat templates without tools."""
    example = format.write_calls([("function-name", {"argument-name": "value"})])
    signatures = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return TOOLS_PROMPT.format(tools="\n".join(signatures), example=example)


# ---------------------------------------------------------------- messages


def add_to_system_prompt(messages: list[Message], text: str, as_system_message: bool = True) -> list[Message]:
    """Add ``text`` to the system prompt of a chat; to the user's first message if ``as_system_message`` is false."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    if messages and not as_system_message:
        return [{**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def join_system_messages(messages: list[Message], as_system_message: bool) -> list[Message]:
    """Join the system messages at the beginning of a chat, and turn later system messages into the user's.

    If ``as_system_message`` is false, all system messages become the user's.
    """
    system_messages = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
    later_messages = messages[len(system_messages) :]
    chat_messages = [
        {**message, "role": "user"} if message["role"] == "system" else message for message in later_messages
    ]
    system_text = "\n\n".join(message["content"] for message in system_messages)
    if not as_system_message and not (chat_messages and chat_messages[0]["role"] == "user"):
        return [{"role": "user", "content": system_text}, *chat_messages]
    return add_to_system_prompt(chat_messages, system_text, as_system_message) if system_messages else chat_messages


def join_consecutive_messages(messages: list[Message]) -> list[Message]:
    """Join consecutive messages of the user, and of the assistant; leave out empty answers."""
    turns = list[list[Message]]()
    for message in messages:
        role = message["role"]
        last_message = turns[-1][-1] if turns else {}
        if role == "assistant" and not message["content"] and not message.get("tool_calls"):
            continue
        if role in ("user", "assistant") and role == last_message.get("role") and not last_message.get("tool_calls"):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [turn[0] if len(turn) == 1 else join_messages(turn) for turn in turns]


def join_messages(turn: list[Message]) -> Message:
    """Return a single message with the texts of several; only the last message may have calls."""
    texts = {
        field_name: "\n\n".join(message[field_name] for message in turn if message.get(field_name))
        for field_name in ("content", "reasoning_content")
    }
    return {**turn[-1], **{field_name: text for field_name, text in texts.items() if text or field_name == "content"}}


def append_user_text_to_results(messages: list[Message]) -> list[Message]:
    """Append a user message right after tool results to the last result."""
    joined_messages = list[Message]()
    for message in messages:
        if message["role"] == "user" and joined_messages and joined_messages[-1]["role"] == "tool":
            tool_result = joined_messages.pop()
            message = {**tool_result, "content": f"{tool_result['content']}\n\n{message['content']}"}
        joined_messages.append(message)
    return joined_messages


def read_name_and_arguments(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Return (name, arguments) of a call in a message."""
    function = call.get("function", call)
    return function["name"], function["arguments"]


def split_calls(messages: list[Message]) -> list[Message]:
    """Split messages with several calls, each call before its result: for templates with one call per message."""
    split_messages: list[Message] = []
    waiting_calls: list[Message] = []  # calls without results so far
    for message in messages:
        if message["role"] == "tool" and waiting_calls:
            call = next((call for call in waiting_calls if call["id"] == message.get("tool_call_id")), waiting_calls[0])
            waiting_calls.remove(call)
            if not (split_messages and split_messages[-1].get("tool_calls") == [call]):
                split_messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        split_messages.append(message)
        if len(calls := message.get("tool_calls") or ()) > 1:
            split_messages[-1] = {**message, "tool_calls": calls[:1]}
            waiting_calls = list(calls)
        elif message["role"] != "tool":
            waiting_calls = []
    return split_messages


def make_calls_writer(format: ToolFormat) -> Callable[[list[Message]], list[Message]]:
    """Return a function for writing calls into the text of messages: for templates without calls."""

    def write_calls_as_text(messages: list[Message]) -> list[Message]:
        converted = list[Message]()
        for message in messages:
            if calls := message.get("tool_calls"):
                calls_text = format.write_calls(map(read_name_and_arguments, calls))
                text = "\n".join(filter(None, (message["content"], calls_text)))
                message = {name: value for name, value in message.items() if name != "tool_calls"} | {"content": text}
            converted.append(message)
        return converted

    return write_calls_as_text


def move_results_to_user(messages: list[Message]) -> list[Message]:
    """Turn tool results into user messages, consecutive results into a single message."""
    converted = list[Message]()
    for are_results, message_group in itertools.groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            result_texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in message_group]
            converted.append({"role": "user", "content": "\n".join(result_texts)})
        else:
            converted += message_group
    return converted


def shorten_call_id(id: str, length: int | None) -> str:
    """Return ``id``, or its hash, with ``length`` letters and digits; None for any length."""
    if not length or (len(id) == length and id.isascii() and id.isalnum()):
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:length]
