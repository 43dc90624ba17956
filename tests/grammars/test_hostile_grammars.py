"""Wrong and hostile grammars are refused in one sentence and in time; those that are accepted can be followed."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from grammar_walks import allowed, demo_tokenizer, matcher, random_text
from hostile_cases import CHOICES, EITHER, GBNF, LARK, REGEX, SCHEMAS
from llguidance import LLMatcher

from ovspec.errors import OvspecError
from ovspec.grammars import check as checking
from ovspec.grammars import sources
from ovspec.grammars.check import CHECKER, LIMITS, MAX_SECONDS, check

SOURCES: dict[str, tuple[Callable[[Any], str], list]] = {
    "lark": (sources.lark, LARK),
    "gbnf": (sources.gbnf, GBNF),
    "regex": (sources.regex, REGEX),
    "choices": (sources.choices, CHOICES),
    "schema": (sources.json_schema, SCHEMAS),
}
CASES = [
    pytest.param(kind, given, expected, id=f"{kind}-{i}-{re.sub('[^ -~]', '', str(given))[:40]}")
    for kind, (_, cases) in SOURCES.items()
    for i, (given, expected) in enumerate(cases)
]
NOISE = re.compile(
    r"ExprRef|Some\(|None\)|Result|<non-verbose|<state>|<grammar>|panicked|\.rs:|\n|\[0m|Regex\(|0x[0-9a-f]{6}"
)


def test_there_are_two_hundred_cases() -> None:
    assert len(CASES) > 200


@pytest.mark.parametrize(("kind", "given", "expected"), CASES)
def test_refused_in_a_sentence_or_followed(kind: str, given: Any, expected: str) -> None:
    began = time.monotonic()
    try:
        grammar = SOURCES[kind][0](given)
        check(grammar, "The grammar")
    except OvspecError as error:
        message = str(error)
        assert expected == EITHER or any(part in message for part in expected.split("|")), message
        assert not NOISE.search(message), message
        assert re.search(r"[.?]$", message), message
        assert 10 < len(message) < 500, message
        assert message.count(". ") == 0, f"not one sentence: {message}"
    else:
        assert expected == EITHER, "it should have been refused"
        follow(grammar)
    assert time.monotonic() - began < MAX_SECONDS + 2


def follow(grammar: str) -> None:
    """Check on random walks that every token that a mask allows is accepted."""
    each = LLMatcher(demo_tokenizer(), grammar, log_level=0, limits=LIMITS)
    if "unknown special token" in each.get_error() or "range" in each.get_error():
        return  # whether it is wrong depends on the vocabulary
    assert not each.is_error(), each.get_error()
    for seed in range(2):
        walk = each.deep_copy()
        try:
            assert allowed(walk)
            random_text(walk, random.Random(seed), patience=20, limit=40)
        except AssertionError:
            assert re.search("too many|Too many|row has|too complex", walk.get_error()), walk.get_error()


def test_a_stopped_check_leaves_the_next_one_unharmed() -> None:
    began = time.monotonic()
    with pytest.raises(OvspecError, match=r"^--schema x: the check ran longer than 5 seconds; simplify it\.$"):
        check(sources.json_schema({"type": "integer", "multipleOf": 9999991}), "--schema x")
    assert time.monotonic() - began < MAX_SECONDS + 1
    check(sources.json_schema({"type": "integer", "multipleOf": 7}), "--schema x")
    assert CHECKER._process
    CHECKER._process.kill()
    check(sources.regex("[a-z]{7}"), "--regex")


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CHECKER, "size", 120_000_000)
    with pytest.raises(OvspecError, match="took more than 120 MB of memory"):
        check(sources.json_schema({"type": "integer", "multipleOf": 899981}), "schema")


def test_checking_is_quick() -> None:
    check(sources.regex("warm"), "regex")
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 20} for i in range(20)}}
    began = time.perf_counter()
    for i in range(5):
        check(sources.json_schema({**schema, "title": str(i)}), "schema")
    assert time.perf_counter() - began < 2.5
    began = time.perf_counter()
    check(sources.json_schema({**schema, "title": "0"}), "schema")
    assert time.perf_counter() - began < 0.02, "the result is remembered"


def test_the_rules_are_still_read_from_the_log() -> None:
    """A new llguidance may log them in another form; only this test would fail then."""
    with pytest.raises(OvspecError, match="the rule dead can never come to an end"):
        check(sources.lark('start: "a" dead | "b"\ndead: "x" dead'), "grammar")
    assert checking.problem_with(sources.lark('start: "a" | "(" start ")"')) == ""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("start: e\ne: e e | e e e | e e e e | /[a-z ]/", marks=pytest.mark.slow),
        "start: e\ne: e e e e e e | /./",
        "start: (((/[a-z]/*)*)*)*",
        'start: x\nx: /[a-z]/ x | ""',
    ],
)
def test_a_step_never_takes_long(text: str) -> None:
    each, numbers = matcher(sources.lark(text)), random.Random(1)
    for _ in range(100):
        began = time.process_time()
        each.compute_bitmask()
        assert time.process_time() - began < 2.0  # half a second on a quiet machine
        if each.is_error():
            break
        if not each.consume_token(numbers.choice([i for i in allowed(each) if i != demo_tokenizer().eos_token])):
            assert each.is_error()
            break
