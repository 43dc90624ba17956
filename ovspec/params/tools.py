"""The options for tools: descriptions of tools, and the allowed calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject, JsonValue

MAX_TOOLS = 1000  # tools
TOOL_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,128}")
TOOL_CHOICE_MODES = ("auto", "none", "required")
TOOL_CHOICE_FORMS = (
    '"auto", "none", "required", {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", …}'
)
SCHEMA_FORM = '{"type": "object", "properties": {…}}'
TOOL_FORM = '{"type": "function", "function": {"name": …, "parameters": …}}'


@dataclass(frozen=True)
class AllowedCalls:
    """The tool calls allowed in an answer.

    tool_names: the allowed tools.
    required: the answer consists of tool calls only.
    single_call: at most a single call.
    """

    tool_names: tuple[str, ...]
    required: bool
    single_call: bool = False


NO_TOOLS = AllowedCalls((), False)


def parse_tools(tools: Sequence[JsonValue]) -> list[JsonObject]:
    """Return tools in the format of OpenAI's API, from such objects, their function part, or Python functions.

    Raises:
        OvspecError: a tool isn't a function with a name and a schema, or two tools have the same name.
    """
    if len(tools) > MAX_TOOLS:
        raise OvspecError(f"`tools` has {len(tools)} tools; at most {MAX_TOOLS} are allowed.")
    parsed_tools = list(map(parse_tool, tools))
    names = set[str]()
    for name in (tool["function"]["name"] for tool in parsed_tools):
        if name in names:
            raise OvspecError(f"`tools` has two tools named {name}; give each tool its own name.")
        names.add(name)
    return parsed_tools


def parse_tool(tool: JsonValue) -> JsonObject:
    """Return a single tool in the format of OpenAI's API; see ``parse_tools``."""
    if callable(tool):
        tool = describe_function(tool)
    if not isinstance(tool, Mapping):
        raise OvspecError(f"`tools` has {tool!r:.80}; each tool must be {TOOL_FORM} or a Python function.")
    tool_type = tool.get("type", "function")
    function = tool.get("function", tool)
    if tool_type != "function" or not isinstance(function, Mapping):
        raise OvspecError(f"`tools` has a tool of the type {tool_type!s:.40}; each tool must be {TOOL_FORM}.")
    name = function.get("name")
    parameters = function.get("parameters")
    if not isinstance(name, str) or not TOOL_NAME_PATTERN.fullmatch(name):
        raise OvspecError(f"`tools`: the name {name!r:.80} is invalid; use 1 to 128 letters, digits, _, . or -.")
    for schema_field in ("input_schema", "inputSchema"):  # Anthropic's and MCP's
        if schema_field in function:
            raise OvspecError(
                f"`tools`: {name} has its schema in the field {schema_field}; move the schema to the field parameters."
            )
    if not isinstance(parameters, (Mapping, type(None))):
        raise OvspecError(f"`tools`: the parameters of {name} must be a JSON schema: an object such as {SCHEMA_FORM}.")
    if not isinstance(function.get("strict", False), (bool, type(None))):
        raise OvspecError(f"`tools`: the field strict of {name} must be true or false.")
    if not isinstance(function.get("description") or "", str):
        raise OvspecError(f"`tools`: the description of {name} must be a string.")
    function_fields = {key: value for key, value in function.items() if key != "type" and value is not None}
    return {"type": "function", "function": {**function_fields, "parameters": dict(parameters or EMPTY_SCHEMA)}}


EMPTY_SCHEMA = {"type": "object", "properties": {}}


def describe_function(function: Callable[..., Any]) -> JsonObject:
    """Return name, description and parameters of a Python function, from its type hints and its docstring.

    The docstring is in Google's style: "Args:" with a line "name: description" for each parameter.
    """
    from pydantic import Field, create_model  # imported late: few programs use it
    from pydantic.errors import PydanticUserError

    function_name = getattr(function, "__name__", None)
    if not isinstance(function_name, str):
        raise OvspecError(f"`tools` has {function!r:.80}, a function without a name; define the function with def.")
    docstring = inspect.cleandoc(function.__doc__ or "")
    description, _, arguments_text = docstring.partition("Args:\n")
    argument_entries = re.findall(
        r"(?m)^( +)(\w+)(?: \([^)]*\))?: (.+(?:\n\1 +.+)*)", arguments_text.split("\nReturns:")[0]
    )
    argument_notes = {name: argument_note for _, name, argument_note in argument_entries}
    model_fields: JsonObject = {}
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, TypeError, ValueError) as error:
        raise OvspecError(
            f"`tools`: the parameters of {function!r:.80} can't be read ({error!s:.80}); define the function with def."
        ) from None
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.annotation is parameter.empty:
            raise OvspecError(
                f"`tools`: the parameter {name} of {function_name} has no type hint; add a type, as in {name}: str."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        argument_note = " ".join(argument_notes[name].split()) if name in argument_notes else None
        # Renamed, because pydantic reserves some names.
        model_fields[f"parameter_{len(model_fields)}"] = (
            parameter.annotation,
            Field(default, alias=name, description=argument_note),
        )
    try:
        schema = create_model(function_name, **model_fields).model_json_schema()
    except (PydanticUserError, NameError) as error:
        reason = str(error).split("\n")[0].split(". ")[0]
        problem = f"`tools`: the type hints of {function_name} can't be turned into a JSON schema ({reason:.200})"
        raise OvspecError(f"{problem}; use types such as str, float or list[str].") from None
    return {
        "name": function_name,
        "description": description.split("\nReturns:")[0].strip(),
        "parameters": {key: remove_titles(value) for key, value in schema.items() if key != "title"},
    }


def remove_titles(schema: JsonValue) -> JsonValue:
    """Return a schema without pydantic's titles, made from names."""
    if isinstance(schema, list):
        return [remove_titles(subschema) for subschema in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: remove_titles(subschema)
        for key, subschema in schema.items()
        if key != "title" or not isinstance(subschema, str)
    }


def parse_tool_choice(tools: Sequence[JsonObject], tool_choice: JsonValue) -> AllowedCalls:
    """Return the allowed calls for ``tools`` in OpenAI's format and the option ``tool_choice``.

    Raises:
        OvspecError: the choice is malformed, or names an unknown tool.
    """
    tool_names = dict.fromkeys(tool["function"]["name"] for tool in tools)
    if tool_choice is None or tool_choice in TOOL_CHOICE_MODES:
        if tool_choice == "required" and not tool_names:
            raise OvspecError("`tool_choice` is required, but there are no `tools`; add a tool.")
        return AllowedCalls(() if tool_choice == "none" else (*tool_names,), tool_choice == "required")
    choice_type = tool_choice.get("type") if isinstance(tool_choice, Mapping) else None
    choice_content = tool_choice.get(choice_type, tool_choice) if choice_type in ("function", "allowed_tools") else None
    if choice_type == "function" and isinstance(choice_content, Mapping):
        return AllowedCalls(select_requested_tool_names([choice_content.get("name")], tool_names), True, True)
    if isinstance(choice_content, Mapping) and choice_content.get("mode", "auto") in ("auto", "required"):
        allowed_tools = choice_content.get("tools")
        if isinstance(allowed_tools, list) and all(isinstance(tool, Mapping) for tool in allowed_tools):
            allowed_functions = [tool.get("function", tool) for tool in allowed_tools]
            allowed_names = [
                function.get("name") if isinstance(function, Mapping) else None for function in allowed_functions
            ]
            if not allowed_names and choice_content.get("mode") == "required":
                raise OvspecError(
                    "`tool_choice` requires a tool call, but the list of allowed tools is empty; add a tool."
                )
            return AllowedCalls(
                select_requested_tool_names(allowed_names, tool_names), choice_content.get("mode") == "required"
            )
    raise OvspecError(f"`tool_choice` is {tool_choice!r:.80}; it must be {TOOL_CHOICE_FORMS}.")


def select_requested_tool_names(
    requested_names: Sequence[JsonValue], tool_names: Mapping[str, None]
) -> tuple[str, ...]:
    """Return ``requested_names`` without repetitions; raises OvspecError for an unknown name."""
    for name in requested_names:
        if not isinstance(name, str) or name not in tool_names:
            tools_in_words = f"the tools are {', '.join(tool_names)}" if tool_names else "there are no tools"
            raise OvspecError(f"`tool_choice` names {name!r:.80}, but {tools_in_words:.300}.")
    return tuple(dict.fromkeys(requested_names))
