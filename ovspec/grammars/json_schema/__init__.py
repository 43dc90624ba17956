"""Makes the grammar of a schema's JSON texts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from math import inf

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.grammars.json_schema.checking import SchemaChecker, join_with_and, require_condition
from ovspec.grammars.json_schema.item_tracks import ItemTracks, make_item_tracks
from ovspec.grammars.json_schema.parameters import ParameterExpressions, write_parameters_as_lark
from ovspec.grammars.json_schema.schemas import CircularSchemaError, SchemaGraph
from ovspec.grammars.json_schema.shapes import Strings
from ovspec.grammars.json_schema.writing import JsonStyle, RuleWriter, make_string_schema, write_schema_as_lark

# A space, or a newline and at most 20 spaces or tabs: without a bound a model may write white space forever.
WHITE_SPACE_EXPRESSION = r" |\n[ \t]{0,20}"
# Older versions of llguidance bound neither white space nor escapes.
OLDEST_LLGUIDANCE = (1, 8)
JSON_DUMPS_STYLE = JsonStyle(None, ", ", ": ")  # like Python's json.dumps, and chat templates
STYLE_SETTINGS = ("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern")


@dataclass(frozen=True)
class CompiledSchema:
    """``lark``: the grammar. ``warning``: the ignored parts of the schema, or "".

    ``item_tracks``: the places of arrays with unique items, not enforced by the grammar; None: nowhere.
    ``text_parameters``: with ``ParameterExpressions``, the properties written as text without quotes.
    """

    lark: str
    warning: str
    item_tracks: ItemTracks | None = None
    text_parameters: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SchemaOptions:
    """Options of reading a schema.

    ``lenient``: leave out unenforceable parts instead of refusing the schema. ``close_objects``: objects have only
    listed properties, where the schema doesn't mention others. ``compact``: no white space between tokens.
    """

    lenient: bool = False
    close_objects: bool = False
    compact: bool = False


def compile_schema(
    schema: JsonValue,
    find_problem: Callable[[JsonObject], str],
    options: SchemaOptions = SchemaOptions(),
    parameter_layout: ParameterExpressions | None = None,
) -> CompiledSchema:
    """Return the grammar of a schema, as parsed from JSON; the schema is changed.

    Args:
        find_problem: returns why llguidance can't use a string's schema, as a sentence; "" if it can.
        parameter_layout: for an object with separately written properties, not as JSON: the texts around them.

    Raises:
        OvspecError: the schema is invalid or can't be enforced; the message begins with the JSON pointer of the place.
    """
    if not is_llguidance_recent():
        installed_version = version("llguidance")
        raise OvspecError(
            f"the top: llguidance {installed_version} is too old to enforce schemas; install 1.8 or newer."
        )
    if schema is True:
        schema = {}
    if schema is False:
        raise OvspecError('the top: the schema "false" allows no text at all; give another schema.')
    if not isinstance(schema, dict):
        raise OvspecError("the top: a schema must be an object.")

    @functools.cache
    def has_no_text(strings: Strings) -> bool:
        """Return whether no string satisfies the patterns, formats and length of ``strings``."""
        has_size = bool(strings.min_size or strings.max_size < inf or strings.excluded)
        demand_count = len(strings.patterns) + len(strings.formats) + has_size
        return demand_count >= 2 and says_unsatisfiable(find_problem(make_string_schema(strings)))

    @functools.cache
    def are_disjoint_patterns(first_pattern: str, second_pattern: str) -> bool:
        """Return whether no string matches both patterns, as far as can be proven."""
        patterns = [{"pattern": first_pattern}, {"pattern": second_pattern}]
        return says_unsatisfiable(find_problem({"type": "string", "allOf": patterns}))

    style = JSON_DUMPS_STYLE
    if parameter_layout is None:
        style = read_style(schema.pop("x-guidance", {}), options.compact)
    checker = SchemaChecker(schema, find_problem, options.lenient)
    checker.check_schema()
    try:
        rules = RuleWriter(SchemaGraph(schema, options.lenient, has_no_text), style, are_disjoint_patterns)
        if parameter_layout:
            lark, text_parameters = write_parameters_as_lark(rules, options.close_objects, parameter_layout)
            return CompiledSchema(lark, checker.warning(), None, text_parameters)
        lark = write_schema_as_lark(rules, options.close_objects)
        if not rules.allows_repeats:
            return CompiledSchema(lark, checker.warning())
        return CompiledSchema(lark, checker.warning(), make_item_tracks(rules.graph))
    except CircularSchemaError as error:
        raise OvspecError(f"{error}: the schema is infinitely recursive; add a non-recursive alternative.") from None
    except RecursionError:
        raise OvspecError("#: the schema is nested too deeply; move parts of it into $defs.") from None


def says_unsatisfiable(problem: str) -> bool:
    return problem.startswith(("no JSON text satisfies", "a string in the schema can't have its pattern"))


def read_style(style_settings: JsonValue, compact: bool) -> JsonStyle:
    """Return the text layout from ``x-guidance``; ``compact``: without white space by default."""
    require_condition(isinstance(style_settings, dict), "#/x-guidance", "an object")
    for setting_name in style_settings:
        if setting_name not in STYLE_SETTINGS:
            raise OvspecError(f"#/x-guidance/{setting_name}: x-guidance can only have {join_with_and(STYLE_SETTINGS)}.")
    for setting_name, setting_value in style_settings.items():
        if setting_name == "whitespace_flexible":
            require_condition(isinstance(setting_value, bool), f"#/x-guidance/{setting_name}", "true or false")
        else:
            require_condition(isinstance(setting_value, str), f"#/x-guidance/{setting_name}", "a regular expression")
    whitespace_is_flexible = style_settings.get("whitespace_flexible", not compact)
    white_space = style_settings.get("whitespace_pattern", WHITE_SPACE_EXPRESSION if whitespace_is_flexible else None)
    return JsonStyle(white_space, style_settings.get("item_separator", ","), style_settings.get("key_separator", ":"))


@functools.cache
def is_llguidance_recent() -> bool:
    """Return whether llguidance is recent enough for schemas.

    The guidance library requires an older version, sufficient for everything else.
    """
    return tuple(map(int, version("llguidance").split(".")[:2])) >= OLDEST_LLGUIDANCE
