"""Texts generated with the masks of a JSON schema are valid JSON according to an independent validator."""

from __future__ import annotations

import json
import random
import re
from datetime import date, datetime
from decimal import Decimal, InvalidOperation, localcontext
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from grammar_walks import demo_tokenizer, matcher, random_text
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for
from schema_strategy import Schema, schemas

from ovspec.base.errors import OvspecError
from ovspec.grammars import json_schema as cleaning
from ovspec.grammars.sources import convert_json_schema
from ovspec.sampling.grammar_conversion import convert_grammar

SCHEMAS = sorted((Path(__file__).parent / "schemas").glob("*.json"))
FORMATS = FormatChecker(formats=())


def moment(text: str) -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", text)
    datetime.fromisoformat(re.sub(r"\.\d+", "", text.upper()))


def host(text: str) -> None:
    parts = text.split(".")
    assert len(text) <= 253
    assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?", part) for part in parts)


def matches(pattern: str) -> Any:
    def holds(text: str) -> None:
        assert re.fullmatch(pattern, text)

    return holds


CHECKS = {
    "date": date.fromisoformat,
    "date-time": moment,
    "time": lambda text: moment(f"2000-01-01T{text}"),
    "ipv4": IPv4Address,
    "ipv6": IPv6Address,
    "uuid": UUID,
    "hostname": host,
    "email": matches(r"[^@\s]+@[^@\s]+"),
    "duration": matches(r"P(\d+W|(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+S)?)?)"),
    "uri": matches(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]*"),
}


def checks(name: str) -> None:
    def holds(value: object) -> bool:
        if isinstance(value, str):
            CHECKS[name](value)
        return True

    FORMATS.checks(name, raises=(ValueError, AssertionError))(holds)


for each in CHECKS:
    checks(each)


def number(text: str) -> Decimal | float:
    """Read a number exactly as written: 9.99999999999999999999 is below 10, but as a float it would be 10."""
    try:
        return Decimal(text)
    except InvalidOperation:  # e.g. an exponent of twenty digits
        return float(text)


def prove(schema: Schema, texts: list[bytes]) -> None:
    exact = json.loads(json.dumps(schema), parse_float=number)
    validator = validator_for(exact, Draft202012Validator)(exact, format_checker=FORMATS)
    for text in texts:
        with localcontext(prec=2000):
            errors = list(validator.iter_errors(json.loads(text, parse_float=number)))
        assert not errors, f"{text!r}: {errors[0].message}"
        between = re.findall(rb"\s+", re.sub(rb'"(\\.|[^"\\])*"', b"x", text))
        assert all(re.fullmatch(rb" |\n[ \t]{0,20}", white) for white in between), text


def texts(grammar: str, count: int) -> list[bytes]:
    start = matcher(grammar)
    found = [random_text(start.deep_copy(), random.Random(i)) for i in range(count)]
    return [text for text in found if text is not None]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] * (at % 3 > 0), id=path.stem) for at, path in enumerate(SCHEMAS)],
)
def test_texts_of_a_schema_are_valid(path: Path) -> None:
    grammar = convert_grammar("json_schema", path, str(path))
    found = texts(grammar, 12)
    assert len(found) >= 11, "nearly all texts end"
    prove(json.loads(path.read_text(encoding="utf-8")), found)


def test_dates_are_those_that_there_are() -> None:
    """Dates at the start and the end of every month, in years of all kinds, are accepted exactly if they exist."""
    start = matcher(convert_json_schema({"format": "date", "type": "string"})[0])
    for year in (0, 1, 4, 100, 400, 1900, 1996, 2000, 2023, 2024, 2100, 9999):
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    date.fromisoformat(text)
                    right = True
                except ValueError:
                    right = False
                each = start.deep_copy()
                tokens = demo_tokenizer().tokenize_str(json.dumps(text))
                assert (each.try_consume_tokens(tokens) == len(tokens) and each.is_accepting()) == right, text


def test_there_are_fifty_schemas() -> None:
    assert len(SCHEMAS) >= 50


@pytest.mark.parametrize("examples", [20, pytest.param(150, marks=pytest.mark.slow)])
def test_texts_of_any_schema_are_valid(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(schemas())
    def each(schema: Schema) -> None:
        try:
            grammar = convert_grammar("json_schema", schema, "schema")
        except OvspecError as error:
            assert re.search(
                "no JSON text satisfies|a string in the schema can't have|may overlap|can't be enforced", str(error)
            ), error
            return
        prove(schema, texts(grammar, 4))

    each()


def test_an_old_llguidance_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, good in (("1.5.0", False), ("1.7.9", False), ("1.8.0", True), ("1.10.2", True), ("2.0.0rc1", True)):
        cleaning.is_llguidance_recent.cache_clear()
        monkeypatch.setattr(cleaning, "version", lambda _, found=found: found)
        assert cleaning.is_llguidance_recent() == good
        if not good:
            with pytest.raises(OvspecError, match=f"llguidance {found} is too old to enforce schemas"):
                cleaning.compile_schema({"type": "integer"}, lambda _: "")
    cleaning.is_llguidance_recent.cache_clear()


@pytest.mark.parametrize(
    ("form", "kept", "refused"),
    [
        ("date-time", ["2024-02-29T12:34:56.123456+02:00", "2024-01-31t23:59:59z"], "2024-01-31T23:59:59.0123456789Z"),
        ("time", ["12:34:56Z", "12:34:56.5-01:30"], "12:34:56.0123456789Z"),
        ("duration", ["P1Y2M3DT4H5M6S", "PT5M", "P3W"], "P1234567D"),
        ("email", ["a@b", "joe.x@example.com"], f"{'a' * 65}@b"),
    ],
)
def test_formats_end(form: str, kept: list[str], refused: str) -> None:
    """Digits without a bound would be written forever."""
    for text in (*kept, refused):
        walk = matcher(convert_json_schema({"type": "string", "format": form})[0])
        tokens = demo_tokenizer().tokenize_str(json.dumps(text))
        whole = walk.try_consume_tokens(tokens) == len(tokens) and walk.is_accepting()
        assert whole == (text in kept), text
