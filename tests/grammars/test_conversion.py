"""Wrong and hostile grammars are refused in one sentence and in time; those that are accepted can be followed."""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from grammar_walks import allowed, demo_tokenizer, matcher, random_text
from hostile_cases import CHOICES, EITHER, GBNF, LARK, REGEX, SCHEMAS
from llguidance import LLMatcher

from ovspec.base.errors import OvspecError
from ovspec.grammars import sources
from ovspec.grammars.sources import PARSER_LIMITS
from ovspec.grammars.wording import word_llguidance_error
from ovspec.sampling.grammar_conversion import GRAMMAR_CONVERTER, MAX_CONVERSION_SECONDS, convert_grammar

SOURCES = {"grammar": LARK, "gbnf": GBNF, "regex": REGEX, "choice": CHOICES, "json_schema": SCHEMAS}
# Quick runs leave out what is large and accepted; test_sources.py and test_heartbeat.py have some of it.
LARGE = 4000
# They also leave out those whose walks take longest: others like them are beside them, and in the tests of a step.
LONGEST = {("gbnf", 38), ("grammar", 92)}
CASES = [
    pytest.param(
        kind,
        given,
        expected,
        id=f"{kind}-{i}-{re.sub('[^ -~]', '', str(given))[:40]}",
        marks=[pytest.mark.slow] * (expected == EITHER and (len(str(given)) > LARGE or (kind, i) in LONGEST)),
    )
    for kind, cases in SOURCES.items()
    for i, (given, expected) in enumerate(cases)
]
NOISE = re.compile(
    r"ExprRef|Some\(|None\)|Result|<non-verbose|<state>|<grammar>|panicked|\.rs:|\n|\[0m|Regex\(|0x[0-9a-f]{6}|NoExtension|TooComplex"
)


def test_there_are_two_hundred_cases() -> None:
    assert len(CASES) > 200


@pytest.mark.parametrize(("kind", "given", "expected"), CASES)
def test_refused_in_a_sentence_or_followed(kind: str, given: Any, expected: str) -> None:
    began = time.monotonic()
    try:
        grammar = convert_grammar(kind, given, "The grammar")
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
    assert time.monotonic() - began < MAX_CONVERSION_SECONDS + 2


def follow(grammar: str) -> None:
    """Check on random walks that every token that a mask allows is accepted."""
    each = LLMatcher(demo_tokenizer(), grammar, log_level=0, limits=PARSER_LIMITS)
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


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Allow a check fewer seconds than usual, so that the tests of this limit end sooner."""
    assert GRAMMAR_CONVERTER.max_seconds == MAX_CONVERSION_SECONDS == 5
    monkeypatch.setattr(GRAMMAR_CONVERTER, "max_seconds", 1.5)
    before = [*GRAMMAR_CONVERTER.idle_processes]
    yield GRAMMAR_CONVERTER.max_seconds
    if any(process not in before for process in GRAMMAR_CONVERTER.idle_processes):
        GRAMMAR_CONVERTER.end_idle_processes()  # the new ones allow only this long themselves


def test_a_stopped_check_leaves_the_next_one_unharmed(hurried: float) -> None:
    took = list[float]()
    while not took or (len(took) < 3 and min(took) >= hurried + 1):  # other processes may delay one
        began = time.monotonic()
        with pytest.raises(
            OvspecError, match=r"^--schema x: the check ran longer than 1\.5 seconds; simplify the schema\.$"
        ):
            convert_grammar("json_schema", {"type": "integer", "multipleOf": 9999991}, "--schema x")
        took.append(time.monotonic() - began)
    assert min(took) < hurried + 1
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda length: convert_grammar("regex", f"[a-z]{{{length}}}", "--regex"), (5, 6)))
    assert len(GRAMMAR_CONVERTER.idle_processes) > 1
    for process in GRAMMAR_CONVERTER.idle_processes:
        process.kill()
    convert_grammar("regex", "[a-z]{7}", "--regex")


# Each froze the process that calls ovspec for seconds, because it was parsed there.
FREEZING: list[tuple[str, Any]] = [
    ("regex", '(at "' + "\\" * 34),
    ("regex", '(at "' + "\\" * 400 + '" (x))'),
    ("json_schema", {"type": "string", "pattern": "[" * 20_000}),
    ("json_schema", {"type": "string", "pattern": "[\\" * 100_000}),
    ("json_schema", '["' * 400_000),
    ("gbnf", "root ::= " + " ".join('[a-z]+ ("x" | "y")*' for _ in range(1200))),
    ("gbnf", "root ::= " + "(" * 90 + '"x"' + "?)" * 90),
    ("grammar", "a\n" * 100_000),
    ("grammar", 'start: "' + "\\" * 30_001),
    ("choice", ["x" * 900] * 1000),
]


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("kind", "given"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each == FREEZING[2])) for each in FREEZING],  # it takes the limit
    ids=lambda value: str(value)[:24],
)
def test_the_calling_process_goes_on_meanwhile(kind: str, given: Any) -> None:
    waits, stop = [], threading.Event()

    def beat() -> None:
        while not stop.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            waits.append(time.monotonic() - began)

    heart = threading.Thread(target=beat)
    heart.start()
    began = time.process_time()
    with contextlib.suppress(OvspecError):
        convert_grammar(kind, given, "the grammar")
    took = time.process_time() - began
    stop.set()
    heart.join()
    assert took < 0.5
    assert max(waits) < 0.5


@pytest.mark.usefixtures("hurried")
def test_one_that_takes_long_holds_up_no_other() -> None:
    slow = threading.Thread(target=refused, args=({"type": "integer", "multipleOf": 9999889},))
    slow.start()
    time.sleep(0.3)
    began = time.monotonic()
    convert_grammar("regex", "[a-f]{3}", "regex")
    assert time.monotonic() - began < 3  # another process starts
    assert slow.is_alive()
    slow.join()


def refused(schema: Any) -> str:
    with pytest.raises(OvspecError) as error:
        convert_grammar("json_schema", schema, "schema")
    return str(error.value)


def test_a_slow_moment_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "integer", "multipleOf": 49999}
    monkeypatch.setattr(GRAMMAR_CONVERTER, "max_seconds", 0.01)
    assert "ran longer than" in refused(schema)
    monkeypatch.undo()
    assert convert_grammar("json_schema", schema, "schema")


def test_a_grammar_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    GRAMMAR_CONVERTER.end_idle_processes()
    convert_grammar("regex", "[a-g]{3}", "regex")
    assert "A_SECRET" not in GRAMMAR_CONVERTER.idle_processes[0].environ()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GRAMMAR_CONVERTER, "max_bytes", 120_000_000)
    with pytest.raises(OvspecError, match="used more than 120 MB of memory"):
        convert_grammar("json_schema", {"type": "integer", "multipleOf": 899981}, "schema")


def test_checking_is_quick() -> None:
    convert_grammar("regex", "warm", "regex")
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 20} for i in range(20)}}
    began = time.perf_counter()
    for i in range(5):
        convert_grammar("json_schema", {**schema, "title": str(i)}, "schema")
    assert time.perf_counter() - began < 2.5
    began = time.perf_counter()
    convert_grammar("json_schema", {**schema, "title": "0"}, "schema")
    assert time.perf_counter() - began < 0.02, "the result is remembered"


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        pytest.param("start: e\ne: e e | e e e | e e e e | /[a-z ]/", 100, marks=pytest.mark.slow),
        ("start: e\ne: e e e e e e | /./", 50),
        pytest.param("start: e\ne: e e e e e e | /./", 100, marks=pytest.mark.slow),
        ("start: (((/[a-z]/*)*)*)*", 20),
        pytest.param("start: (((/[a-z]/*)*)*)*", 100, marks=pytest.mark.slow),
        ('start: x\nx: /[a-z]/ x | ""', 100),
    ],
)
def test_a_step_never_takes_long(text: str, steps: int) -> None:
    each, numbers = matcher(sources.convert_lark(text)), random.Random(1)
    for _ in range(steps):
        began = time.process_time()
        each.compute_bitmask()
        assert time.process_time() - began < 2.0  # half a second on a quiet machine
        if each.is_error():
            break
        if not each.consume_token(numbers.choice([i for i in allowed(each) if i != demo_tokenizer().eos_token])):
            assert each.is_error()
            break


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("NoExtensionBias", "it has a dead end, a text without a next token; add an alternative."),
        ("NoExtension\n<state>", "it has a dead end, a text without a next token; add an alternative."),
        ("LexerTooComplex", "it is too complex; simplify it."),
        ("ParserTooComplex", "it is too complex; simplify it."),
        ("unknown name: x", "unknown name: x."),
    ],
)
def test_messages_name_no_internals(error: str, said: str) -> None:
    assert word_llguidance_error(error) == said
