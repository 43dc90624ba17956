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
    escape_slashes, match_json_string, match_other_texts, split_lookaheads, use_ascii_classes,
)  # fmt: skip
from ovspec.grammars.json_schema.formats import STRICTER_PATTERNS
from ovspec.grammars.json_schema.schemas import SchemaGraph

from ovspec.grammars.json_schema.shapes import (  # isort: skip
    NO_VALUE, Alternative, Arrays, Booleans, Nulls, Numbers, Objects, SchemaNode, Strings, Unenforceable, close_object,
    join_nodes,
)  # fmt: skip

MAX_STATES = 20_000  # of one object or array
MAX_UNORDERED = 5  # values or properties that may come in any order
# Without \uXXXX: a key would have several spellings.
ALLOWED_ESCAPES = 'nrbtf\\"'
UNESCAPED_CHARACTER = r'[^"\\\x00-\x1f\x7f]'
STRING_CHARACTER = r'([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'
MAX_BOUNDED_MULTIPLE = 1000


@dataclass(frozen=True)
class JsonStyle:
    """How texts are laid out: expressions of the white space between tokens, and of the separators."""

    white_space: str | None
    item_separator: str = ","
    key_separator: str = ":"


@dataclass
class RuleWriter:
    """Writes rules and terminals, each content once.

    ``are_disjoint_patterns``: returns whether no string has both patterns. ``allows_repeats``: whether the grammar
    allows arrays to repeat items that must differ, see ``item_tracks``. ``pending_nodes``: nodes whose rules have names
    and aren't written yet.
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
        """Write a rule, if there is none of this content; return its name."""
        if content not in self.names_by_content:
            self.names_by_content[content] = f"{prefix}{len(self.names_by_content)}"
            self.lines.append(f"{self.names_by_content[content]}: {content}")
        return self.names_by_content[content]

    def write_option_rule(self, options: list[str]) -> str | None:
        return self.write_rule(" | ".join(options)) if options else None

    def node_rule(self, node: SchemaNode) -> str:
        """Return the name of a node's rule, which is written later."""
        if node not in self._node_rules:
            self._node_rules[node] = f"v{len(self._node_rules)}"
            self.pending_nodes.append((node, self._node_rules[node]))
        return self._node_rules[node]

    def write_node_rules(self, close_objects: bool) -> None:
        """Write the rules of all nodes that rules refer to; raises OvspecError if something can't be enforced."""
        while self.pending_nodes:
            node, name = self.pending_nodes.pop()
            self.lines.append(f"{name}: {write_node_options(self, node, close_objects)}")

    # ------------------------------------------------------------ numbers and strings

    def write_numbers(self, allowed: Numbers) -> str:
        if allowed.multiple:
            bounds = [bound for bound in (allowed.low, allowed.high) if bound]
            if allowed.excluded or any(abs(bound.value) > numbers.LARGEST_EXACT for bound in bounds):
                self.refuse("#", "multipleOf can't be enforced beside excluded numbers or bounds beyond 2**53")
            return self._write_json_rule(make_multiple_schema(allowed))
        present, absent = numbers.number_expressions(allowed)
        parts = [f"/{escape_slashes(expression)}/" for expression in present]
        parts += [f"~/{expression}/" for expression in absent]
        return self.write_terminal(" & ".join(parts))

    def write_strings(self, strings: Strings) -> str:
        if strings.values is not None and not strings.formats:
            return self.write_terminal(" | ".join(map(quote_json_string, strings.values)))
        if strings.absent_patterns:
            return self._write_unescaped_strings(strings)
        if not strings.patterns and not strings.formats:
            return self._write_without_excluded([f'/"{STRING_CHARACTER}{size_range(strings)}"/'], strings)
        return self._write_json_rule(make_string_schema(strings))

    def _write_unescaped_strings(self, strings: Strings) -> str:
        """Write the strings without any escape: only they can be compared with ``absent_patterns``."""
        present = [match_json_string(use_ascii_classes(pattern)) for pattern in sorted(strings.patterns)]
        absent = [match_json_string(pattern) for pattern in sorted(strings.absent_patterns)]
        if strings.formats or None in present or None in absent:
            self.refuse(f"the pattern {min(strings.absent_patterns)!r}", "it can't be negated here")
            return self.write_strings(replace(strings, absent_patterns=frozenset()))
        parts = [f'/"{UNESCAPED_CHARACTER}{size_range(strings)}"/']
        parts += [f"/{expression}/" for expression in present]
        parts += [f"~/{expression}/" for expression in absent]
        return self._write_without_excluded(parts, strings)

    def _write_without_excluded(self, parts: list[str], strings: Strings) -> str:
        if strings.excluded:
            parts = [*parts, f"~({' | '.join(map(quote_json_string, sorted(strings.excluded)))})"]
        return self.write_terminal(" & ".join(parts))

    def _write_json_rule(self, schema: JsonObject) -> str:
        """Write the rule of a number or string that llguidance's own JSON schemas describe."""
        guidance: JsonObject = {"whitespace_flexible": False}
        if self.style.white_space:
            guidance = {"whitespace_pattern": self.style.white_space}
        guided = {**schema, "x-guidance": {**guidance, "json_allowed_escapes": ALLOWED_ESCAPES}}
        return self.write_rule(f"%json {json.dumps(guided)}")

    def write_separator(self, expression: str) -> str:
        if expression in (",", ":"):
            return quote_literal(expression)
        return self.write_terminal(f"/{escape_slashes(expression)}/")

    def refuse(self, pointer: str, reason: str) -> None:
        """Raise OvspecError, unless parts that can't be enforced are to be left out."""
        if not self.graph.lenient:
            raise make_refusal(pointer, reason)


def make_refusal(pointer: str, reason: str) -> OvspecError:
    return OvspecError(f"{pointer}: {reason}; rewrite it, or set `json_schema_mode='checked'`.")


def write_schema_as_lark(rules: RuleWriter, close_objects: bool) -> str:
    """Return the whole grammar.

    Args:
        close_objects: objects have only the listed properties, where the schema says nothing.

    Raises:
        OvspecError: no text matches, or something can't be enforced.
    """
    root = rules.graph.root
    if rules.graph.is_empty(root):
        raise OvspecError("#: no JSON text satisfies this schema.")
    header: list[str] = []
    if rules.style.white_space:
        header = ['%llguidance {"ignore_once": true}', f"%ignore /{escape_slashes(rules.style.white_space)}/"]
    start = rules.node_rule(root)
    rules.write_node_rules(close_objects)
    return "\n".join([*header, f"start: {start}", *rules.lines])


def write_node_options(rules: RuleWriter, node: SchemaNode, close_objects: bool) -> str:
    """Return the alternatives of a node; raises OvspecError if some can't be enforced and matter."""
    options: dict[str, None] = {}
    for alternatives in rules.graph.find_shape(node).by_type.values():
        usable = [alternative for alternative in alternatives if not isinstance(alternative, Unenforceable)]
        for alternative in alternatives:
            if isinstance(alternative, Unenforceable) and not (usable and alternative.dispensable):
                raise make_refusal(alternative.pointer, alternative.reason)
        options.update((write_alternative(rules, alternative, close_objects), None) for alternative in usable)
    return " | ".join(options)


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
    name_alternatives = rules.graph.find_shape(objects.names).by_type.get("string", ())
    for alternative in name_alternatives:
        if isinstance(alternative, Unenforceable):
            rules.refuse(alternative.pointer, alternative.reason)
    names = [strings for strings in name_alternatives if isinstance(strings, Strings)]
    objects = list_allowed_names(objects, names)
    colon = rules.write_separator(rules.style.key_separator)
    comma = rules.write_separator(rules.style.item_separator)
    pairs: list[tuple[str, bool]] = []
    for name, node in objects.properties:
        is_allowed = any(strings.accepts_text(name) for strings in names)
        if is_allowed and not rules.graph.is_empty(node):
            pair = f"{quote_json_string(name)} {colon} {rules.node_rule(node)}"
            pairs.append((pair, name in objects.required))
    if objects.any_order and len(pairs) <= MAX_UNORDERED and all(required for _, required in pairs):
        items = [rules.write_rule(pair) for pair, _ in pairs]
        return f'"{{" {write_in_any_order(rules, items, len(items), len(items), comma)} "}}"'
    unlisted = write_unlisted_property(rules, objects, names, colon)
    ordered = [(rules.write_rule(pair), required) for pair, required in pairs]
    sizes = (objects.min_size, objects.max_size)
    return f'"{{" {write_in_order(rules, ordered, sizes, unlisted, comma)} "}}"'


def list_allowed_names(objects: Objects, names: list[Strings]) -> Objects:
    """Return the objects with all of ``names`` as listed properties, if they are certain values."""
    if any(strings.values is None for strings in names):
        return objects
    listed = dict(objects.properties)
    allowed = dict.fromkeys(name for strings in names for name in strings.values or ())
    unlisted = tuple((name, objects.property_node(name)) for name in allowed if name not in listed)
    return replace(objects, properties=(*objects.properties, *unlisted), rest=NO_VALUE, patterns=())


def write_unlisted_property(rules: RuleWriter, objects: Objects, names: list[Strings], colon: str) -> str | None:
    """Write the rule of a property that isn't listed; None if there is none."""
    listed = frozenset(name for name, _ in objects.properties)
    options: list[str] = []
    for pattern, node in objects.patterns:
        rivals = ((rival, rival_node) for rival, rival_node in objects.patterns if rival != pattern)
        overlapping = (rival_node for rival, rival_node in rivals if not rules.are_disjoint_patterns(rival, pattern))
        value_node = join_nodes(node, *overlapping)
        if rules.graph.is_empty(value_node):
            continue
        present, absent = split_lookaheads(pattern)
        for strings in names:
            patterns, absent_patterns = strings.patterns.union(present), strings.absent_patterns.union(absent)
            excluded = strings.excluded | listed
            key = replace(strings, patterns=patterns, absent_patterns=absent_patterns, excluded=excluded)
            if not rules.graph.has_no_text(key):
                options.append(f"{rules.write_strings(key)} {colon} {rules.node_rule(value_node)}")
    if not rules.graph.is_empty(objects.rest):
        rest_rule = rules.node_rule(objects.rest)
        property_patterns = frozenset(pattern for pattern, _ in objects.patterns)
        for strings in names:
            absent_patterns = strings.absent_patterns | property_patterns
            key = replace(strings, excluded=strings.excluded | listed, absent_patterns=absent_patterns)
            # Where it can't be said which names have none of the patterns, there are no others.
            compared = [*key.absent_patterns, *key.patterns] if property_patterns else key.absent_patterns
            if None not in map(match_json_string, compared):
                options.append(f"{rules.write_strings(key)} {colon} {rest_rule}")
    return rules.write_option_rule(options)


# ---------------------------------------------------------------- arrays, and lists of properties


def write_array(rules: RuleWriter, arrays: Arrays) -> str:
    if arrays.unique and arrays.max_size > 1:
        value_expressions = list_item_values(rules, arrays)
        if value_expressions is not None:
            return write_unique_array(rules, arrays, value_expressions)
        rules.allows_repeats = True
    comma = rules.write_separator(rules.style.item_separator)
    body = write_array_rest(rules, arrays, comma)
    for i, node in reversed([*enumerate(arrays.prefix)]):
        if i < arrays.max_size:
            body = make_optional(f"{comma} " * (i > 0) + f"{rules.node_rule(node)} {body}", i >= arrays.min_size)
    return f'"[" {body} "]"'


def write_array_rest(rules: RuleWriter, arrays: Arrays, comma: str) -> str:
    """Return the expression of the items after the prefix."""
    length = len(arrays.prefix)
    least = max(arrays.min_size - length, 0)
    most = arrays.max_size - length
    if most <= 0 or rules.graph.is_empty(arrays.items):
        return ""
    item = rules.node_rule(arrays.items)
    if length:
        return repeat_expression(f"{comma} {item}", least, most)
    return make_optional(separate_expression(item, comma, least - 1, most), not least)


def list_item_values(rules: RuleWriter, arrays: Arrays) -> list[str] | None:
    """Return the expressions of all items that may be in an array; None if they aren't few."""
    if arrays.prefix or rules.graph.is_empty(arrays.items):
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
    """Return an array of different values: in any order if they are few, else in the order of the schema."""
    most = min(arrays.max_size, len(value_expressions))
    comma = rules.write_separator(rules.style.item_separator)
    if len(value_expressions) <= MAX_UNORDERED:
        body = write_in_any_order(rules, value_expressions, arrays.min_size, most, comma)
    else:
        sizes = (arrays.min_size, most if most < len(value_expressions) else inf)
        body = write_in_order(rules, [(expression, False) for expression in value_expressions], sizes, None, comma)
    return f'"[" {body} "]"'


def write_in_any_order(rules: RuleWriter, items: list[str], least: int, most: float, comma: str) -> str:
    """Write the rule of ``least`` to ``most`` different ones of ``items``, in any order."""

    def write_rest(unused: tuple[str, ...]) -> str:
        count = len(items) - len(unused)
        options = ['""'] * (count >= least)
        for item in unused if count < most else ():
            rest = write_rest(tuple(other for other in unused if other != item))
            options.append(f"{comma} " * (count > 0) + f"{item} {rest}")
        return rules.write_rule(" | ".join(options))

    return write_rest(tuple(items))


def write_in_order(
    rules: RuleWriter, items: list[tuple[str, bool]], sizes: tuple[int, float], extra: str | None, comma: str
) -> str:
    """Write the rule of some of ``items``, (expression, whether required), in their order, and any number of ``extra``.

    sizes: minimum and maximum of all together; all of ``extra`` count as one for the minimum, because they may be the
        same.
    """
    least, most = sizes
    max_counted = max(least if most == inf else int(most), 1)  # more aren't told apart
    if len(items) * max_counted > MAX_STATES:
        rules.refuse("#", "the number of properties or items can't be enforced for so many")
        return write_in_order(rules, items, (0, inf), extra, comma)
    # By the number of items before: the rule of the rest of the list; None if no rest is possible.
    item_counts = range(max_counted + 1)
    rests = [write_extras(rules, least - count, most - count, count > 0, extra, comma) for count in item_counts]
    for item, required in reversed(items):
        later_rests = [*rests]
        for count in reversed(item_counts):
            options: list[str] = []
            rest_after_item = later_rests[min(count + 1, max_counted)]
            if rest_after_item is not None and count < most:
                options.append(f"{comma} " * (count > 0) + f"{item} {rest_after_item}")
            rest_without_item = later_rests[count]
            if rest_without_item is not None and not required:
                options.append(rest_without_item)
            rests[count] = rules.write_option_rule(options)
    if rests[0] is None:
        raise OvspecError("#: no JSON text has so many properties or items; ask for fewer.")
    return rests[0]


def write_extras(
    rules: RuleWriter, lacking_items: int, items_left: float, follows_items: bool, extra: str | None, comma: str
) -> str | None:
    """Write the rule of the extra items at the end of a list, at most ``items_left``; None if too many are lacking."""
    if lacking_items > 1 or (lacking_items == 1 and (extra is None or items_left == 0)):
        return None
    if extra is None or items_left == 0:
        return '""'
    if follows_items:
        return rules.write_rule(repeat_expression(f"{comma} {extra}", max(lacking_items, 0), items_left))
    return rules.write_rule(make_optional(separate_expression(extra, comma, 0, items_left), lacking_items <= 0))


def separate_expression(item: str, comma: str, least_more: int, most: float) -> str:
    """Return the expression of an item and ``least_more`` or more others, at most ``most`` together."""
    return f"{item} {repeat_expression(f'{comma} {item}', max(least_more, 0), most - 1)}"


def repeat_expression(item: str, least: int, most: float) -> str:
    if most == inf:
        return f"({item}){{{least},}}" if least else f"({item})*"
    return f"({item}){{{least},{most}}}" if most else ""


def make_optional(expression: str, optional: bool) -> str:
    return f"({expression})?" if optional else expression


# ---------------------------------------------------------------- numbers and strings


def make_multiple_schema(allowed: Numbers) -> JsonObject:
    """Return llguidance's own schema of the multiples of a number, with a bounded number of digits."""
    assert allowed.multiple
    json_type = "integer" if allowed.integer else "number"
    schema: JsonObject = {"type": json_type, "multipleOf": to_json_number(allowed.multiple)}
    needs_bounds = allowed.multiple < MAX_BOUNDED_MULTIPLE  # else the bounds would take llguidance too long
    usual_bounds = (allowed.low, "Minimum", -numbers.LARGEST_EXACT), (allowed.high, "Maximum", numbers.LARGEST_EXACT)
    for bound, keyword, usual in usual_bounds:
        if bound:
            name = f"exclusive{keyword}" if bound.exclusive else keyword.lower()
            schema[name] = to_json_number(bound.value)
        elif needs_bounds:
            schema[keyword.lower()] = usual
    return schema


def size_range(strings: Strings) -> str:
    """Return the repetition of a character with which an expression has the right lengths."""
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
    patterns = [*sorted(strings.patterns), *(STRICTER_PATTERNS[name] for name in formats if name in STRICTER_PATTERNS)]
    parts = [{"pattern": pattern} for pattern in patterns] + [{"format": name} for name in formats]
    if strings.excluded:
        parts.append({"pattern": match_other_texts(strings.excluded)})
    return {**schema, "allOf": parts}


def quote_json_string(value: str) -> str:
    """Return a literal of Lark that is the JSON string of ``value``."""
    return quote_literal(json.dumps(value, ensure_ascii=False))


def quote_literal(text: str) -> str:
    """Return a literal of Lark that is ``text``."""
    return json.dumps(text, ensure_ascii=False)


def to_json_number(value: Decimal) -> int | float:
    if value == value.to_integral_value():
        return int(value)
    return float(value)
