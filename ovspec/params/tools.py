"""The tools that a model may call: what users give, and what they ask of them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ovspec.base.errors import OvspecError

MAX_TOOLS = 1000  # tools
TOOL_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,128}")
TOOL_CHOICE_MODES = ("auto", "none", "required")
TOOL_CHOICE_FORMS = (
    '"auto", "none", "required", {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", …}'
)


@dataclass(frozen=True)
class AllowedCalls:
    """What an answer may call.

    names: the tools that it may call.
    required: it must, and says nothing else.
    once: it has one call at most.
    """

    names: tuple[str, ...]
    required: bool
    once: bool = False


NO_TOOLS = AllowedCalls((), False)


def find_tool_formats() -> list[str]:
    """Return the names of the formats in ``text/tool_formats``; only the option imports from that higher layer."""
    return sorted(importlib.import_module("ovspec.text.tool_formats").FORMATS_BY_NAME)


def parse_tools(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Return tools as OpenAI's API has them; each given so, as the function within, or as a Python function.

    Raises:
        OvspecError: one isn't a function with a name and a schema, or two have the same name.
    """
    if len(given) > MAX_TOOLS:
        raise OvspecError(f"`tools` has {len(given)} tools; at most {MAX_TOOLS} are allowed.")
    tools, names = list(map(parse_tool, given)), set[str]()
    for name in (tool["function"]["name"] for tool in tools):
        if name in names:
            raise OvspecError(f"`tools` has {name} twice; give each tool another name.")
        names.add(name)
    return tools


def parse_tool(given: Any) -> dict[str, Any]:
    if callable(given):
        given = describe_function(given)
    if not isinstance(given, Mapping):
        raise OvspecError(f"`tools` has {given!r:.80}; each must be a function, or an object that describes one.")
    kind, function = given.get("type", "function"), given.get("function", given)
    if kind != "function" or not isinstance(function, Mapping):
        raise OvspecError(f"`tools` has a tool of the type {kind!s:.40}; only functions can be called here.")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME_PATTERN.fullmatch(name):
        raise OvspecError(f"`tools`: a name is {name!r:.80}; it must have 1 to 128 letters, digits, _, . or -.")
    for other in ("input_schema", "inputSchema"):  # Anthropic's and MCP's
        if other in function:
            raise OvspecError(f"`tools`: {name} has its schema in {other}; give it in parameters.")
    if not isinstance(parameters, (Mapping, type(None))):
        raise OvspecError(f"`tools`: the parameters of {name} must be a JSON schema, which is an object.")
    if not isinstance(function.get("strict", False), (bool, type(None))):
        raise OvspecError(f"`tools`: strict of {name} must be true or false.")
    if not isinstance(function.get("description") or "", str):
        raise OvspecError(f"`tools`: the description of {name} must be a string.")
    kept = {key: value for key, value in function.items() if key != "type" and value is not None}
    return {"type": "function", "function": {**kept, "parameters": dict(parameters or EMPTY_SCHEMA)}}


EMPTY_SCHEMA = {"type": "object", "properties": {}}


def describe_function(function: Callable[..., Any]) -> dict[str, Any]:
    """Return name, description and parameters of a Python function, from its type hints and its docstring.

    The docstring is one of Google's style: "Args:" with a line "name: what it is" for each parameter.
    """
    from pydantic import Field, create_model  # deferred, because few need it
    from pydantic.errors import PydanticUserError

    called = getattr(function, "__name__", None)
    if not isinstance(called, str):
        raise OvspecError(f"`tools` has {function!r:.80}, which has no name; give a function made with def.")
    text = inspect.cleandoc(function.__doc__ or "")
    about, _, arguments = text.partition("Args:\n")
    notes = dict(
        found[1:]
        for found in re.findall(
            r"^( +)(\w+)(?: \([^)]*\))?: (.+(?:\n\1 +.+)*)", arguments.split("\nReturns:")[0], re.MULTILINE
        )
    )
    fields: dict[str, Any] = {}
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, TypeError, ValueError) as error:
        raise OvspecError(f"`tools`: the parameters of {function!r:.80} can't be read ({error!s:.80}).") from None
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.annotation is parameter.empty:
            raise OvspecError(f"`tools`: {called} needs a type hint for its parameter {name}.")
        default = ... if parameter.default is parameter.empty else parameter.default
        note = " ".join(notes[name].split()) if name in notes else None
        # Under another name, because pydantic has names of its own.
        fields[f"parameter_{len(fields)}"] = (parameter.annotation, Field(default, alias=name, description=note))
    try:
        schema = create_model(called, **fields).model_json_schema()
    except (PydanticUserError, NameError) as error:
        first = str(error).split("\n")[0].split(". ")[0]
        told = f"`tools`: the type hints of {called} make no JSON schema ({first:.200})"
        raise OvspecError(f"{told}; use types that JSON has.") from None
    return {
        "name": called,
        "description": about.split("\nReturns:")[0].strip(),
        "parameters": {key: remove_titles(value) for key, value in schema.items() if key != "title"},
    }


def remove_titles(schema: Any) -> Any:
    """Return a schema without the titles that pydantic makes of names."""
    if isinstance(schema, list):
        return [remove_titles(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: remove_titles(each) for key, each in schema.items() if not (key == "title" and isinstance(each, str))}


def parse_tool_choice(tools: Sequence[Any], choice: Any) -> AllowedCalls:
    """Return what an answer may call; ``tools`` are OpenAI's, ``choice`` is the option ``tool_choice``.

    Raises:
        OvspecError: the choice isn't one, or names a tool that isn't there.
    """
    names = dict.fromkeys(tool["function"]["name"] for tool in tools)
    if choice is None or choice in TOOL_CHOICE_MODES:
        if choice == "required" and not names:
            raise OvspecError("`tool_choice` is required, which needs `tools`.")
        return AllowedCalls(() if choice == "none" else (*names,), choice == "required")
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    inner = choice.get(kind, choice) if kind in ("function", "allowed_tools") else None
    if kind == "function" and isinstance(inner, Mapping):
        return AllowedCalls(check_tool_names([inner.get("name")], names), True, True)
    if isinstance(inner, Mapping) and inner.get("mode", "auto") in ("auto", "required"):
        listed = inner.get("tools")
        if isinstance(listed, list) and all(isinstance(each, Mapping) for each in listed):
            given = [each.get("function", each) for each in listed]
            wanted = [each.get("name") if isinstance(each, Mapping) else None for each in given]
            if not wanted and inner.get("mode") == "required":
                raise OvspecError("`tool_choice` is required, but allows no tool; name some.")
            return AllowedCalls(check_tool_names(wanted, names), inner.get("mode") == "required")
    raise OvspecError(f"`tool_choice` is {choice!r:.80}; it must be {TOOL_CHOICE_FORMS}.")


def check_tool_names(wanted: Sequence[Any], names: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``wanted`` names, each once; raises OvspecError for one that no tool has."""
    for name in wanted:
        if not isinstance(name, str) or name not in names:
            there = f"the tools are {', '.join(names)}" if names else "there are no tools"
            raise OvspecError(f"`tool_choice` names {name!r:.80}, but {there:.300}.")
    return tuple(dict.fromkeys(wanted))
