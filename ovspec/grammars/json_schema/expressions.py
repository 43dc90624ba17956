"""Regular expressions of JSON schemas: split, negated, and quoted."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

EXPRESSION_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
ASCII_CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}
ANCHOR_PATTERN = re.compile(r"\\[bBAzZ]")


def split_lookaheads(pattern: str) -> tuple[list[str], list[str]]:
    """Return the required and the forbidden expressions in texts with a match of ``pattern``.

    They differ from ``pattern`` if it begins with look-aheads: ^(?!aws).+$ is ^.+$ without ^(?:aws).
    """
    if not pattern.startswith("^") or len(split_at_bars(pattern)) > 1:
        return [pattern], []
    required_patterns: list[str] = []
    forbidden_patterns: list[str] = []
    remaining_pattern = pattern.removeprefix("^")
    while remaining_pattern.startswith(("(?!", "(?=")):
        group_end = find_group_end(remaining_pattern)
        if group_end is None or remaining_pattern[group_end : group_end + 1] in tuple("*+?{"):
            return [pattern], []
        lookahead_patterns = forbidden_patterns if remaining_pattern[2] == "!" else required_patterns
        lookahead_patterns.append(f"^(?:{remaining_pattern[3 : group_end - 1]})")
        remaining_pattern = remaining_pattern[group_end:]
    if remaining_pattern or not forbidden_patterns:
        required_patterns.append(f"^{remaining_pattern}")
    return required_patterns, forbidden_patterns


def use_ascii_classes(pattern: str) -> str:
    """Return ``pattern`` with \\d and \\w as llguidance reads them in JSON schemas: ECMAScript's, not Rust's.

    Negated classes stay as they are, and then allow less.
    """

    def replace_in_class(match: re.Match[str]) -> str:
        if match[1] not in ASCII_CLASSES:
            return match[0]
        return ASCII_CLASSES[match[1]] + r"\-" * bool(match[2])

    def replace_part(match: re.Match[str]) -> str:
        expression_part = match[0]
        if expression_part.startswith("[") and not expression_part.startswith("[^"):
            return re.sub(r"(\\.)(-(?!\]))?", replace_in_class, expression_part)
        if expression_part in ASCII_CLASSES:
            return f"[{ASCII_CLASSES[expression_part]}]"
        return expression_part

    return EXPRESSION_PART.sub(replace_part, pattern)


def find_group_end(expression: str) -> int | None:
    """Return the end of the group at the start of an expression."""
    return next((part.end() for part, depth in iterate_parts_with_depths(expression) if not depth), None)


def split_at_bars(pattern: str) -> list[str]:
    """Return the options of an expression, separated by |."""
    bar_positions = [part.start() for part, depth in iterate_parts_with_depths(pattern) if part[0] == "|" and not depth]
    return [pattern[begin + 1 : end] for begin, end in itertools.pairwise((-1, *bar_positions, len(pattern)))]


def iterate_parts_with_depths(expression: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield the parts of an expression, each with the number of open groups after it."""
    depth = 0
    for part in EXPRESSION_PART.finditer(expression):
        depth += (part[0] == "(") - (part[0] == ")")
        yield part, depth


def make_json_string_expression(pattern: str) -> str | None:
    """Return the expression of JSON strings with ``pattern`` in them, without escapes; None if this isn't easy.

    It is escaped for use between slashes.
    """
    whole_text = make_whole_text_expression(pattern, '[^"]*')
    return whole_text and escape_slashes(f'"{whole_text}"')


def make_whole_text_expression(pattern: str, other_text: str) -> str | None:
    """Return the expression of whole texts with ``pattern`` in them; None if this isn't easy.

    ``other_text``: the expression of the text before and after it.
    """
    if re.fullmatch(r"\^\(\?:(.*)\)", pattern, re.DOTALL) and find_group_end(pattern[1:]) == len(pattern) - 1:
        option_patterns = [
            f"^{option_pattern.removeprefix('^')}" for option_pattern in split_at_bars(pattern[4:-1])
        ]  # options with or without anchors
    else:
        option_patterns = split_at_bars(pattern)
    whole_texts: list[str] = []
    for option_pattern in option_patterns:
        anchored_at_start = option_pattern.startswith("^")
        anchored_at_end = re.search(r"(?<!\\)(?:\\\\)*\$$", option_pattern) is not None
        inner_expression = option_pattern[anchored_at_start : len(option_pattern) - anchored_at_end]
        if any(
            part[0] in ("^", "$") or ANCHOR_PATTERN.fullmatch(part[0])
            for part in EXPRESSION_PART.finditer(inner_expression)
        ):
            return None
        if re.search(r"\(\?[=!<]", inner_expression):
            return None
        whole_texts.append(
            other_text * (not anchored_at_start) + f"({inner_expression})" + other_text * (not anchored_at_end)
        )
    return f"({'|'.join(whole_texts)})"


def make_other_texts_expression(words: Iterable[str]) -> str:
    """Return the expression of all texts except ``words``, for use as a JSON schema's pattern."""
    return f"^({_make_other_endings_expression(frozenset(words))})$"


def _make_other_endings_expression(words: frozenset[str]) -> str:
    endings_by_character: dict[str, set[str]] = {}
    for word in words:
        if word:
            endings_by_character.setdefault(word[0], set()).add(word[1:])
    if not endings_by_character:
        return r"[\s\S]+" if "" in words else r"[\s\S]*"
    characters = "".join(map(escape_expression, sorted(endings_by_character)))
    options = [f"[^{characters}][\\s\\S]*"]
    for first_character, endings in sorted(endings_by_character.items()):
        options.append(f"{escape_expression(first_character)}({_make_other_endings_expression(frozenset(endings))})")
    if "" not in words:
        options.append("")
    return "|".join(options)


def escape_expression(text: str) -> str:
    """Return the expression of ``text`` itself."""
    return "".join(map(_escape_character, text))


def _escape_character(character: str) -> str:
    if character < " ":
        return f"\\x{ord(character):02x}"
    return re.escape(character) if character.isascii() else character


def escape_slashes(expression: str) -> str:
    """Return a regular expression escaped for use between slashes."""
    escapes = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\0": "\\x00"}
    return re.sub(r"\\.|[/\n\r\0]", lambda match: escapes.get(match[0], match[0]), expression, flags=re.DOTALL)
