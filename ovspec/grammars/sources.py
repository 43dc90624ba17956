"""Makes llguidance grammars from JSON schemas, regular expressions, choices, Lark and GBNF.

All functions raise OvspecError if the input is invalid or can't be enforced during generation; the message names the
place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.grammars.gbnf import convert_gbnf_to_lark
from ovspec.grammars.json_schema import SchemaOptions, compile_schema
from ovspec.grammars.json_schema.expressions import escape_slashes
from ovspec.grammars.response_format import is_response_format, unwrap_response_format
from ovspec.grammars.wording import word_llguidance_error

MAX_GRAMMAR_CHARACTERS = 2_000_000  # of a schema, a grammar, an expression or all choices together
MAX_GBNF_CHARACTERS = 200_000  # lower, because GBNF is parsed in Python
MAX_NESTING = 200
# For checking grammars and for following them. C over 131,072 tokens needs 41,000 items for a mask on average; with
# this limit of items, the most ambiguous grammars take a second or two for a step before they fail.
PARSER_LIMITS = LLParserLimits(
    max_items_in_row=1000, step_max_items=100_000, max_lexer_states=50_000,
    precompute_large_lexemes=True, verbose_errors=False,
)  # fmt: skip
UNIQUE_ITEMS_KEY = "unique_items"  # next to llguidance's own keys: ``json_schema.item_tracks``

# First the tokens with arbitrary content, then the tokens to search for.
LARK_TOKEN_PATTERN = re.compile(
    r'"(?:\\.|[^"\\\n])*"?'
    r"|//[^\n]*|\#[^\n]*"
    r"|/(?:\\.|[^/\\\n])+/?"
    r"|<[^<>\s]+>"
    r"|(?P<json>%json\b\s*)"
    r"|\b(?P<option>max_tokens|stop|temperature)\s*="
)
BRACKET_PATTERN = re.compile(r'"(?:\\.|[^"\\])*"?|[\[{]|[\]}]')


def convert_json_schema(
    schema: JsonObject | bool | str,
    label: str = "The JSON schema",
    lenient: bool = False,
    close_objects: bool | None = None,
    compact: bool = False,
) -> tuple[str, str]:
    """Return (the grammar of a schema's JSON texts, the ignored parts of the schema or "").

    Args:
        schema: the schema itself or its JSON text. ``x-guidance`` at its top sets separators and white space.
        label: the schema's name in messages.
        lenient, close_objects, compact: see ``json_schema.SchemaOptions``; response formats are closed by default.
    """
    if isinstance(schema, str):
        schema = parse_json(schema, label)
    try:
        schema_text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OvspecError(f"{label} can't be written as JSON: {error}.") from None
    check_character_count(schema_text, label)
    check_nesting(schema_text, label)
    try:
        schema = json.loads(schema_text)
        if close_objects is None:
            close_objects = is_response_format(schema)
        schema_options = SchemaOptions(lenient, close_objects, compact)
        compiled_schema = compile_schema(unwrap_response_format(schema), find_schema_problem, schema_options)
    except OvspecError as error:
        raise OvspecError(f"{label}, at {re.sub('^#:', 'the top:', str(error))}") from None
    grammar = write_grammar_json("json", lark_grammar=compiled_schema.lark)
    if compiled_schema.item_tracks:
        grammar = json.dumps({**json.loads(grammar), UNIQUE_ITEMS_KEY: compiled_schema.item_tracks})
    return grammar, compiled_schema.warning


def find_schema_problem(schema: JsonObject) -> str:
    """Return why llguidance can't use a schema, as a sentence; "" if it can."""
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return word_llguidance_error(LLMatcher.validate_grammar(grammar, None, limits=PARSER_LIMITS))


def convert_regex(pattern: str, label: str = "The regular expression") -> str:
    """Return the grammar of texts with a full match of ``pattern``, in Rust's ``regex`` syntax without look-around."""
    check_text(pattern, label)
    pattern = re.sub(r"(?<!\\)((?:\\\\)*)\$\Z", r"\1", pattern.removeprefix("^"))
    if re.search(r"(?<!\\)(?:\\\\)*\\\Z", pattern):
        raise OvspecError(f"{label} ends with a backslash; write \\\\ to match a backslash.")
    return write_grammar_json("regex", lark_grammar=f"start: /{escape_slashes(pattern)}/")


def convert_choices(choices: Sequence[str], label: str = "choice") -> str:
    """Return the grammar of exactly the texts in ``choices``."""
    if isinstance(choices, str) or not choices:
        raise OvspecError(f"{label} must be a non-empty list of strings.")
    for i, choice in enumerate(choices):
        check_text(choice, f"Choice {i + 1}")
    choice_expressions = "|".join("".join(map(escape_choice_character, choice)) for choice in dict.fromkeys(choices))
    check_character_count(choice_expressions, "The list of choices")
    return write_grammar_json("choices", lark_grammar=f"start: /(?:{choice_expressions})/")


def convert_lark(text: str, label: str = "The Lark grammar") -> str:
    """Return the grammar for a text in llguidance's dialect of Lark; the start rule is ``start``.

    ``max_tokens=``, ``stop=`` and ``temperature=`` are refused.
    """
    check_text(text, label)
    check_character_count(text, label)
    if match := re.search(r"^[^\S\n]*%import[^\S\n]+\.", text, re.MULTILINE):
        reason = "a grammar can't import files; put all rules into it."
        raise OvspecError(f"{label}, {line_and_column(text, match.start())}: {reason}")
    if re.search(r"^[\w-]+[^\S\n]*::=", text, re.MULTILINE):
        raise OvspecError(f"{label}: rules with ::= are GBNF; use `gbnf` instead of `grammar`.")
    grammar_parts: list[str] = []
    schema_grammars: list[dict[str, str]] = []
    next_index = 0
    while match := LARK_TOKEN_PATTERN.search(text, next_index):
        grammar_parts.append(text[next_index : match.end()])
        next_index = match.end()
        if refused_option := match["option"]:
            reason = f"the attribute {refused_option}= isn't supported; delete it from the rule."
            raise OvspecError(f"{label}, {line_and_column(text, match.start())}: {reason}")
        if match["json"]:
            schema_lark, schema_end = convert_inline_schema(text, next_index, label)
            schema_name = f"json_schema_{len(schema_grammars)}"
            schema_grammars.append({"name": schema_name, "lark_grammar": schema_lark})
            grammar_parts[-1] = grammar_parts[-1][: -len(match["json"])]
            line_breaks = "\n" * text.count("\n", match.start("json"), schema_end)  # later lines keep their numbers
            grammar_parts += [f"@{schema_name}", line_breaks]
            next_index = schema_end
    return write_grammar_json("lark", *schema_grammars, lark_grammar="".join(grammar_parts) + text[next_index:])


def convert_gbnf(text: str, label: str = "The GBNF grammar") -> str:
    """Return the grammar for a text in llama.cpp's GBNF; the start rule is ``root``."""
    check_text(text, label)
    check_character_count(text, label, MAX_GBNF_CHARACTERS)
    try:
        return write_grammar_json("gbnf", lark_grammar=convert_gbnf_to_lark(text))
    except OvspecError as error:
        raise OvspecError(f"{label}, {error}") from None


def write_grammar_json(grammar_kind: str, *other_grammars: dict[str, str], lark_grammar: str) -> str:
    """Return a grammar in llguidance's own notation, with its kind as its name, for the wording of errors.

    ``other_grammars``: grammars referenced in it by name.
    """
    return json.dumps({"grammars": [{"name": grammar_kind, "lark_grammar": lark_grammar}, *other_grammars]})


def convert_inline_schema(text: str, schema_start: int, label: str) -> tuple[str, int]:
    """Return the grammar of the schema after ``%json``, and the schema's end in ``text``."""
    check_nesting(text, label, schema_start)
    try:
        schema, schema_end = json.JSONDecoder().raw_decode(text, schema_start)
        compiled_schema = compile_schema(schema, find_schema_problem)
        if compiled_schema.item_tracks:
            raise OvspecError("uniqueItems: this keyword can't be enforced within a grammar; remove it.")
        return compiled_schema.lark, schema_end
    except (ValueError, RecursionError):
        reason = "the JSON schema isn't valid JSON."
    except OvspecError as error:
        reason = f"the JSON schema, at {re.sub('^#:', 'the top:', str(error))}"
    raise OvspecError(f"{label}, {line_and_column(text, schema_start)}: {reason}")


def parse_json(text: str, label: str) -> JsonValue:
    def make_object(members: list[tuple[str, JsonValue]]) -> JsonObject:
        parsed_object: JsonObject = {}
        for key, value in members:
            if key in parsed_object:
                raise OvspecError(f'{label} has a duplicate key "{key}".')
            parsed_object[key] = value
        return parsed_object

    check_character_count(text, label)
    check_nesting(text, label)
    try:
        return json.loads(text, object_pairs_hook=make_object)
    except json.JSONDecodeError as error:
        raise OvspecError(f"{label} isn't JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    except (ValueError, RecursionError) as error:
        raise OvspecError(f"{label} isn't JSON: {error}.") from None


def check_character_count(text: str, label: str, max_characters: int = MAX_GRAMMAR_CHARACTERS) -> None:
    """Refuse a text above the length limit."""
    if len(text) > max_characters:
        raise OvspecError(f"{label} has {len(text)} characters; at most {max_characters} are allowed.")


def check_nesting(text: str, label: str, start: int = 0) -> None:
    """Refuse deeply nested JSON, without recursion; the text after it is ignored."""
    depth = 0
    for match in BRACKET_PATTERN.finditer(text, start):
        depth += (match.group() in "[{") - (match.group() in "]}")
        if depth > MAX_NESTING:
            location = line_and_column(text, match.start())
            raise OvspecError(f"{label} is nested deeper than {MAX_NESTING} at {location}.")
        if depth <= 0:
            return


def check_text(text: str, label: str) -> None:
    """Refuse a value that isn't text, or can't be encoded."""
    if not isinstance(text, str):
        raise OvspecError(f"{label} must be a string, not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        location = line_and_column(text, error.start)
        raise OvspecError(f"{label} contains an unpaired surrogate at {location}; remove the surrogate.") from None


def line_and_column(text: str, index: int) -> str:
    return f"line {text.count(chr(10), 0, index) + 1}, column {index - text.rfind(chr(10), 0, index)}"


def escape_choice_character(character: str) -> str:
    """Return the expression of a character."""
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
