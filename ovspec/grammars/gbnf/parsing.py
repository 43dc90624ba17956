"""Parses llama.cpp's GBNF (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md)."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from ovspec.base.errors import OvspecError

Ranges = tuple[tuple[int, int], ...]  # ranges of code points, sorted and disjoint, both ends included

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
MAX_DEPTH = 100  # nested parentheses
MAX_STACKED = 8  # repetition operators in a row
MAX_REPEAT = 100_000
SPACE, SPACE_AND_LINES = re.compile(r"(?:[ \t]|#[^\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
NAME = frozenset(string.ascii_letters + string.digits + "-_")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(eq=False, slots=True)
class Chars:
    """One character from any of the ranges."""

    ranges: Ranges


@dataclass(eq=False, slots=True)
class Seq:
    parts: tuple[Expression, ...]


@dataclass(eq=False, slots=True)
class Alt:
    options: tuple[Expression, ...]


@dataclass(eq=False, slots=True)
class Repeat:
    part: Expression
    least: int
    most: int | None  # None: any number


@dataclass(eq=False, slots=True)
class Name:
    """A reference to a rule."""

    text: str


Expression = Chars | Seq | Alt | Repeat | Name


@dataclass(frozen=True)
class Gbnf:
    """The rules of a grammar by name.

    ``make`` makes an expression; equal expressions are one object, so they are compared and hashed by identity.
    """

    rules: dict[str, Expression]
    make: Callable[..., Expression]


def parse_gbnf(text: str) -> Gbnf:
    """Return the rules of a GBNF grammar.

    Raises:
        OvspecError: it isn't GBNF or lacks a rule; the message names the line and column.
    """
    return Reader(text).grammar()


class Reader:
    """Parses the text in one pass; ``at`` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0
        self.make = functools.cache(lambda kind, *fields: kind(*fields))
        self.used: dict[str, int] = {}  # name -> where it is first used

    def fail(self, why: str, at: int | None = None) -> OvspecError:
        at = self.at if at is None else at
        line, column = self.text.count("\n", 0, at) + 1, at - self.text.rfind("\n", 0, at)
        return OvspecError(f"line {line}, column {column}: {why}.")

    def next(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def space(self, lines: bool) -> None:
        """Skip spaces and comments, and line ends if ``lines``."""
        if found := (SPACE_AND_LINES if lines else SPACE).match(self.text, self.at):
            self.at = found.end()

    def grammar(self) -> Gbnf:
        rules: dict[str, Expression] = {}
        self.space(lines=True)
        while self.next():
            start, name = self.at, self.name()
            self.space(lines=False)
            if not self.text.startswith("::=", self.at):
                raise self.fail(f'"::=" should follow the name {name}')
            if name in rules:
                raise self.fail(f"the rule {name} is defined twice", start)
            self.at += 3
            self.space(lines=True)
            rules[name] = self.options(nested=False)
            if self.next() not in ("", "\r", "\n"):
                raise self.fail(f"{self.next()!r} doesn't belong here")
            self.space(lines=True)
        for name, at in self.used.items():
            if name not in rules:
                raise self.fail(f"there is no rule {name}", at)
        if "root" not in rules:
            raise OvspecError("line 1, column 1: the grammar has no rule root; add one that matches the whole text.")
        return Gbnf(rules, self.make)

    def name(self) -> str:
        start = self.at
        while self.next() in NAME and self.next():
            self.at += 1
        if start == self.at:
            raise self.fail(f"a name is expected here, not {self.next()!r}")
        return self.text[start : self.at]

    def options(self, nested: bool) -> Expression:
        options = [self.sequence(nested)]
        while self.next() == "|":
            self.at += 1
            self.space(lines=True)
            options.append(self.sequence(nested))
        return options[0] if len(options) == 1 else self.make(Alt, tuple(options))

    def sequence(self, nested: bool) -> Expression:
        parts: list[Expression] = []
        while (found := self.next()) and (found in '"[(.' or found in NAME):
            part = self.element()
            self.space(nested)
            times = 0
            while self.next() and self.next() in "*+?{":
                times += 1
                if times > MAX_STACKED:
                    raise self.fail(f"no more than {MAX_STACKED} repetitions may follow one another")
                part = self.repeated(part)
                self.space(nested)
            parts.append(part)
        return self.joined(parts)

    def joined(self, parts: list[Expression]) -> Expression:
        return parts[0] if len(parts) == 1 else self.make(Seq, tuple(parts))

    def element(self) -> Expression:
        start, found = self.at, self.next()
        if found in NAME:
            name = self.name()
            self.used.setdefault(name, start)
            return self.make(Name, name)
        self.at += 1
        if found == ".":
            return self.make(Chars, negated(()))
        if found == "[":
            return self.chars(start)
        if found == '"':
            parts: list[Expression] = []
            while self.next() != '"':
                parts.append(self.make(Chars, ((code := self.character(start, "text"), code),)))
            self.at += 1
            return self.joined(parts)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.fail(f"parentheses are nested deeper than {MAX_DEPTH}")
        self.space(lines=True)
        inner = self.options(nested=True)
        if self.next() != ")":
            raise self.fail("this parenthesis is not closed", start)
        self.at, self.depth = self.at + 1, self.depth - 1
        return inner

    def character(self, start: int, what: str) -> int:
        """Read a character of a literal or a class, perhaps escaped; return its code point."""
        found = self.next()
        if found in ("", "\n", "\r"):
            raise self.fail(f"this {what} is not closed", start)
        self.at += 1
        code = ord(found)
        if found == "\\":
            kind = self.next()
            self.at += 1
            if kind in ESCAPES:
                return ord(ESCAPES[kind])
            digits = self.text[self.at : self.at + HEX_DIGITS.get(kind, 0)]
            if not digits or len(digits) < HEX_DIGITS[kind] or not set(digits) <= set(string.hexdigits):
                raise self.fail(f"\\{kind}{digits} isn't a valid escape", self.at - 2)
            self.at, code = self.at + len(digits), int(digits, 16)
        if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            raise self.fail(f"U+{code:04X} isn't a character", self.at - 1)
        return code

    def chars(self, start: int) -> Expression:
        negate = self.next() == "^"
        self.at += negate
        ranges: list[tuple[int, int]] = []
        while self.next() != "]":
            first = last = self.character(start, "class")
            if self.next() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                last = self.character(start, "class")
            if last < first:
                raise self.fail("this range ends before it begins", start)
            ranges.append((first, last))
        self.at += 1
        if not ranges and not negate:
            raise self.fail("this class has no characters", start)
        return self.make(Chars, negated(ranges) if negate else negated(negated(ranges)))

    def repeated(self, part: Expression) -> Expression:
        start, found = self.at, self.next()
        self.at += 1
        if found != "{":
            least = int(found == "+")
            if isinstance(part, Repeat) and part.least < 2 and part.most is None:  # x** is x*
                return self.make(Repeat, part.part, min(least, part.least), None)
            return self.make(Repeat, part, least, 1 if found == "?" else None)
        end = self.text.find("}", start)
        least, comma, most = (side.strip() for side in self.text[start + 1 : end].partition(","))
        if end < 0 or not (least + most).isascii() or not least.isdigit() or not (most or "0").isdigit():
            raise self.fail("a repetition is written {3}, {3,} or {3,5}", start)
        if max(len(least), len(most)) > 6 or max(int(least), int(most or 0)) > MAX_REPEAT:
            raise self.fail(f"nothing may be repeated more than {MAX_REPEAT} times", start)
        if most and int(most) < int(least):
            raise self.fail("this repetition ends before it begins", start)
        self.at = end + 1
        return self.make(Repeat, part, int(least), int(most) if most else None if comma else int(least))


def negated(ranges: list[tuple[int, int]] | Ranges) -> Ranges:
    """Return all characters except these and the surrogates; applied twice, it sorts and merges the ranges."""
    found, free = [], 0
    for first, last in sorted([*ranges, SURROGATES]):
        if first > free:
            found.append((free, first - 1))
        free = max(free, last + 1)
    return (*found, (free, LAST)) if free <= LAST else tuple(found)
