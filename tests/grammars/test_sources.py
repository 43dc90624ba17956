"""Regular expressions, choices, Lark and GBNF become grammars that match the same texts."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
import warnings
from pathlib import Path

import pytest
from grammar_walks import demo_tokenizer, matcher, random_text
from llguidance import LLMatcher, LLTokenizer

from ovspec.base.errors import OvspecError
from ovspec.grammars import sources
from ovspec.grammars.sources import PARSER_LIMITS
from ovspec.sampling.grammar_conversion import convert_grammar

BYTES = LLTokenizer("byte")


def matching(grammar: str, texts: list[str]) -> set[str]:
    """Return those of ``texts`` that the grammar matches."""
    start = LLMatcher(BYTES, grammar, log_level=0, limits=PARSER_LIMITS)
    assert not start.is_error(), start.get_error()
    found = set()
    for text in texts:
        each, data = start.deep_copy(), list(text.encode())
        if each.try_consume_tokens(data) == len(data) and each.is_accepting():
            found.add(text)
        assert not each.is_error(), each.get_error()
    return found


def all_texts(letters: str, longest: int) -> list[str]:
    return ["".join(each) for size in range(longest + 1) for each in itertools.product(letters, repeat=size)]


# GBNF compared with the sets of texts that its operators stand for, computed without any parser.

Rules = dict[str, tuple[str, tuple]]
LONGEST = 6


def random_rule(numbers: random.Random, depth: int, names: list[str]) -> tuple[str, tuple]:
    """Return an expression over a and b, as (GBNF, its meaning)."""
    kind = numbers.random()
    if depth == 0 or kind < 0.3:
        name = numbers.choice(names)
        literal = numbers.choice(["a", "b", "ab", "ba", "aa", ""])
        return numbers.choice(
            [(f'"{literal}"', ("texts", {literal})), ("[ab]", ("texts", {"a", "b"})), ("[^a]", ("texts", {"b"}))]
            + [(name, ("rule", name))] * 3
        )
    if kind < 0.8:
        parts = [random_rule(numbers, depth - 1, names) for _ in range(numbers.choice([2, 2, 3]))]
        if kind < 0.6:
            return " ".join(f"({text})" for text, _ in parts), ("sequence", [each for _, each in parts])
        return " | ".join(text for text, _ in parts), ("options", [each for _, each in parts])
    text, inner = random_rule(numbers, depth - 1, names)
    signs = [("*", 0, 9), ("+", 1, 9), ("?", 0, 1), ("{2}", 2, 2), ("{1,2}", 1, 2), ("{2,}", 2, 9)]
    sign, least, most = numbers.choice(signs)
    return f"({text}){sign}", ("repeat", inner, least, most)


def meaning(expression: tuple, rules: dict[str, set[str]]) -> set[str]:
    def joined(one: set[str], other: set[str]) -> set[str]:
        return {a + b for a in one for b in other if len(a) + len(b) <= LONGEST}

    match expression:
        case "texts", texts:
            return texts
        case "rule", name:
            return rules[name]
        case "options", options:
            return set().union(*(meaning(each, rules) for each in options))
        case "sequence", parts:
            found = {""}
            for each in parts:
                found = joined(found, meaning(each, rules))
            return found
        case "repeat", inner, least, most:
            once, now, found = meaning(inner, rules), {""}, set()
            for count in range(most + 1):
                found |= now if count >= least else set()
                now = joined(now, once)
            return found
    raise AssertionError(expression)


def language(rules: Rules) -> set[str]:
    now: dict[str, set[str]] = {name: set() for name in rules}
    while True:
        after = {name: meaning(each, now) for name, (_, each) in rules.items()}
        if after == now:
            return now["root"]
        now = after


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 6)) for seed in range(20)])
def test_gbnf_means_what_its_operators_mean(seed: int) -> None:
    texts = all_texts("ab", LONGEST)
    for number in range(25):
        numbers = random.Random(f"{seed} {number}")
        names = ["root", "x", "y", "z"][: numbers.randint(1, 4)]
        rules = {name: random_rule(numbers, numbers.randint(1, 3), names) for name in names}
        text = "\n".join(f"{name} ::= {line}" for name, (line, _) in rules.items())
        assert matching(sources.convert_gbnf(text), texts) == language(rules), text


JSON = r"""# JSON, as llama.cpp's users write it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (
    string ":" ws value      # the first
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
# Regular grammars, each with the same language as a Python regular expression, and the letters to try.
REGULAR = {
    "list": ('root ::= item ("," item)*\nitem ::= [ab]+', "[ab]+(,[ab]+)*", "ab,"),
    "csv": (
        'root ::= (cell "," cell "\\n")+\ncell ::= [a-b]* | "\\"" [^"]* "\\""',
        '(?:([ab]*|"[^"]*"),([ab]*|"[^"]*")\n)+',
        'a,"\n',
    ),
    "moves": ('root ::= "1." move (" " move)?\nmove ::= (piece | "O-O") [+#]?\npiece ::= [NB]? "x"? [a-h] [1-8]',
              r"1\.(?:[NB]?x?[a-h][1-8]|O-O)[+#]?(?: (?:[NB]?x?[a-h][1-8]|O-O)[+#]?)?", "1.NxO-a"),
    "hyphens and capitals": ('root ::= My-rule my-rule\nMy-rule ::= "a"\nmy-rule ::= "b"', "ab", "ab"),
    "underscores": ('root ::= a_b | ab\na_b ::= "x"\nab ::= "y" a_b', "x|yx", "xy"),
    "keyword or name": ('root ::= ("ab" | name) "=" name\nname ::= [a-b]+', "[ab]+=[ab]+", "ab="),
    "name before a letter": ('root ::= ident "b" | ident root\nident ::= [ab]+', "[ab]+b", "ab"),
    "shared beginnings": ('root ::= "a" "ba" | "ab" "b"', "aba|abb", "ab"),
    "any character": ('root ::= . "b" .*', "(?s:.b.*)", "ab\n"),
    "escapes": ('root ::= "\\x61" "\\u0062" "\\U0000000A"? [\\]\\-\\\\^]', "ab\n?[\\]\\-\\\\^]", "ab\n]-"),
    "unicode": ('root ::= [α-ω]+ "é" [^😀]?', "[α-ω]+é[^😀]?", "αωé😀"),
    "hyphen at the end": ("root ::= [a-]+ [^-]", "[a-]+[^-]", "a-b"),
    "counted": ('root ::= "a"{2,3} "b"{2} ("a" | "b"){0,1} "b"{1,}', "a{2,3}b{2}[ab]?b+", "ab"),
    "empty option": ('root ::= "a" ( | "b") "a"?', "ab?a?", "ab"),
    "stacked": ('root ::= ("a"?)+ ("b"*)* "a"??', "a*b*a?", "ab"),
    "comments": ('# first\nroot ::= # second\n  "a" | # third\n  "b"\n\n# last', "a|b", "ab#"),
    "carriage returns": ('root ::= x\r\nx ::= "a" (\r\n"b" )\r\n', "ab", "ab"),
}  # fmt: skip


@pytest.mark.parametrize("name", REGULAR)
def test_regular_gbnf_equals_an_expression(name: str) -> None:
    grammar, pattern, letters = REGULAR[name]
    texts = all_texts(letters, 5 if len(letters) < 6 else 4)
    texts += [random_chunk(letters, seed) for seed in range(500)]
    assert matching(sources.convert_gbnf(grammar), texts) == {text for text in texts if re.fullmatch(pattern, text)}


def random_chunk(letters: str, seed: int) -> str:
    numbers = random.Random(seed)
    return "".join(numbers.choice(letters) for _ in range(numbers.randint(5, 9)))


def balanced(text: str) -> bool:
    """Return whether the text is arithmetic over a with + and parentheses, by reducing it step by step."""
    while (smaller := re.sub(r"\(a\)|a\+a", "a", text)) != text:
        text = smaller
    return text == "a"


RECURSIVE = {
    "left": 'root ::= root "+" term | term\nterm ::= "(" root ")" | "a"',
    "right": 'root ::= term "+" root | term\nterm ::= "(" root ")" | "a"',
    "both": 'root ::= root "+" root | "(" root ")" | "a"',
    "repeated": 'root ::= term ("+" term)*\nterm ::= ("(" root ")") | "a"',
}


@pytest.mark.parametrize("name", RECURSIVE)
def test_arithmetic_in_gbnf(name: str) -> None:
    texts = all_texts("a+()", 6)
    assert matching(sources.convert_gbnf(RECURSIVE[name]), texts) == {text for text in texts if balanced(text)}


def test_json_in_gbnf() -> None:
    start = time.perf_counter()
    grammar = convert_grammar("gbnf", JSON, "json")
    for seed in range(20):
        text = random_text(matcher(grammar), random.Random(seed))
        assert text is not None
        assert isinstance(json.loads(text), dict)
    values = [{"a": [1, -2.5e3, None, True], 'q"\\\n': {"": []}, "é😀": "x" * 50}, {}, {"k": [[[[1]]]]}]
    texts = [json.dumps(value, ensure_ascii=flag) for value in values for flag in (True, False)]
    wrong = ["[1]", "{'a':1}", '{"a":01}', '{"a":1,}', '{"a" "b"}', '{"a":"\n"}']
    assert matching(grammar, texts + wrong) == set(texts)
    assert time.perf_counter() - start < 10


def test_masks_of_gbnf_are_quick() -> None:
    each = matcher(sources.convert_gbnf(JSON))
    took = []
    for token in demo_tokenizer().tokenize_str(json.dumps({"name": "word " * 40, "n": list(range(40))})):
        began = time.perf_counter()
        each.compute_bitmask()
        took.append(time.perf_counter() - began)
        assert each.consume_token(token)
    assert sorted(took)[len(took) // 2] < 0.002


# Choices and regular expressions.


def test_choices_match_themselves_and_nothing_else() -> None:
    texts = [
        "a",
        "ab",
        "abc",
        'say "hi"',
        "back\\slash",
        "new\nline",
        "\0",
        "é😀",
        "<|im_end|>",
        "[x](y)*+?.{2}|^$/#",
        " ",
        "a",
    ]
    near = [text + "x" for text in texts] + [text[:-1] for text in texts]
    assert matching(sources.convert_choices(texts), texts + near) == set(texts) | (set(near) & set(texts))


def test_ten_thousand_choices_are_quick() -> None:
    texts = [f"choice {i * 7919} of {i}" for i in range(10_000)]
    began = time.perf_counter()
    grammar = convert_grammar("choice", texts, "choices")
    each = matcher(grammar)
    assert random_text(each, random.Random(0)).decode() in set(texts)  # type: ignore[union-attr]
    assert time.perf_counter() - began < 3
    assert matching(grammar, [*texts[:50], "choice", "choice 1 of 1"]) == set(texts[:50])


def test_an_empty_choice_may_stand_beside_others() -> None:
    assert matching(sources.convert_choices(["", "a"]), ["", "a", "aa"]) == {"", "a"}


PATTERNS = ["ab*", "^a|b$", "(ab|ba)+", "a/b", "[/]", r"\/", "a\nb", r"a\nb", r"[^a]",
            "(?i)AB", r"a\$", r"\^a", ".", "(?s).", "a{2,3}",
            "(a|b)*?b", r"\x61", "\0?a", r"a\\", "(?:a|ab)(?:b|)", "[a-]", "é?a"]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_expressions_match_whole_texts(pattern: str) -> None:
    texts = [*all_texts("ab/\n", 4), *all_texts("a$^\\-", 3), "\0a", "éa", "é"]
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if inner.endswith("$") and not inner.endswith("\\$") else inner
    assert matching(sources.convert_regex(pattern), texts) == {text for text in texts if re.fullmatch(inner, text)}


# Lark and schemas.


def test_schemas_within_lark_are_held_to_the_same_rules() -> None:
    grammar = sources.convert_lark(
        'start: "call " args\nargs: %json {\n"type": "array", "items": {"enum": [1, 2]}\n} // end\n'
    )
    texts = ["call []", "call [1,2]", "call [1, 2]", "call [1,  2]", "call [3]", "call"]
    assert matching(grammar, texts) == {"call []", "call [1,2]", "call [1, 2]"}
    with pytest.raises(OvspecError, match=r"line 2, column 10: the JSON schema, at #/items/not: this should"):
        sources.convert_lark('start: a\na: %json {"items": {"not": 3}}')


def test_places_in_lark_survive_a_schema() -> None:
    with pytest.raises(OvspecError, match=r"grammar, line 4, column 4: unknown name"):
        convert_grammar("grammar", 'start: a b\na: %json {"type":\n"null"}\nb: c', "grammar")


@pytest.mark.parametrize(
    "text", ['start: "max_tokens=1"', "start: /stop=/", '// stop=\nstart: "a"', '# temperature=\nstart: "a"']
)
def test_words_that_are_options_elsewhere(text: str) -> None:
    convert_grammar("grammar", text, "grammar")


def test_a_schema_is_given_as_object_text_or_file(tmp_path: Path) -> None:
    schema = {"type": "integer", "minimum": 3}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema), encoding="utf-8")
    grammar = sources.convert_json_schema(schema)[0]
    assert (
        grammar == sources.convert_json_schema(json.dumps(schema))[0] == convert_grammar("json_schema", file, "schema")
    )
    with pytest.raises(OvspecError, match="isn't JSON"):
        convert_grammar("json_schema", str(file), "schema")  # a text is never taken for a file's name
    assert matching(grammar, ["2", "3", "30"]) == {"3", "30"}
    file.write_text('{"requird": [], "note": 3, "x-note": 3, "format": "iri", "title": "A"}', encoding="utf-8")
    ignored = "'requird' at #/requird (did you mean required?), 'note' at #/note, 'format iri' at #/format"
    with pytest.warns(UserWarning, match=re.escape(f"{file} ignores what JSON Schema doesn't define: {ignored}")):
        convert_grammar("json_schema", file, str(file))
    used = '{"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"type": "integer"}}}}'
    file.write_text(used, encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_grammar("json_schema", file, str(file))
    file.write_text('{"type": "intger"}', encoding="utf-8")
    with pytest.raises(OvspecError, match=re.escape("at #/type: 'intger' isn't a type; did you mean integer?")):
        convert_grammar("json_schema", file, str(file))


def test_white_space_is_bounded_unless_the_schema_says_otherwise() -> None:
    texts = ["[1,2]", "[1, 2]", "[1,  2]", "[1,\n  2]", "[1,\n\n2]", f"[1,\n{' ' * 20}2]", f"[1,\n{' ' * 21}2]"]

    def matched(**guidance: object) -> set[str]:
        schema = {"type": "array", "items": {"type": "integer"}, "x-guidance": guidance}
        return matching(sources.convert_json_schema(schema)[0], texts)

    assert matched() == {texts[i] for i in (0, 1, 3, 5)}
    assert matched(whitespace_flexible=False) == {texts[0]}
    assert matched(whitespace_pattern=" +") == set(texts[:3])


def test_a_key_in_other_letters_is_the_same_key() -> None:
    grammar = sources.convert_json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})[0]
    assert matching(grammar, ['{"\\u0061":"x"}', '{"a":"x"}', '{"a":1}', '{"b":"x"}']) == {'{"a":1}', '{"b":"x"}'}


def test_a_grammar_imports_no_files() -> None:
    with pytest.raises(OvspecError, match=r"it, line 2, column 1: a grammar can't import files"):
        sources.convert_lark("\n%import .a.x\nstart: x\n", "it")
    sources.convert_lark("%import common.INT\nstart: INT\n", "it")
