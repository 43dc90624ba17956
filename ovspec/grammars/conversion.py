"""Converts what users write as a grammar, in a process of its own, because it may be untrusted."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

from ovspec.errors import OvspecError
from ovspec.files import read_text
from ovspec.grammars.sources import MAX_CHARACTERS
from ovspec.sandbox import Stopped, Worker

MAX_SECONDS = 5.0
MAX_BYTES = 1_000_000_000

CONVERTER = Worker("ovspec.grammars.conversion_worker", MAX_SECONDS, MAX_BYTES)


def converted(kind: str, given: Any, what: str, **reading: bool) -> str:
    """Return a grammar in llguidance's own notation, which is known to be valid and to have a finite text.

    Args:
        kind: json_schema, regex, choice, grammar (Lark) or gbnf.
        given: its text; a Path to a file with it; a schema as Python's values; or a list of choices.
        what: the grammar's name in errors and warnings, such as "--grammar words.lark".
        reading: fields of ``json_schema.Reading``.

    Raises:
        OvspecError: it is invalid, or takes too much time or memory.
    """
    if isinstance(given, Path):
        given = read_text(given)
    try:
        request = json.dumps({"kind": kind, "given": given, "what": what, "reading": reading}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise OvspecError(f"{what} can't be written as JSON: {error}.") from None
    if len(request) > 8 * MAX_CHARACTERS:  # more than any escapes could make of what is allowed
        raise OvspecError(f"{what} has more than {MAX_CHARACTERS} characters, the most that are allowed.")
    grammar, warning = ask(request)
    if warning:
        warnings.warn(f"{what} {warning}", stacklevel=2)
    return grammar


@functools.lru_cache(maxsize=64)
def ask(request: str) -> tuple[str, str]:
    """Return (grammar, warning) for a request to the worker; a refusal is an exception, so it isn't remembered."""
    what = json.loads(request)["what"]
    try:
        found = CONVERTER.ask(request)
    except Stopped as why:
        raise OvspecError(f"{what}: the check {why}; simplify it.") from None
    except (OSError, ValueError):
        raise OvspecError(f"{what}: the process that checks it ended without an answer; simplify it.") from None
    if "error" in found:
        raise OvspecError(found["error"])
    return found["grammar"], found["warning"]
