"""Makes the grammar of the JSON texts that a schema describes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.grammars.json_schema.checking import Checker, Schema, listed, need
from ovspec.grammars.json_schema.parameters import Around, grammar_of_parameters
from ovspec.grammars.json_schema.schemas import Circular, Schemas
from ovspec.grammars.json_schema.shapes import Strings
from ovspec.grammars.json_schema.writing import RuleWriter, Style, grammar_of, string_schema, tracks_of

# One space, or a newline and at most 20 spaces or tabs: without a bound a model may write white space forever.
WHITE_SPACE = r" |\n[ \t]{0,20}"
# Older versions of llguidance bound neither white space nor escapes.
OLDEST = (1, 8)
DUMPED = Style(None, ", ", ": ")  # as json.dumps and chat templates lay out values
SETTINGS = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern")


@dataclass(frozen=True)
class CompiledSchema:
    """``lark``: the grammar. ``warning``: what is ignored, or "".

    ``tracks``: where the items of arrays must differ, which the grammar doesn't enforce; None: nowhere.
    ``strings``: with ``Around``, the properties that are written as text without quotes.
    """

    lark: str
    warning: str
    tracks: list[list[dict[str, Any]]] | None = None
    strings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SchemaReading:
    """How a schema is read.

    ``lenient``: leave out what can't be enforced, instead of refusing it. ``close_objects``: objects have only the
    listed properties, where the schema says nothing of others. ``compact``: no white space between tokens.
    """

    lenient: bool = False
    close_objects: bool = False
    compact: bool = False


def compile_schema(
    schema: Any,
    problem: Callable[[Schema], str],
    reading: SchemaReading = SchemaReading(),
    around: Around | None = None,
) -> CompiledSchema:
    """Return the grammar of a schema, as parsed from JSON; the schema is changed.

    Args:
        problem: returns why llguidance can't use a schema of a string, as a sentence; "" if it can.
        around: for an object whose properties are written one by one, not as JSON: what is around them.

    Raises:
        OvspecError: the schema is invalid or can't be enforced; the message begins with the JSON pointer of the place.
    """
    if not is_llguidance_recent():
        found = version("llguidance")
        raise OvspecError(f"the top: llguidance {found} doesn't enforce schemas strictly enough; use 1.8 or newer.")
    schema = {} if schema is True else schema
    if schema is False:
        raise OvspecError('the top: "false" allows no text at all.')
    if not isinstance(schema, dict):
        raise OvspecError("the top: a schema must be an object.")

    @functools.cache
    def no_text(each: Strings) -> bool:
        """Return whether no string has the patterns, formats and length of ``each``."""
        few = len(each.patterns) + len(each.formats) + bool(each.least or each.most is not None or each.excluded) < 2
        return not few and unsatisfiable(problem(string_schema(each)))

    @functools.cache
    def apart(one: str, other: str) -> bool:
        """Return whether no string has both patterns, as far as that can be told."""
        return unsatisfiable(problem({"type": "string", "allOf": [{"pattern": one}, {"pattern": other}]}))

    compact = {"whitespace_flexible": False} if reading.compact else {}
    style = styled(schema.pop("x-guidance", {}), compact) if around is None else DUMPED
    checker = Checker(schema, problem, reading.lenient)
    checker.check()
    try:
        rules = RuleWriter(Schemas(schema, reading.lenient, no_text), style, apart)
        if around:
            lark, strings = grammar_of_parameters(rules, reading.close_objects, around)
            return CompiledSchema(lark, checker.warning(), None, strings)
        lark = grammar_of(rules, reading.close_objects)
        return CompiledSchema(lark, checker.warning(), tracks_of(rules.schemas) if rules.repeats else None)
    except Circular as error:
        raise OvspecError(f"{error}: this can never come to an end, because it refers to itself.") from None
    except RecursionError:
        raise OvspecError("#: it is nested too deeply; split it into named parts.") from None


def unsatisfiable(problem: str) -> bool:
    return problem.startswith(("no JSON text satisfies", "no text has this pattern"))


def styled(settings: Any, usual: dict[str, bool]) -> Style:
    """Return the layout of texts that ``x-guidance`` asks for; ``usual`` has settings that it may leave out."""
    need(isinstance(settings, dict), "#/x-guidance", "an object")
    if others := [name for name in settings if name not in SETTINGS]:
        raise OvspecError(f"#/x-guidance/{others[0]}: only {listed(SETTINGS)} can be set here.")
    for name, value in settings.items():
        kind, what = (bool, "true or false") if name == "whitespace_flexible" else (str, "a regular expression")
        need(isinstance(value, kind), f"#/x-guidance/{name}", what)
    settings = {**usual, **settings}
    flexible = settings.get("whitespace_flexible", True)
    white_space = settings.get("whitespace_pattern", WHITE_SPACE if flexible else None)
    return Style(white_space, settings.get("item_separator", ","), settings.get("key_separator", ":"))


@functools.cache
def is_llguidance_recent() -> bool:
    """Return whether llguidance is recent enough for schemas.

    The guidance library requires an older version, which is good enough for everything else.
    """
    return tuple(map(int, version("llguidance").split(".")[:2])) >= OLDEST
