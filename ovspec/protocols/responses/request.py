"""Reads requests to the Responses API: from items to a chat."""

from collections.abc import Iterable
from typing import Any

from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.option import literal_values
from ovspec.protocols.bodies import RequestError
from ovspec.protocols.requests import (
    FORMATS,
    MOST_CALLS,
    Ignored,
    Overrides,
    TextRequest,
    check_continued,
    left_out,
    overrides_of,
    schema_of,
)
from ovspec.text.chat_template import Message

ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
OF_FUNCTIONS = ("type", "name", "description", "parameters", "strict")
# Items with pictures or files, of which the model is told. Others that can't be read only tell of tools elsewhere.
TOLD = ("computer_call", "file_search_call", "image_generation_call")
LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")  # thinking is never encrypted, so there is nothing to include
EFFORTS: tuple[str, ...] = literal_values(GENERATE_OPTIONS["reasoning_effort"].value_type)
SHAPE = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": …, "schema": …}'


def read_response(body: Any) -> TextRequest:
    """Return the request in a body; raises RequestError for what can't be met."""
    overrides, ignored = overrides_of(body), Ignored()
    if body.max_output_tokens is not None:
        overrides.set("max_tokens", body.max_output_tokens, "max_output_tokens")
    if body.max_output_tokens == 0:
        raise wrong("max_output_tokens", "it must be at least 1, or -1.")
    read_reasoning(body.reasoning or {}, overrides, ignored)
    read_text(body.text or {}, overrides, ignored)
    include = body.include or []
    ignored |= {f"include.{name}": None for name in include if name not in INCLUDED}
    if LOGPROBS in include or body.top_logprobs:
        overrides.set("logprobs", body.top_logprobs or 0, "top_logprobs")
    if body.tools:
        overrides.values["tools"] = [tool for tool, _, _ in functions_of(body.tools, ignored)]
    messages = read_items(body.input, ignored)
    check_continued(body, messages)
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


def wrong(field: str, message: str) -> RequestError:
    return RequestError(f"{field}: {message}", field)


def read_reasoning(given: dict[str, Any], overrides: Overrides, ignored: Ignored) -> None:
    """Read ``reasoning``: how much to think."""
    ignored |= {f"reasoning.{name}": None for name in given if name not in ("effort", "summary", "generate_summary")}
    if (effort := given.get("effort")) is None:
        return
    effort = "xhigh" if effort == "max" else effort
    if effort not in EFFORTS:
        raise wrong("reasoning", f"effort is {effort!r:.40}; it must be {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}.")
    overrides.set("reasoning_effort", effort, "reasoning")


def read_text(given: dict[str, Any], overrides: Overrides, ignored: Ignored) -> None:
    """Read ``text``: the format of the answer."""
    ignored |= {f"text.{name}": None for name in given if name not in ("format", "verbosity")}
    if given.get("verbosity") not in (None, "medium"):
        ignored["text.verbosity"] = None
    if (format := given.get("format")) is None:
        return
    kind = format.get("type") if isinstance(format, dict) else None
    if (
        not isinstance(kind, str)
        or kind not in FORMATS
        or (kind == "json_schema" and not isinstance(format.get("schema"), dict))
    ):
        raise wrong("text", f"format must be {SHAPE}.")
    if kind == "json_schema":  # as chat completions have it
        format = {"type": kind, kind: {name: each for name, each in format.items() if name != "type"}}
    try:
        schema = schema_of(format)
    except RequestError as error:
        told = str(error).replace("`response_format`", "format").replace("json_schema.", "")
        raise wrong("text", told) from None
    overrides.set_schema(schema, "text")


# ---------------------------------------------------------------- tools


def functions_of(tools: Iterable[Any], ignored: Ignored) -> list[tuple[dict[str, Any], str, str | None]]:
    """Return the functions among ``tools``, as chat completions have them, each with its own name and its namespace.

    Kinds that can't be called here are left out; their names are added to ``ignored``.
    """
    found = list[tuple[dict[str, Any], str, str | None]]()
    for tool in tools:
        kind, inner = tool.get("type", "function"), tool.get("tools")
        if kind == "function":
            tool = tool["function"] if isinstance(tool.get("function"), dict) else tool  # chat completions' form
            found.append((function_of(tool, ignored), str(tool.get("name")), None))
        elif kind == "namespace" and isinstance(inner, list) and isinstance(space := tool.get("name"), str):
            for each in inner:
                if isinstance(each, dict) and each.get("type") == "function" and isinstance(each.get("name"), str):
                    named = function_of(each, ignored) | {"name": full_name(space, each["name"])}
                    found.append((named, each["name"], space))
                else:
                    ignored[f"tools.{space}"] = None
        else:
            ignored[f"tools.{kind}"] = None
    return found


def function_of(tool: dict[str, Any], ignored: Ignored) -> dict[str, Any]:
    """Return a function without what the model needn't see."""
    ignored |= {f"tools.{name}": None for name in tool if name not in OF_FUNCTIONS}
    # That a schema isn't strict needn't be said: a call always fits it.
    return {name: tool[name] for name in OF_FUNCTIONS if name != "type" and tool.get(name) not in (None, False)}


def full_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a tool in a namespace."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


# ---------------------------------------------------------------- items


def read_items(given: str | list[dict[str, Any]], ignored: Ignored) -> list[Message]:
    """Return the messages that items make; names of what is left out are added to ``ignored``."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = list[Message]()
    last = max((at for at, item in enumerate(given) if item.get("role") == "user"), default=-1)
    for at, item in enumerate(given):
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            read_message(item, messages, ignored, at == last)
        elif kind == "reasoning":
            if text := text_of(item.get("content") or item.get("summary"), kind, ignored):
                read_reasoning_item(text, messages)
        elif kind in CALLS:
            read_call(item, messages)
        elif kind in RESULTS:
            id, output = text_field(item, "call_id"), item.get("output")
            messages.append({"role": "tool", "tool_call_id": id, "content": text_of(output, kind, ignored)})
        elif kind == "item_reference":
            raise wrong("input", "an item_reference can't be met, because nothing is stored; send the item itself.")
        elif kind in TOLD:
            read_message({"role": "assistant", "content": [{"type": kind}]}, messages, ignored)
        elif not isinstance(kind, str):
            raise wrong("input", f"an item of the type {kind!s:.40} can't be read; only text and calls can.")
        else:
            ignored[f"input.{kind}"] = None
    if not messages:
        raise wrong("input", "it has nothing to answer; send a message.")
    return messages


def read_message(item: dict[str, Any], messages: list[Message], ignored: Ignored, strict: bool = False) -> None:
    """Add the message in an item, all of which must be readable if ``strict``.

    What the model said belongs to what it thought before.
    """
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong("input", f"the role of a message is {role!r:.40}; it must be {', '.join(ROLES)}.")
    strict = strict or ROLES[role] == "system"
    content, last = text_of(item.get("content"), "message", ignored, strict), messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == role and not last["content"] and "tool_calls" not in last:
        last["content"] = content
    else:
        messages.append({"role": ROLES[role], "content": content})


def read_reasoning_item(text: str, messages: list[Message]) -> None:
    """Add what the model thought to what it said right before, or as the beginning of an answer."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and "tool_calls" not in last and "reasoning_content" not in last:
        last["reasoning_content"] = text
    else:
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def read_call(item: dict[str, Any], messages: list[Message]) -> None:
    """Add the call in an item to what the model said before it."""
    name, space = text_field(item, "name"), item.get("namespace")
    if not isinstance(space, (str, type(None))):
        raise wrong("input", f"the namespace of a call of {name:.80} must be a string.")
    arguments = (
        item.get("arguments") or "{}" if item["type"] == "function_call" else {"input": text_field(item, "input")}
    )
    function = {"name": full_name(space, name), "arguments": arguments}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": text_field(item, "call_id"), "type": "function", "function": function})
    if len(calls) > MOST_CALLS:
        raise wrong("input", f"an answer has more than {MOST_CALLS} calls; send fewer.")


def text_field(item: dict[str, Any], name: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise wrong("input", f"an item of the type {item['type']} needs {name}, which is a string.")
    return value


def text_of(content: Any, kind: str, ignored: Ignored, strict: bool = False) -> str:
    """Return the text of a string or of parts; raises RequestError for what isn't text, if ``strict``."""
    if isinstance(content, str):
        return content
    if content in (None, []) and not strict:
        return ""
    if not isinstance(content, list) or not content or not all(isinstance(part, dict) for part in content):
        raise wrong("input", f"the content of an item of the type {kind} must be a string or a list of parts.")
    texts = list[str]()
    for part in content:
        if (type := part.get("type")) not in TEXTS:
            if strict:
                raise wrong("input", f"a part of the type {type!s:.40} can't be read; only text can.")
            texts.append(left_out(type, ignored))
            continue
        text = part.get("refusal" if type == "refusal" else "text")
        if not isinstance(text if strict else text or "", str):
            raise wrong("input", f"a part of the type {type} needs a text, which is a string.")
        texts.append(text or "")
    return "\n".join(texts)
