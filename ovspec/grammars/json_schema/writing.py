"""Writes the grammar of the JSON texts of a schema, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import inf

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.grammars.json_schema import numbers

from ovspec.grammars.json_schema.expressions import (  # isort: skip
    escape_slashes, make_json_string_expression, make_other_texts_expression, split_lookaheads, use_ascii_classes,
)  # fmt: skip
from ovspec.grammars.json_schema.formats import STRICTER_PATTERNS
from ovspec.grammars.json_schema.schemas import SchemaGraph

from ovspec.grammars.json_schema.shapes import (  # isort: skip
    NO_VALUE, Alternative, Arrays, Booleans, Nulls, Numbers, Objects, SchemaNode, Strings, UnenforceableValues,
    close_object, join_nodes,
)  # fmt: skip

MAX_RULE_STATES = 20_000  # per object or array
MAX_UNORDERED_ITEMS = 5  # values or properties allowed in any order
# Without \uXXXX: otherwise a key would have several spellings.
ALLOWED_ESCAPES = 'nrbtf\\"'
UNESCAPED_CHARACTER = r'[^"\\\x00-\x1f\x7f]'
STRING_CHARACTER = r'([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'
MAX_BOUNDED_MULTIPLE = 1000


@dataclass(frozen=True)
class JsonStyle:
    """The layout of texts: expressions of the white space between tokens, and of the separators."""

    white_space: str | None
    item_separator: str = ","
    key_separator: str = ":"


@dataclass
class RuleWriter:
    """Writes rules and terminals, without duplicates.

    ``are_disjoint_patterns``: returns whether no string matches both patterns. ``allows_repeats``: whether the grammar
    allows duplicates in arrays with unique items, see ``item_tracks``. ``pending_nodes``: nodes whose rules are named
    but not written yet.
    """

    graph: SchemaGraph
    style: JsonStyle
    are_disjoint_patterns: Callable[[str, str], bool]
    allows_repeats: bool = False
    lines: list[str] = field(default_factory=list)
    names_by_content: dict[str, str] = field(default_factory=dict)  # of rules and terminals
    _node_rules: dict[SchemaNode, str] = field(default_factory=dict)
    pending_nodes: list[tuple[SchemaNode, str]] = field(default_factory=list)

    # ------------------------------------------------------------ names

    def write_terminal(self, content: str) -> str:
        return self.write_rule(content, "T")

    def write_rule(self, content: str, prefix: str = "r") -> str:
        """Write a rule, unless one with this content exists; return its name."""
        if content not in self.names_by_content:
            self.names_by_content[content] = f"{prefix}{len(self.names_by_content)}"
            self.lines.append(f"{self.names_by_content[content]}: {content}")
        return self.names_by_content[content]

    def write_alternation_rule(self, alternatives: list[str]) -> str | None:
        return self.write_rule(" | ".join(alternatives)) if alternatives else None

    def node_rule_name(self, node: SchemaNode) -> str:
        """Return the name of a node's rule, to be written later."""
        if node not in self._node_rules:
            self._node_rules[node] = f"v{len(self._node_rules)}"
            self.pending_nodes.append((node, self._node_rules[node]))
        return self._node_rules[node]

    def write_node_rules(self, close_objects: bool) -> None:
        """Write the rules of all referenced nodes; raises OvspecError if a part can't be enforced."""
        while self.pending_nodes:
            node, rule_name = self.pending_nodes.pop()
            self.lines.append(f"{rule_name}: {write_node_alternatives(self, node, close_objects)}")

    # ------------------------------------------------------------ numbers and strings

    def write_numbers(self, allowed_numbers: Numbers) -> str:
        if allowed_numbers.multiple_of:
            bounds = [bound for bound in (allowed_numbers.low, allowed_numbers.high) if bound]
            if allowed_numbers.excluded or any(abs(bound.value) > numbers.LARGEST_EXACT_NUMBER for bound in bounds):
                self.refuse_part("#", "multipleOf can't be enforced beside excluded numbers or bounds beyond 2**53")
            return self._write_json_rule(make_multiple_schema(allowed_numbers))
        required_expressions, forbidden_expressions = numbers.write_number_expressions(allowed_numbers)
        text_conditions = [f"/{escape_slashes(expression)}/" for expression in required_expressions]
        text_conditions += [f"~/{expression}/" for expression in forbidden_expressions]
        return self.write_terminal(" & ".join(text_conditions))

    def write_strings(self, strings: Strings) -> str:
        if strings.values is not None and not strings.formats:
            return self.write_terminal(" | ".join(map(quote_json_string, strings.values)))
        if strings.absent_patterns:
            return self._write_unescaped_strings(strings)
        if not strings.patterns and not strings.formats:
            return self._write_without_excluded([f'/"{STRING_CHARACTER}{size_quantifier(strings)}"/'], strings)
        return self._write_json_rule(make_string_schema(strings))

    def _write_unescaped_strings(self, strings: Strings) -> str:
        """Write the strings without any escape: only these can be compared with ``absent_patterns``."""
        required_patterns = map(use_ascii_classes, sorted(strings.patterns))
        required_expressions = [make_json_string_expression(pattern) for pattern in required_patterns]
        forbidden_expressions = [make_json_string_expression(pattern) for pattern in sorted(strings.absent_patterns)]
        if strings.formats or None in required_expressions or None in forbidden_expressions:
            self.refuse_part(f"the pattern {min(strings.absent_patterns)!r}", "its matches can't be excluded")
            return self.write_strings(replace(strings, absent_patterns=frozenset()))
        text_conditions = [f'/"{UNESCAPED_CHARACTER}{size_quantifier(strings)}"/']
        text_conditions += [f"/{expression}/" for expression in required_expressions]
        text_conditions += [f"~/{expression}/" for expression in forbidden_expressions]
        return self._write_without_excluded(text_conditions, strings)

    def _write_without_excluded(self, text_conditions: list[str], strings: Strings) -> str:
        if strings.excluded:
            text_conditions = [*text_conditions, f"~({' | '.join(map(quote_json_string, sorted(strings.excluded)))})"]
        return self.write_terminal(" & ".join(text_conditions))

    def _write_json_rule(self, schema: JsonObject) -> str:
        """Write the rule of a number or string by llguidance's own JSON schemas."""
        guidance_settings: JsonObject = {"whitespace_flexible": False}
        if self.style.white_space:
            guidance_settings = {"whitespace_pattern": self.style.white_space}
        guided_schema = {**schema, "x-guidance": {**guidance_settings, "json_allowed_escapes": ALLOWED_ESCAPES}}
        return self.write_rule(f"%json {json.dumps(guided_schema)}")

    def write_separator(self, expression: str) -> str:
        if expression in (",", ":"):
            return quote_literal(expression)
        return self.write_terminal(f"/{escape_slashes(expression)}/")

    def refuse_part(self, pointer: str, reason: str) -> None:
        """Raise OvspecError, unless unenforceable parts are to be left out."""
        if not self.graph.lenient:
            raise make_refusal(pointer, reason)


def make_refusal(pointer: str, reason: str) -> OvspecError:
    return OvspecError(f"{pointer}: {reason}; remove this restriction, or set `json_schema_mode='checked'`.")


def write_schema_as_lark(rules: RuleWriter, close_objects: bool) -> str:
    """Return the whole grammar.

    Args:
        close_objects: objects have only the listed properties, where the schema doesn't mention others.

    Raises:
        OvspecError: no text matches, or a part can't be enforced.
    """
    root_node = rules.graph.root_node
    if rules.graph.fits_no_value(root_node):
        raise OvspecError("#: no JSON text satisfies this schema; remove the contradiction in it.")
    header_lines: list[str] = []
    if rules.style.white_space:
        header_lines = ['%llguidance {"ignore_once": true}', f"%ignore /{escape_slashes(rules.style.white_space)}/"]
    start_rule = rules.node_rule_name(root_node)
    rules.write_node_rules(close_objects)
    return "\n".join([*header_lines, f"start: {start_rule}", *rules.lines])


def write_node_alternatives(rules: RuleWriter, node: SchemaNode, close_objects: bool) -> str:
    """Return the alternatives of a node; raises OvspecError if some can't be enforced and matter."""
    expressions: dict[str, None] = {}
    for alternatives in rules.graph.find_shape(node).by_type.values():
        enforceable = [alternative for alternative in alternatives if not isinstance(alternative, UnenforceableValues)]
        for alternative in alternatives:
            if isinstance(alternative, UnenforceableValues) and not (enforceable and alternative.dispensable):
                raise make_refusal(alternative.pointer, alternative.obstacle)
        expressions.update((write_alternative(rules, alternative, close_objects), None) for alternative in enforceable)
    return " | ".join(expressions)


def write_alternative(rules: RuleWriter, alternative: Alternative, close_objects: bool) -> str:
    match alternative:
        case Nulls() | Booleans():
            return " | ".join(list_literals(alternative))
        case Numbers():
            return rules.write_numbers(alternative)
        case Strings():
            return rules.write_strings(alternative)
        case Arrays():
            return write_array(rules, alternative)
        case Objects() if close_objects:
            return write_object(rules, close_object(alternative))
        case Objects():
            return write_object(rules, alternative)
    raise AssertionError(alternative)


def list_literals(alternative: Nulls | Booleans) -> list[str]:
    """Return the expressions of null, or of booleans."""
    if isinstance(alternative, Nulls):
        return ['"null"']
    return [quote_literal(json.dumps(value)) for value in sorted(alternative.values)]


# ---------------------------------------------------------------- objects


def write_object(rules: RuleWriter, objects: Objects) -> str:
    name_alternatives = rules.graph.find_shape(objects.name_node).by_type.get("string", ())
    for alternative in name_alternatives:
        if isinstance(alternative, UnenforceableValues):
            rules.refuse_part(alternative.pointer, alternative.obstacle)
    name_strings = [strings for strings in name_alternatives if isinstance(strings, Strings)]
    objects = add_names_as_properties(objects, name_strings)
    colon = rules.write_separator(rules.style.key_separator)
    comma = rules.write_separator(rules.style.item_separator)
    property_expressions: list[tuple[str, bool]] = []
    for property_name, node in objects.properties:
        is_allowed = any(strings.accepts_text(property_name) for strings in name_strings)
        if is_allowed and not rules.graph.fits_no_value(node):
            property_expression = f"{quote_json_string(property_name)} {colon} {rules.node_rule_name(node)}"
            property_expressions.append((property_expression, property_name in objects.required))
    if (
        objects.any_order
        and len(property_expressions) <= MAX_UNORDERED_ITEMS
        and all(required for _, required in property_expressions)
    ):
        items = [rules.write_rule(property_expression) for property_expression, _ in property_expressions]
        return f'"{{" {write_in_any_order(rules, items, len(items), len(items), comma)} "}}"'
    unlisted_rule = write_unlisted_property(rules, objects, name_strings, colon)
    ordered_rules = [(rules.write_rule(expression), required) for expression, required in property_expressions]
    size_limits = (objects.min_size, objects.max_size)
    return f'"{{" {write_in_order(rules, ordered_rules, size_limits, unlisted_rule, comma)} "}}"'


def add_names_as_properties(objects: Objects, name_strings: list[Strings]) -> Objects:
    """Return the objects with all of ``name_strings`` as listed properties, if they are known values."""
    if any(strings.values is None for strings in name_strings):
        return objects
    listed_nodes = dict(objects.properties)
    allowed_names = dict.fromkeys(property_name for strings in name_strings for property_name in strings.values or ())
    added_properties = tuple(
        (property_name, objects.property_node(property_name))
        for property_name in allowed_names
        if property_name not in listed_nodes
    )
    return replace(objects, properties=(*objects.properties, *added_properties), unlisted_node=NO_VALUE, patterns=())


def write_unlisted_property(rules: RuleWriter, objects: Objects, name_strings: list[Strings], colon: str) -> str | None:
    """Write the rule of an unlisted property; None if there is none."""
    listed_names = frozenset(property_name for property_name, _ in objects.properties)
    property_alternatives: list[str] = []
    for pattern, node in objects.patterns:
        overlapping_nodes = (
            other_node
            for other, other_node in objects.patterns
            if other != pattern and not rules.are_disjoint_patterns(other, pattern)
        )
        value_node = join_nodes(node, *overlapping_nodes)
        if rules.graph.fits_no_value(value_node):
            continue
        required_patterns, forbidden_patterns = split_lookaheads(pattern)
        for strings in name_strings:
            patterns = strings.patterns.union(required_patterns)
            absent_patterns = strings.absent_patterns.union(forbidden_patterns)
            excluded = strings.excluded | listed_names
            key_strings = replace(strings, patterns=patterns, absent_patterns=absent_patterns, excluded=excluded)
            if not rules.graph.has_no_text(key_strings):
                value_rule = rules.node_rule_name(value_node)
                property_alternatives.append(f"{rules.write_strings(key_strings)} {colon} {value_rule}")
    if not rules.graph.fits_no_value(objects.unlisted_node):
        value_rule = rules.node_rule_name(objects.unlisted_node)
        property_patterns = frozenset(pattern for pattern, _ in objects.patterns)
        for strings in name_strings:
            absent_patterns = strings.absent_patterns | property_patterns
            key_strings = replace(strings, excluded=strings.excluded | listed_names, absent_patterns=absent_patterns)
            # If names without a match of any pattern can't be described, none are allowed.
            compared_patterns = [*key_strings.absent_patterns, *(key_strings.patterns if property_patterns else ())]
            if None not in map(make_json_string_expression, compared_patterns):
                property_alternatives.append(f"{rules.write_strings(key_strings)} {colon} {value_rule}")
    return rules.write_alternation_rule(property_alternatives)


# ---------------------------------------------------------------- arrays, and lists of properties


def write_array(rules: RuleWriter, arrays: Arrays) -> str:
    if arrays.unique and arrays.max_size > 1:
        value_expressions = list_item_values(rules, arrays)
        if value_expressions is not None:
            return write_unique_array(rules, arrays, value_expressions)
        rules.allows_repeats = True
    comma = rules.write_separator(rules.style.item_separator)
    array_body = write_items_after_prefix(rules, arrays, comma)
    for i, node in reversed([*enumerate(arrays.prefix)]):
        if i < arrays.max_size:
            array_body = make_optional(
                f"{comma} " * (i > 0) + f"{rules.node_rule_name(node)} {array_body}", i >= arrays.min_size
            )
    return f'"[" {array_body} "]"'


def write_items_after_prefix(rules: RuleWriter, arrays: Arrays, comma: str) -> str:
    """Return the expression of the items after the prefix."""
    prefix_length = len(arrays.prefix)
    min_count = max(arrays.min_size - prefix_length, 0)
    max_count = arrays.max_size - prefix_length
    if max_count <= 0 or rules.graph.fits_no_value(arrays.items):
        return ""
    item_rule = rules.node_rule_name(arrays.items)
    if prefix_length:
        return repeat_expression(f"{comma} {item_rule}", min_count, max_count)
    return make_optional(write_separated_items(item_rule, comma, min_count - 1, max_count), not min_count)


def list_item_values(rules: RuleWriter, arrays: Arrays) -> list[str] | None:
    """Return the expressions of all possible items of an array; None if they are many."""
    if arrays.prefix or rules.graph.fits_no_value(arrays.items):
        return None
    value_expressions: list[str] = []
    for alternatives in rules.graph.find_shape(arrays.items).by_type.values():
        for alternative in alternatives:
            match alternative:
                case Nulls() | Booleans():
                    value_expressions += list_literals(alternative)
                case Numbers() if alternative.values is not None:
                    value_expressions += [f"/{numbers.spell_number(number)}/" for number in sorted(alternative.values)]
                case Strings() if alternative.values is not None and not alternative.formats:
                    value_expressions += map(quote_json_string, alternative.values)
                case _:
                    return None
    return list(dict.fromkeys(value_expressions))


def write_unique_array(rules: RuleWriter, arrays: Arrays, value_expressions: list[str]) -> str:
    """Return an array of different values: in any order if there are few, else in the order of the schema."""
    max_count = min(arrays.max_size, len(value_expressions))
    comma = rules.write_separator(rules.style.item_separator)
    if len(value_expressions) <= MAX_UNORDERED_ITEMS:
        array_body = write_in_any_order(rules, value_expressions, arrays.min_size, max_count, comma)
    else:
        size_limits = (arrays.min_size, max_count if max_count < len(value_expressions) else inf)
        optional_items = [(expression, False) for expression in value_expressions]
        array_body = write_in_order(rules, optional_items, size_limits, None, comma)
    return f'"[" {array_body} "]"'


def write_in_any_order(
    rules: RuleWriter, item_expressions: list[str], min_count: int, max_count: float, comma: str
) -> str:
    """Write the rule of ``min_count`` to ``max_count`` different ``item_expressions``, in any order."""

    def write_remaining(unused_items: tuple[str, ...]) -> str:
        used_count = len(item_expressions) - len(unused_items)
        alternatives = ['""'] * (used_count >= min_count)
        for item_expression in unused_items if used_count < max_count else ():
            remaining_rule = write_remaining(tuple(other for other in unused_items if other != item_expression))
            alternatives.append(f"{comma} " * (used_count > 0) + f"{item_expression} {remaining_rule}")
        return rules.write_rule(" | ".join(alternatives))

    return write_remaining(tuple(item_expressions))


def write_in_order(
    rules: RuleWriter,
    item_expressions: list[tuple[str, bool]],
    size_limits: tuple[int, float],
    extra_item: str | None,
    comma: str,
) -> str:
    """Write the rule of some of the items, (expression, whether required), in order, and any number of ``extra_item``.

    size_limits: minimum and maximum of all together; all of ``extra_item`` count as a single item for the minimum,
        because they may be the same.
    """
    min_count, max_count = size_limits
    max_counted = max(min_count if max_count == inf else int(max_count), 1)  # higher counts are equivalent
    if len(item_expressions) * max_counted > MAX_RULE_STATES:
        rules.refuse_part("#", "there are too many properties or items to enforce a limit on their number")
        return write_in_order(rules, item_expressions, (0, inf), extra_item, comma)
    # By the number of items so far: the rule of the rest of the list; None if no rest is possible.
    item_counts = range(max_counted + 1)
    rest_rules = [
        write_extra_items(rules, min_count - item_count, max_count - item_count, item_count > 0, extra_item, comma)
        for item_count in item_counts
    ]
    for item_expression, required in reversed(item_expressions):
        later_rest_rules = [*rest_rules]
        for item_count in reversed(item_counts):
            alternatives: list[str] = []
            rest_after_item = later_rest_rules[min(item_count + 1, max_counted)]
            if rest_after_item is not None and item_count < max_count:
                alternatives.append(f"{comma} " * (item_count > 0) + f"{item_expression} {rest_after_item}")
            rest_without_item = later_rest_rules[item_count]
            if rest_without_item is not None and not required:
                alternatives.append(rest_without_item)
            rest_rules[item_count] = rules.write_alternation_rule(alternatives)
    if rest_rules[0] is None:
        raise OvspecError("#: no JSON text can have as many properties or items as required; require fewer.")
    return rest_rules[0]


def write_extra_items(
    rules: RuleWriter,
    lacking_count: int,
    max_extra_count: float,
    follows_items: bool,
    extra_item: str | None,
    comma: str,
) -> str | None:
    """Write the rule of the extra items at a list's end, ``max_extra_count`` at most; None if too many are missing."""
    if lacking_count > 1 or (lacking_count == 1 and (extra_item is None or max_extra_count == 0)):
        return None
    if extra_item is None or max_extra_count == 0:
        return '""'
    if follows_items:
        return rules.write_rule(repeat_expression(f"{comma} {extra_item}", max(lacking_count, 0), max_extra_count))
    extra_items = write_separated_items(extra_item, comma, 0, max_extra_count)
    return rules.write_rule(make_optional(extra_items, lacking_count <= 0))


def write_separated_items(item_expression: str, comma: str, min_more: int, max_count: float) -> str:
    """Return the expression of an item and ``min_more`` or more others, at most ``max_count`` together."""
    return f"{item_expression} {repeat_expression(f'{comma} {item_expression}', max(min_more, 0), max_count - 1)}"


def repeat_expression(item_expression: str, min_count: int, max_count: float) -> str:
    if max_count == inf:
        return f"({item_expression}){{{min_count},}}" if min_count else f"({item_expression})*"
    return f"({item_expression}){{{min_count},{max_count}}}" if max_count else ""


def make_optional(expression: str, optional: bool) -> str:
    return f"({expression})?" if optional else expression


# ---------------------------------------------------------------- numbers and strings


def make_multiple_schema(allowed_numbers: Numbers) -> JsonObject:
    """Return llguidance's own schema of the multiples of a number, with a bounded number of digits."""
    assert allowed_numbers.multiple_of
    json_type = "integer" if allowed_numbers.integer else "number"
    schema: JsonObject = {"type": json_type, "multipleOf": to_json_number(allowed_numbers.multiple_of)}
    needs_bounds = allowed_numbers.multiple_of < MAX_BOUNDED_MULTIPLE  # otherwise llguidance would be too slow
    default_bounds = (
        (allowed_numbers.low, "Minimum", -numbers.LARGEST_EXACT_NUMBER),
        (allowed_numbers.high, "Maximum", numbers.LARGEST_EXACT_NUMBER),
    )
    for bound, keyword, default_bound in default_bounds:
        if bound:
            bound_keyword = f"exclusive{keyword}" if bound.exclusive else keyword.lower()
            schema[bound_keyword] = to_json_number(bound.value)
        elif needs_bounds:
            schema[keyword.lower()] = default_bound
    return schema


def size_quantifier(strings: Strings) -> str:
    """Return the repetition of a character, to give an expression the right lengths."""
    if strings.max_size < inf:
        return f"{{{strings.min_size},{strings.max_size}}}"
    return f"{{{strings.min_size},}}" if strings.min_size else "*"


def make_string_schema(strings: Strings) -> JsonObject:
    """Return llguidance's own schema of a string."""
    schema: JsonObject = {"type": "string", "minLength": strings.min_size}
    if strings.values is not None:
        schema["enum"] = list(strings.values)
    if strings.max_size < inf:
        schema["maxLength"] = strings.max_size
    formats = sorted(strings.formats)
    patterns = [
        *sorted(strings.patterns),
        *(STRICTER_PATTERNS[format_name] for format_name in formats if format_name in STRICTER_PATTERNS),
    ]
    text_conditions = [{"pattern": pattern} for pattern in patterns] + [{"format": name} for name in formats]
    if strings.excluded:
        text_conditions.append({"pattern": make_other_texts_expression(strings.excluded)})
    return {**schema, "allOf": text_conditions}


def quote_json_string(value: str) -> str:
    """Return a Lark literal of the JSON string of ``value``."""
    return quote_literal(json.dumps(value, ensure_ascii=False))


def quote_literal(text: str) -> str:
    """Return a Lark literal of ``text``."""
    return json.dumps(text, ensure_ascii=False)


def to_json_number(value: Decimal) -> int | float:
    if value == value.to_integral_value():
        return int(value)
    return float(value)
