"""Adapts JSON schemas to llguidance, and refuses what it would ignore, get wrong or refuse without naming the place.

Sources: https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md and
https://json-schema.org/draft/2020-12/json-schema-validation
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote

from ovspec.errors import OvspecError

Schema = dict[str, Any]

# One space, or a newline and at most 20 spaces or tabs: without a bound a model may write white space forever.
WHITE_SPACE = r" |\n[ \t]{0,20}"
# Older versions of llguidance bound neither white space nor escapes.
OLDEST = (1, 8)
# Without \uXXXX: llguidance takes the key "\u0061" for another key than "a".
ESCAPES = 'nrbtf\\"'
SETTINGS = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern")

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
# llguidance accepts the year 0, a 29th of February in any year, and a leap second in any minute.
FOURTH = "(0[48]|[2468][048]|[13579][26])"  # two digits divisible by four, except 00
YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
DATE = f"({YEAR}-((0[13-9]|1[0-2])-[0-9]{{2}}|02-([01][0-9]|2[0-8]))|([0-9]{{2}}{FOURTH}|{FOURTH}00)-02-29)"
STRICTER = {"date": f"^{DATE}", "date-time": f"^{DATE}.{{7}}[0-5]", "time": "^.{6}[0-5]"}
ANNOTATIONS = (
    "$schema", "$id", "id", "$comment", "$anchor", "$vocabulary", "title", "description", "default", "examples",
    "example", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema",
    "discriminator", "externalDocs", "xml", "markdownDescription",
)  # fmt: skip
# What to use instead -> keywords that can't be enforced.
INSTEAD = {
    "use an enum of whole arrays, or check the text afterwards": "uniqueItems",
    "describe what is allowed instead": "not",
    "use anyOf with a branch for each case": "if then else dependentRequired dependentSchemas dependencies",
    "use prefixItems for the required item": "contains",
    "use prefixItems": "minContains maxContains",
    "use patternProperties and additionalProperties: false": "propertyNames",
    "use additionalProperties": "unevaluatedProperties",
    "use items: false with prefixItems": "unevaluatedItems",
    "add null to the types": "nullable",
    "use $ref": "$dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor",
}
NOT_ENFORCED = {name: advice for advice, names in INSTEAD.items() for name in names.split()}
# Keywords that are dropped if they have this value, which changes nothing.
NO_OPS = {"uniqueItems": False, "nullable": False, "unevaluatedProperties": True, "unevaluatedItems": True}
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
OTHERS = (
    "items", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf", "prefixItems", "properties",
    "patternProperties", "$defs", "definitions", "$ref", "type", "const", "enum", "required", "pattern", "format",
    "multipleOf", "x-guidance",
)  # fmt: skip
KNOWN = {*ANNOTATIONS, *NOT_ENFORCED, *COUNTS, *BOUNDS, *OTHERS}

EXACT = 2**53  # llguidance reads bounds as 64-bit floats
SET_OPERATIONS = re.compile(r"&&|--|~~|\[")  # operators in Rust's classes, plain characters in JSON Schema's


def cleaned(schema: Any) -> Schema:
    """Change a schema, as parsed from JSON, so that llguidance enforces all of it; return the schema.

    Raises:
        OvspecError: it is invalid or can't be enforced; the message begins with the JSON pointer of the place.
    """
    if not recent():
        found = version("llguidance")
        raise OvspecError(f"the top: llguidance {found} doesn't enforce schemas strictly enough; use 1.8 or newer.")
    if schema is True:
        schema = {}
    if schema is False:
        raise OvspecError('the top: "false" allows no text at all.')
    if not isinstance(schema, dict):
        raise OvspecError("the top: a schema must be an object.")
    settings = schema.pop("x-guidance", {})
    Cleaner(schema).all()
    need(isinstance(settings, dict), "#/x-guidance", "an object")
    if others := [name for name in settings if name not in SETTINGS]:
        raise OvspecError(f"#/x-guidance/{others[0]}: only {listed(SETTINGS)} can be set here.")
    own_white_space = {"whitespace_flexible", "whitespace_pattern"} & settings.keys()
    white_space = {} if own_white_space else {"whitespace_pattern": WHITE_SPACE}
    schema["x-guidance"] = {**white_space, "json_allowed_escapes": ESCAPES, **settings}
    return schema


@functools.cache
def recent() -> bool:
    """Return whether llguidance is recent enough for schemas.

    The guidance library requires an older version, which is good enough for everything else.
    """
    return tuple(map(int, version("llguidance").split(".")[:2])) >= OLDEST


class Cleaner:
    """Checks and adapts a schema and everything it refers to."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.waiting: list[tuple[Any, str]] = [(root, "#")]
        self.seen: set[int] = set()

    def all(self) -> None:
        while self.waiting:
            schema, at = self.waiting.pop()
            if isinstance(schema, dict) and id(schema) not in self.seen:
                self.seen.add(id(schema))
                self.visit(schema, at)
            elif not isinstance(schema, dict | bool):
                raise OvspecError(f"{at}: this should be a schema, that is an object, true or false.")

    def visit(self, schema: Schema, at: str) -> None:
        for key in [key for key, value in NO_OPS.items() if schema.get(key) is value]:
            del schema[key]
        if "string" not in as_list(schema.get("type", "string")):
            schema.pop("format", None)  # it applies to strings only
        for key, value in schema.items():
            self.keyword(key, value, f"{at}/{pointed(key)}")
        if schema.get("$id") and at != "#" and not str(schema["$id"]).startswith("#"):
            raise OvspecError(f"{at}/$id: schemas within schemas can't have their own $id; refer to #/$defs instead.")
        if schema.get("format") in STRICTER:
            schema["allOf"] = [*schema.get("allOf", ()), {"pattern": STRICTER[schema["format"]]}]
        # A generated object may repeat a key that is not listed, and a reader counts it once.
        least, free = schema.get("minProperties", 0), schema.get("additionalProperties") is not False
        if least > len(set(schema.get("required", ()))) + 1 and (free or schema.get("patternProperties")):
            raise OvspecError(f"{at}/minProperties: more than one key besides the required ones can't be enforced.")

    def keyword(self, key: str, value: Any, at: str) -> None:
        """Check one keyword, and queue the schemas within it."""
        if key in NOT_ENFORCED:
            raise OvspecError(f"{at}: {key} can't be enforced; {NOT_ENFORCED[key]}.")
        if key not in KNOWN and not key.startswith("x-"):
            near = difflib.get_close_matches(key, KNOWN, 1, 0.75)
            advice = f"did you mean {near[0]}?" if near else "leave it out, or begin its name with x- if it is a note."
            raise OvspecError(f"{at}: {key!r} isn't a JSON Schema keyword; {advice}")
        match key:
            case "anyOf" | "oneOf" | "allOf" | "prefixItems" | "items" if key != "items" or isinstance(value, list):
                need(isinstance(value, list) and (value or key not in ("anyOf", "oneOf")), at, "a list of schemas")
                self.waiting += [(each, f"{at}/{i}") for i, each in enumerate(value)]
            case "items" | "additionalItems" | "additionalProperties":
                self.waiting.append((value, at))
            case "properties" | "patternProperties":
                need(isinstance(value, dict), at, "an object with a schema for each name")
                for name, each in value.items():
                    below = f"{at}/{pointed(name)}"
                    self.waiting.append((each, below))
                    (pattern if key == "patternProperties" else writable)(name, below)
            case _ if key in COUNTS:
                need(isinstance(value, int) and is_number(value) and value >= 0, at, "a whole number of at least 0")
            case _ if key in BOUNDS:
                old = key.startswith("exclusive") and isinstance(value, bool)  # draft 4
                need(old or is_number(value), at, "a number")
                need(abs(value) <= EXACT, at, "between -2**53 and 2**53, because larger bounds are rounded")
            case "type":
                need(value and all(isinstance(each, str) for each in as_list(value)), at, "a type or a list of types")
                for each in as_list(value):
                    if each not in TYPES:
                        near = difflib.get_close_matches(each, TYPES, 1)
                        advice = f"did you mean {near[0]}?" if near else f"the types are {listed(TYPES)}."
                        raise OvspecError(f"{at}: {each!r} isn't a type; {advice}")
            case "format":
                if value not in FORMATS:
                    advice = f"use a pattern, or one of {listed(FORMATS)}"
                    raise OvspecError(f"{at}: the format {value!r} can't be enforced; {advice}.")
            case "const":
                writable(value, at)
            case "enum":
                need(isinstance(value, list) and value, at, "a list of at least one value")
                writable(value, at)
            case "required":
                need(isinstance(value, list) and all(isinstance(each, str) for each in value), at, "a list of names")
                writable(value, at)
            case "multipleOf":
                need(is_number(value) and value > 0, at, "a number above 0")
            case "pattern":
                pattern(value, at)
            case "$schema":
                known = isinstance(value, str) and re.match(r"https?://json-schema\.org/(draft[-/]|schema)", value)
                need(known, at, "a draft of json-schema.org, or be left out")
            case "x-guidance":
                raise OvspecError(f"{at}: this is allowed only at the top of the schema.")
            case "$ref":
                self.waiting.append(self.resolved(value, at))

    def resolved(self, value: Any, at: str) -> tuple[Any, str]:
        """Return the schema that a $ref refers to, and its JSON pointer."""
        need(isinstance(value, str), at, "text such as #/$defs/name")
        own = self.root.get("$id")
        target = value.removeprefix(own.rstrip("#")) if isinstance(own, str) else value
        if target in ("", "#"):
            return self.root, "#"
        if not target.startswith("#"):
            raise OvspecError(f"{at}: {value!r} is outside this schema; copy it to $defs and refer to #/$defs/name.")
        found: Any = self.root
        if not target.startswith("#/"):
            if target[1:] in self.anchors:
                return self.anchors[target[1:]]
            raise OvspecError(f"{at}: there is no {value!r} in this schema.")
        for part in target[2:].split("/"):
            part = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdigit() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                raise OvspecError(f"{at}: there is no {value!r} in this schema.")
        return found, target

    @functools.cached_property
    def anchors(self) -> dict[str, tuple[Any, str]]:
        found: dict[str, tuple[Any, str]] = {}
        waiting: list[tuple[Any, str]] = [(self.root, "#")]
        while waiting:
            value, at = waiting.pop()
            if isinstance(value, dict) and isinstance(value.get("$anchor"), str):
                found[value["$anchor"]] = (value, at)
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(each, f"{at}/{pointed(str(key))}") for key, each in pairs if isinstance(each, dict | list)]
        return found


def pattern(value: Any, at: str) -> None:
    need(isinstance(value, str), at, "a regular expression")
    for inside in re.findall(r"\\.|\[\^?\]?((?:\\.|\[:\w+:\]|[^\]\\])*)\]", value, re.DOTALL):
        if found := SET_OPERATIONS.search(re.sub(r"\\.|\[:\w+:\]", "", inside, flags=re.DOTALL)):
            raise OvspecError(f"{at}: {found.group()!r} in a class has a special meaning here; put \\ before it.")


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


def pointed(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
