"""Makes the grammar of an answer's tool calls, in the format of a family of models."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.grammars.json_schema import Around, CompiledSchema, SchemaReading, compile_schema
from ovspec.grammars.sources import UNIQUE_ITEMS_KEY, bounded, find_schema_problem, shallow
from ovspec.text.tool_formats import FORMATS_BY_NAME
from ovspec.text.tool_formats.layout import SLOT_PATTERNS, ToolFormat

TOKEN_NAMES_KEY = "marks"  # beside llguidance's own keys: names of tokens in the grammar -> those in the vocabulary
TEXT_PARAMETERS_KEY = "strings"  # and tool -> the parameters that are written as text without quotes
# The first character of the grammar's texts, which isn't generated, tells what they are: calls, calls behind thinking,
# or the other answer, behind thinking or not.
ANSWER_CALLS, ANSWER_CALLS_AFTER_THINKING, ANSWER_TEXT, ANSWER_TEXT_AFTER_THINKING = b"c", b"C", b"o", b"O"
GAP = "/[ \\t\\n]{1,4}/"  # white space behind thinking
# Keywords of a schema that say nothing of an object's properties, where there are none.
SILENT = {"type", "properties", "required", "title", "description", "$schema", "$id", "$comment"}
# Beside those of an object: what may be where in a text that isn't JSON as a whole, but in which arguments are.
WRAPPED = ("arguments", "parameters")


def write_tools_grammar(given: dict[str, Any], what: str) -> tuple[str, str]:
    """Return the grammar of answers that call tools, and what is ignored of their schemas or "".

    Args:
        given: "format": the name of the tool format; "tools": {"name", "parameters"} of those that may be called;
            "parallel": whether there may be several calls; "reading": fields of ``json_schema.SchemaReading``;
            "tokens": the tags that are tokens; "header": the text that may follow thinking, "" for white space, null
            without thinking;
            "other": the grammar of answers without calls, or null for none; "text": the tag in front of such an answer.
        what: the tools' name in messages.

    Raises:
        OvspecError: a schema is invalid or can't be enforced; the message names the tool.
    """
    format, marks = (
        FORMATS_BY_NAME[given["format"]],
        {f"<mark{index}>": name for index, name in enumerate(given["tokens"])},
    )
    around = None
    if parts := format.parameters:
        middle = "" if any(token in parts.middle for token in given["tokens"]) else parts.middle
        around = Around(
            literal(parts.open, marks), literal(parts.middle, marks), middle, *split_close(parts.close, marks)
        )
    reading = SchemaReading(**given["reading"])
    made = {tool["name"]: arguments(tool, reading, around, what) for tool in given["tools"]}
    names = {name: f"tool_{index}" for index, name in enumerate(made)}
    answers = [(ANSWER_CALLS, ANSWER_CALLS_AFTER_THINKING, "calls")] if made else []
    answers += (
        [(ANSWER_TEXT, ANSWER_TEXT_AFTER_THINKING, f"{literal(given['text'], marks)} @other")] if given["other"] else []
    )
    starts = [f'"{kind.decode()}" {answer}' for kind, _, answer in answers]
    if given["header"] is not None:
        header = literal(given["header"], marks) or GAP
        starts += [f'"{kind.decode()}" ({header})? {answer}' for _, kind, answer in answers]
    lines = [f"start: {' | '.join(starts)}"]
    lines += rules_of(format, names, given["parallel"], marks) if made else []
    grammars = [{"name": "tools", "lark_grammar": "\n".join(lines)}]
    grammars += [{"name": names[name], "lark_grammar": each.lark} for name, each in made.items()]
    tracks = [each.tracks for each in made.values() if each.tracks]
    if given["other"]:
        other = json.loads(given["other"])
        grammars += [{**other["grammars"][0], "name": "other"}, *other["grammars"][1:]]
        tracks += [other[UNIQUE_ITEMS_KEY]] if UNIQUE_ITEMS_KEY in other else []
    whole: dict[str, Any] = {"grammars": grammars, TOKEN_NAMES_KEY: marks}
    whole[TEXT_PARAMETERS_KEY] = {name: each.strings for name, each in made.items() if each.strings}
    if tracks:
        whole[UNIQUE_ITEMS_KEY] = merged(tracks)
    warnings = (f"{name}: {each.warning}" for name, each in made.items() if each.warning)
    return json.dumps(whole), " ".join(warnings)


def arguments(tool: dict[str, Any], reading: SchemaReading, around: Around | None, what: str) -> CompiledSchema:
    """Return the grammar of a tool's arguments."""
    what = f"{what}: the schema of {tool['name']}"
    schema = dict(tool["parameters"] or {})
    text = json.dumps(schema)
    bounded(text, what)
    shallow(text, what)
    if schema.setdefault("type", "object") != "object":
        raise OvspecError(f"{what}, at #/type: arguments are an object; set the type to object.")
    silent = not schema.get("properties") and not schema.get("required") and not schema.keys() - SILENT
    if reading.close_objects and silent:
        schema["additionalProperties"] = False  # a function without parameters
    try:
        return compile_schema(schema, find_schema_problem, reading, around)
    except OvspecError as error:
        raise OvspecError(f"{what}, at {error}") from None


def rules_of(format: ToolFormat, names: dict[str, str], parallel: bool, marks: dict[str, str]) -> list[str]:
    """Return the rules of all calls; ``names``: those of the grammars of the tools' arguments."""
    several = parallel and format.between is not None
    between = f"({literal(format.between or '', marks)} call)*" if several else ""
    lines = [f"calls: {literal(format.begin, marks)} call {between} {literal(format.end, marks)}"]
    options = [way_of(way, name, rule, marks) for name, rule in names.items() for way in format.calls]
    lines.append(f"call: {' | '.join(options)}")
    return [
        *lines,
        *(f"{slot}: /{pattern}/" for slot, pattern in SLOT_PATTERNS.items() if slot in sum(format.calls, ())),
    ]


def way_of(way: Sequence[str], name: str, rule: str, marks: dict[str, str]) -> str:
    """Return a call of the tool ``name``."""
    parts = list[str]()
    for slot, texts in itertools.groupby(way, lambda part: part if part in (*SLOT_PATTERNS, "ARGUMENTS") else ""):
        text = "".join(name if part == "NAME" else part for part in texts)
        parts.append(f"@{rule}" if slot == "ARGUMENTS" else slot or literal(text, marks))
    return " ".join(parts)


def literal(text: str, marks: dict[str, str]) -> str:
    """Return the expression of ``text``; ``marks``: names of the tokens that may be in it."""
    return " ".join(piece if piece in marks else json.dumps(piece, ensure_ascii=False) for piece in pieces(text, marks))


def pieces(text: str, marks: dict[str, str]) -> list[str]:
    """Return ``text`` split at tokens, which have their names in the grammar."""
    by_text = {token: name for name, token in marks.items()}
    longest_first = "|".join(map(re.escape, sorted(by_text, key=len, reverse=True)))
    parts = re.split(f"({longest_first})", text) if by_text else [text]
    return [by_text.get(part, part) for part in parts if part]


def split_close(text: str, marks: dict[str, str]) -> tuple[str, str, bool]:
    """Return (the text in front of the first token, the expression of the rest, whether there is a token)."""
    before = next(iter(pieces(text, marks)), "")
    before = "" if before in marks else before
    rest = literal(text[len(before) :], marks)
    return before, rest, len(before) < len(text)


def merged(tracks: Iterable[list[list[dict[str, Any]]]]) -> list[list[dict[str, Any]]]:
    """Return where items must differ in texts that hold JSON of several schemas, alone, in objects or in lists."""
    roots, found = list[dict[str, Any]](), list[list[dict[str, Any]]]([[], []])
    for each in tracks:
        shifted = [[shift(one, len(found)) for one in alternatives] for alternatives in each]
        roots += shifted[0]
        found += shifted
    nothing = len(found)
    found.append([])
    found[0] = [
        *roots,
        {"properties": dict.fromkeys(WRAPPED, 1), "patterns": [], "rest": nothing},
        {"unique": False, "prefix": [], "items": 0},
    ]
    found[1] = roots
    return found


def shift(one: dict[str, Any], by: int) -> dict[str, Any]:
    """Return an alternative of ``json_schema.writing.tracks_of`` whose nodes have numbers that are higher."""
    if "items" in one:
        return {**one, "prefix": [number + by for number in one["prefix"]], "items": one["items"] + by}
    properties = {name: number + by for name, number in one["properties"].items()}
    patterns = [(pattern, number + by) for pattern, number in one["patterns"]]
    return {"properties": properties, "patterns": patterns, "rest": one["rest"] + by}
