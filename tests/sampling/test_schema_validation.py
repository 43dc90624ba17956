"""The modes strict and checked, retries, the types and formats that a schema may have, and where objects end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grammar_walks import demo_tokenizer, matcher
from pydantic import BaseModel, Field, SecretStr

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.batch.requests import parse_line
from ovspec.batch.resumable_run import run_file
from ovspec.params import make_params
from ovspec.sampling.grammar_conversion import convert_grammar
from ovspec.sampling.schema_validation import VALIDATION_POOL, find_schema_errors

Load = Callable[..., ovspec.LanguageModel]

ODD = {"type": "integer", "minimum": 0, "maximum": 9, "not": {"multipleOf": 2}}
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Colour(Enum):
    red = "red"
    blue = "blue"


class Item(BaseModel):
    name: str = Field(max_length=5)
    tags: set[str] = Field(max_length=2)
    where: Path | None = None
    secret: SecretStr | None = None
    raw: bytes | None = None
    colour: Colour = Colour.red
    price: float = 0


@dataclass
class Point:
    x: int
    y: int


def accepts(grammar: str, text: str) -> bool:
    each, tokens = matcher(grammar), demo_tokenizer().tokenize_str(text)
    return each.try_consume_tokens(tokens) == len(tokens) and each.is_accepting()


def test_strict_refuses_what_checked_judges(load: Load) -> None:
    lm = load()
    with pytest.raises(OvspecError, match=r"`json_schema`, at #/not/multipleOf: multipleOf can't be negated"):
        lm.generate("1 + 2 = ", json_schema=ODD, max_tokens=5)
    for seed in range(8):
        result = lm.generate("= ", json_schema=ODD, json_schema_mode="checked", seed=seed, temperature=2.0)
        assert result.text.isdecimal()
        broken = int(result.text) % 2 == 0
        assert bool(result.schema_errors) == broken
        if broken:
            assert result.schema_errors == [f"#: {result.text} should not be valid under {{'multipleOf': 2}}"]
    assert lm.generate("= ", json_schema={"type": "integer", "maximum": 9}, max_tokens=5).schema_errors is None


@pytest.mark.parametrize("draft", [pytest.param(False, marks=pytest.mark.slow), True])
def test_retries_take_the_next_seeds_until_the_text_is_valid(load: Load, draft: bool) -> None:
    options: dict[str, Any] = {"json_schema": ODD, "json_schema_mode": "checked", "temperature": 2.0}
    lm = load(draft)
    single = {seed: lm.generate("= ", seed=seed, **options) for seed in range(12)}
    good = [seed for seed, result in single.items() if not result.schema_errors]
    bad = next(seed for seed in range(12) if seed not in good and any(other > seed for other in good))
    after = next(seed for seed in good if seed > bad)
    result = lm.generate("= ", seed=bad, retries=after - bad, **options)
    assert (result.text, result.stats.seed) == (single[after].text, after)
    assert lm.generate("= ", seed=bad, retries=0, **options).schema_errors
    assert lm.verify(result).ok
    samples = lm.samples("= ", seed=bad, retries=20, n=4, **options)
    assert all(not each.schema_errors for each in samples)
    texts = lm.generate(["= ", "1 + "], seed=bad, retries=20, **options)
    assert all(int(each.text) % 2 for each in texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retries": 2}, "`retries` works only with a JSON schema; add `json_schema`"),
        ({"compact_json": True, "regex": "a"}, "`compact_json` works only with a JSON schema"),
        ({"additional_properties": False}, "`additional_properties` works only with a JSON schema"),
        ({"json_schema": {}, "retries": 1, "temperature": 1.0}, "`retries` needs `json_schema_mode='checked'`"),
        ({"json_schema": {}, "retries": 1, "json_schema_mode": "checked"}, "`retries` needs a `temperature` above 0"),
        ({"json_schema": {}, "json_schema_mode": "loose"}, "must be one of strict, checked"),
        ({"json_schema": {}, "retries": -1}, "must be 0 or more"),
        ({"json_schema": 3}, "`json_schema`: 3 can't be turned into a JSON schema"),
    ],
)
def test_options_that_do_not_fit(load: Load, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OvspecError, match=message):
        load().generate("a", max_tokens=3, **options)


def test_streams_and_sessions_have_no_retries(load: Load) -> None:
    options: Any = {"json_schema": ODD, "json_schema_mode": "checked", "temperature": 1.0, "retries": 1}
    with pytest.raises(OvspecError, match="`retries` can't be combined with streaming"):
        load().stream("a", **options)
    with load().session() as session, pytest.raises(OvspecError, match="`retries` can't be used in a session"):
        session.append("a")
        session.generate(**options)


def test_a_text_that_began_in_the_prompt_is_judged_whole(load: Load) -> None:
    schema = {"type": "array", "items": {"type": "integer", "maximum": 9}, "not": {"contains": {"multipleOf": 2}}}
    options: Any = {"json_schema": schema, "json_schema_mode": "checked", "constrain_from": "[", "max_tokens": 40}
    result = load().generate("x = [2, ", **options)
    if result.finish_reason != "length":
        assert result.schema_errors
        assert result.schema_errors[0].startswith("#: ")


def test_a_type_without_a_schema_is_refused(load: Load) -> None:
    class Calling(BaseModel):
        call: Callable[[int], int]

    with pytest.raises(OvspecError, match="can't be turned into a JSON schema"):
        load().generate("x", json_schema=Calling)


def test_errors_name_their_places() -> None:
    schema = {"properties": {"a/b": {"items": {"type": "string"}}}}
    assert find_schema_errors(schema, "", '{"a/b": ["x", 3]}') == ["#/a~1b/1: 3 is not of type 'string'"]
    assert find_schema_errors(json.dumps(schema), '{"a/b": ', '["x"]}') == []
    assert find_schema_errors(schema, "", "{")[0].startswith("the text isn't JSON")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            Item,
            '{"name": "a", "tags": ["x", "y"], "where": "/tmp", "secret": "s", "raw": "b", "price": 1.5}',
        ),
        (list[Item], '[{"name": "a", "tags": []}]'),
        (set[str], '["a", "b"]'),
        (Point, '{"x": 1, "y": -2}'),
        (dict[str, int], '{"any": 1, "name": 2}'),
        ({"name": "answer", "strict": True, "schema": OPEN}, '{"a": 1}'),
        ({"type": "json_schema", "json_schema": {"name": "answer", "schema": OPEN}}, '{"a": 1}'),
        ({"type": "json_object"}, '{"any": 1}'),
    ],
    ids=["model", "list", "set", "dataclass", "dict", "wrapped", "response_format", "json_object"],
)
def test_types_and_response_formats(load: Load, schema: Any, text: str) -> None:
    lm = load()
    [row] = lm.runtime.row_maker.make_rows(
        "x = ", lm.runtime.row_maker.make_complete_params({"json_schema": schema, "max_tokens": 400})
    )
    tokens = [*row.sequence.tokens, *lm.tokenizer.encode_continuation(text)]
    made = row.sampler.constraints
    for count in range(len(row.sequence.tokens), len(tokens)):
        assert made.allows_token(int(tokens[count]), np.array(tokens[:count])), text[:count]
    wrong = [*tokens[:-1], *lm.tokenizer.encode_continuation(', "more": 1}')]
    if text.endswith("}") and "any" not in text:
        count = len(tokens) - 1
        assert not made.allows_token(int(wrong[count]), np.array(wrong[:count])), "objects have no other properties"


@pytest.mark.parametrize(("allowed", "ends"), [(None, False), (True, False), (False, True)])
def test_additional_properties(allowed: bool | None, ends: bool) -> None:
    grammar = convert_grammar(
        "json_schema", OPEN, "schema", **({} if allowed is None else {"close_objects": not allowed})
    )
    assert accepts(grammar, '{"a": 1}')
    assert accepts(grammar, '{"a": 1, "b": 2}') != ends
    said = {**OPEN, "additionalProperties": {"type": "null"}}
    grammar = convert_grammar("json_schema", said, "schema", close_objects=ends)
    assert accepts(grammar, '{"a": 1, "b": null}'), "what the schema says counts"
    free = convert_grammar("json_schema", {"type": "object"}, "schema", close_objects=True)
    assert accepts(free, '{"a": 1}'), "an object without any property isn't meant"


def test_compact_json_has_no_white_space(load: Load) -> None:
    grammar = convert_grammar("json_schema", OPEN, "schema", compact=True)
    assert accepts(grammar, '{"a":1}')
    assert not accepts(grammar, '{"a": 1}')
    schema = {**OPEN, "additionalProperties": False, "properties": {"a": {"enum": [12]}}}
    lm = load()
    roomy, compact = (
        lm.generate("x = ", json_schema=schema, compact_json=each, max_tokens=30) for each in (False, True)
    )
    assert compact.text in ('{"a":12}', '{"a":12.0}')
    assert len(compact.token_ids) <= len(roomy.token_ids)


def test_a_schema_without_a_type_says_what_it_allows() -> None:
    with pytest.warns(UserWarning, match='also allows numbers, texts and lists.*no "type": "object"'):
        convert_grammar("json_schema", {"properties": {"a": {}}, "required": ["a"]}, "schema")


def test_batches_judge_and_retry(load: Load, tmp_path: Path) -> None:
    lines = [
        {"prompt": "= ", "seed": 3},
        {"prompt": "1 + ", "seed": 4},
        {"prompt": "a", "regex": "yes|no"},
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": OPEN}}},
    ]
    requests = [parse_line(json.dumps(line), str(i)) for i, line in enumerate(lines)]
    options: Any = {"json_schema": ODD, "json_schema_mode": "checked", "retries": 20, "temperature": 2.0}
    options["max_tokens"] = 40
    run_file(load(), requests, tmp_path / "out.jsonl", make_params(options))
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(int(each["text"]) % 2 and each["schema_errors"] == [] for each in found[:2])
    assert found[2]["text"] in ("yes", "no")
    assert "schema_errors" not in found[2]
    assert set(json.loads(found[3]["text"])) == {"a"}


HOSTILE = {
    "type": "object",
    "properties": {"x": {"type": "string", "pattern": "^(a|a)+(b)\\2$"}},
    "required": ["x"],
    "additionalProperties": False,
}
DOUBLING = {"$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)} | {"d60": True}}
ENDLESS = [
    pytest.param(HOSTILE, json.dumps({"x": "a" * 40 + "!"}), id="pattern"),
    pytest.param({**DOUBLING, "$ref": "#/$defs/d0"}, "1", marks=pytest.mark.slow, id="references"),
]


@pytest.mark.parametrize(("schema", "text"), ENDLESS)
def test_judging_is_given_up_and_holds_up_nobody(schema: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VALIDATION_POOL, "max_seconds", 1.0)
    found, waits = list[str](), list[float]()
    judging = threading.Thread(target=lambda: found.extend(find_schema_errors(schema, "", text)))
    judging.start()
    while judging.is_alive() and len(waits) < 6000:
        began = time.monotonic()
        time.sleep(0.01)
        waits.append(time.monotonic() - began)
    assert found == ["the JSON schema check ran longer than 1 seconds, so the text may be invalid"]
    assert max(waits) < 1
    assert find_schema_errors(HOSTILE, "", '{"x": "abb"}') == []
    assert find_schema_errors(HOSTILE, '{"x": ', '"ab"}') == ["#/x: 'ab' does not match '^(a|a)+(b)\\\\2$'"]


def test_judging_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VALIDATION_POOL, "max_bytes", 10_000_000)  # less than Python itself
    (found,) = find_schema_errors(HOSTILE, "", json.dumps({"x": "a" * 40 + "!"}))
    assert found == "the JSON schema check used more than 10 MB of memory, so the text may be invalid"


def test_only_what_may_take_long_is_judged_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(VALIDATION_POOL, "ask", lambda request: asked.append(request) or {"errors": []})
    assert find_schema_errors(OPEN, "", "{}") == ["#: 'a' is a required property"]
    assert not asked
    many = {"enum": [f"choice {i}" for i in range(10_000)]}
    slow: list[tuple[Any, str]] = [
        (HOSTILE, "{}"), ({"patternProperties": {"a": {}}}, "{}"), ({"items": {"uniqueItems": True}}, "[]"),
        ({"allOf": [{"$ref": "#/$defs/a"}]}, "1"), ({"unevaluatedItems": False}, "[]"), (many, "[" + "1," * 99 + "1]"),
    ]  # fmt: skip
    for schema, text in slow:
        find_schema_errors(schema, "", text)
    assert len(asked) == len(slow)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"pattern": "\\p{L}"}, "bad escape"),
        ({"$ref": "#/$defs/none"}, "PointerToNowhere|Unresolvable"),
        ({"$ref": "file:///etc/hostname"}, "Unresolvable"),
        ({"minLength": "3"}, "'<' not supported"),
        ({"$ref": "#"}, "recursion"),
    ],
)
def test_schemas_that_judge_nothing(schema: Any, why: str) -> None:
    with pytest.raises(OvspecError, match=rf"^`json_schema` can't be used to check a text: .*({why}).*\.$"):
        find_schema_errors(schema, "", '"a text"')


def test_a_text_nested_too_deeply_is_no_json() -> None:
    assert find_schema_errors({}, "", "[" * 100_000)[0].startswith("the text isn't JSON")
