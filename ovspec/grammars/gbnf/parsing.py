"""Parses llama.cpp's GBNF (https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md)."""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable
from dataclasses import dataclass

from ovspec.base.errors import OvspecError

CodePointRanges = tuple[tuple[int, int], ...]  # ranges of code points, sorted and disjoint, both ends included

LAST_CODE_POINT = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
MAX_PARENTHESES = 100  # nested parentheses
MAX_STACKED_REPETITIONS = 8  # consecutive repetition operators
MAX_REPETITIONS = 100_000
SPACES, SPACES_AND_LINES = re.compile(r"(?:[ \t]|#[^\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_")
ESCAPED_CHARACTERS = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
HEX_DIGIT_COUNTS = {"x": 2, "u": 4, "U": 8}


@dataclass(eq=False, slots=True)
class CharacterClass:
    """A character from a list of ranges."""

    ranges: CodePointRanges


@dataclass(eq=False, slots=True)
class Concatenation:
    parts: tuple[Expression, ...]


@dataclass(eq=False, slots=True)
class Alternation:
    alternatives: tuple[Expression, ...]


@dataclass(eq=False, slots=True)
class Repetition:
    part: Expression
    min_count: int
    max_count: int | None  # None: any number


@dataclass(eq=False, slots=True)
class RuleReference:
    """A reference to a rule."""

    name: str


Expression = CharacterClass | Concatenation | Alternation | Repetition | RuleReference


@dataclass(frozen=True)
class GbnfGrammar:
    """The rules of a grammar by name.

    ``make_expression``: equal expressions are the same object, so they are compared and hashed by identity.
    """

    rules: dict[str, Expression]
    make_expression: Callable[..., Expression]


def parse_gbnf(text: str) -> GbnfGrammar:
    """Return the rules of a GBNF grammar.

    Raises:
        OvspecError: it isn't GBNF or lacks a rule; the message has the line and column.
    """
    return GbnfParser(text).parse_grammar()


class GbnfParser:
    """Parses the text in a single pass; ``position`` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0  # number of open parentheses
        self.make_expression = functools.cache(lambda expression_type, *values: expression_type(*values))
        self.first_use_positions: dict[str, int] = {}  # name -> position of its first use

    def error_at(self, problem: str, character_index: int | None = None) -> OvspecError:
        if character_index is None:
            character_index = self.position
        line = self.text.count("\n", 0, character_index) + 1
        column = character_index - self.text.rfind("\n", 0, character_index)
        return OvspecError(f"line {line}, column {column}: {problem}.")

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def skip_spaces(self, skip_line_ends: bool) -> None:
        """Skip spaces and comments, and line ends if ``skip_line_ends``."""
        pattern = SPACES_AND_LINES if skip_line_ends else SPACES
        if match := pattern.match(self.text, self.position):
            self.position = match.end()

    def parse_grammar(self) -> GbnfGrammar:
        rules: dict[str, Expression] = {}
        self.skip_spaces(skip_line_ends=True)
        while self.peek():
            name_start = self.position
            rule_name = self.parse_name()
            self.skip_spaces(skip_line_ends=False)
            if not self.text.startswith("::=", self.position):
                raise self.error_at(f'"::=" is missing after the name {rule_name}')
            if rule_name in rules:
                raise self.error_at(f"the rule {rule_name} is defined twice", name_start)
            self.position += 3
            self.skip_spaces(skip_line_ends=True)
            rules[rule_name] = self.parse_alternation(nested=False)
            if self.peek() not in ("", "\r", "\n"):
                raise self.error_at(f"unexpected character {self.peek()!r}")
            self.skip_spaces(skip_line_ends=True)
        for rule_name, use_position in self.first_use_positions.items():
            if rule_name not in rules:
                raise self.error_at(f"there is no rule {rule_name}", use_position)
        if "root" not in rules:
            raise OvspecError("line 1, column 1: the grammar has no rule root; add a rule root for the whole text.")
        return GbnfGrammar(rules, self.make_expression)

    def parse_name(self) -> str:
        name_start = self.position
        while self.peek() in NAME_CHARACTERS and self.peek():
            self.position += 1
        if name_start == self.position:
            raise self.error_at(f"expected a rule name, not {self.peek()!r}")
        return self.text[name_start : self.position]

    def parse_alternation(self, nested: bool) -> Expression:
        alternatives = [self.parse_concatenation(nested)]
        while self.peek() == "|":
            self.position += 1
            self.skip_spaces(skip_line_ends=True)
            alternatives.append(self.parse_concatenation(nested))
        return self.join_expressions(Alternation, alternatives)

    def parse_concatenation(self, nested: bool) -> Expression:
        parts: list[Expression] = []
        while self.peek() and (self.peek() in '"[(.' or self.peek() in NAME_CHARACTERS):
            part = self.parse_element()
            self.skip_spaces(nested)
            repetition_count = 0
            while self.peek() and self.peek() in "*+?{":
                repetition_count += 1
                if repetition_count > MAX_STACKED_REPETITIONS:
                    raise self.error_at(f"more than {MAX_STACKED_REPETITIONS} repetition operators in a row")
                part = self.parse_repetition(part)
                self.skip_spaces(nested)
            parts.append(part)
        return self.join_expressions(Concatenation, parts)

    def join_expressions(self, expression_type: type[Expression], parts: list[Expression]) -> Expression:
        return parts[0] if len(parts) == 1 else self.make_expression(expression_type, tuple(parts))

    def parse_element(self) -> Expression:
        element_start, character = self.position, self.peek()
        if character in NAME_CHARACTERS:
            rule_name = self.parse_name()
            self.first_use_positions.setdefault(rule_name, element_start)
            return self.make_expression(RuleReference, rule_name)
        self.position += 1
        if character == ".":
            return self.make_expression(CharacterClass, complement_ranges(()))
        if character == "[":
            return self.parse_class(element_start)
        if character == '"':
            parts: list[Expression] = []
            while self.peek() != '"':
                code_point = self.parse_character(element_start, "text")
                parts.append(self.make_expression(CharacterClass, ((code_point, code_point),)))
            self.position += 1
            return self.join_expressions(Concatenation, parts)
        self.depth += 1
        if self.depth > MAX_PARENTHESES:
            raise self.error_at(f"parentheses are nested deeper than {MAX_PARENTHESES}")
        self.skip_spaces(skip_line_ends=True)
        inner_expression = self.parse_alternation(nested=True)
        if self.peek() != ")":
            raise self.error_at("this parenthesis is not closed", element_start)
        self.position += 1
        self.depth -= 1
        return inner_expression

    def parse_character(self, container_start: int, container_name: str) -> int:
        """Read a character of a literal or a class, perhaps escaped; return its code point.

        ``container_name``: its name in errors; ``container_start``: its start.
        """
        character = self.peek()
        if character in ("", "\n", "\r"):
            raise self.error_at(f"this {container_name} is not closed", container_start)
        self.position += 1
        code_point = ord(character)
        if character == "\\":
            escape_letter = self.peek()
            self.position += 1
            if escape_letter in ESCAPED_CHARACTERS:
                return ord(ESCAPED_CHARACTERS[escape_letter])
            hex_digits = self.text[self.position : self.position + HEX_DIGIT_COUNTS.get(escape_letter, 0)]
            if (
                not hex_digits
                or len(hex_digits) < HEX_DIGIT_COUNTS[escape_letter]
                or not set(hex_digits) <= set(string.hexdigits)
            ):
                raise self.error_at(f"\\{escape_letter}{hex_digits} isn't a valid escape", self.position - 2)
            self.position += len(hex_digits)
            code_point = int(hex_digits, 16)
        if code_point > LAST_CODE_POINT or SURROGATES[0] <= code_point <= SURROGATES[1]:
            raise self.error_at(f"U+{code_point:04X} isn't a valid character", self.position - 1)
        return code_point

    def parse_class(self, class_start: int) -> Expression:
        is_negated = self.peek() == "^"
        self.position += is_negated
        ranges: list[tuple[int, int]] = []
        while self.peek() != "]":
            first_code = last_code = self.parse_character(class_start, "character class")
            if self.peek() == "-" and self.text[self.position + 1 : self.position + 2] != "]":
                self.position += 1
                last_code = self.parse_character(class_start, "character class")
            if last_code < first_code:
                raise self.error_at("the end of this character range comes before the start", class_start)
            ranges.append((first_code, last_code))
        self.position += 1
        if not ranges and not is_negated:
            raise self.error_at("this character class is empty", class_start)
        complement = complement_ranges(ranges)
        return self.make_expression(CharacterClass, complement if is_negated else complement_ranges(complement))

    def parse_repetition(self, repeated_part: Expression) -> Expression:
        operator_position = self.position
        operator = self.peek()
        self.position += 1
        if operator != "{":
            min_count = int(operator == "+")
            if (
                isinstance(repeated_part, Repetition)
                and repeated_part.min_count < 2
                and repeated_part.max_count is None
            ):  # x** is x*
                return self.make_expression(
                    Repetition, repeated_part.part, min(min_count, repeated_part.min_count), None
                )
            return self.make_expression(Repetition, repeated_part, min_count, 1 if operator == "?" else None)
        closing_brace = self.text.find("}", operator_position)
        min_text, comma, max_text = (
            count_text.strip() for count_text in self.text[operator_position + 1 : closing_brace].partition(",")
        )
        digits = min_text + max_text
        if closing_brace < 0 or not digits.isascii() or not min_text.isdigit() or not digits.isdigit():
            raise self.error_at("invalid repetition; write {3}, {3,} or {3,5}", operator_position)
        # Longer numbers might be slow to parse.
        if max(len(min_text), len(max_text)) > 6 or max(int(min_text), int(max_text or 0)) > MAX_REPETITIONS:
            raise self.error_at(f"at most {MAX_REPETITIONS} repetitions are allowed", operator_position)
        min_count = int(min_text)
        max_count = int(max_text or min_text)
        if max_count < min_count:
            raise self.error_at("the maximum of this repetition is below the minimum", operator_position)
        self.position = closing_brace + 1
        if comma and not max_text:
            return self.make_expression(Repetition, repeated_part, min_count, None)
        return self.make_expression(Repetition, repeated_part, min_count, max_count)


def complement_ranges(ranges: list[tuple[int, int]] | CodePointRanges) -> CodePointRanges:
    """Return all characters except these and the surrogates; applied twice, it sorts and merges the ranges."""
    complement: list[tuple[int, int]] = []
    next_free = 0
    for first_code, last_code in sorted([*ranges, SURROGATES]):
        if first_code > next_free:
            complement.append((next_free, first_code - 1))
        next_free = max(next_free, last_code + 1)
    if next_free <= LAST_CODE_POINT:
        complement.append((next_free, LAST_CODE_POINT))
    return tuple(complement)
