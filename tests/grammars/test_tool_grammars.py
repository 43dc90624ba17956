"""Schemas of tools: many and large ones are quick, hostile ones are refused by name, and all calls are valid."""

from __future__ import annotations

import functools
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from answers import EOS, PLAIN, PROMPT, Answers, Vocabulary, allowed, answers, random_answer, tool, with_schema
from conftest import ROOT
from hostile_cases import deep

from ovspec.base.errors import OvspecError
from ovspec.params import make_params
from ovspec.params.tool_formats import TOOL_FORMATS
from ovspec.sampling.answer_constraint import AnswerConstraint
from ovspec.sampling.grammar_constraint import GrammarCompiler
from ovspec.sampling.grammar_conversion import MAX_TOOLS_SECONDS
from ovspec.sampling.grammar_options import convert_answer_grammar
from ovspec.sampling.vocabulary_index import VocabularyIndex
from ovspec.text.tokenizer import make_byte_vocabulary
from ovspec.text.tokenizer_files import TokenizerFile

REAL = ROOT / "smollm2" / "tokenizer.json"  # of 49,152 tokens; used if it is there
XML = [each for each in TOOL_FORMATS if each.parameters]
NESTED = [each for each in TOOL_FORMATS if not each.parameters]


@functools.cache
def real_vocabulary() -> tuple[VocabularyIndex, GrammarCompiler]:
    if not Path(REAL).exists():
        return PLAIN.tokens, PLAIN.grammars
    loaded = json.loads(REAL.read_text("utf-8"))
    spelt = make_byte_vocabulary(msgspec.convert(loaded, TokenizerFile)) or []
    return VocabularyIndex(spelt), GrammarCompiler(loaded, spelt)


def refusal(format: str, *tools: Any) -> str:
    with pytest.raises(OvspecError) as refused:
        answers(format, tools, tool_choice="required").constraint()
    return str(refused.value)


# ---------------------------------------------------------------- large


def filled(index: int) -> dict[str, Any]:
    """Return a tool with ten parameters of all kinds."""
    note = {"description": "What it is, told in a sentence as long as people write them."}
    text = {"type": "string", "maxLength": 200 + index}
    kinds = [text, {"type": "integer"}, {"enum": ["a", "b", f"c{index}"]}, {"type": "array", "items": text}]
    properties = {f"parameter_{at}": {**kinds[at % 4], **note} for at in range(10)}
    return with_schema(f"tool_{index}", {"type": "object", "properties": properties, "required": ["parameter_0"]})


TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}},
    "required": ["root"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "maxLength": 100_000},
                "parts": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["text"],
            "additionalProperties": False,
        }
    },
}
LARGE = [*map(filled, range(127)), with_schema("tree", TREE)]


@pytest.mark.parametrize(
    "format", ["hermes", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen-xml", "llama3", "harmony"))]
)
def test_large_sets_of_tools_are_quick(format: str) -> None:
    assert len(json.dumps(LARGE)) > 100_000
    vocabulary, grammars = real_vocabulary()
    steps = list[float]()

    def made() -> float:
        """Make a constraint and follow a call of the last tool; return the seconds of computing before its masks.

        The conversion is in another process, which ends after ``MAX_TOOLS_SECONDS`` of computing.
        """
        began = time.process_time()
        answer = answers(format, LARGE)
        grammar = convert_answer_grammar(make_params(answer.options), answer.format)  # type: ignore[arg-type]
        assert grammar and answer.format.tool_format

        def make(start: int, begun: list[bytes | int]) -> Any:
            return grammars.make_constraint(grammar, start, frozenset({EOS}), generated_parts=begun)

        limits = AnswerConstraint(0, answer.format, vocabulary, make, False, {EOS})
        trigger = answer.format.tool_format.triggers[0].replace("{NAME}", "tree")
        tokens = [next(i for i, t in enumerate(vocabulary.vocabulary) if t == bytes([b])) for b in trigger.encode()]
        text, numbers = np.array(tokens, dtype=np.int64), random.Random(3)
        for at in range(len(text)):
            limits.token_mask(text[:at])
        limits.token_mask(text)
        seconds = time.process_time() - began
        while len(text) < 200 and not limits.is_complete(text):
            began = time.process_time()
            options = allowed(limits, text, vocabulary.size)
            steps.append(time.process_time() - began)
            text = np.append(text, numbers.choice(options))
            if text[-1] == EOS:
                break
        return seconds

    first, again = made(), made()
    assert first < MAX_TOOLS_SECONDS
    assert again < first, "it is remembered"
    assert len(steps) > 20
    assert np.mean(steps) < 0.01


# ---------------------------------------------------------------- hostile


def schema_of(value: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": value}, "required": ["x"]}


HOSTILE: list[Any] = [
    schema_of({"type": "integer", "multipleOf": 999_983}),
    schema_of({"type": "integer", "multipleOf": 30_011, "minimum": 7}),
    schema_of(json.loads(deep('{"items":', "true", "}", 190))),
    schema_of({"type": "string", "pattern": "^(a|b)*a(a|b){300}$"}),
    schema_of({"type": "string", "pattern": "(a|b){1,200}c.*d{3,50}", "maxLength": 500}),
    schema_of({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
    schema_of({"enum": [f"value {i}" for i in range(50_000)]}),
    schema_of({"anyOf": [{"type": "string", "pattern": f"a.*{i}"} for i in range(200)]}),
    schema_of({"allOf": [{"anyOf": [{"const": i}, {"const": i + 1}]} for i in range(200)]}),
    schema_of({"type": "array", "minItems": 10**7}),
    {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}, "minProperties": 1500},
    {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": f"x.*{i}"} for i in range(500)}},
    {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i * 7 + j) % 100}"} for j in range(20)]} for i in range(100)}},
]


TOO_MUCH = (0, 1, 11)  # of these
LONGEST = (0, 6)  # of these, left out in quick runs: 1 is refused like 0, and test_sources.py has many choices


@pytest.mark.parametrize("format", ["hermes", pytest.param("qwen-xml", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "index", [pytest.param(at, marks=[pytest.mark.slow] * (at in LONGEST)) for at in range(len(HOSTILE))]
)
def test_hostile_schemas_are_used_or_refused_in_time(index: int, format: str) -> None:
    harmless, began = tool("find", text={"type": "string"}), time.perf_counter()
    answer = answers(format, [harmless, with_schema("evil", HOSTILE[index])], tool_choice="required")
    try:
        limits = answer.constraint()
    except OvspecError as refused:
        assert time.perf_counter() - began < 30  # 3 of computing; the machine may be busy
        assert re.match(r"`tools`: the schema of evil\b", str(refused)), refused
        assert str(refused).endswith("."), refused
        return
    assert index not in TOO_MUCH
    random_answer(limits, PLAIN, random.Random(2), limit=100)


def test_schemas_that_are_refused() -> None:
    strange = {"type": "object", "properties": {"x": {"type": "strnig"}}}
    for format in ("hermes", "glm"):
        for schema, sentence in [
            ({"type": "array", "items": {}}, "at #/type: arguments must be an object; set the type to 'object'"),
            ({"type": "string"}, "arguments must be an object"),
            ({"type": ["object", "null"]}, "arguments must be an object"),
            (strange, "did you mean string"),
            ({"type": "object", "properties": []}, "#/properties: this should be an object"),
            (schema_of({"$ref": "other.json"}), "outside this schema"),
            (schema_of(False), "satisfies this schema"),
            (schema_of({"not": {"items": {"type": "string"}}, "type": "array"}), "items can't be negated"),
            (schema_of(json.loads(deep('{"items":', "true", "}", 300))), "nested deeper than 200"),
        ]:
            told = refusal(format, with_schema("find", {"type": "object"}), with_schema("evil", schema))
            assert told.startswith("`tools`: the schema of evil"), told
            assert sentence in told
    for schema in (None, {}, {"type": "object"}, {"type": "object", "description": "Nothing."}):
        for format in ("hermes", "glm"):
            assert answers(format, [with_schema("find", schema)], tool_choice="required").constraint()
    for name in ("", "get weather", 'a"b', "a\nb", "a>b", "é", "x" * 129, "<tool_call>", None, 3):
        with pytest.raises(OvspecError, match=r"`tools`: the name .* is invalid; use 1 to 128 letters"):
            make_params({"tools": [with_schema(name, {})]})  # type: ignore[arg-type]
    with pytest.raises(OvspecError, match="`tools`: the parameters of find must be a JSON schema: an object such as"):
        make_params({"tools": [with_schema("find", True)]})
    with pytest.raises(OvspecError, match="`tools` has two tools named find"):
        make_params({"tools": [with_schema("find", {}), with_schema("find", {})]})


PARTS = ("NAME", "ID", "INDEX", "ARGUMENTS")  # of calls, as formats name them


@pytest.mark.parametrize(
    ("format", "names"),
    [
        *[(each.name, (PARTS[number % 4], PARTS[(number + 1) % 4])) for number, each in enumerate(TOOL_FORMATS)],
        *[pytest.param(each.name, PARTS, marks=pytest.mark.slow) for each in TOOL_FORMATS],
    ],
)
def test_tools_that_are_called_as_parts_of_calls_are(format: str, names: tuple[str, ...]) -> None:
    for name in names:
        calls(answers(format, [tool(name, x={"type": "integer", "maximum": 9})], tool_choice="required"), 1)


@pytest.mark.parametrize("more", [{}, {"properties": {}}, {"properties": {}, "required": [], "$schema": "x:y"}])
def test_a_function_without_parameters_gets_none(more: dict[str, Any]) -> None:
    made = answers("hermes", [with_schema("f", {"type": "object", **more})], tool_choice="required")
    assert calls(made, 2)[:2] == [("f", {})] * 2


def test_names_of_parameters_in_xml() -> None:
    for name in ("a b", 'q"', "é", "x/y", "<a", "", "arg_key", "{", "a\nb"):
        calls(answers("seed-oss", [tool("f", **{name: {"type": "string", "maxLength": 3}})], tool_choice="required"), 2)
    for format, name in [
        ("qwen-xml", "a>\nb"),
        ("seed-oss", "a>b"),
        ("seed-oss", ">"),
        ("glm-dense", "</arg_key><arg_value>"),
    ]:
        told = refusal(format, tool("f", **{name: {"type": "string"}}))
        assert "at the top: " in told and "can't be used in the model's tool format" in told
    for schema, sentence in [
        ({"additionalProperties": {"type": "string"}}, "properties that aren't listed can't be written"),
        ({"patternProperties": {"^k": {}}}, "properties that aren't listed can't be written"),
        ({"properties": {"x": {"type": "array", "uniqueItems": True}}}, "uniqueItems: this keyword can't be enforced"),
    ]:
        assert sentence in refusal("qwen-xml", with_schema("f", {"type": "object", **schema}))


# ---------------------------------------------------------------- values

VALUES: dict[str, Any] = {
    "text": {"type": "string", "maxLength": 8},
    "least": {"type": "string", "minLength": 3, "maxLength": 5},
    "enum": {"enum": ["red", "17", "true", "", "</", "a\nb", "é\t", " x "]},
    "const": {"const": "<tool_call>"},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}\\d+$", "maxLength": 6},
    "found": {"type": "string", "pattern": "a|b$", "maxLength": 4},
    "patterns": {"type": "string", "allOf": [{"pattern": "^[0-9]+$"}, {"pattern": "7"}], "maxLength": 4},
    "not": {"type": "string", "maxLength": 3, "not": {"enum": ["a", "b"]}},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "integer": {"type": "integer", "minimum": -3, "maximum": 400},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "mixed": {"enum": ["a", 1, None, [True], {"b": "</parameter>"}]},
    "either": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}, {"type": "integer", "minimum": 5}]},
    "two": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^xyz+$", "maxLength": 6}]},
    "array": {
        "type": "array",
        "items": {"enum": ["</arg_value>", "</parameter>", "\n</parameter>\n", 2]},
        "maxItems": 3,
    },
    "object": schema_of({"type": "string", "maxLength": 5}) | {"additionalProperties": False},
    "empty": {"type": "object", "additionalProperties": False},
}


def tagged(format: Any) -> tuple[str, ...]:
    return tuple(sorted({tag for text in format.fixed_texts() for tag in re.findall(r"<[^<>\s=]+>", text)}))


def calls(answer: Answers, count: int, seed: int = 1) -> list[tuple[str, dict[str, Any]]]:
    """Return ``count`` random calls, whose arguments are valid."""
    limits, numbers, found = answer.constraint(), random.Random(seed), list[tuple[str, dict[str, Any]]]()
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in answer.options["tools"]}
    while len(found) < count:
        tokens, ended = random_answer(limits, answer.vocabulary, numbers, patience=30)
        assert ended
        _, reader = answer.read(tokens, numbers.choice((1, 3, 1000)))
        assert reader.calls
        for call in reader.calls:
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, schemas[call.name or ""])
            found.append((call.name or "", arguments))
    return found


@pytest.mark.parametrize(
    ("format", "count"),
    [
        pytest.param(XML[0], 1, id=XML[0].name),
        pytest.param(XML[1], 1, id=XML[1].name, marks=pytest.mark.slow),
        *[pytest.param(each, 3, id=f"{each.name}, more", marks=pytest.mark.slow) for each in XML],
    ],
)
def test_values_in_xml(format: Any, count: int) -> None:
    """With tags as texts, as special tokens, as other tokens, and mixed; between two parameters, and alone."""
    vocabularies = [PLAIN, Vocabulary(tagged(format)), Vocabulary((), tagged(format)), Vocabulary(("</parameter>",))]
    for index, schema in enumerate(VALUES.values()):
        tools = [tool("f", x=schema, y={"type": "string", "maxLength": 2}, z=schema)]
        for vocabulary in (vocabularies[index % 4], vocabularies[(index + 1) % 4]):
            calls(answers(format.name, tools, vocabulary=vocabulary, tool_choice="required"), count)


@pytest.mark.parametrize("format", XML, ids=lambda each: each.name)
def test_texts_in_xml_stay_what_they_are(format: Any) -> None:
    """What looks like another value, or like a tag, is a text; what would end a value can't be in it."""
    for vocabulary in (PLAIN, Vocabulary(tagged(format))):
        answer = answers(format.name, [tool("f", x={"type": "string"})], vocabulary=vocabulary, tool_choice="required")
        layout = answer.format.tool_format
        assert layout and layout.parameters
        texts = ["5", "true", "null", '"', "[1, 2]", '{"a": 1}', "", " ", "\n", "a\n", "\n\nb", "\\n", "<parameter=y>"]
        for text in texts:
            tokens = vocabulary.ids_of(layout.write_calls([("f", {"x": text})]))
            assert follows(answer, tokens), text
            _, reader = answer.read(tokens, 2)
            assert json.loads(reader.calls[0].arguments) == {"x": text}
        close = layout.parameters.after_value
        for text in (close, f"a{close}b", f"{close}{close}"):
            spelt = PLAIN.ids_of(text)
            begin = vocabulary.ids_of(layout.write_calls([("f", {"x": "a"})]).partition(close)[0])
            rest = vocabulary.ids_of(layout.write_calls([("f", {"x": "a"})]).partition(close)[2])
            tokens = [*begin, *spelt, *vocabulary.ids_of(close), *rest]
            if vocabulary is PLAIN:
                assert not follows(answer, tokens), "it would end there"
            else:
                assert follows(answer, tokens)
                assert json.loads(answer.read(tokens)[1].calls[0].arguments) == {"x": f"a{text}"}


def follows(answer: Answers, tokens: list[int]) -> bool:
    """Return whether a grammar allows ``tokens``, in whatever tokens they are."""
    limits, text = answer.constraint(), np.concatenate((PROMPT, np.array(tokens, dtype=np.int64)))
    make = answer.make
    spelt = [PLAIN.spelt[token] if token < PLAIN.tokens.size else token for token in tokens]
    assert limits
    assert make
    try:
        made = make(0, [b"c", *(each for each in spelt if each is not None)])
    except OvspecError:
        return False
    return made.is_complete(text[:0]) or made.allows_token(EOS, text[:0])
