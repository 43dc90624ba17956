"""Writes the grammar of the JSON texts of a schema."""

from __future__ import annotations

import json
from typing import Any

from ovspec.errors import OvspecError
from ovspec.grammars.expressions import slashed
from ovspec.grammars.schema_lists import array
from ovspec.grammars.schema_objects import object_rule
from ovspec.grammars.schema_rules import Rules
from ovspec.grammars.schemas import Schemas
from ovspec.grammars.shapes import (
    Alternative,
    Arrays,
    Booleans,
    Node,
    Nulls,
    Numbers,
    Objects,
    Refused,
    Strings,
    closed,
)


def grammar_of(rules: Rules, close: bool) -> str:
    """Return the whole grammar.

    Args:
        close: objects have only the listed properties, where the schema says nothing.

    Raises:
        OvspecError: no text matches, or something can't be enforced.
    """
    root = rules.schemas.root
    if rules.schemas.empty(root):
        raise OvspecError("#: no JSON text satisfies this schema.")
    head = []
    if rules.style.white_space:
        head = ['%llguidance {"ignore_once": true}', f"%ignore /{slashed(rules.style.white_space)}/"]
    start = rules.value(root)
    while rules.waiting:
        node, name = rules.waiting.pop()
        rules.write(name, options_of(rules, node, close))
    return "\n".join([*head, f"start: {start}", *rules.lines])


def options_of(rules: Rules, node: Node, close: bool) -> str:
    """Return the alternatives of a node; raises OvspecError if some can't be enforced and matter."""
    options: dict[str, None] = {}
    for alternatives in rules.schemas.shape(node).kinds.values():
        usable = [each for each in alternatives if not isinstance(each, Refused)]
        refused = [each for each in alternatives if isinstance(each, Refused) and not (usable and each.dispensable)]
        if refused:
            raise OvspecError(f"{refused[0].at}: {refused[0].why}; rewrite it, or set `json_schema_mode='checked'`.")
        options.update((alternative(rules, each, close), None) for each in usable)
    return " | ".join(options)


def alternative(rules: Rules, each: Alternative, close: bool) -> str:
    match each:
        case Nulls():
            return '"null"'
        case Booleans():
            return " | ".join(json.dumps(json.dumps(value)) for value in sorted(each.values))
        case Numbers():
            return rules.number(each)
        case Strings():
            return rules.string(each)
        case Arrays():
            return array(rules, each)
        case Objects():
            return object_rule(rules, closed(each) if close else each)
    raise AssertionError(each)


def tracks_of(schemas: Schemas) -> list[list[dict[str, Any]]]:
    """Return where arrays are whose items must differ: for each node, by its number, the alternatives of a value.

    Arrays: {"unique", "prefix", "items"}; objects: {"properties", "patterns", "rest"}, with the numbers of nodes.
    """
    numbers = {schemas.root: 0}
    waiting, found = [schemas.root], list[list[dict[str, Any]]]()

    def number(node: Node) -> int:
        if node not in numbers:
            numbers[node] = len(numbers)
            waiting.append(node)
        return numbers[node]

    while waiting:
        found.append([])
        for alternatives in schemas.shape(waiting.pop(0)).kinds.values():
            for each in alternatives:
                if isinstance(each, Arrays):
                    prefix = [number(item) for item in each.prefix]
                    found[-1].append({"unique": each.unique, "prefix": prefix, "items": number(each.items)})
                elif isinstance(each, Objects):
                    properties = {name: number(value) for name, value in each.properties}
                    patterns = [(pattern, number(value)) for pattern, value in each.patterns]
                    found[-1].append({"properties": properties, "patterns": patterns, "rest": number(each.rest)})
    return found
