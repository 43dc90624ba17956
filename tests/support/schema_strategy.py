"""Hypothesis strategies for JSON schemas whose texts end, over all keywords that can be enforced."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Schema = dict[str, Any]

NAMES = ("a", "b", "id", "na me", "é", 'q"', "x/y", "items")
PATTERNS = ("^[a-c]{1,4}$", "^a|b$", "[0-9]", "^(x|yz)*$", "^\\d{2}-\\w$", "^[^a-z]{0,3}$", "é+", '^"\\\\$')
FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "uuid")
ANNOTATIONS = ({}, {}, {"title": "A title", "default": None}, {"$comment": "note", "examples": [1], "x-note": 1})


def values() -> SearchStrategy[Any]:
    simple = st.none() | st.booleans() | st.integers(-1000, 1000) | st.sampled_from([0.5, -1.25, 1e3]) | words()
    return simple | st.lists(simple, max_size=3) | st.dictionaries(st.sampled_from(NAMES), simple, max_size=2)


def words() -> SearchStrategy[str]:
    return st.text(
        st.characters(min_codepoint=32, max_codepoint=0x17F, exclude_characters="\x7f") | st.just("😀"), max_size=5
    )


@st.composite
def texts(draw: st.DrawFn) -> Schema:
    schema: Schema = {"type": "string", "maxLength": draw(st.integers(4, 12))}
    match draw(st.integers(0, 3)):
        case 0:
            schema["pattern"] = draw(st.sampled_from(PATTERNS))
        case 1:
            schema = {"type": "string", "format": draw(st.sampled_from(FORMATS))}
        case 2:
            schema["minLength"] = draw(st.integers(0, 4))
    return schema


@st.composite
def numbers(draw: st.DrawFn) -> Schema:
    whole = draw(st.booleans())
    bound = st.integers(-50, 50) if whole else st.integers(-500, 500).map(lambda i: i / 8)
    least, most = sorted((draw(bound), draw(bound)))
    schema: Schema = {"type": "integer" if whole else "number"}
    if draw(st.booleans()):
        schema["minimum" if draw(st.booleans()) else "exclusiveMinimum"] = least
    if draw(st.booleans()):
        schema["maximum" if draw(st.booleans()) else "exclusiveMaximum"] = most + 10
    if draw(st.integers(0, 3)) == 0:
        schema["multipleOf"] = draw(st.sampled_from([2, 3, 5]) if whole else st.sampled_from([0.5, 0.25, 2]))
    return schema


@st.composite
def arrays(draw: st.DrawFn, items: SearchStrategy[Schema]) -> Schema:
    least = draw(st.integers(0, 2))
    schema: Schema = {"type": "array", "minItems": least, "maxItems": least + draw(st.integers(0, 2))}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(items, min_size=1, max_size=2))
    schema["items"] = draw(items)
    return schema


@st.composite
def objects(draw: st.DrawFn, inner: SearchStrategy[Schema]) -> Schema:
    named = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=3))
    needed = [name for name in named if draw(st.booleans())]
    schema: Schema = {"type": "object", "properties": named, "required": needed, "additionalProperties": False}
    match draw(st.integers(0, 4)):
        case 0:
            schema |= {"required": list(named), "additionalProperties": draw(inner), "maxProperties": len(named) + 2}
        case 1:
            schema |= {"patternProperties": {"^k[0-9]$": draw(inner)}, "required": list(named), "maxProperties": 4}
        case 2:
            schema |= {"required": list(named), "additionalProperties": draw(inner)}
            schema |= {"minProperties": len(named) + 1, "maxProperties": len(named) + 2}
    return schema


@st.composite
def joined(draw: st.DrawFn, inner: SearchStrategy[Schema]) -> Schema:
    match draw(st.integers(0, 3)):
        case 0:
            return {"anyOf": draw(st.lists(inner, min_size=1, max_size=3))}
        case 1:
            kinds = draw(st.lists(inner, min_size=1, max_size=3))
            tagged = [
                {"type": "object", "properties": {"kind": {"const": i}, "of": kind}, "required": ["kind", "of"]}
                for i, kind in enumerate(kinds)
            ]
            return {"oneOf": [{**each, "additionalProperties": False} for each in tagged]}
        case 2:
            one, other = (
                {"type": "object", "properties": {name: draw(inner)}, "required": [name]} for name in ("l", "r")
            )
            return {"properties": {"l": True, "r": True}, "allOf": [one, other], "additionalProperties": False}
    return {"type": ["null", "integer", "string"], "minimum": 3, "maxLength": 5}


def schemas() -> SearchStrategy[Schema]:
    """Return schemas that allow at least one text, or are refused because they allow none."""
    fixed = st.lists(values(), min_size=1, max_size=4).map(lambda each: {"enum": each}) | values().map(
        lambda v: {"const": v}
    )
    leaves = fixed | texts() | numbers() | st.sampled_from([{"type": "boolean"}, {"type": "null"}])
    nested = st.recursive(leaves, lambda inner: arrays(inner) | objects(inner) | joined(inner), max_leaves=6)
    noted = st.tuples(nested, st.sampled_from(ANNOTATIONS)).map(lambda pair: {**pair[0], **pair[1]})
    return noted | noted.map(lambda schema: {"$defs": {"s": schema}, "$ref": "#/$defs/s"}) | noted.map(recursive)


def recursive(schema: Schema) -> Schema:
    """Return the schema of a linked list whose items follow ``schema``."""
    link = {"type": "object", "properties": {"of": schema, "next": {"$ref": "#/$defs/link"}}, "required": ["of"]}
    return {"$defs": {"link": {**link, "additionalProperties": False}}, "$ref": "#/$defs/link"}


def is_linked_list(schema: Schema) -> bool:
    """Return whether ``recursive`` made the schema."""
    return schema.get("$ref") == "#/$defs/link"
