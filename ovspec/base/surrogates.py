"""Halves of surrogate pairs, which programs in JavaScript leave where they cut a text in the middle of a character."""

import re

# Escapes in JSON: backslashes, a whole pair, half of one. The first two are matched so that the third is in neither.
JSON_ESCAPES = re.compile(
    r"(?:\\\\)+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def replace_half_surrogates(json_text: str) -> str:
    """Return JSON with U+FFFD instead of each half of a surrogate pair, which isn't valid Unicode."""
    return JSON_ESCAPES.sub(lambda escape: r"\ufffd" if escape[1] else escape[0], json_text)
