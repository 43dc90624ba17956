"""Arrays whose items must differ: masks never allow an item again, and nothing else is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHECKPOINTS
from grammar_walks import tokens
from jsonschema import Draft202012Validator

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.sampling.grammar_constraint import GrammarCompiler, GrammarConstraint
from ovspec.sampling.grammar_conversion import convert_grammar
from ovspec.sampling.masks import mask_contains

END = 0
SCHEMAS: list[dict[str, Any]] = [
    {"items": {"type": "string", "pattern": "^[ab]{1,2}$"}, "minItems": 4},
    {"items": {"type": "integer", "minimum": 1, "maximum": 12}, "minItems": 9, "maxItems": 12},
    {"items": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]}, "minItems": 5, "maxItems": 8},
    {
        "items": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "pattern": "^[xy]$"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "maxItems": 2,
    },
    {"items": {"type": "array", "items": {"type": "string", "pattern": "^[pq]$"}, "maxItems": 2}, "minItems": 3},
    {"items": {"type": "array", "prefixItems": [{"type": "boolean"}] * 2, "minItems": 2, "maxItems": 2}, "minItems": 4},
    {"items": {"type": "integer", "minimum": -2, "maximum": 2}, "minItems": 4},
    {"items": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25}, "minItems": 3},
]


QUICK = {(2, "property"), (3, "pattern"), (2, "item")}  # beside all that are a whole text


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    tokenizer = json.loads((CHECKPOINTS / "target" / "tokenizer.json").read_text(encoding="utf-8"))
    return GrammarCompiler(tokenizer, [text or None for text in tokens()])


def walk(grammar: GrammarConstraint, numbers: random.Random, limit: int = 300) -> bytes | None:
    """Return a random text that the masks allow; None if it has no end within ``limit`` tokens."""
    path: list[int] = []
    for _ in range(limit):
        text = np.array(path, dtype=np.int64)
        if grammar.is_complete(text):
            return b"".join(tokens()[token] for token in path)
        options = np.flatnonzero(np.unpackbits(grammar.token_mask(text), bitorder="little"))
        token = int(numbers.choice(options))
        assert grammar.allows_token(token, text)
        for other in numbers.sample(range(len(tokens())), 5):
            assert grammar.allows_token(other, text) == mask_contains(grammar.token_mask(text), other)
        if token == END:
            return b"".join(tokens()[token] for token in path)
        path.append(token)
    return None


@pytest.mark.parametrize(
    ("schema", "place", "walks"),
    [
        pytest.param(schema, place, walks, marks=() if quick and walks == 2 else pytest.mark.slow)
        for number, schema in enumerate(SCHEMAS)
        for place in ("top", "property", "pattern", "item")
        for quick in [place == "top" or (number, place) in QUICK]
        for walks in ((2, 4) if quick else (4,))
    ],
    ids=lambda value: json.dumps(value["items"])[:30] if isinstance(value, dict) else value,
)
def test_items_differ(grammars: GrammarCompiler, schema: dict[str, Any], place: str, walks: int) -> None:
    array = {"type": "array", "uniqueItems": True, **schema}
    match place:
        case "property":
            array = {"type": "object", "properties": {"of": array, "x": {}}, "required": ["of"]}
            array["additionalProperties"] = False
        case "pattern":
            array = {"type": "object", "patternProperties": {"^k": array}, "additionalProperties": False}
            array |= {"minProperties": 1, "maxProperties": 1, "propertyNames": {"maxLength": 3}}
        case "item":
            array = {"type": "array", "prefixItems": [{"const": 1}, array], "items": False, "minItems": 2}
    grammar, found = convert_grammar("json_schema", array, "schema"), []
    for seed in range(walks):
        text = walk(grammars.make_constraint(grammar, 0, frozenset({END})), random.Random(seed))
        if text is not None:
            found.append(json.loads(text))
    assert found
    for value in found:
        assert not list(Draft202012Validator(array).iter_errors(value)), value


def test_without_it_items_repeat(grammars: GrammarCompiler) -> None:
    """The walks would find repeated items if nothing kept them apart."""
    array = {"type": "array", "items": SCHEMAS[0]["items"], "minItems": 4}
    grammar = convert_grammar("json_schema", array, "schema")
    texts = [walk(grammars.make_constraint(grammar, 0, frozenset({END})), random.Random(seed)) for seed in range(6)]
    values = [json.loads(text) for text in texts if text]
    assert any(len(set(value)) < len(value) for value in values)


def test_a_prompt_that_has_items_already(load: Callable[..., ovspec.LanguageModel]) -> None:
    schema = {"type": "array", "items": {"type": "string", "pattern": "^[ab]$"}, "uniqueItems": True, "minItems": 2}
    for draft in (False, True):
        lm = load(draft)
        result = lm.generate('x = ["a", ', max_tokens=30, json_schema=schema, constrain_from="[")
        assert json.loads('["a", ' + result.text) == ["a", "b"]
        with pytest.raises(OvspecError, match="repeats an item"):
            lm.generate('x = ["a", "a", ', max_tokens=30, json_schema=schema, constrain_from="[")


@pytest.mark.parametrize("heal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_same_with_any_draft(load: Callable[..., ovspec.LanguageModel], heal: bool) -> None:
    schema = {"type": "array", "items": {"type": "string", "maxLength": 2}, "uniqueItems": True, "minItems": 6}
    schema["maxItems"] = 6
    texts = set[str]()
    for draft in ("none", "lookup,draft"):
        lm = load(draft)
        for seed in (1, 2):
            result = lm.generate(
                "names: ", max_tokens=80, json_schema=schema, temperature=1.0, seed=seed, heal=heal, ignore_eos=False
            )
            items = json.loads(result.text)
            assert len({*items}) == 6
            texts.add(f"{seed} {result.text}")
    assert len(texts) == 2


def test_files_of_other_schemas_are_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text('{"type": "array", "uniqueItems": true, "maxItems": 1}', encoding="utf-8")
    assert "unique_items" not in json.loads(convert_grammar("json_schema", file, "schema"))
