"""Reads requests to the Responses API: from items to a chat."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.option import literal_values
from ovspec.protocols.bodies import RequestError
from ovspec.protocols.chat.request import (
    MAX_TOOL_CALLS,
    RESPONSE_FORMAT_FIELDS,
    check_chat_ending,
    describe_omitted_part,
    read_response_format_schema,
)
from ovspec.protocols.requests import IgnoredNames, Overrides, TextRequest, read_overrides
from ovspec.text.chat_template import Message

ITEM_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXT_PART_TYPES = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
CALL_TYPES = ("function_call", "custom_tool_call")
CALL_RESULT_TYPES = ("function_call_output", "custom_tool_call_output")
FUNCTION_FIELDS = ("type", "name", "description", "parameters", "strict")
# Items with images or files, mentioned to the model. Other unreadable items only report tools on other servers.
MENTIONED_ITEM_TYPES = ("computer_call", "file_search_call", "image_generation_call")
INCLUDE_LOGPROBS = "message.output_text.logprobs"
# Thinking is never encrypted, so there is nothing to include.
KNOWN_INCLUDES = (INCLUDE_LOGPROBS, "reasoning.encrypted_content")
REASONING_EFFORTS: tuple[str, ...] = literal_values(GENERATE_OPTIONS["reasoning_effort"].value_type)
TEXT_FORMAT_SHAPES = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": …, "schema": …}'


def read_responses_request(body: Any) -> TextRequest:
    """Return the request in a body; raises RequestError for an invalid request."""
    overrides = read_overrides(body)
    ignored = IgnoredNames()
    if body.max_output_tokens is not None:
        overrides.set_option("max_tokens", body.max_output_tokens, "max_output_tokens")
    if body.max_output_tokens == 0:
        raise make_field_error("max_output_tokens", "the value is 0; it must be at least 1, or -1 for no limit.")
    read_reasoning_options(body.reasoning or {}, overrides, ignored)
    read_text_format(body.text or {}, overrides, ignored)
    included_names = body.include or []
    ignored |= {f"include.{name}": None for name in included_names if name not in KNOWN_INCLUDES}
    if INCLUDE_LOGPROBS in included_names or body.top_logprobs:
        overrides.set_option("logprobs", body.top_logprobs or 0, "top_logprobs")
    if body.tools:
        overrides.values["tools"] = [tool for tool, _, _ in read_functions(body.tools, ignored)]
    messages = items_to_messages(body.input, ignored)
    check_chat_ending(body, messages)
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    return TextRequest(
        "response",
        [messages],
        overrides,
        body.model,
        stream=bool(body.stream),
        return_record=bool(body.return_record),
        draft=body.draft,
        body=body,
        ignored=tuple(ignored),
    )


def make_field_error(field: str, message: str) -> RequestError:
    return RequestError(f"{field}: {message}", field)


def read_reasoning_options(reasoning_options: JsonObject, overrides: Overrides, ignored: IgnoredNames) -> None:
    """Read ``reasoning_options``: the amount of thinking."""
    known_fields = ("effort", "summary", "generate_summary")
    ignored |= {f"reasoning.{field}": None for field in reasoning_options if field not in known_fields}
    effort = reasoning_options.get("effort")
    if effort is None:
        return
    if effort == "max":
        effort = "xhigh"
    if effort not in REASONING_EFFORTS:
        raise make_field_error(
            "reasoning",
            f"effort is {effort!r:.40}; it must be {', '.join(REASONING_EFFORTS[:-1])} or {REASONING_EFFORTS[-1]}.",
        )
    overrides.set_option("reasoning_effort", effort, "reasoning")


def read_text_format(text_options: JsonObject, overrides: Overrides, ignored: IgnoredNames) -> None:
    """Read ``text_options``: the format of the answer."""
    ignored |= {f"text.{field}": None for field in text_options if field not in ("format", "verbosity")}
    if text_options.get("verbosity") not in (None, "medium"):
        ignored["text.verbosity"] = None
    text_format = text_options.get("format")
    if text_format is None:
        return
    format_type = text_format.get("type") if isinstance(text_format, dict) else None
    if not isinstance(format_type, str) or format_type not in RESPONSE_FORMAT_FIELDS:
        raise make_field_error("text", f"format must be {TEXT_FORMAT_SHAPES}.")
    if format_type == "json_schema":  # in the form of chat completions
        if not isinstance(text_format.get("schema"), dict):
            raise make_field_error("text", f"format must be {TEXT_FORMAT_SHAPES}.")
        text_format = {
            "type": format_type,
            format_type: {field: value for field, value in text_format.items() if field != "type"},
        }
    try:
        schema = read_response_format_schema(text_format)
    except RequestError as error:
        message = str(error).replace("`response_format`", "format").replace("json_schema.", "")
        raise make_field_error("text", message) from None
    overrides.set_schema(schema, "text")


# ---------------------------------------------------------------- tools


class NamespacedFunction(NamedTuple):
    """A function in the form of chat completions, its own name, and its namespace, if any."""

    function: JsonObject
    name: str
    namespace: str | None


def read_functions(tools: Iterable[JsonObject], ignored: IgnoredNames) -> list[NamespacedFunction]:
    """Return the functions among ``tools``.

    Tools of unsupported types are left out; their names are added to ``ignored``.
    """
    functions = list[NamespacedFunction]()
    for tool in tools:
        tool_type = tool.get("type", "function")
        namespace_tools = tool.get("tools")
        tool_name = tool.get("name")
        if tool_type == "function":
            if isinstance(tool.get("function"), dict):  # chat completions' form
                tool = tool["function"]
            functions.append(NamespacedFunction(to_chat_function(tool, ignored), str(tool.get("name")), None))
        elif tool_type == "namespace" and isinstance(namespace_tools, list) and isinstance(tool_name, str):
            functions += read_namespace(tool_name, namespace_tools, ignored)
        else:
            ignored[f"tools.{tool_type}"] = None
    return functions


def read_namespace(namespace: str, tools: list[JsonValue], ignored: IgnoredNames) -> Iterator[NamespacedFunction]:
    """Yield the functions of a namespace."""
    for tool in tools:
        if isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str):
            full_name_field = {"name": full_function_name(namespace, tool["name"])}
            yield NamespacedFunction(to_chat_function(tool, ignored) | full_name_field, tool["name"], namespace)
        else:
            ignored[f"tools.{namespace}"] = None


def to_chat_function(tool: JsonObject, ignored: IgnoredNames) -> JsonObject:
    """Return a function with the fields for the model only."""
    ignored |= {f"tools.{field}": None for field in tool if field not in FUNCTION_FIELDS}
    # strict: false is left out, because a call always matches its schema.
    return {field: tool[field] for field in FUNCTION_FIELDS if field != "type" and tool.get(field) not in (None, False)}


def full_function_name(namespace: str | None, function_name: str) -> str:
    """Return the model's name for a tool in a namespace."""
    return f"{namespace.removesuffix('__')}__{function_name}" if namespace else function_name


# ---------------------------------------------------------------- items


def items_to_messages(items: str | list[JsonObject], ignored: IgnoredNames) -> list[Message]:
    """Return the messages in items; the names of omitted items are added to ``ignored``."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages = list[Message]()
    user_indices = [index for index, item in enumerate(items) if item.get("role") == "user"]
    last_user_index = max(user_indices, default=-1)
    for index, item in enumerate(items):
        item_type = item.get("type") or ("message" if "role" in item else None)
        if item_type == "message":
            add_message(item, messages, ignored, text_only=index == last_user_index)
        elif item_type == "reasoning":
            if text := flatten_item_content(item.get("content") or item.get("summary"), item_type, ignored):
                add_reasoning(text, messages)
        elif item_type in CALL_TYPES:
            add_tool_call(item, messages)
        elif item_type in CALL_RESULT_TYPES:
            call_id = read_item_string(item, "call_id")
            output = flatten_item_content(item.get("output"), item_type, ignored)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        elif item_type == "item_reference":
            message = "item_reference is not supported, because this server stores no items; send the item itself."
            raise make_field_error("input", message)
        elif item_type in MENTIONED_ITEM_TYPES:
            add_message({"role": "assistant", "content": [{"type": item_type}]}, messages, ignored)
        elif not isinstance(item_type, str):
            message = (
                f'the type of an item is {item_type!s:.40}; it must be a string, such as "message" or "function_call".'
            )
            raise make_field_error("input", message)
        else:
            ignored[f"input.{item_type}"] = None
    if not messages:
        raise make_field_error("input", "there is no message to answer; add a message.")
    return messages


def add_message(item: JsonObject, messages: list[Message], ignored: IgnoredNames, text_only: bool = False) -> None:
    """Add the message in an item; with ``text_only``, all of it must be readable.

    The assistant's text joins its preceding thinking.
    """
    role = item.get("role")
    if not isinstance(role, str) or role not in ITEM_ROLES:
        raise make_field_error(
            "input", f"the role of a message is {role!r:.40}; it must be one of {', '.join(ITEM_ROLES)}."
        )
    text_only = text_only or ITEM_ROLES[role] == "system"
    content = flatten_item_content(item.get("content"), "message", ignored, text_only)
    previous = messages[-1] if messages else {}
    if (
        role == "assistant"
        and previous.get("role") == role
        and not previous["content"]
        and "tool_calls" not in previous
    ):
        previous["content"] = content
    else:
        messages.append({"role": ITEM_ROLES[role], "content": content})


def add_reasoning(text: str, messages: list[Message]) -> None:
    """Add thinking to the preceding assistant message, or as the beginning of a new message."""
    previous = messages[-1] if messages else {}
    if previous.get("role") == "assistant" and "tool_calls" not in previous and "reasoning_content" not in previous:
        previous["reasoning_content"] = text
    else:
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def add_tool_call(item: JsonObject, messages: list[Message]) -> None:
    """Add the call in an item to the preceding assistant message."""
    function_name = read_item_string(item, "name")
    namespace = item.get("namespace")
    if not isinstance(namespace, (str, type(None))):
        raise make_field_error("input", f"the namespace of a tool call to {function_name:.80} must be a string.")
    if item["type"] == "function_call":
        arguments: JsonValue = item.get("arguments") or "{}"
    else:
        arguments = {"input": read_item_string(item, "input")}
    call_function = {"name": full_function_name(namespace, function_name), "arguments": arguments}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": read_item_string(item, "call_id"), "type": "function", "function": call_function})
    if len(calls) > MAX_TOOL_CALLS:
        raise make_field_error("input", f"an answer has more than {MAX_TOOL_CALLS} tool calls; send fewer.")


def read_item_string(item: JsonObject, field: str) -> str:
    """Return a field of an item; raises RequestError if it isn't a string."""
    if not isinstance(field_value := item.get(field), str):
        raise make_field_error("input", f"an item of the type {item['type']} must have the field {field}, a string.")
    return field_value


def flatten_item_content(content: JsonValue, item_type: str, ignored: IgnoredNames, text_only: bool = False) -> str:
    """Return the text of a string or of parts; with ``text_only``, raises RequestError for other parts."""
    if isinstance(content, str):
        return content
    if content in (None, []) and not text_only:
        return ""
    if not isinstance(content, list) or not content or not all(isinstance(part, dict) for part in content):
        raise make_field_error(
            "input", f"the content of an item of the type {item_type} must be a string or a list of content parts."
        )
    return "\n".join(read_item_part(part, ignored, text_only) for part in content)


def read_item_part(part: JsonObject, ignored: IgnoredNames, text_only: bool) -> str:
    """Return the text of a part, or its placeholder for the model."""
    part_type = part.get("type")
    if part_type not in TEXT_PART_TYPES:
        if text_only:
            raise make_field_error(
                "input", f"a content part of the type {part_type!s:.40} is not supported; send text."
            )
        return describe_omitted_part(part_type, ignored)
    field = "refusal" if part_type == "refusal" else "text"
    text = part.get(field)
    if not text_only:
        text = text or ""
    if not isinstance(text, str):
        raise make_field_error(
            "input", f"a content part of the type {part_type} must have the field {field}, a string."
        )
    return text
