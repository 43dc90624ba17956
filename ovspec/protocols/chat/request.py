"""Reads OpenAI's chats and completions: from a body to a ``TextRequest``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.engine.prompts import Prompt, is_nonempty_prompt_list
from ovspec.grammars.response_format import WRAPPER_KEYS
from ovspec.protocols.bodies import MESSAGE_FIELDS, TEXT_PART_FIELDS, ChatEndingFields, RequestError
from ovspec.protocols.requests import (
    IgnoredNames,
    Overrides,
    RequestKind,
    TextRequest,
    add_ignored,
    read_overrides,
    refuse_unknown_fields,
)
from ovspec.text.chat_format import find_begun_answer
from ovspec.text.chat_template import Message
from ovspec.text.infill import InfillPrompt

# The fields of each response format besides its type; a schema next to the type is llama.cpp's form.
RESPONSE_FORMAT_FIELDS = {"text": set[str](), "json_object": {"schema"}, "json_schema": {"json_schema"}}


def read_chat_or_completion(body: Any, kind: RequestKind) -> TextRequest:
    """Return the request in a body; raises RequestError for conflicting fields."""
    messages = getattr(body, "messages", None)
    prompt = getattr(body, "prompt", None)
    if (messages is None) == (prompt is None):
        raise RequestError("A request needs exactly one of the fields prompt and messages.")
    echo = bool(getattr(body, "echo", None))
    ignored = IgnoredNames()
    template_messages = to_template_messages(messages or [], ignored, kind == "batch_line")
    if isinstance(body, ChatEndingFields):
        check_chat_ending(body, template_messages)
    if messages is not None:
        if echo:
            raise RequestError("echo can't be combined with messages; leave echo out.", "echo")
        prompt = template_messages
    if suffix := getattr(body, "suffix", None):
        if echo:
            raise RequestError("suffix can't be combined with echo; leave one out.", "suffix")
        if not isinstance(prompt, str):
            raise RequestError("suffix works only if the prompt is a single string.", "suffix")
        prompt = InfillPrompt(prompt, suffix)
    prompts: Any = prompt if is_nonempty_prompt_list(prompt) else [prompt]
    return replace(build_text_request(body, kind, prompts, echo), ignored=(*ignored,))


def build_text_request(body: Any, kind: RequestKind, prompts: list[Prompt], echo: bool = False) -> TextRequest:
    """Return the request for the texts of prompts with the options in ``body``; see ``read_chat_or_completion``."""
    overrides = read_overrides(body)
    if body.response_format is not None:
        overrides.set_schema(read_response_format_schema(body.response_format), "response_format")
    set_logprobs_option(body, overrides)
    if body.stream_options and not body.stream:
        raise RequestError("stream_options needs stream to be true.", "stream_options")
    return TextRequest(
        kind,
        prompts,
        overrides,
        body.model,
        echo,
        overrides.values.get("max_tokens") == 0,
        bool(body.stream),
        bool(body.stream_options and body.stream_options.include_usage),
        bool(body.return_record),
        bool(getattr(body, "return_token_sources", None)),
        bool(getattr(body, "timings_per_token", None)),
        body.draft,
    )


def set_logprobs_option(body: Any, overrides: Overrides) -> None:
    """Set the option of OpenAI's ``logprobs``, a number, or a boolean with ``top_logprobs``."""
    logprobs = getattr(body, "logprobs", None)
    top_logprobs = getattr(body, "top_logprobs", None)
    if top_logprobs is not None and logprobs is not True:
        raise RequestError("`top_logprobs` needs `logprobs` to be true.", "top_logprobs")
    if logprobs is True:
        overrides.values["logprobs"] = top_logprobs or 0
    elif logprobs is not None:
        overrides.values["logprobs"] = None if logprobs is False else logprobs


def read_response_format_schema(response_format: JsonObject) -> JsonValue:
    """Return the schema in OpenAI's ``response_format``, or None for any text."""
    format_fields = {field: value for field, value in response_format.items() if value is not None}
    format_type = str(format_fields.get("type"))
    schema_is_beside_type = format_type == "json_schema" and "json_schema" not in format_fields  # llama.cpp's way
    if format_type in RESPONSE_FORMAT_FIELDS:
        known_fields = {"type", *RESPONSE_FORMAT_FIELDS[format_type], *(WRAPPER_KEYS if schema_is_beside_type else ())}
        refuse_unknown_fields(
            format_fields, known_fields, "{name} is not a field of `response_format`", "response_format"
        )
    if format_type == "text":
        return None
    if format_type == "json_object" and format_fields.get("schema", {}) == {}:
        return {"type": "object"}
    wrapper: JsonValue = (
        format_fields if schema_is_beside_type or format_type == "json_object" else format_fields.get("json_schema")
    )
    has_schema = isinstance(wrapper, dict) and isinstance(wrapper.get("schema"), dict)
    if format_type not in RESPONSE_FORMAT_FIELDS or not has_schema:
        raise RequestError(
            '`response_format` must be {"type": "text"}, {"type": "json_object"} or '
            '{"type": "json_schema", "json_schema": {"schema": …}}.',
            "response_format",
        )
    if wrapper is not format_fields:
        refuse_unknown_fields(
            wrapper, WRAPPER_KEYS, "json_schema.{name} is not a field of `response_format`", "response_format"
        )
    return {"name": str(wrapper.get("name")), "schema": wrapper["schema"]}


MAX_TOOL_CALLS = 1000  # of a message


CHAT_ROLES = ("system", "developer", "user", "assistant", "tool")


# The names of omitted media in the model's prompt.
MEDIA_KINDS = ("image", "audio", "video", "document", "file")


def check_chat_ending(body: ChatEndingFields, template_messages: list[Message]) -> None:
    """Raise RequestError if a body's ending, continued or a new message, doesn't match its chat."""
    is_continued = find_begun_answer(template_messages) is not None
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "`continue_final_message` and `add_generation_prompt` can't both be true; leave one out.",
            "continue_final_message",
        )
    if body.continue_final_message and not is_continued:
        raise RequestError(
            "`continue_final_message` needs an assistant message without tool calls at the end of the chat; leave "
            "`continue_final_message` out.",
            "continue_final_message",
        )
    if body.continue_final_message is False and is_continued:
        raise RequestError(
            "`continue_final_message` is false, but an assistant message at the end of the chat is always continued; "
            "add a user message at the end.",
            "continue_final_message",
        )
    if body.add_generation_prompt is False and not is_continued:
        raise RequestError(
            "`add_generation_prompt` is false, but the chat doesn't end with an assistant message to continue; leave "
            "`add_generation_prompt` out.",
            "add_generation_prompt",
        )


def to_template_messages(messages: Sequence[Message], ignored: IgnoredNames, any_field: bool = False) -> list[Message]:
    """Return messages in the form for chat templates.

    Only the system message and the user's last message must be readable, since clients send back all earlier messages.
    Other messages' unreadable parts are left out; their names go to ``ignored``. ``any_field``: messages may have other
    fields.
    """
    user_indices = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    last_user_index = max(user_indices, default=-1)
    return [
        to_template_message(message, ignored, index == last_user_index, any_field)
        for index, message in enumerate(messages)
    ]


def to_template_message(message: Message, ignored: IgnoredNames, text_only: bool, any_field: bool = False) -> Message:
    """Return ``message`` in the form for chat templates, with a string as content and a common role."""
    # OpenAI's clients send null and empty fields back with the assistant's answers.
    fields = {field: value for field, value in message.items() if value not in (None, [])}
    if "function_call" in fields:
        raise make_message_error("function_call is not supported; send the call in the field tool_calls.")
    if "reasoning" in fields:  # vLLM's name
        fields.setdefault("reasoning_content", fields.pop("reasoning"))
    if not any_field:
        refuse_unknown_fields(fields, MESSAGE_FIELDS, "messages: {name} is not a field of a message", "messages")
    for field in ("name", "tool_call_id", "reasoning_content", "thinking"):
        if not isinstance(fields.get(field, ""), str):
            raise make_message_error(f"the field {field} of a message must be a string.")
    if not isinstance(role := fields.get("role"), str):
        raise make_message_error('each message needs a role, as in {"role": "user", "content": …}.')
    if role not in CHAT_ROLES:
        raise make_message_error(
            f"the role of a message is {role!r:.40}; it must be {', '.join(CHAT_ROLES[:-1])} or {CHAT_ROLES[-1]}."
        )
    if role == "developer":  # OpenAI's newer name
        role = fields["role"] = "system"
    if "tool_calls" in fields:
        fields["tool_calls"] = to_template_calls(fields["tool_calls"])
    fields["content"] = flatten_content(fields.get("content"), ignored, text_only or role == "system")
    return fields


def to_template_calls(calls: JsonValue) -> list[JsonObject]:
    """Return a message's tool calls in the form for chat templates; raises RequestError."""
    if not isinstance(calls, list):
        raise make_message_error("the field tool_calls of a message must be a list.")
    if len(calls) > MAX_TOOL_CALLS:
        raise make_message_error(f"a message has {len(calls)} tool_calls; at most {MAX_TOOL_CALLS} are allowed.")
    return [to_template_call(call) for call in calls]


def to_template_call(call: JsonValue) -> JsonObject:
    is_function = isinstance(call, dict) and call.get("type", "function") == "function"
    function = call.get("function") if is_function else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise make_message_error(
            'each tool call must be {"type": "function", "function": {"name": …, "arguments": …}}.'
        )
    if not isinstance(call_id := call.get("id") or "", str):
        raise make_message_error(f"the id of a tool call to {function['name']:.80} must be a string.")
    name_and_arguments = {"name": function["name"], "arguments": function.get("arguments") or "{}"}
    template_call: JsonObject = {"type": "function", "function": name_and_arguments}
    return {"id": call_id, **template_call} if call_id else template_call


def flatten_content(content: JsonValue, ignored: IgnoredNames, text_only: bool) -> str:
    """Return a message's content as a single string; raises RequestError for unreadable parts."""
    if isinstance(content, str):
        return content
    if content is None and not text_only:
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise make_message_error('each message needs content: a string, or a list of {"type": "text", "text": …}.')
    return "\n".join(read_text_part(part, ignored, text_only) for part in content)


def read_text_part(part: JsonObject, ignored: IgnoredNames, text_only: bool) -> str:
    """Return the text of a part of a content, or its placeholder for the model."""
    part_type = part.get("type")
    if part_type not in ("text", "refusal"):
        if text_only:
            raise make_message_error(f"content of the type {part_type!s:.40} is not supported; send text.")
        return describe_omitted_part(part_type, ignored)
    text = part.get(part_type)
    if not text_only:
        text = text or ""
    if not isinstance(text, str):
        raise make_message_error(f"a content part of the type {part_type} must have the field {part_type}, a string.")
    fields = [field for field in part if part[field] is not None]
    message = f"messages: {{name}} is not a field of a content part of the type {part_type}"
    refuse_unknown_fields(fields, {*TEXT_PART_FIELDS, part_type}, message, "messages")
    return text


def describe_omitted_part(part_type: JsonValue, ignored: IgnoredNames) -> str:
    """Return the placeholder of an unreadable part; its name is added to ``ignored``."""
    part_name = f"{part_type!s:.40}"
    add_ignored(f"content.{part_name}", ignored)
    media_kind = next((media_kind for media_kind in MEDIA_KINDS if media_kind in part_name), part_name)
    return f"[{media_kind} omitted]"


def make_message_error(message: str) -> RequestError:
    return RequestError(f"messages: {message}", "messages")
