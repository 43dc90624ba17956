"""Regular expressions of JSON schemas: split, negated, and quoted."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regular expression
CLASSES = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}
ANCHOR = re.compile(r"\\[bBAzZ]")


def split(pattern: str) -> tuple[list[str], list[str]]:
    """Return the expressions that must be found in a text, and those that must not, where ``pattern`` is found.

    They differ from ``pattern`` if it begins with look-aheads: ^(?!aws).+$ is ^.+$ without ^(?:aws).
    """
    present, absent, rest = [], [], pattern.removeprefix("^")
    if not pattern.startswith("^") or len(options(pattern)) > 1:
        return [pattern], []
    while rest.startswith(("(?!", "(?=")):
        end = group_end(rest)
        if end is None or rest[end : end + 1] in tuple("*+?{"):
            return [pattern], []
        (absent if rest[2] == "!" else present).append(f"^(?:{rest[3 : end - 1]})")
        rest = rest[end:]
    return ([*present, f"^{rest}"] if rest or not absent else present), absent


def in_ascii(pattern: str) -> str:
    """Return ``pattern`` with \\d and \\w as llguidance reads them in JSON schemas: ECMAScript's, not Rust's.

    Negated classes stay as they are, with which they allow less.
    """

    def within(found: re.Match[str]) -> str:
        return CLASSES[found[1]] + r"\-" * bool(found[2]) if found[1] in CLASSES else found[0]

    def replaced(found: re.Match[str]) -> str:
        part = found[0]
        if part.startswith("[") and not part.startswith("[^"):
            return re.sub(r"(\\.)(-(?!\]))?", within, part)
        return f"[{CLASSES[part]}]" if part in CLASSES else part

    return PARTS.sub(replaced, pattern)


def group_end(expression: str) -> int | None:
    """Return where the group ends with which an expression begins."""
    return next((part.end() for part, depth in with_depths(expression) if not depth), None)


def options(pattern: str) -> list[str]:
    """Return the options of an expression, which | separates."""
    bars = [part.start() for part, depth in with_depths(pattern) if part[0] == "|" and not depth]
    return [pattern[begin + 1 : end] for begin, end in itertools.pairwise((-1, *bars, len(pattern)))]


def with_depths(expression: str) -> Iterator[tuple[re.Match[str], int]]:
    """Yield the parts of an expression, each with the number of groups that are open after it."""
    depth = 0
    for part in PARTS.finditer(expression):
        depth += (part[0] == "(") - (part[0] == ")")
        yield part, depth


def sought(pattern: str) -> str | None:
    """Return the expression of JSON strings without escapes in which ``pattern`` is found; None if that isn't easy.

    It is escaped for use between slashes.
    """
    found = found_in(pattern, '[^"]*')
    return found and slashed(f'"{found}"')


def found_in(pattern: str, anything: str) -> str | None:
    """Return the expression of whole texts in which ``pattern`` is found; None if that isn't easy.

    ``anything``: the expression of what may come before and after.
    """
    if re.fullmatch(r"\^\(\?:(.*)\)", pattern, re.DOTALL) and group_end(pattern[1:]) == len(pattern) - 1:
        parts = [f"^{option.removeprefix('^')}" for option in options(pattern[4:-1])]  # anchors may be within
    else:
        parts = options(pattern)
    texts = []
    for option in parts:
        begins, ends = option.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", option) is not None
        inner = option[begins : len(option) - ends]
        if any(part[0] in ("^", "$") or ANCHOR.fullmatch(part[0]) for part in PARTS.finditer(inner)):
            return None
        if re.search(r"\(\?[=!<]", inner):
            return None
        before, after = ("" if anchored else anything for anchored in (begins, ends))
        texts.append(f"{before}({inner}){after}")
    return f"({'|'.join(texts)})"


def none_of(words: Iterable[str]) -> str:
    """Return the expression of all texts that are none of ``words``, for use as a JSON schema's pattern."""
    return f"^({_differs(frozenset(words))})$"


def _differs(words: frozenset[str]) -> str:
    ends = "" in words
    tails: dict[str, set[str]] = {}
    for word in words:
        if word:
            tails.setdefault(word[0], set()).add(word[1:])
    if not tails:
        return r"[\s\S]+" if ends else r"[\s\S]*"
    others = "".join(map(escaped, sorted(tails)))
    found = [f"[^{others}][\\s\\S]*"]
    found += [f"{escaped(first)}({_differs(frozenset(rest))})" for first, rest in sorted(tails.items())]
    return "|".join(found if ends else [*found, ""])


def escaped(text: str) -> str:
    """Return the expression of ``text`` itself."""
    return "".join(
        f"\\x{ord(each):02x}" if each < " " else re.escape(each) if each.isascii() else each for each in text
    )


def slashed(expression: str) -> str:
    """Return a regular expression escaped for use between slashes."""
    escapes = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\0": "\\x00"}
    return re.sub(r"\\.|[/\n\r\0]", lambda found: escapes.get(found[0], found[0]), expression, flags=re.DOTALL)
