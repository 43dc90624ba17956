"""Makes the grammar of an answer's tool calls, in the format of a family of models."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.grammars.json_schema import CompiledSchema, SchemaOptions, compile_schema
from ovspec.grammars.json_schema.item_tracks import merge_item_tracks
from ovspec.grammars.json_schema.parameters import ParameterExpressions
from ovspec.grammars.sources import UNIQUE_ITEMS_KEY, check_character_count, check_nesting, find_schema_problem
from ovspec.params.tool_formats import TOOL_FORMATS_BY_NAME
from ovspec.params.tool_formats.layout import SLOT_PATTERNS, ToolFormat

# Next to llguidance's own keys.
TOKEN_NAMES_KEY = "marks"  # names of tokens in the grammar -> names in the vocabulary
TEXT_PARAMETERS_KEY = "strings"  # tool -> the parameters written as text without quotes
# The first character of the grammar's texts isn't generated, but selects their kind: calls, calls after thinking, or an
# answer without calls, after thinking or not.
ANSWER_CALLS, ANSWER_CALLS_AFTER_THINKING = b"c", b"C"
ANSWER_TEXT, ANSWER_TEXT_AFTER_THINKING = b"o", b"O"
SPACE_AFTER_THINKING = "/[ \\t\\n]{1,4}/"
# Keywords without a statement about an object's properties, for schemas without properties.
SILENT_KEYWORDS = {"type", "properties", "required", "title", "description", "$schema", "$id", "$comment"}


def write_tools_grammar(source: JsonObject, label: str) -> tuple[str, str]:
    """Return the grammar of answers with tool calls, and a note on ignored parts of their schemas or "".

    Args:
        source: "format": the name of the tool format; "tools": {"name", "parameters"} of the tools allowed;
            "parallel": whether several calls are allowed; "reading": fields of ``json_schema.SchemaOptions``;
            "tokens": the tags with a token of their own; "header": the text allowed after thinking, "" for white space,
            null without thinking; "other": the grammar of answers without calls, or null for none; "text": the tag in
            front of such an answer.
        label: the tools' name in messages.

    Raises:
        OvspecError: a schema is invalid or can't be enforced; the message names the tool.
    """
    tool_format = TOOL_FORMATS_BY_NAME[source["format"]]
    token_names = {f"<mark{tool_number}>": tag_token for tool_number, tag_token in enumerate(source["tokens"])}
    parameter_layout = make_parameter_layout(tool_format, token_names)
    schema_options = SchemaOptions(**source["reading"])
    compiled_schemas = {
        tool["name"]: compile_arguments(tool, schema_options, parameter_layout, label) for tool in source["tools"]
    }
    grammar_names = {tool_name: f"tool_{tool_number}" for tool_number, tool_name in enumerate(compiled_schemas)}
    rule_lines = [f"start: {' | '.join(list_answer_expressions(source, token_names))}"]
    if compiled_schemas:
        rule_lines += write_call_rules(tool_format, grammar_names, source["parallel"], token_names)
    partial_grammars: list[JsonObject] = [{"name": "tools", "lark_grammar": "\n".join(rule_lines)}]
    partial_grammars += [
        {"name": grammar_names[tool_name], "lark_grammar": schema.lark}
        for tool_name, schema in compiled_schemas.items()
    ]
    item_tracks = [schema.item_tracks for schema in compiled_schemas.values() if schema.item_tracks]
    if source["other"]:
        text_grammar = json.loads(source["other"])
        partial_grammars += [{**text_grammar["grammars"][0], "name": "other"}, *text_grammar["grammars"][1:]]
        if UNIQUE_ITEMS_KEY in text_grammar:
            item_tracks.append(text_grammar[UNIQUE_ITEMS_KEY])
    text_parameters = {
        tool_name: schema.text_parameters for tool_name, schema in compiled_schemas.items() if schema.text_parameters
    }
    grammar: JsonObject = {
        "grammars": partial_grammars,
        TOKEN_NAMES_KEY: token_names,
        TEXT_PARAMETERS_KEY: text_parameters,
    }
    if item_tracks:
        grammar[UNIQUE_ITEMS_KEY] = merge_item_tracks(item_tracks)
    warnings = (f"{tool_name}: {schema.warning}" for tool_name, schema in compiled_schemas.items() if schema.warning)
    return json.dumps(grammar), " ".join(warnings)


def make_parameter_layout(tool_format: ToolFormat, token_names: dict[str, str]) -> ParameterExpressions | None:
    """Return the texts around separately written arguments; None if all arguments are a single JSON object."""
    parameters = tool_format.parameters
    if not parameters:
        return None
    has_token_after_name = any(tag_token in parameters.after_name for tag_token in token_names.values())
    before_name = write_literal(parameters.before_name, token_names)
    after_name = write_literal(parameters.after_name, token_names)
    value_ending = split_at_token(parameters.after_value, token_names)
    return ParameterExpressions(
        before_name, after_name, parameters.after_name * (not has_token_after_name), *value_ending
    )


def compile_arguments(
    tool: JsonObject, schema_options: SchemaOptions, parameter_layout: ParameterExpressions | None, label: str
) -> CompiledSchema:
    """Return the grammar of a tool's arguments."""
    schema_label = f"{label}: the schema of {tool['name']}"
    schema = dict(tool["parameters"] or {})
    schema_text = json.dumps(schema)
    check_character_count(schema_text, schema_label)
    check_nesting(schema_text, schema_label)
    if schema.setdefault("type", "object") != "object":
        raise OvspecError(f"{schema_label}, at #/type: arguments must be an object; set the type to 'object'.")
    has_parameters = schema.get("properties") or schema.get("required") or schema.keys() - SILENT_KEYWORDS
    if schema_options.close_objects and not has_parameters:
        schema["additionalProperties"] = False
    try:
        return compile_schema(schema, find_schema_problem, schema_options, parameter_layout)
    except OvspecError as error:
        raise OvspecError(f"{schema_label}, at {re.sub('^#:', 'the top:', str(error))}") from None


def list_answer_expressions(source: JsonObject, token_names: dict[str, str]) -> list[str]:
    """Return the expressions of all kinds of answers."""
    answer_kinds: list[tuple[bytes, bytes, str]] = []
    if source["tools"]:
        answer_kinds.append((ANSWER_CALLS, ANSWER_CALLS_AFTER_THINKING, "calls"))
    if source["other"]:
        text_answer = f"{write_literal(source['text'], token_names)} @other"
        answer_kinds.append((ANSWER_TEXT, ANSWER_TEXT_AFTER_THINKING, text_answer))
    answer_expressions = [f'"{answer_kind.decode()}" {answer}' for answer_kind, _, answer in answer_kinds]
    if source["header"] is not None:
        header = write_literal(source["header"], token_names) or SPACE_AFTER_THINKING
        answer_expressions += [
            f'"{answer_kind.decode()}" ({header})? {answer}' for _, answer_kind, answer in answer_kinds
        ]
    return answer_expressions


def write_call_rules(
    tool_format: ToolFormat, grammar_names: dict[str, str], parallel: bool, token_names: dict[str, str]
) -> list[str]:
    """Return the rules of all calls; ``grammar_names``: tool -> the grammar of its arguments."""
    more_calls = ""
    if parallel and tool_format.between_calls is not None:
        more_calls = f"({write_literal(tool_format.between_calls, token_names)} call)*"
    before_calls, after_calls = (
        write_literal(tool_format.before_calls, token_names),
        write_literal(tool_format.after_calls, token_names),
    )
    rule_lines = [f"calls: {before_calls} call {more_calls} {after_calls}"]
    tools_and_calls = itertools.product(grammar_names.items(), tool_format.calls)
    call_expressions = [
        write_call(call_parts, tool_name, grammar, token_names) for (tool_name, grammar), call_parts in tools_and_calls
    ]
    rule_lines.append(f"call: {' | '.join(call_expressions)}")
    return rule_lines + [
        f"{slot}: /{pattern}/" for slot, pattern in SLOT_PATTERNS.items() if slot in sum(tool_format.calls, ())
    ]


def write_call(call_parts: Sequence[str], tool_name: str, grammar_name: str, token_names: dict[str, str]) -> str:
    """Return the expression of a call: texts and slots."""
    expressions: list[str] = []
    for slot, parts in itertools.groupby(
        call_parts, lambda call_part: call_part if call_part in (*SLOT_PATTERNS, "ARGUMENTS") else ""
    ):
        if slot == "ARGUMENTS":
            expressions.append(f"@{grammar_name}")
        else:
            text = "".join(tool_name if call_part == "NAME" else call_part for call_part in parts)
            expressions.append(slot or write_literal(text, token_names))
    return " ".join(expressions)


def write_literal(text: str, token_names: dict[str, str]) -> str:
    """Return the expression of ``text``; ``token_names``: names of tokens possible in it."""
    text_parts = split_at_tokens(text, token_names)
    return " ".join(
        text_part if text_part in token_names else json.dumps(text_part, ensure_ascii=False) for text_part in text_parts
    )


def split_at_tokens(text: str, token_names: dict[str, str]) -> list[str]:
    """Return ``text`` split at tokens with a name in the grammar."""
    name_by_token = {tag_token: name for name, tag_token in token_names.items()}
    token_pattern = "|".join(map(re.escape, sorted(name_by_token, key=len, reverse=True)))
    text_parts = re.split(f"({token_pattern})", text) if name_by_token else [text]
    return [name_by_token.get(text_part, text_part) for text_part in text_parts if text_part]


def split_at_token(text: str, token_names: dict[str, str]) -> tuple[str, str, bool]:
    """Return (the text before the first token, the expression of the rest, whether there is a token)."""
    text_before = next(iter(split_at_tokens(text, token_names)), "")
    if text_before in token_names:
        text_before = ""
    return text_before, write_literal(text[len(text_before) :], token_names), len(text_before) < len(text)
