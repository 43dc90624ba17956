"""Converts the grammars in params, and checks finished answers against their schemas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonValue
from ovspec.params import Params
from ovspec.sampling.schema_validation import find_schema_errors
from ovspec.text.answer import AnswerFormat, ToolCall


def convert_requested_grammar(params: Params) -> tuple[str | None, str]:
    """Return (the requested grammar in llguidance's notation, its name in messages), or (None, "").

    Raises:
        OvspecError: the grammar is invalid.
    """
    if not (option_name := params.grammar_option):
        return None, ""
    from ovspec.sampling.grammar_conversion import convert_grammar

    requested_grammar = getattr(params, option_name)
    grammar_source = normalize_grammar_option(option_name, requested_grammar)
    grammar_label = f"`{option_name}`"
    if isinstance(grammar_source, Path):
        grammar_label += f" {grammar_source}"
    if option_name != "json_schema":
        return convert_grammar(option_name, grammar_source, grammar_label), grammar_label
    additional_properties = params.additional_properties
    if additional_properties is None and not isinstance(requested_grammar, (dict, bool, str, Path)):
        additional_properties = False  # a Python type has no other fields
    schema_options = {
        "lenient": params.json_schema_mode == "checked",
        "close_objects": None if additional_properties is None else not additional_properties,
        "compact": bool(params.compact_json),
    }
    return convert_grammar(option_name, grammar_source, grammar_label, **schema_options), grammar_label


def convert_answer_grammar(params: Params, answer_format: AnswerFormat) -> str | None:
    """Return the grammar of calls, or of the whole answer after thinking; None if ``params`` has it or there is none.

    Raises:
        OvspecError: a tool's schema can't be used; the message names the tool.
    """
    allowed_calls = params.allowed_calls
    thinking = answer_format.thinking_format
    text_grammar = None
    if not allowed_calls.required:
        text_grammar, _ = convert_requested_grammar(params)
    if not allowed_calls.tool_names and not (text_grammar and thinking):
        return None
    from ovspec.sampling.grammar_conversion import convert_grammar

    allowed_functions = [
        tool["function"] for tool in params.tools if tool["function"]["name"] in allowed_calls.tool_names
    ]
    request = {
        "format": answer_format.tool_format.name if answer_format.tool_format else "generic",
        "tools": [{"name": function["name"], "parameters": function["parameters"]} for function in allowed_functions],
        "parallel": params.parallel_tool_calls and not allowed_calls.single_call,
        "tokens": [*answer_format.tag_token_ids],
        "header": thinking and thinking.message_header,
        "text": thinking.text_header if thinking else "",
        "other": text_grammar,
        "reading": {
            "lenient": params.json_schema_mode == "checked",
            "close_objects": params.additional_properties is not True,
            "compact": params.compact_json,
        },
    }
    return convert_grammar("tools", request, "`tools`")


def find_answer_schema_errors(
    params: Params, prompt_part: str, answer_text: str, tool_calls: Sequence[ToolCall]
) -> list[str]:
    """Return how an answer, ``prompt_part + text`` with tool calls, breaks its schemas; see ``find_schema_errors``."""
    errors: list[str] = []
    schemas_by_tool = {tool["function"]["name"]: tool["function"]["parameters"] for tool in params.tools}
    if params.json_schema is not None and (answer_text or not tool_calls):
        errors += find_schema_errors(
            normalize_grammar_option("json_schema", params.json_schema), prompt_part, answer_text
        )
    for tool_call in tool_calls:
        call_errors = find_schema_errors(schemas_by_tool[tool_call.name or ""], "", tool_call.arguments)
        errors += (f"{tool_call.name}: {error}" for error in call_errors)
    return errors


def normalize_grammar_option(option_name: str, grammar_source: Any) -> JsonValue | Path:
    """Return the value of a grammar option for ``convert_grammar``; raises OvspecError if it has another type."""
    if isinstance(grammar_source, Path):
        if grammar_source.is_dir():
            raise OvspecError(f"`{option_name}`: {grammar_source} is a folder; give a file.")
        if option_name in ("json_schema", "grammar", "gbnf"):
            return grammar_source
    if option_name == "json_schema":
        if grammar_source is not None and not isinstance(grammar_source, (dict, bool, str)):
            return make_type_schema(grammar_source)
        if isinstance(grammar_source, str) and not grammar_source.lstrip().startswith(("{", "[", '"', "true", "false")):
            raise OvspecError(
                f"`{option_name}` {grammar_source[:80]!r} isn't JSON; give the schema's text, or a Path for a file."
            )
        return grammar_source
    if option_name == "choice":
        choices = (
            list(grammar_source) if isinstance(grammar_source, Iterable) and not isinstance(grammar_source, str) else []
        )
        if not choices or not all(isinstance(choice_text, str) for choice_text in choices):
            raise OvspecError("`choice` must be a non-empty list of strings.")
        return choices
    if option_name == "regex" and isinstance(grammar_source, Path):
        return str(grammar_source)
    if not isinstance(grammar_source, str):
        raise OvspecError(f"`{option_name}` must be a string or a Path, not {type(grammar_source).__name__}.")
    if option_name != "regex" and ":" not in grammar_source:
        raise OvspecError(
            f"`{option_name}` {grammar_source[:80]!r} isn't a grammar; give the grammar's text, or a Path for a file."
        )
    return grammar_source


def make_type_schema(python_type: Any) -> JsonValue:
    """Return the JSON schema of a pydantic model or of another type supported by pydantic, such as list[str]."""
    from pydantic import PydanticUserError, TypeAdapter  # deferred, because few need it

    try:
        if hasattr(python_type, "model_json_schema"):
            return python_type.model_json_schema()
        return TypeAdapter(python_type).json_schema()
    except PydanticUserError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise OvspecError(f"`json_schema`: {python_type!r:.80} can't be turned into a JSON schema: {reason}.") from None
