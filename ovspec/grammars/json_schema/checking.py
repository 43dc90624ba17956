"""Checks a JSON schema: the keywords' values must be right; what the standard ignores is ignored with a warning.

https://json-schema.org/draft/2020-12/json-schema-validation defines the keywords.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote

from ovspec.base.errors import OvspecError
from ovspec.grammars.json_schema.expressions import split
from ovspec.grammars.json_schema.formats import FORMATS, NOTES

Schema = dict[str, Any]

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
ANNOTATIONS = (
    "$schema", "$id", "id", "$comment", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "title",
    "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "contentMediaType",
    "contentEncoding", "contentSchema", "discriminator", "externalDocs", "xml", "markdownDescription",
)  # fmt: skip
COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ONE = (
    "items", "additionalItems", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
OTHERS = (
    "$defs", "definitions", "type", "const", "enum", "required", "pattern", "format", "multipleOf", "uniqueItems",
    "nullable", "dependentRequired", "x-guidance",
)  # fmt: skip
KNOWN = {*ANNOTATIONS, *COUNTS, *BOUNDS, *ONE, *LISTS, *NAMED, *REFERENCES, *OTHERS}

MOST_NAMED = 5  # ignored keywords that a warning names
SET_OPERATIONS = re.compile(r"&&|--|~~|\[")  # operators in Rust's classes, plain characters in JSON Schema's


class Checker:
    """Checks a schema and everything it refers to, and adapts it in place.

    Args:
        problem: returns why llguidance can't use a schema of a string; "" if it can.
        lenient: leave out expressions that can't be enforced instead of refusing them.
    """

    def __init__(self, root: Schema, problem: Callable[[Schema], str], lenient: bool) -> None:
        self._problem = problem
        self.ignored: dict[str, str] = {}  # keyword or format -> JSON pointer of the first
        self._root, self._lenient = root, lenient
        self._waiting: list[tuple[Any, str]] = [(root, "#")]
        self._seen: set[int] = set()
        self._expressions: dict[str, str] = {}  # pattern -> what is wrong with it
        self._used: set[str] = set()  # references

    def check(self) -> None:
        """Raise OvspecError if something is wrong; the message begins with the JSON pointer of the place."""
        while self._waiting:
            schema, at = self._waiting.pop()
            if isinstance(schema, dict) and id(schema) not in self._seen:
                self._seen.add(id(schema))
                self._visit(schema, at)
            elif not isinstance(schema, dict | bool):
                raise OvspecError(f"{at}: this should be a schema, that is an object, true or false.")

    def warning(self) -> str:
        """Return what an author may not expect, as the end of a sentence; "" if there is nothing."""
        # What a reference leads through is used, as OpenAPI's components are.
        ignored = [each for each in self.ignored.items() if not any(x.startswith(f"{each[1]}/") for x in self._used)]
        said = [self._ignored(ignored)] if ignored else []
        if "properties" in self._root and not self._root.keys() & {"type", "enum", "const", "$ref", *LISTS}:
            said.append('also allows numbers, texts and lists, because it has properties but no "type": "object"')
        return ", and ".join(said)

    def _ignored(self, ignored: list[tuple[str, str]]) -> str:
        named = []
        for name, at in ignored[:MOST_NAMED]:
            near = difflib.get_close_matches(name, KNOWN, 1, 0.86)
            named.append(f"{name!r} at {at}" + (f" (did you mean {near[0]}?)" if near else ""))
        more = f", and {len(ignored) - MOST_NAMED} others" if len(ignored) > MOST_NAMED else ""
        return f"ignores what JSON Schema doesn't define: {', '.join(named)}{more}"

    def _visit(self, schema: Schema, at: str) -> None:
        for key, value in list(schema.items()):
            self._keyword(schema, key, value, f"{at}/{pointed(key)}")
        if schema.get("$id") and at != "#" and not str(schema["$id"]).startswith("#"):
            raise OvspecError(f"{at}/$id: schemas within schemas can't have their own $id; refer to #/$defs instead.")

    def _keyword(self, schema: Schema, key: str, value: Any, at: str) -> None:
        """Check one keyword, and queue the schemas within it."""
        if key not in KNOWN:
            if not key.startswith("x-"):
                self.ignored.setdefault(key, at)
            return
        if key in LISTS and (key != "items" or isinstance(value, list)):
            need(isinstance(value, list) and (value or key not in ("anyOf", "oneOf")), at, "a list of schemas")
            self._waiting += [(each, f"{at}/{i}") for i, each in enumerate(value)]
        elif key in ONE:
            self._waiting.append((value, at))
        elif key in NAMED:
            need(isinstance(value, dict), at, "an object with a schema for each name")
            for name, each in list(value.items()):
                self._named(schema, key, name, each, f"{at}/{pointed(name)}")
        elif key in REFERENCES:
            self._waiting.append(resolved(self._root, value, at))
            self._used.add(str(value))
        elif key in COUNTS:
            right = is_number(value) and value >= 0 and value == int(value)
            need(right, at, "a whole number of at least 0")
            schema[key] = int(value)
        elif key in BOUNDS:
            old = key.startswith("exclusive") and isinstance(value, bool)  # draft 4
            need(old or is_number(value), at, "a number")
        else:
            self._value(schema, key, value, at)

    def _named(self, schema: Schema, key: str, name: str, each: Any, at: str) -> None:
        if key == "dependencies" and (isinstance(each, str | list)):
            need(all(isinstance(other, str) for other in as_list(each)), at, "a schema or a list of names")
            return
        self._waiting.append((each, at))
        if key != "patternProperties":
            writable(name, at)
        elif not self._usable(name, at):
            del schema[key][name]
            schema.pop("additionalProperties", None)

    def _value(self, schema: Schema, key: str, value: Any, at: str) -> None:
        match key:
            case "type":
                need(value and all(isinstance(each, str) for each in as_list(value)), at, "a type or a list of types")
                for each in as_list(value):
                    if each not in TYPES:
                        near = difflib.get_close_matches(each, TYPES, 1)
                        advice = f"did you mean {near[0]}?" if near else f"the types are {listed(TYPES)}."
                        raise OvspecError(f"{at}: {each!r} isn't a type; {advice}")
            case "format":
                need(isinstance(value, str), at, "text")
                if value not in (*FORMATS, *NOTES):
                    self.ignored.setdefault(f"format {value}", at)
            case "const":
                writable(value, at)
            case "enum":
                need(isinstance(value, list) and value, at, "a list of at least one value")
                writable(value, at)
            case "required":
                need(isinstance(value, list) and all(isinstance(each, str) for each in value), at, "a list of names")
                writable(value, at)
            case "dependentRequired":
                right = isinstance(value, dict) and all(isinstance(each, list) for each in value.values())
                right = right and all(isinstance(name, str) for each in value.values() for name in each)
                need(right, at, "an object with a list of names for each name")
            case "multipleOf":
                need(is_number(value) and value > 0, at, "a number above 0")
            case "pattern":
                need(isinstance(value, str), at, "a regular expression")
                if not self._usable(value, at):
                    del schema["pattern"]
            case "uniqueItems" | "nullable":
                need(isinstance(value, bool), at, "true or false")
            case "$schema":
                known = isinstance(value, str) and re.match(r"https?://json-schema\.org/(draft[-/]|schema)", value)
                if not known:
                    self.ignored.setdefault(f"$schema {value!s:.80}", at)
            case "x-guidance":
                raise OvspecError(f"{at}: this is allowed only at the top of the schema.")

    def _usable(self, pattern: str, at: str) -> bool:
        """Return whether ``pattern`` can be enforced; raises OvspecError for others if it must be."""
        if pattern not in self._expressions:
            present, absent = split(pattern)
            self._expressions[pattern] = next(filter(None, map(self._wrong_in, (*present, *absent))), "")
        if why := self._expressions[pattern]:
            if not self._lenient:
                raise OvspecError(f"{at}: {why}")
            return False
        return True

    def _wrong_in(self, pattern: str) -> str:
        """Return why a regular expression can't be used, as the end of a sentence; "" if it can."""
        for inside in re.findall(r"\\.|\[\^?\]?((?:\\.|\[:\w+:\]|[^\]\\])*)\]", pattern, re.DOTALL):
            if found := SET_OPERATIONS.search(re.sub(r"\\.|\[:\w+:\]", "", inside, flags=re.DOTALL)):
                return f"{found.group()!r} in a class has a special meaning here; put \\ before it."
        return self._problem({"type": "string", "pattern": pattern})


def resolved(root: Any, reference: Any, at: str) -> tuple[Any, str]:
    """Return the schema within ``root`` that a reference at JSON pointer ``at`` refers to, and its JSON pointer."""
    need(isinstance(reference, str), at, "text such as #/$defs/name")
    own = root.get("$id", root.get("id"))
    target = reference.removeprefix(own.rstrip("#")) if isinstance(own, str) else reference
    if target in ("", "#"):
        return root, "#"
    if not target.startswith("#/"):
        where = "an anchor" if target.startswith("#") else "outside this schema"
        raise OvspecError(f"{at}: {reference!r} is {where}; put the schema into $defs and refer to #/$defs/name.")
    found: Any = root
    for part in target[2:].split("/"):
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict) and part in found:
            found = found[part]
        else:
            raise OvspecError(f"{at}: there is no {reference!r} in this schema.")
    return found, target


def pointed(key: str) -> str:
    """Return a key as JSON pointers write it."""
    return key.replace("~", "~0").replace("/", "~1")


def writable(value: Any, at: str) -> None:
    """Refuse characters that only a numeric escape could write."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, str) and (found := re.search(r"[\0-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]", each)):
            raise OvspecError(f"{at}: the character U+{ord(found.group()):04X} can't be written; leave it out.")


def need(right: Any, at: str, what: str) -> None:
    if not right:
        raise OvspecError(f"{at}: this should be {what}.")


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
