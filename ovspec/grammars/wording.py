"""Rewords llguidance's errors for users."""

from __future__ import annotations

import re

# (pattern in llguidance's error, its replacement in reports); the first match counts.
ERROR_WORDINGS = (
    (r"regex(?:p)? parse error:.*error: (.*)", r"invalid regular expression: \1"),
    (r"^lookarounds not supported.*regex (/.*/)", r"anchors (^, $) and \\b aren't supported inside the expression \1"),
    (r"NoExtension", "it has a dead end, a text without a next token; add an alternative"),
    (r"(?:Lexer|Parser)TooComplex", "it is too complex; simplify it"),
    (r"Regex is empty", "a string in the schema can't have its pattern, format and length together; change one"),
    (r"^Failed to generate regex for integer range.*", "this integer's bounds are too far from 0; move them closer"),
    (r"^Unsatisfiable schema: (.*)", r"no JSON text satisfies this schema (\1); change it"),
    (r"(?i)too many (?:items|states|expressions)|row has \d+ items", "it is too complex; simplify it"),
    (r"(?i)grammar too large|grammar size|fuel|too big|too large", "it is too large; simplify it"),
    (r"recursion limit|too deeply nested", "it is nested too deeply; split it into named rules"),
    (r"^lexer error", "this isn't valid Lark; is a quote or a slash missing?"),
    (r"^no start rule found|^Empty grammar", "the rule start is missing; add 'start: …' for the whole text"),
    (r"^Unknown common regex: ([\w.]+)", r"\1 can't be imported; define \1 in the grammar"),
    (r"unknown special token: (\S+?);", r"\1 is not a special token of the model; use another token"),
)


def word_placed_error(error: str, grammar_kind: str) -> str:
    """Return llguidance's error as the rest of a sentence, beginning with the place if known."""
    position = re.match(r"(?:at )?(\d+)\((\d+)\): ", error)
    place_text = ""
    if grammar_kind == "lark" and position:
        place_text = f", line {position[1]}, column {position[2]}"
    elif grammar_kind == "regex" and (caret_match := re.search(r"parse error:\n    .*\n    ( *)\^", error)):
        place_text = f", column {len(caret_match[1]) + 1}"
    if position:
        error = error[position.end() :]
    return f"{place_text}: {word_llguidance_error(error)}"


def word_llguidance_error(error: str) -> str:
    """Return llguidance's error as a single sentence, without its debugging details; "" stays ""."""
    if not error:
        return ""
    error = re.sub(r"<non-verbose/>|\n +\d+ \|.*(\n +\^)?", "", error).replace("failed to compile JSON schema: ", "")
    error = re.sub(r"^invalid regex .*? \(in regex\): ", "", error, flags=re.DOTALL)
    if error.strip().endswith("))") and (details_start := error.rfind('(at "')) >= 0:
        error = error[:details_start]
    sentence = " ".join(error.split())
    for pattern, wording in ERROR_WORDINGS:
        if match := re.search(pattern, sentence):
            sentence = match.expand(wording)
            break
    if len(sentence) >= 300:
        sentence = sentence[:300] + "…"
    sentence = sentence.rstrip(" .;:")
    return sentence + "." * (not sentence.endswith("?"))
