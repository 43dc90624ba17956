"""Writes the rules of JSON objects."""

from __future__ import annotations

from dataclasses import replace

from ovspec.grammars.expressions import sought, split
from ovspec.grammars.schema_lists import MOST_ORDERED, any_order, in_order
from ovspec.grammars.schema_rules import Rules, quoted
from ovspec.grammars.shapes import NOTHING, Objects, Refused, Strings, both


def object_rule(rules: Rules, each: Objects) -> str:
    names = rules.schemas.shape(each.names).kinds.get("string", ())
    for refused in names:
        if isinstance(refused, Refused):
            rules.refuse(refused.at, refused.why)
    allowed = [alternative for alternative in names if isinstance(alternative, Strings)]
    each = with_names(each, allowed)
    pairs: list[tuple[str, bool]] = []
    colon, comma = (rules.separator(text) for text in (rules.style.key_separator, rules.style.item_separator))
    for name, node in each.properties:
        fits = any(alternative.fits(name) for alternative in allowed)
        if fits and not rules.schemas.empty(node):
            pairs.append((f"{quoted(name)} {colon} {rules.value(node)}", name in each.required))
    if each.any_order and len(pairs) <= MOST_ORDERED and all(required for _, required in pairs):
        items = [rules.rule(pair) for pair, _ in pairs]
        return f'"{{" {any_order(rules, items, len(items), len(items), comma)} "}}"'
    others = extra(rules, each, allowed, colon)
    items = [(rules.rule(pair), required) for pair, required in pairs]
    return f'"{{" {in_order(rules, items, (each.least, each.most), others, comma)} "}}"'


def with_names(each: Objects, allowed: list[Strings]) -> Objects:
    """Return the object with its names listed, if only some are allowed."""
    if not allowed or any(alternative.values is None for alternative in allowed):
        return each if allowed else replace(each, rest=NOTHING, patterns=())
    listed = dict(each.properties)
    names = dict.fromkeys(name for alternative in allowed for name in alternative.values or ())
    more = tuple((name, each.node(name)) for name in names if name not in listed)
    return replace(each, properties=(*each.properties, *more), rest=NOTHING, patterns=())


def extra(rules: Rules, each: Objects, allowed: list[Strings], colon: str) -> str | None:
    """Return the properties that aren't listed; None if there are none."""
    taken = frozenset(name for name, _ in each.properties)
    options = []
    for pattern, node in each.patterns:
        near = [other for text, other in each.patterns if text == pattern or not rules.patterns_apart(text, pattern)]
        value = both(node, *near)
        if not rules.schemas.empty(value):
            for names in allowed:
                present, absent = split(pattern)
                patterns, without = names.patterns.union(present), names.absent.union(absent)
                key = replace(names, patterns=patterns, absent=without, excluded=names.excluded | taken)
                if not rules.schemas.no_text(key):
                    options.append(f"{rules.string(key)} {colon} {rules.value(value)}")
    if not rules.schemas.empty(each.rest):
        value = rules.value(each.rest)
        without = frozenset(pattern for pattern, _ in each.patterns)
        for names in allowed:
            key = replace(names, excluded=names.excluded | taken, absent=names.absent | without)
            # Where it can't be said which names have none of the patterns, there are no others.
            if not any(sought(pattern) is None for pattern in (*key.absent, *(key.patterns if without else ()))):
                options.append(f"{rules.string(key)} {colon} {value}")
    return rules.rule(" | ".join(options)) if options else None
