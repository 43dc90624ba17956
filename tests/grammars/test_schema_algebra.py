"""Schemas that need negations, conditions, counts and different items: what they accept, beside jsonschema."""

from __future__ import annotations

import copy
import itertools
import json
import random
from typing import Any

import pytest
from grammar_walks import demo_tokenizer, matcher
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from ovspec.base.errors import OvspecError
from ovspec.grammars.json_schema import SchemaOptions, compile_schema
from ovspec.grammars.sources import find_schema_problem, write_grammar_json
from ovspec.sampling.unique_items import JsonCursor, UniqueItems

Schema = dict[str, Any]
OLD = "http://json-schema.org/draft-07/schema#"
# Where all orders of properties are allowed that the schema lists in this order.
SCHEMAS: list[Schema] = [
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}, "type": "object"},
    {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2}]},
    {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"a": {"enum": [1, 2]}}}]},
    {"anyOf": [{"type": "integer"}, {"const": "x"}], "not": {"enum": [1, 2]}},
    {"type": ["string", "integer"], "not": {"anyOf": [{"minimum": 5}, {"pattern": "^a"}]}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "if": {"properties": {"a": {"const": 1}}},
        "then": {"required": ["b"]}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "if": {"required": ["a"]},
        "then": {"required": ["b"]}, "else": False},
    {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "array", "maxItems": 1}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": {"a": {}, "b": {}},
        "dependentSchemas": {"b": {"properties": {"a": {"type": "string"}}}}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1, "maxProperties": 1},
    {"type": "object", "propertyNames": {"enum": ["a", "c"]}},
    {"type": "object", "propertyNames": {"maxLength": 1, "not": {"const": "b"}}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "a$": {"minimum": 2}}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "not": {"required": ["b"]}},
    {"const": {"a": 1, "b": 2}, "minProperties": 3},
    {"enum": [{"a": 1}, {"a": 2, "b": 1}, [1], 1, "x", None], "minProperties": 2},
    {"type": "array", "items": {"enum": [1, 2, "x"]}, "uniqueItems": True},
    {"type": "string", "pattern": r"^(?!a)\w[\w-]\d*$"},
    {"type": "array", "prefixItems": [{"const": 1}], "maxItems": 2},
    {"type": "array", "items": {"enum": [1, "x"]}, "not": {"contains": {"const": "x"}}, "maxItems": 2},
    {"type": "array", "uniqueItems": True, "maxItems": 2},
    {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 5},
    {"type": "number", "exclusiveMinimum": 1, "maximum": 2},
    {"type": "string", "pattern": "^(?!a)[a-z]*$"},
    {"type": "string", "not": {"pattern": "x"}, "maxLength": 2},
    {"$schema": OLD, "definitions": {"n": {"type": "string"}}, "not": {"$ref": "#/definitions/n", "maxLength": 1}},
    {"$schema": OLD, "type": "array", "prefixItems": [{"const": "x"}], "items": {"type": "integer"}},
    {"$defs": {"n": {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "maxProperties": 1}},
        "$ref": "#/$defs/n"},
]  # fmt: skip
LEAVES = (1, 2, 5, 1.5, "x", "ab", "a", "", None, True)
VALUES: list[Any] = [
    *LEAVES, 0, -1, 3, 4, "abc", "bx", [], {}, {"a": {"a": {}}}, {"aa": 1}, {"aba": 1}, {"aa": "x"}, {"c": "x"},
    *([each] for each in LEAVES), *(list(pair) for pair in itertools.product(LEAVES[:6], repeat=2)), [1, 2,
        "x"], [2, 1, "x"],
    *({"a": each} for each in LEAVES), *({"b": each} for each in LEAVES[:4]), {"a": 1, "c": 2}, {"c": 1, "d": 2},
    *({"a": one, "b": two} for one, two in itertools.product(LEAVES[:6], repeat=2)), {"a": 1, "b": 2, "c": 3},
]  # fmt: skip


class Acceptor:
    def __init__(self, schema: Schema, lenient: bool = False) -> None:
        found = compile_schema(json.loads(json.dumps(schema)), find_schema_problem, SchemaOptions(lenient=lenient))
        self._matcher = matcher(write_grammar_json("json", lark_grammar=found.lark))
        self._unique = UniqueItems(found.item_tracks, [None]) if found.item_tracks else None

    def accepts(self, value: Any) -> bool:
        text, each = json.dumps(value), self._matcher.deep_copy()
        tokens = demo_tokenizer().tokenize_str(text)
        accepted = each.try_consume_tokens(tokens) == len(tokens) and each.is_accepting()
        return accepted and (
            self._unique is None or self._unique.advance_by_bytes(JsonCursor(), text.encode()) is not None
        )


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:50])
def test_accepts_what_jsonschema_finds_valid(schema: Schema) -> None:
    judge = validator_for(schema, Draft202012Validator)(schema)
    valid = [value for value in VALUES if judge.is_valid(value)]
    if not valid:
        with pytest.raises(OvspecError, match="no JSON text"):
            compile_schema(json.loads(json.dumps(schema)), find_schema_problem)
        return
    acceptor = Acceptor(schema)
    assert valid != VALUES
    wrong = [value for value in VALUES if acceptor.accepts(value) and not judge.is_valid(value)]
    assert not wrong
    assert [value for value in valid if not acceptor.accepts(value)] == []


LEAF = st.sampled_from([
    {"type": "integer"}, {"type": "string"}, {"const": 1}, {"enum": [1, "x"]}, {"minimum": 2},
        {"maxLength": 1}, {"type": "null"},
    {"required": ["a"]}, {"required": ["b"]}, {"maxItems": 1}, {"minProperties": 1}, {"maxProperties": 1}, True, False,
])  # fmt: skip


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda each: {"not": each}, inner),
        st.builds(lambda key, each: {key: each}, st.sampled_from(["allOf", "anyOf", "oneOf"]), some),
        st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, inner, inner, inner),
        st.builds(lambda a, b, c: {"properties": {"a": a, "b": b}, "additionalProperties": c}, inner, inner, inner),
        st.builds(lambda a, b: {"items": a, "contains": b}, inner, inner),
        st.builds(lambda a, b: {"prefixItems": [a], "items": b, "type": ["array", "string"]}, inner, inner),
        st.builds(lambda a: {"dependentSchemas": {"a": a}, "type": ["object", "integer"]}, inner),
    )


@pytest.mark.parametrize("examples", [40, pytest.param(300, marks=pytest.mark.slow)])
def test_nothing_invalid_is_accepted(examples: int) -> None:
    """In the mode strict, what is accepted is valid; in checked, what is valid is accepted."""

    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.recursive(LEAF, combined, max_leaves=5), st.booleans())
    def each(schema: Any, lenient: bool) -> None:
        if not isinstance(schema, dict):
            return
        judge = Draft202012Validator(schema)
        try:
            acceptor = Acceptor(schema, lenient)
        except (OvspecError, AssertionError) as error:
            assert not lenient or "no JSON text" in str(error), error
            return
        for value in random.Random(0).sample(VALUES, 60):
            valid, accepted = judge.is_valid(value), acceptor.accepts(value)
            if lenient:  # several properties may be in another order
                assert accepted or not valid or "," in json.dumps(value), value
            else:
                assert valid or not accepted, value

    each()


def taken(schema: Schema, text: str) -> bool:
    """Return whether the grammar of ``schema`` takes ``text`` as a whole."""
    each = matcher(write_grammar_json("json", lark_grammar=compile_schema(schema, find_schema_problem).lark))
    tokens = demo_tokenizer().tokenize_str(text)
    return each.try_consume_tokens(tokens) == len(tokens) and each.is_accepting()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"const": 1}, ["1", "1.0"], ["1.5", "2", "true"]),
        ({"const": {"a": 1, "b": 2}}, ['{"a": 1, "b": 2}', '{"b": 2, "a": 1.0}'], ['{"a": 1}', '{"a": 2, "b": 1}']),
        ({"type": "string", "nullable": True}, ['"x"', "null"], ["1"]),
        ({"type": "string", "nullable": False}, ['"x"'], ["null"]),
        ({"type": "integer"}, ["9" * 16], ["9" * 17]),
    ],
)
def test_other_spellings(schema: Schema, right: list[str], wrong: list[str]) -> None:
    for text in (*right, *wrong):
        assert taken(copy.deepcopy(schema), text) == (text in right), text


def test_words_and_digits_are_those_of_ecmascript() -> None:
    """Python and Rust disagree on what else is a letter, such as the mark in the second text."""
    for expression, right in (
        (r"^\w+$", ["a_9"]),
        (r"^(?!x)[\w-.]+$", ["a_9", "a-.9", "-"]),
        (r"^[\.-9]\d$", ["/3"]),
        (r"^[^\w]$", ["-", "é", "٣"]),
    ):
        for text in ("a_9", "mۙ", "é", "a-.9", "/3", "-", "٣"):
            schema: Schema = {"type": "string", "pattern": expression}
            assert taken(schema, json.dumps(text, ensure_ascii=False)) == (text in right), text


@pytest.mark.parametrize("bounds", [{"minimum": 2, "exclusiveMaximum": 2}, {"exclusiveMinimum": 2, "maximum": 2}])
def test_bounds_that_meet_leave_nothing_if_one_excludes_it(bounds: Schema) -> None:
    """A list of such numbers could only be empty; a model that began one would be stuck in it."""
    with pytest.raises(OvspecError, match="no JSON text"):
        compile_schema({"type": "number", **bounds}, find_schema_problem)
    assert Acceptor({"type": "number", "minimum": 2, "maximum": 2}).accepts(2)


def test_no_string_has_control_characters() -> None:
    each = matcher(
        write_grammar_json("json", lark_grammar=compile_schema({"type": "string"}, find_schema_problem).lark)
    )
    for code in (0, 9, 10, 31, 32, 127):
        tokens = demo_tokenizer().tokenize_bytes(bytes([ord('"'), code]))
        assert (each.deep_copy().try_consume_tokens(tokens) == len(tokens)) == (code == 32), code
