"""Halves of surrogate pairs, as produced by JavaScript programs if they cut a text inside a character."""

import re

# Escapes in JSON: backslashes, a whole pair, half of a pair. The first two are matched to leave only true halves.
JSON_ESCAPES = re.compile(
    r"(?:\\\\)+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def replace_half_surrogates(json_text: str) -> str:
    """Return JSON with U+FFFD in place of each half of a surrogate pair: a half is invalid Unicode."""
    return JSON_ESCAPES.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], json_text)
