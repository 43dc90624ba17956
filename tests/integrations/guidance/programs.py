"""guidance programs. Each takes a model and returns its captures and its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import guidance
from guidance import (
    assistant,
    at_most_n_repeats,
    block,
    capture,
    exactly_n_repeats,
    gen,
    lark,
    one_or_more,
    optional,
    regex,
    select,
    sequence,
    string,
    substring,
    system,
    token_limit,
    user,
    with_temperature,
    zero_or_more,
)
from guidance import json as gen_json
from pydantic import BaseModel

PROMPT = '''import os
import sys

def find_executable(name, path=None):
    """Find'''
Program = Callable[[Any], dict[str, Any]]


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]
    share: int


def free_text(lm: Any) -> dict[str, Any]:
    lm += PROMPT + gen("doc", max_tokens=40) + '\n    """\n' + gen("body", max_tokens=40)
    return {"text": str(lm), "doc": lm["doc"], "body": lm["body"]}


def stops(lm: Any) -> dict[str, Any]:
    lm += PROMPT + gen("line", stop="\n", max_tokens=40) + "\n" + gen("call", stop=["(", ")"], save_stop_text=True)
    lm += gen("word", stop_regex="[^a-z ]", max_tokens=20) + gen("end", suffix="\n", max_tokens=20)
    return {"text": str(lm), **{name: lm[name] for name in ("line", "call", "word", "end")}}


def expressions(lm: Any) -> dict[str, Any]:
    lm += "def add(a, b):\n    return a + b\n\nassert add(1, 2) == " + gen("sum", regex="[0-9]{1,3}")
    lm += "\nassert add(" + regex(r"\d", name="first") + ", " + gen("second", regex=r"-?\d+", max_tokens=6) + ")\n"
    lm += "import " + gen("module", regex="[a-z_]+(\\.[a-z_]+)?", max_tokens=8)
    return {"text": str(lm), **{name: lm[name] for name in ("sum", "first", "second", "module")}}


def choices(lm: Any) -> dict[str, Any]:
    lm += "class Stack:\n    def " + select(["push", "pop", "peek", "__len__", "__init__"], name="method") + "(self"
    lm += select(["", ", value", ", *values"], name="arguments") + "):\n        "
    lm += select(["return " + string("self."), "self." + gen(max_tokens=3), "pass"], name="statement")
    return {"text": str(lm), **{name: lm[name] for name in ("method", "arguments", "statement")}}


def schemas(lm: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
            "open": {"type": "boolean"},
        },
        "required": ["name", "sizes", "open"],
        "additionalProperties": False,
    }
    lm += "# the settings of a window\nwindow = " + gen_json("window", schema=schema, max_tokens=80)
    lm += "\ncolour = " + gen_json("colour", schema=Colour, max_tokens=40)
    return {"text": str(lm), "window": lm["window"], "colour": lm["colour"]}


def grammars(lm: Any) -> dict[str, Any]:
    sums = 'start: term ("+" term){1,3}\nterm: NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,2}/'
    lm += "# a sum\ntotal = " + lark(sums, name="sum", max_tokens=30) + "\n"
    lm += "parts = " + lark('start: "[" NAME ("," NAME){2} "]"\nNAME: /[a-z]{1,6}/', name="parts")
    return {"text": str(lm), "sum": lm["sum"], "parts": lm["parts"]}


def chat(lm: Any) -> dict[str, Any]:
    with system():
        lm += "You write Python."
    with user():
        lm += "How do I read a file?"
    with assistant():
        lm += gen("answer", max_tokens=24)
    with user():
        lm += "And how many lines has it? "
    with assistant():
        lm += "It has " + gen("lines", regex="[0-9]+", max_tokens=4) + " lines."
    return {"text": str(lm), "answer": lm["answer"], "lines": lm["lines"]}


def lists(lm: Any) -> dict[str, Any]:
    lm += "# three colours\ncolours = ["
    for _ in range(3):
        lm += '"' + gen("colours", stop='"', list_append=True, max_tokens=8) + '", '
    lm += "]\nfor colour in colours:\n" + capture("    print(" + gen(max_tokens=4, stop=")") + ")", "call")
    return {"text": str(lm), "colours": lm["colours"], "call": lm["call"]}


def repetition(lm: Any) -> dict[str, Any]:
    digit = regex("[0-9]")
    lm += "x = " + capture(token_limit(one_or_more(digit), 5), "number") + optional("." + digit) + "\ny = ["
    lm += (
        capture(token_limit(zero_or_more(digit + ", "), 9), "items")
        + "]\nz = "
        + capture(exactly_n_repeats(digit, 3), "three")
    )
    lm += "\nw = " + capture(at_most_n_repeats(digit, 2), "two") + capture(sequence(digit, 1, 2), "more")
    return {"text": str(lm), **{name: lm[name] for name in ("number", "items", "three", "two", "more")}}


def healing(lm: Any) -> dict[str, Any]:
    url = lm + "See http:" + gen("url", max_tokens=12)
    path = lm + "import os\nos.pa" + gen("path", max_tokens=12)
    space = lm + "import os\nfor name in os.listdir(path): " + gen("space", max_tokens=12)
    return {"url": url["url"], "path": path["path"], "space": space["space"]}


def branches(lm: Any) -> dict[str, Any]:
    lm += PROMPT + gen("doc", max_tokens=24)
    first, second, third = lm + "\n\ndef first(", lm + "\n\ndef second(", lm
    for _ in range(4):
        first += gen("first", max_tokens=8, list_append=True)
        second += gen("second", max_tokens=8, list_append=True)
        third += gen("third", max_tokens=8, list_append=True)
    return {"texts": [str(first), str(second), str(third)], "first": first["first"], "third": third["third"]}


def loops(lm: Any) -> dict[str, Any]:
    lm += "# names and ages\n"
    for name in ("Tom", "Ann", "Eve", "Max"):
        lm += f"ages['{name}'] = " + gen("ages", regex="[0-9]{1,2}", list_append=True) + "\n"
    while len(lm["ages"]) < 6:
        lm += "ages[" + gen(stop="]", max_tokens=6) + "] = " + gen("ages", regex="[0-9]{1,2}", list_append=True) + "\n"
    return {"text": str(lm), "ages": lm["ages"]}


@guidance(stateless=True)
def term(lm: Any) -> Any:
    return lm + select([regex("[a-z]"), "(" + term() + ")", term() + "*" + term()])


@guidance
def guarded(lm: Any, depth: int) -> Any:
    lm += "    " * depth + "if " + gen("conditions", stop=":", max_tokens=8, list_append=True) + ":\n"
    return lm + guarded(depth + 1) if depth < 3 else lm + "    " * (depth + 1) + gen("body", stop="\n", max_tokens=12)


def recursion(lm: Any) -> dict[str, Any]:
    lm += "product = " + capture(token_limit(term(), 12), "product") + "\n"
    lm += guarded(0)
    return {"text": str(lm), **{name: lm[name] for name in ("product", "conditions", "body")}}


def quotes(lm: Any) -> dict[str, Any]:
    text = "The quick brown fox jumps over the lazy dog"
    lm += f"# {text}\nsaid = '" + capture(substring(text), "quote") + "'\n"
    with block("whole"):
        lm += "size = " + with_temperature(gen("size", regex="[0-9]+", max_tokens=3), 0.0)
    return {"text": str(lm), **{name: lm[name] for name in ("quote", "size", "whole")}}


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        *(free_text, stops, expressions, choices, schemas, grammars, chat, lists, repetition, healing, branches),
        *(loops, recursion, quotes),
    )
}
