"""Parses llama.cpp's GBNF (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md)."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from ovspec.base.errors import OvspecError

Ranges = tuple[tuple[int, int], ...]  # ranges of code points, sorted and disjoint, both ends included

LAST_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
MAX_PARENTHESES = 100  # nested parentheses
MAX_STACKED_REPETITIONS = 8  # repetition operators in a row
MAX_REPETITIONS = 100_000
SPACES, SPACES_AND_LINES = re.compile(r"(?:[ \t]|#[^\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


@dataclass(eq=False, slots=True)
class CharacterClass:
    """One character from any of the ranges."""

    ranges: Ranges


@dataclass(eq=False, slots=True)
class Concatenation:
    parts: tuple[Expression, ...]


@dataclass(eq=False, slots=True)
class Alternation:
    options: tuple[Expression, ...]


@dataclass(eq=False, slots=True)
class Repetition:
    part: Expression
    least: int
    most: int | None  # None: any number


@dataclass(eq=False, slots=True)
class RuleReference:
    """A reference to a rule."""

    name: str


Expression = CharacterClass | Concatenation | Alternation | Repetition | RuleReference


@dataclass(frozen=True)
class GbnfGrammar:
    """The rules of a grammar by name.

    ``make_expression``: equal expressions are one object, so they are compared and hashed by identity.
    """

    rules: dict[str, Expression]
    make_expression: Callable[..., Expression]


def parse_gbnf(text: str) -> GbnfGrammar:
    """Return the rules of a GBNF grammar.

    Raises:
        OvspecError: it isn't GBNF or lacks a rule; the message names the line and column.
    """
    return GbnfParser(text).parse_grammar()


class GbnfParser:
    """Parses the text in one pass; ``position`` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0  # of open parentheses
        self.make_expression = functools.cache(lambda kind, *fields: kind(*fields))
        self.first_uses: dict[str, int] = {}  # name -> where it is first used

    def error_at(self, why: str, index: int | None = None) -> OvspecError:
        if index is None:
            index = self.position
        line = self.text.count("\n", 0, index) + 1
        column = index - self.text.rfind("\n", 0, index)
        return OvspecError(f"line {line}, column {column}: {why}.")

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def skip_spaces(self, lines: bool) -> None:
        """Skip spaces and comments, and line ends if ``lines``."""
        pattern = SPACES_AND_LINES if lines else SPACES
        if match := pattern.match(self.text, self.position):
            self.position = match.end()

    def parse_grammar(self) -> GbnfGrammar:
        rules: dict[str, Expression] = {}
        self.skip_spaces(lines=True)
        while self.peek():
            start = self.position
            name = self.parse_name()
            self.skip_spaces(lines=False)
            if not self.text.startswith("::=", self.position):
                raise self.error_at(f'"::=" should follow the name {name}')
            if name in rules:
                raise self.error_at(f"the rule {name} is defined twice", start)
            self.position += 3
            self.skip_spaces(lines=True)
            rules[name] = self.parse_options(nested=False)
            if self.peek() not in ("", "\r", "\n"):
                raise self.error_at(f"{self.peek()!r} doesn't belong here")
            self.skip_spaces(lines=True)
        for name, position in self.first_uses.items():
            if name not in rules:
                raise self.error_at(f"there is no rule {name}", position)
        if "root" not in rules:
            raise OvspecError("line 1, column 1: the grammar has no rule root; add one that matches the whole text.")
        return GbnfGrammar(rules, self.make_expression)

    def parse_name(self) -> str:
        start = self.position
        while self.peek() in NAME_CHARACTERS and self.peek():
            self.position += 1
        if start == self.position:
            raise self.error_at(f"a name is expected here, not {self.peek()!r}")
        return self.text[start : self.position]

    def parse_options(self, nested: bool) -> Expression:
        options = [self.parse_concatenation(nested)]
        while self.peek() == "|":
            self.position += 1
            self.skip_spaces(lines=True)
            options.append(self.parse_concatenation(nested))
        return self.join_expressions(Alternation, options)

    def parse_concatenation(self, nested: bool) -> Expression:
        parts: list[Expression] = []
        while self.peek() and (self.peek() in '"[(.' or self.peek() in NAME_CHARACTERS):
            part = self.parse_element()
            self.skip_spaces(nested)
            repetitions = 0
            while self.peek() and self.peek() in "*+?{":
                repetitions += 1
                if repetitions > MAX_STACKED_REPETITIONS:
                    raise self.error_at(f"no more than {MAX_STACKED_REPETITIONS} repetitions may follow one another")
                part = self.parse_repetition(part)
                self.skip_spaces(nested)
            parts.append(part)
        return self.join_expressions(Concatenation, parts)

    def join_expressions(self, kind: type[Expression], parts: list[Expression]) -> Expression:
        return parts[0] if len(parts) == 1 else self.make_expression(kind, tuple(parts))

    def parse_element(self) -> Expression:
        start, character = self.position, self.peek()
        if character in NAME_CHARACTERS:
            name = self.parse_name()
            self.first_uses.setdefault(name, start)
            return self.make_expression(RuleReference, name)
        self.position += 1
        if character == ".":
            return self.make_expression(CharacterClass, complement_ranges(()))
        if character == "[":
            return self.parse_class(start)
        if character == '"':
            parts: list[Expression] = []
            while self.peek() != '"':
                code = self.parse_character(start, "text")
                parts.append(self.make_expression(CharacterClass, ((code, code),)))
            self.position += 1
            return self.join_expressions(Concatenation, parts)
        self.depth += 1
        if self.depth > MAX_PARENTHESES:
            raise self.error_at(f"parentheses are nested deeper than {MAX_PARENTHESES}")
        self.skip_spaces(lines=True)
        inner = self.parse_options(nested=True)
        if self.peek() != ")":
            raise self.error_at("this parenthesis is not closed", start)
        self.position += 1
        self.depth -= 1
        return inner

    def parse_character(self, start: int, container: str) -> int:
        """Read a character of a literal or a class, perhaps escaped; return its code point.

        ``container``: its name in errors; it begins at ``start``.
        """
        character = self.peek()
        if character in ("", "\n", "\r"):
            raise self.error_at(f"this {container} is not closed", start)
        self.position += 1
        code = ord(character)
        if character == "\\":
            letter = self.peek()
            self.position += 1
            if letter in ESCAPES:
                return ord(ESCAPES[letter])
            digits = self.text[self.position : self.position + HEX_DIGITS.get(letter, 0)]
            if not digits or len(digits) < HEX_DIGITS[letter] or not set(digits) <= set(string.hexdigits):
                raise self.error_at(f"\\{letter}{digits} isn't a valid escape", self.position - 2)
            self.position += len(digits)
            code = int(digits, 16)
        if code > LAST_CODE_POINT or SURROGATES[0] <= code <= SURROGATES[1]:
            raise self.error_at(f"U+{code:04X} isn't a character", self.position - 1)
        return code

    def parse_class(self, start: int) -> Expression:
        negate = self.peek() == "^"
        self.position += negate
        ranges: list[tuple[int, int]] = []
        while self.peek() != "]":
            first = last = self.parse_character(start, "class")
            if self.peek() == "-" and self.text[self.position + 1 : self.position + 2] != "]":
                self.position += 1
                last = self.parse_character(start, "class")
            if last < first:
                raise self.error_at("this range ends before it begins", start)
            ranges.append((first, last))
        self.position += 1
        if not ranges and not negate:
            raise self.error_at("this class has no characters", start)
        complement = complement_ranges(ranges)
        return self.make_expression(CharacterClass, complement if negate else complement_ranges(complement))

    def parse_repetition(self, part: Expression) -> Expression:
        start = self.position
        operator = self.peek()
        self.position += 1
        if operator != "{":
            least = int(operator == "+")
            if isinstance(part, Repetition) and part.least < 2 and part.most is None:  # x** is x*
                return self.make_expression(Repetition, part.part, min(least, part.least), None)
            return self.make_expression(Repetition, part, least, 1 if operator == "?" else None)
        end = self.text.find("}", start)
        least_text, comma, most_text = (side.strip() for side in self.text[start + 1 : end].partition(","))
        digits = least_text + most_text
        if end < 0 or not digits.isascii() or not least_text.isdigit() or not digits.isdigit():
            raise self.error_at("a repetition is written {3}, {3,} or {3,5}", start)
        # Longer numbers might take long to read.
        if max(len(least_text), len(most_text)) > 6 or max(int(least_text), int(most_text or 0)) > MAX_REPETITIONS:
            raise self.error_at(f"nothing may be repeated more than {MAX_REPETITIONS} times", start)
        least = int(least_text)
        most = int(most_text or least_text)
        if most < least:
            raise self.error_at("this repetition ends before it begins", start)
        self.position = end + 1
        if comma and not most_text:
            return self.make_expression(Repetition, part, least, None)
        return self.make_expression(Repetition, part, least, most)


def complement_ranges(ranges: list[tuple[int, int]] | Ranges) -> Ranges:
    """Return all characters except these and the surrogates; applied twice, it sorts and merges the ranges."""
    complement: list[tuple[int, int]] = []
    free = 0
    for first, last in sorted([*ranges, SURROGATES]):
        if first > free:
            complement.append((free, first - 1))
        free = max(free, last + 1)
    if free <= LAST_CODE_POINT:
        complement.append((free, LAST_CODE_POINT))
    return tuple(complement)
