"""Checks a JSON schema: keywords must have valid values; keywords unknown to the standard give a warning.

https://json-schema.org/draft/2020-12/json-schema-validation defines the keywords.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from urllib.parse import unquote

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.grammars.json_schema.expressions import split_lookaheads
from ovspec.grammars.json_schema.formats import ENFORCED_FORMATS, NOTE_FORMATS

TYPE_NAMES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATION_KEYWORDS = (
    "$schema", "$id", "id", "$comment", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "title",
    "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "contentMediaType",
    "contentEncoding", "contentSchema", "discriminator", "externalDocs", "xml", "markdownDescription",
)  # fmt: skip
COUNT_KEYWORDS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
BOUND_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SUBSCHEMA_KEYWORDS = (
    "items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
SCHEMA_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SCHEMA_MAP_KEYWORDS = ("properties", "patternProperties", "dependentSchemas", "dependencies")
REFERENCE_KEYWORDS = ("$ref", "$dynamicRef", "$recursiveRef")
OTHER_KEYWORDS = (
    "$defs", "definitions", "type", "const", "enum", "required", "pattern", "format", "multipleOf", "uniqueItems",
    "nullable", "dependentRequired", "x-guidance",
)  # fmt: skip
KNOWN_KEYWORDS = {
    *ANNOTATION_KEYWORDS, *COUNT_KEYWORDS, *BOUND_KEYWORDS, *SUBSCHEMA_KEYWORDS, *SCHEMA_LIST_KEYWORDS,
    *SCHEMA_MAP_KEYWORDS, *REFERENCE_KEYWORDS, *OTHER_KEYWORDS,
}  # fmt: skip

MAX_WARNED_KEYWORDS = 5  # ignored keywords named in a warning
CLASS_OPERATORS = re.compile(r"&&|--|~~|\[")  # operators in Rust's classes, plain characters in JSON Schema's


class SchemaChecker:
    """Checks a schema and everything it refers to, and adapts it in place.

    Args:
        find_problem: returns why llguidance can't use a string's schema; "" if it can.
        lenient: leave out unenforceable expressions instead of refusing them.
    """

    def __init__(self, root: JsonObject, find_problem: Callable[[JsonObject], str], lenient: bool) -> None:
        self._find_problem = find_problem
        self.first_pointer_by_ignored_keyword: dict[str, str] = {}  # also by format
        self._root = root
        self._lenient = lenient
        self._unchecked: list[tuple[JsonValue, str]] = [(root, "#")]  # schemas with JSON pointers
        self._checked_ids: set[int] = set()
        self._pattern_problems: dict[str, str] = {}  # "" for a usable pattern
        self._references: set[str] = set()

    def check_schema(self) -> None:
        """Raise OvspecError for an invalid schema; the message begins with the JSON pointer of the place."""
        while self._unchecked:
            schema, pointer = self._unchecked.pop()
            if isinstance(schema, dict) and id(schema) not in self._checked_ids:
                self._checked_ids.add(id(schema))
                self._check_keywords(schema, pointer)
            elif not isinstance(schema, dict | bool):
                raise OvspecError(f"{pointer}: this should be a schema: an object, true or false.")

    def warning(self) -> str:
        """Return a warning about surprises for the author, as the end of a sentence; "" for none."""
        warnings: list[str] = []
        ignored_keywords = self.first_pointer_by_ignored_keyword.items()
        if ignored := [(keyword, pointer) for keyword, pointer in ignored_keywords if not self._is_referenced(pointer)]:
            warnings.append(self._word_ignored_keywords(ignored))
        restricting_keywords = {"type", "enum", "const", "$ref", *SCHEMA_LIST_KEYWORDS}
        if "properties" in self._root and not self._root.keys() & restricting_keywords:
            warnings.append('also allows numbers, texts and lists, because it has properties but no "type": "object"')
        return ", and ".join(warnings)

    def _is_referenced(self, pointer: str) -> bool:
        """Return whether a reference leads through a keyword, as through OpenAPI's components."""
        return any(reference.startswith(f"{pointer}/") for reference in self._references)

    def _word_ignored_keywords(self, ignored: list[tuple[str, str]]) -> str:
        keyword_texts: list[str] = []
        for keyword, pointer in ignored[:MAX_WARNED_KEYWORDS]:
            keyword_texts.append(f"{keyword!r} at {pointer}")
            if similar_keywords := difflib.get_close_matches(keyword, KNOWN_KEYWORDS, 1, 0.86):
                keyword_texts[-1] += f" (did you mean {similar_keywords[0]}?)"
        if len(ignored) > MAX_WARNED_KEYWORDS:
            keyword_texts.append(f"and {len(ignored) - MAX_WARNED_KEYWORDS} others")
        return f"ignores what JSON Schema doesn't define: {', '.join(keyword_texts)}"

    def _check_keywords(self, schema: JsonObject, pointer: str) -> None:
        for keyword, value in list(schema.items()):
            self._check_keyword(schema, keyword, value, f"{pointer}/{escape_pointer_key(keyword)}")
        if schema.get("$id") and pointer != "#" and not str(schema["$id"]).startswith("#"):
            reason = "a subschema can't have its own $id; delete $id, and refer to #/$defs/name."
            raise OvspecError(f"{pointer}/$id: {reason}")

    def _check_keyword(self, schema: JsonObject, keyword: str, value: JsonValue, pointer: str) -> None:
        """Check a keyword, and queue the schemas within it."""
        if keyword not in KNOWN_KEYWORDS:
            if not keyword.startswith("x-"):
                self.first_pointer_by_ignored_keyword.setdefault(keyword, pointer)
            return
        if keyword in SCHEMA_LIST_KEYWORDS and (keyword != "items" or isinstance(value, list)):
            may_be_empty = keyword not in ("anyOf", "oneOf")
            require_condition(isinstance(value, list) and (value or may_be_empty), pointer, "a list of schemas")
            self._unchecked += [(subschema, f"{pointer}/{i}") for i, subschema in enumerate(value)]
        elif keyword in SUBSCHEMA_KEYWORDS:
            self._unchecked.append((value, pointer))
        elif keyword in SCHEMA_MAP_KEYWORDS:
            require_condition(isinstance(value, dict), pointer, "an object with a schema for each name")
            for name, subschema in list(value.items()):
                self._check_named_schema(schema, keyword, name, subschema, f"{pointer}/{escape_pointer_key(name)}")
        elif keyword in REFERENCE_KEYWORDS:
            self._unchecked.append(resolve_reference(self._root, value, pointer))
            self._references.add(str(value))
        elif keyword in COUNT_KEYWORDS:
            is_count = is_number(value) and value >= 0 and value == int(value)
            require_condition(is_count, pointer, "a whole number of at least 0")
            schema[keyword] = int(value)
        elif keyword in BOUND_KEYWORDS:
            is_flag = keyword.startswith("exclusive") and isinstance(value, bool)  # draft 4
            require_condition(is_flag or is_number(value), pointer, "a number")
        else:
            self._check_other_keyword(schema, keyword, value, pointer)

    def _check_named_schema(
        self, schema: JsonObject, keyword: str, name: str, subschema: JsonValue, pointer: str
    ) -> None:
        if keyword == "dependencies" and (isinstance(subschema, str | list)):
            require_condition(is_list_of_texts(as_list(subschema)), pointer, "a schema or a list of names")
            return
        self._unchecked.append((subschema, pointer))
        if keyword != "patternProperties":
            check_writable(name, pointer)
        elif not self._check_pattern(name, pointer):
            del schema[keyword][name]
            schema.pop("additionalProperties", None)

    def _check_other_keyword(self, schema: JsonObject, keyword: str, value: JsonValue, pointer: str) -> None:
        match keyword:
            case "type":
                require_condition(value and is_list_of_texts(as_list(value)), pointer, "a type or a list of types")
                for type_name in as_list(value):
                    check_type_name(type_name, pointer)
            case "format":
                require_condition(isinstance(value, str), pointer, "text")
                if value not in (*ENFORCED_FORMATS, *NOTE_FORMATS):
                    self.first_pointer_by_ignored_keyword.setdefault(f"format {value}", pointer)
            case "const":
                check_writable(value, pointer)
            case "enum":
                require_condition(isinstance(value, list) and value, pointer, "a list of at least one value")
                check_writable(value, pointer)
            case "required":
                require_condition(is_list_of_texts(value), pointer, "a list of names")
                check_writable(value, pointer)
            case "dependentRequired":
                is_valid = isinstance(value, dict) and all(map(is_list_of_texts, value.values()))
                require_condition(is_valid, pointer, "an object with a list of names for each name")
            case "multipleOf":
                require_condition(is_number(value) and value > 0, pointer, "a number above 0")
            case "pattern":
                require_condition(isinstance(value, str), pointer, "a regular expression")
                if not self._check_pattern(value, pointer):
                    del schema["pattern"]
            case "uniqueItems" | "nullable":
                require_condition(isinstance(value, bool), pointer, "true or false")
            case "$schema":
                dialect_pattern = r"https?://json-schema\.org/(draft[-/]|schema)"
                if not (isinstance(value, str) and re.match(dialect_pattern, value)):
                    self.first_pointer_by_ignored_keyword.setdefault(f"$schema {value!s:.80}", pointer)
            case "x-guidance":
                raise OvspecError(f"{pointer}: x-guidance is allowed only at the top of the schema.")

    def _check_pattern(self, pattern: str, pointer: str) -> bool:
        """Return whether ``pattern`` can be enforced; raises OvspecError if it can't but must be."""
        if pattern not in self._pattern_problems:
            required_patterns, forbidden_patterns = split_lookaheads(pattern)
            problems = map(self._find_pattern_problem, (*required_patterns, *forbidden_patterns))
            self._pattern_problems[pattern] = next(filter(None, problems), "")
        problem = self._pattern_problems[pattern]
        if problem and not self._lenient:
            raise OvspecError(f"{pointer}: {problem}")
        return not problem

    def _find_pattern_problem(self, pattern: str) -> str:
        """Return why a regular expression is unusable, as the end of a sentence; "" if it is usable."""
        for class_members in re.findall(r"\\.|\[\^?\]?((?:\\.|\[:\w+:\]|[^\]\\])*)\]", pattern, re.DOTALL):
            if operator := CLASS_OPERATORS.search(re.sub(r"\\.|\[:\w+:\]", "", class_members, flags=re.DOTALL)):
                return f"{operator.group()!r} is an operator in a character class; put \\ before it."
        return self._find_problem({"type": "string", "pattern": pattern})


def check_type_name(type_name: str, pointer: str) -> None:
    if type_name not in TYPE_NAMES:
        advice = f"the types are {join_with_and(TYPE_NAMES)}."
        if similar_types := difflib.get_close_matches(type_name, TYPE_NAMES, 1):
            advice = f"did you mean {similar_types[0]}?"
        raise OvspecError(f"{pointer}: {type_name!r} isn't a type; {advice}")


def resolve_reference(root: JsonObject, reference: JsonValue, pointer: str) -> tuple[JsonValue, str]:
    """Return the schema in ``root`` referenced at JSON pointer ``pointer``, and its own pointer."""
    require_condition(isinstance(reference, str), pointer, "text such as #/$defs/name")
    schema_id = root.get("$id", root.get("id"))
    target_pointer = reference
    if isinstance(schema_id, str):
        target_pointer = reference.removeprefix(schema_id.rstrip("#"))
    if target_pointer in ("", "#"):
        return root, "#"
    if not target_pointer.startswith("#/"):
        location = "an anchor, not a JSON pointer" if target_pointer.startswith("#") else "outside this schema"
        advice = "put the schema into $defs and refer to #/$defs/name."
        raise OvspecError(f"{pointer}: {reference!r} is {location}; {advice}")
    schema: JsonValue = root
    for pointer_part in target_pointer[2:].split("/"):
        schema_key = unquote(pointer_part).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and schema_key.isdigit() and int(schema_key) < len(schema):
            schema = schema[int(schema_key)]
        elif isinstance(schema, dict) and schema_key in schema:
            schema = schema[schema_key]
        else:
            raise OvspecError(f"{pointer}: there is no {reference!r} in this schema.")
    return schema, target_pointer


def escape_pointer_key(schema_key: str) -> str:
    """Return a key as written in JSON pointers."""
    return schema_key.replace("~", "~0").replace("/", "~1")


def check_writable(value: JsonValue, pointer: str) -> None:
    """Refuse characters without a spelling except numeric escapes."""
    unchecked_values = [value]
    while unchecked_values:
        value_part = unchecked_values.pop()
        if isinstance(value_part, dict):
            unchecked_values += [*value_part, *value_part.values()]
        elif isinstance(value_part, list):
            unchecked_values += value_part
        elif isinstance(value_part, str) and (
            match := re.search(r"[\0-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]", value_part)
        ):
            raise OvspecError(f"{pointer}: the character U+{ord(match.group()):04X} can't be generated; remove it.")


def require_condition(condition: JsonValue, pointer: str, expected: str) -> None:
    if not condition:
        raise OvspecError(f"{pointer}: this should be {expected}.")


def as_list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else [value]


def is_list_of_texts(value: JsonValue) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def join_with_and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
