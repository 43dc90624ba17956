"""Writes the grammar of an object with separate properties: strings without quotes, other values as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from ovspec.base.errors import OvspecError

from ovspec.grammars.json_schema.expressions import (  # isort: skip
    escape_expression, escape_slashes, make_whole_text_expression, use_ascii_classes,
)  # fmt: skip
from ovspec.grammars.json_schema.shapes import Objects, SchemaNode, Strings, UnenforceableValues, close_object
from ovspec.grammars.json_schema.writing import RuleWriter, make_refusal, quote_literal, size_quantifier, write_in_order

# llguidance 1.9 fails if a token follows an expression, and only the expression's negated part could continue.
OPTIONAL_SPACE = "/ ?/"


@dataclass(frozen=True)
class ParameterExpressions:
    """The texts around names and values.

    before_name, after_name, after_value: expressions of Lark before a name, between name and value, and after
        ``value_end``.
    name_end: the text after a name; "" if it includes a token.
    value_end: the text after a value.
    token_follows: whether ``after_value`` begins with a token; otherwise no string may contain ``value_end``.
    """

    before_name: str
    after_name: str
    name_end: str
    value_end: str
    after_value: str
    token_follows: bool


def write_parameters_as_lark(
    rules: RuleWriter, close_objects: bool, layout: ParameterExpressions
) -> tuple[str, list[str]]:
    """Return (the whole grammar, the properties written as text without quotes).

    Args:
        close_objects: as for ``writing.write_schema_as_lark``.

    Raises:
        OvspecError: no object matches, or a part can't be enforced.
    """
    object_rules: list[str] = []
    text_names = set[str]()
    for objects in rules.graph.find_shape(rules.graph.root_node).by_type.get("object", ()):
        if isinstance(objects, UnenforceableValues):
            raise make_refusal(objects.pointer, objects.obstacle)
        assert isinstance(objects, Objects)
        if close_objects:
            objects = close_object(objects)
        object_rules.append(write_parameters(rules, objects, layout, text_names))
    if not object_rules:
        raise OvspecError("#: no object satisfies this schema; remove the contradiction in it.")
    rules.write_node_rules(close_objects)
    if rules.allows_repeats and not rules.graph.lenient:
        raise OvspecError("uniqueItems: this keyword can't be enforced in the model's tool format; remove it.")
    return "\n".join([f"start: {' | '.join(object_rules)}", *rules.lines]), sorted(text_names)


def write_parameters(rules: RuleWriter, objects: Objects, layout: ParameterExpressions, text_names: set[str]) -> str:
    """Write the rule of an object's properties; add the names of text properties to ``text_names``."""
    if not objects.properties and (objects.patterns or not rules.graph.fits_no_value(objects.unlisted_node)):
        rules.refuse_part("#", "properties that aren't listed can't be written in the model's tool format")
    property_rules: list[tuple[str, bool]] = []
    for property_name, node in objects.properties:
        if rules.graph.fits_no_value(node):
            continue
        if layout.name_end and (property_name + layout.name_end).find(layout.name_end) < len(property_name):
            raise OvspecError(f"#: the name {property_name!r:.80} can't be used in the model's tool format; change it.")
        value_expression = write_text_values(rules, node, layout)
        if value_expression:
            text_names.add(property_name)
        elif property_name in text_names:
            raise OvspecError(f"#: {property_name} may be a string or another type; allow only strings, or no strings.")
        else:
            value_ending = quote_literal(layout.value_end) if layout.value_end else OPTIONAL_SPACE
            value_expression = f"{rules.node_rule_name(node)} {value_ending}"
        property_start = f"{layout.before_name} {quote_literal(property_name)} {layout.after_name}"
        property_rules.append(
            (
                rules.write_rule(f"{property_start} {value_expression} {layout.after_value}"),
                property_name in objects.required,
            )
        )
    return write_in_order(rules, property_rules, (objects.min_size, objects.max_size), None, "")


def write_text_values(rules: RuleWriter, node: SchemaNode, layout: ParameterExpressions) -> str | None:
    """Return the terminals of a node's texts, each followed by ``value_end``; None if some values aren't texts."""
    by_type = rules.graph.find_shape(node).by_type
    if [json_type for json_type, alternatives in by_type.items() if alternatives] != ["string"]:
        return None
    text_terminals: list[str] = []
    for strings in by_type["string"]:
        if not isinstance(strings, Strings) or strings.formats or strings.absent_patterns:
            return None
        patterns = [
            make_whole_text_expression(use_ascii_classes(pattern), "(?s:.*)") for pattern in sorted(strings.patterns)
        ]
        if None in patterns:
            return None
        if strings.excluded and layout.token_follows:  # see OPTIONAL_SPACE
            return None
        text_terminals.append(write_text_terminal(rules, strings, [*filter(None, patterns)], layout))
    return f"({' | '.join(text_terminals)})"


def write_text_terminal(rules: RuleWriter, strings: Strings, patterns: list[str], layout: ParameterExpressions) -> str:
    """Write the terminal of some strings; ``patterns``: expressions of whole texts."""

    def quote_values(values: list[str] | tuple[str, ...]) -> str:
        return " | ".join(quote_literal(value + layout.value_end) for value in values)

    end_expression = escape_slashes(escape_expression(layout.value_end))
    text_conditions = [
        f"/(?s:.){size_quantifier(strings)}{end_expression}/",
        *(f"/{escape_slashes(pattern)}{end_expression}/" for pattern in patterns),
    ]
    if strings.values is not None:
        text_conditions.append(f"({quote_values(strings.values)})")
    if strings.excluded:
        text_conditions.append(f"~({quote_values(sorted(strings.excluded))})")
    if not layout.token_follows:
        text_conditions.append(f"~/(?s:.*){end_expression}(?s:.+)/")
    return rules.write_terminal(" & ".join(text_conditions))
