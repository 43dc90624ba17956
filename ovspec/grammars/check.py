"""Tests grammars in a separate process before anything else compiles them, because they may be untrusted."""

from __future__ import annotations

import functools
import json
import re

from ovspec.errors import OvspecError
from ovspec.grammars.check_worker import LIMITS
from ovspec.sandbox import Stopped, Worker

__all__ = ["LIMITS", "check"]

MAX_SECONDS = 5.0
MAX_BYTES = 1_000_000_000
MAX_GRAMMAR = 8_000_000  # bytes; the sources check limits of their own first

CHECKER = Worker("ovspec.grammars.check_worker", MAX_SECONDS, MAX_BYTES)

# (pattern in llguidance's error, what to report instead); the first match counts.
WORDS = (
    (r"regex(?:p)? parse error:.*error: (.*)", r"the regular expression is wrong: \1"),
    (r"^lookarounds not supported.*regex (/.*/)", r"anchors and \\b aren't supported inside the expression \1"),
    (r"Regex is empty", "no text has this pattern, format and length together"),
    (r"^oneOf constraints", "the options of oneOf may overlap, which can't be enforced; use anyOf"),
    (r"^circular references with sibling", "a $ref to an enclosing schema can't be combined with other keywords"),
    (r"^Schema intersection stack", "merging these schemas never ends, because they refer to themselves"),
    (r"^min/maxProperties only", "minProperties and maxProperties need all listed properties to be required"),
    (r"^Failed to generate regex for integer range.*", "the bounds of this integer are too large"),
    (r"^patternProperty regexes (.*) are not disjoint", r"a key may match both \1, which can't be enforced"),
    (r"^Unsatisfiable schema: (.*)", r"no JSON text satisfies this: \1"),
    (r"(?i)too many (?:items|states|expressions)|row has \d+ items", "it becomes too complex; simplify it"),
    (r"(?i)grammar too large|grammar size|fuel|too big|too large", "it is too large; simplify it"),
    (r"recursion limit|too deeply nested", "it is nested too deeply; split it into named parts"),
    (r"^lexer error", "this isn't valid Lark; is a quote or a slash missing?"),
    (r"^no start rule found|^Empty grammar", "there is no rule start; add one that matches the whole text"),
    (r"^Unknown common regex: ([\w.]+)", r"\1 is not one of the names that can be imported"),
    (r"unknown special token: (\S+?);", r"unknown special token \1"),
)


def check(grammar: str, what: str) -> None:
    """Raise OvspecError if a grammar is invalid, has no finite text, or takes too much time or memory.

    Args:
        grammar: a grammar made by ``ovspec.grammars.sources``.
        what: the grammar's name in the message, such as "--grammar words.lark".
    """
    if why := problem_with(grammar):
        raise OvspecError(f"{what}{why}")


@functools.lru_cache(maxsize=64)
def problem_with(grammar: str) -> str:
    """Return what follows a refused grammar's name in the error message; "" for a good grammar."""
    if len(grammar) > MAX_GRAMMAR:
        return f": it has {len(grammar)} bytes; at most {MAX_GRAMMAR} are allowed."
    try:
        found = CHECKER.ask(json.dumps(grammar))
    except Stopped as why:
        return f": the check {why}; simplify it."
    except (OSError, ValueError):
        return ": the process that checks it ended without an answer; simplify it."
    kind = json.loads(grammar)["grammars"][0].get("name", "")
    if "refused" in found:
        return f": {plain(found['refused'])}"
    return worded(found["error"], kind, found["at"]) if found else ""


def worded(error: str, kind: str, pointer: str) -> str:
    """Return llguidance's error as the rest of a sentence, beginning with the place if it is known."""
    first = re.match(r"(?:at )?(\d+)\((\d+)\): ", error)
    where = ""
    if kind == "lark" and first:
        where = f", line {first[1]}, column {first[2]}"
    elif kind == "json" and pointer:
        where = f", at {pointer}"
    elif kind == "regex" and (caret := re.search(r"parse error:\n    .*\n    ( *)\^", error)):
        where = f", column {len(caret[1]) + 1}"
    return f"{where}: {plain(error[first.end() :] if first else error)}"


def plain(error: str) -> str:
    """Return llguidance's error as one sentence, without its debugging details."""
    error = re.sub(r"<non-verbose/>|\n +\d+ \|.*(\n +\^)?", "", error).replace("failed to compile JSON schema: ", "")
    error = re.sub(r"^invalid regex .*? \(in regex\): ", "", error, flags=re.DOTALL)
    error = re.sub(r"\(at \"(?:\\.|[^\"])*\" \(.*?\)\)$", "", error.strip(), flags=re.DOTALL)
    flat = " ".join(error.split())
    for pattern, words in WORDS:
        if match := re.search(pattern, flat):
            flat = match.expand(words)
            break
    flat = (flat if len(flat) < 300 else flat[:300] + "…").rstrip(" .;:")
    return flat if flat.endswith("?") else f"{flat}."
