"""Makes llguidance grammars from what users write: JSON schemas, regular expressions, choices, Lark and GBNF.

All functions raise OvspecError if the input is invalid or can't be enforced during generation; the message names the
place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from ovspec.base.errors import OvspecError
from ovspec.grammars.gbnf import convert_gbnf_to_lark
from ovspec.grammars.json_schema import SchemaReading, compile_schema
from ovspec.grammars.json_schema.expressions import slashed
from ovspec.grammars.response_format import is_response_format, unwrap_response_format
from ovspec.grammars.wording import word_llguidance_error

MAX_CHARACTERS = 2_000_000  # of a schema, a grammar, an expression or all choices together
MAX_GBNF_CHARACTERS = 200_000  # lower, because GBNF is parsed in Python
MAX_NESTING = 200
# For checking grammars and for following them. C over 131,072 tokens takes 41,000 items for a mask on average; with
# this limit of items, the most ambiguous grammars take a second or two for a step before they fail.
PARSER_LIMITS = LLParserLimits(
    max_items_in_row=1000, step_max_items=100_000, max_lexer_states=50_000,
    precompute_large_lexemes=True, verbose_errors=False,
)  # fmt: skip
UNIQUE_ITEMS_KEY = "unique_items"  # beside llguidance's own keys: the tracks of constraints.unique_items

# First the tokens that may contain anything, then those that are searched for.
LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"?'
    r"|//[^\n]*|\#[^\n]*"
    r"|/(?:\\.|[^/\\\n])+/?"
    r"|<[^<>\s]+>"
    r"|(?P<json>%json\b\s*)"
    r"|\b(?P<option>max_tokens|stop|temperature)\s*="
)
BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"?|[\[{]|[\]}]')


def convert_json_schema(
    schema: dict[str, Any] | bool | str,
    what: str = "The JSON schema",
    lenient: bool = False,
    close_objects: bool | None = None,
    compact: bool = False,
) -> tuple[str, str]:
    """Return (the grammar of the JSON texts that a schema describes, what was ignored of it or "").

    Args:
        schema: the schema itself or its JSON text. ``x-guidance`` at its top sets separators and white space.
        what: the schema's name in messages.
        lenient, close_objects, compact: see ``json_schema.SchemaReading``; response formats are closed by default.
    """
    if isinstance(schema, str):
        schema = parsed(schema, what)
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OvspecError(f"{what} can't be written as JSON: {error}.") from None
    bounded(text, what)
    shallow(text, what)
    try:
        schema = json.loads(text)
        if close_objects is None:
            close_objects = is_response_format(schema)
        reading = SchemaReading(lenient, close_objects, compact)
        found = compile_schema(unwrap_response_format(schema), find_schema_problem, reading)
    except OvspecError as error:
        raise OvspecError(f"{what}, at {error}") from None
    text = write_grammar_json("json", lark_grammar=found.lark)
    if found.tracks:
        text = json.dumps({**json.loads(text), UNIQUE_ITEMS_KEY: found.tracks})
    return text, found.warning


def find_schema_problem(schema: dict[str, Any]) -> str:
    """Return why llguidance can't use a schema, as a sentence; "" if it can."""
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return word_llguidance_error(LLMatcher.validate_grammar(grammar, None, limits=PARSER_LIMITS))


def convert_regex(pattern: str, what: str = "The regular expression") -> str:
    """Return the grammar of texts that fully match ``pattern``, in Rust's ``regex`` syntax without look-around."""
    pattern = well_formed(pattern, what).removeprefix("^")
    pattern = re.sub(r"(?<!\\)((?:\\\\)*)\$\Z", r"\1", pattern)
    if re.search(r"(?<!\\)(?:\\\\)*\\\Z", pattern):
        raise OvspecError(f"{what} ends with a backslash; write \\\\ to match one.")
    return write_grammar_json("regex", lark_grammar=f"start: /{slashed(pattern)}/")


def convert_choices(texts: Sequence[str], what: str = "choice") -> str:
    """Return the grammar that matches any one of ``texts`` and nothing else."""
    if isinstance(texts, str) or not texts:
        raise OvspecError(f"{what} must be a list of texts with at least one entry.")
    unique = dict.fromkeys(well_formed(text, f"Choice {i + 1}") for i, text in enumerate(texts))
    options = "|".join("".join(map(escaped, text)) for text in unique)
    bounded(options, "The list of choices")
    return write_grammar_json("choices", lark_grammar=f"start: /(?:{options})/")


def convert_lark(text: str, what: str = "The Lark grammar") -> str:
    """Return the grammar for a text in llguidance's dialect of Lark, whose start rule is ``start``.

    ``max_tokens=``, ``stop=`` and ``temperature=`` are refused.
    """
    text = well_formed(text, what)
    bounded(text, what)
    if match := re.search(r"^[^\S\n]*%import[^\S\n]+\.", text, re.MULTILINE):
        raise OvspecError(f"{what}, {place(text, match.start())}: a grammar can't import files; put all rules into it.")
    if re.search(r"^[\w-]+[^\S\n]*::=", text, re.MULTILINE):
        raise OvspecError(f"{what}: rules with ::= are GBNF; give it as gbnf.")
    parts, at, schemas = [], 0, []
    while match := LARK_TOKEN.search(text, at):
        parts.append(text[at : match.end()])
        at = match.end()
        if option := match["option"]:
            why = f"{option}= isn't supported, because it can't be rolled back; leave it out."
            raise OvspecError(f"{what}, {place(text, match.start())}: {why}")
        if match["json"]:
            inline, end = inline_schema(text, at, what)
            name = f"json_schema_{len(schemas)}"
            schemas.append({"name": name, "lark_grammar": inline})
            parts[-1] = parts[-1][: -len(match["json"])]
            parts += [f"@{name}", "\n" * text.count("\n", match.start("json"), end)]  # later lines keep their numbers
            at = end
    return write_grammar_json("lark", *schemas, lark_grammar="".join(parts) + text[at:])


def convert_gbnf(text: str, what: str = "The GBNF grammar") -> str:
    """Return the grammar for a text in llama.cpp's GBNF, whose start rule is ``root``."""
    text = well_formed(text, what)
    bounded(text, what, MAX_GBNF_CHARACTERS)
    try:
        return write_grammar_json("gbnf", lark_grammar=convert_gbnf_to_lark(text))
    except OvspecError as error:
        raise OvspecError(f"{what}, {error}") from None


def write_grammar_json(kind: str, *others: dict[str, str], **source: Any) -> str:
    """Return a grammar in llguidance's own notation, named after its kind so that errors can be worded for it.

    ``others``: grammars that it refers to by name.
    """
    return json.dumps({"grammars": [{"name": kind, **source}, *others]})


def inline_schema(text: str, start: int, what: str) -> tuple[str, int]:
    """Return the grammar of the schema after ``%json``, and where the schema ends in ``text``."""
    shallow(text, what, start)
    try:
        schema, end = json.JSONDecoder().raw_decode(text, start)
        found = compile_schema(schema, find_schema_problem)
        if found.tracks:
            raise OvspecError("#: uniqueItems can't be enforced within a grammar; leave it out.")
        return found.lark, end
    except (ValueError, RecursionError):
        why = "this should be a JSON schema, but isn't JSON."
    except OvspecError as error:
        why = f"the JSON schema, at {error}"
    raise OvspecError(f"{what}, {place(text, start)}: {why}")


def parsed(text: str, what: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise OvspecError(f'{what} has the key "{key}" twice in one object.')
            found[key] = value
        return found

    bounded(text, what)
    shallow(text, what)
    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise OvspecError(f"{what} isn't JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    except (ValueError, RecursionError) as error:
        raise OvspecError(f"{what} isn't JSON: {error}.") from None


def bounded(text: str, what: str, most: int = MAX_CHARACTERS) -> None:
    """Refuse a text that is too long."""
    if len(text) > most:
        raise OvspecError(f"{what} has {len(text)} characters; at most {most} are allowed.")


def shallow(text: str, what: str, start: int = 0) -> None:
    """Refuse JSON that is nested too deeply, without recursion; the text after it is ignored."""
    depth = 0
    for match in BRACKETS.finditer(text, start):
        depth += (match.group() in "[{") - (match.group() in "]}")
        if depth > MAX_NESTING:
            raise OvspecError(f"{what} is nested deeper than {MAX_NESTING} at {place(text, match.start())}.")
        if depth <= 0:
            return


def well_formed(text: str, what: str) -> str:
    if not isinstance(text, str):
        raise OvspecError(f"{what} should be text, not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OvspecError(f"{what} contains half a character (a surrogate) at {place(text, error.start)}.") from None
    return text


def place(text: str, at: int) -> str:
    return f"line {text.count(chr(10), 0, at) + 1}, column {at - text.rfind(chr(10), 0, at)}"


def escaped(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
