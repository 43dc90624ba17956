"""GBNF becomes Lark in bounded time, and the resulting large lexemes match the same texts."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterable
from itertools import count

import pytest
from grammar_walks import matcher, random_text
from llguidance import LLMatcher, LLTokenizer

from ovspec.grammars import gbnf as lexemes
from ovspec.grammars.gbnf import StepBudget
from ovspec.grammars.gbnf.parsing import parse_gbnf
from ovspec.grammars.sources import MAX_GBNF_CHARACTERS, PARSER_LIMITS, convert_gbnf

SECONDS = 6  # a second or two on a quiet machine
STACKED = "{2}{3}" * 4


def filled(part: Callable[[int], str], around: str = "root ::= {}", size: int = MAX_GBNF_CHARACTERS - 100) -> str:
    """Return a grammar with as many parts as fit into ``size`` characters."""

    def parts() -> Iterable[str]:
        left = size - len(around)
        for i in count():
            left -= len(part(i))
            if left < 0:
                return
            yield part(i)

    return around.replace("{}", "".join(parts()))


def nested(opening: str, inner: str, closing: str) -> str:
    return opening * 99 + inner + closing * 99


def shuffled(lines: int) -> list[int]:
    return random.Random(0).sample(range(lines), lines)


HARD = {
    "nested": "root ::= " + nested('("a" | "b" ', '"c"', ")"),
    "nested optional": "root ::= " + nested('("a" | "b"? ', '"c"?', ")?"),
    "stacked repetitions": "root ::= " + nested("(", '"a"', ")" + STACKED),
    "stacked stars": "root ::= " + nested("(", '"a"', ")*?+*?+*?"),
    "many stacked repetitions": filled(lambda i: nested("(", f'"{i}"', ")" + STACKED)),
    "wide": filled(lambda i: f'"word{i}" | ', 'root ::= {}"x"'),
    "wide and recursive": filled(lambda i: f'"word{i}" root | ', 'root ::= {}"x"'),
    "wide and recursive on both sides": filled(lambda i: f'root "{i}" root | ', 'root ::= {}"x"'),
    "wide and optional": filled(lambda i: f'"a{i}"? ', 'root ::= {}"x"'),
    "names before keywords": filled(lambda i: f'[a-z]+ "{i}" root | ', 'root ::= {}"x"'),
    "many classes": filled(lambda i: f"[a-{chr(98 + i % 20)}]*"),
    "large classes": filled(lambda i: f"[^{''.join(chr(256 + 3 * j + i % 7) for j in range(300))}]* root | ") + '"x"',
    "many characters": f'root ::= "{"".join(chr(0x20000 + i) for i in range(100_000))}"',
    "one long text": filled(lambda _: "a", 'root ::= "{}"'),
    "a long chain": "root ::= x0\n" + "".join(f"x{i} ::= x{i + 1}\n" for i in range(6000)) + 'x6000 ::= "a"',
    "a branching chain": "root ::= x3999\n" + "\n".join(f"x{i} ::= x{i - 1} x{i - 1}?" for i in range(1, 4000))
    + '\nx0 ::= "a" x3?',
    "a chain in any order": 'root ::= x0\nx4000 ::= "a"\n'
    + "\n".join(f"x{i} ::= x{i + 1}? root? [{'abcdef'[i % 6]}]" for i in shuffled(4000)),
    "a large rule used often": filled(lambda i: f'y x "{i}" y | ', "root ::= {}", 150_000)
    + f'"x"\ny ::= "(" y ")" | "q"\nx ::= "{"b" * 1900}"',
    "greedy at every turn": " ".join(["root ::=", *[f'([a-z]* "{chr(97 + i % 26)}" [a-z]*)*' for i in range(2000)]]),
}  # fmt: skip


# Quick runs have those that take longest in a shorter form.
SHORTER = {
    "many stacked repetitions": filled(lambda i: nested("(", f'"{i}"', ")" + STACKED), size=MAX_GBNF_CHARACTERS // 5),
    "wide": filled(lambda i: f'"word{i}" | ', 'root ::= {}"x"', MAX_GBNF_CHARACTERS // 5),
    "wide and recursive": filled(lambda i: f'"word{i}" root | ', 'root ::= {}"x"', MAX_GBNF_CHARACTERS // 5),
    "wide and recursive on both sides": filled(
        lambda i: f'root "{i}" root | ', 'root ::= {}"x"', MAX_GBNF_CHARACTERS // 5
    ),
    "wide and optional": filled(lambda i: f'"a{i}"? ', 'root ::= {}"x"', MAX_GBNF_CHARACTERS // 5),
    "names before keywords": filled(lambda i: f'[a-z]+ "{i}" root | ', 'root ::= {}"x"', MAX_GBNF_CHARACTERS // 5),
    "many characters": f'root ::= "{"".join(chr(0x20000 + i) for i in range(20_000))}"',
    "many classes": filled(lambda i: f"[a-{chr(98 + i % 20)}]*", size=MAX_GBNF_CHARACTERS // 5),
    "large classes": filled(
        lambda i: f"[^{''.join(chr(256 + 3 * j + i % 7) for j in range(300))}]* root | ", size=MAX_GBNF_CHARACTERS // 5
    )
    + '"x"',
    "one long text": filled(lambda _: "a", 'root ::= "{}"', MAX_GBNF_CHARACTERS // 5),
    "a chain in any order": 'root ::= x0\nx800 ::= "a"\n'
    + "\n".join(f"x{i} ::= x{i + 1}? root? [{'abcdef'[i % 6]}]" for i in shuffled(800)),
    "a large rule used often": filled(lambda i: f'y x "{i}" y | ', "root ::= {}", 30_000)
    + f'"x"\ny ::= "(" y ")" | "q"\nx ::= "{"b" * 1900}"',
}
CASES = [
    *[pytest.param(text, SECONDS, id=name) for name, text in HARD.items() if name not in SHORTER],
    *[pytest.param(HARD[name], SECONDS, marks=pytest.mark.slow, id=name) for name in SHORTER],
    *[pytest.param(text, SECONDS / 2, id=f"{name}, shorter") for name, text in SHORTER.items()],
]


@pytest.mark.parametrize(("text", "seconds"), CASES)
def test_no_grammar_takes_long(text: str, seconds: float) -> None:
    assert len(text) <= MAX_GBNF_CHARACTERS
    began = time.perf_counter()
    convert_gbnf(text)
    assert time.perf_counter() - began < seconds


def test_single_characters_are_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no steps allowed for comparing lexemes, only single characters are lexemes, and the language is the same."""
    text = 'root ::= ("ab" | name) "=" name | "(" root ")"\nname ::= [a-b]+ ("." [0-9]{1,3})?'
    large = convert_gbnf(text)
    monkeypatch.setattr(lexemes, "StepBudget", functools.partial(StepBudget, 0))
    small = convert_gbnf(text)
    assert small.count("[") > large.count("T")
    for one, other in ((large, small), (small, large)):
        for seed in range(30):
            found = random_text(matcher(one), random.Random(seed), limit=60)
            assert found is None or accepts(other, found)


def accepts(grammar: str, text: bytes) -> bool:
    each = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=PARSER_LIMITS)
    return each.try_consume_tokens(list(text)) == len(text) and each.is_accepting()


def test_equal_expressions_are_one() -> None:
    rules = parse_gbnf('root ::= ("a" [b]) | "ab" | x\nx ::= "ab"*+ | ("a" "b")*').rules
    first, second, _ = rules["root"].alternatives  # type: ignore[union-attr]
    assert first is second
    one, other = rules["x"].alternatives  # type: ignore[union-attr]
    assert one is other


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('root ::= "a" [b-c]+ ("d" | "ef")*', 1),  # all of it is one lexeme
        ('root ::= item ("," item)*\nitem ::= [a-z]+ | "(" root ")"', 4),
        ('root ::= [a-z]+ "x" root | "!"', 3),  # [a-z]+ would swallow the x
    ],
)
def test_lexemes_are_as_large_as_they_may_be(text: str, count: int) -> None:
    lines = lexemes.convert_gbnf_to_lark(text).splitlines()
    assert sum(line.startswith("T") for line in lines) == count, lines
