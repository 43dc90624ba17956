"""Writes the grammar of the JSON texts of a schema, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ovspec.errors import OvspecError
from ovspec.grammars.json_schema import numbers
from ovspec.grammars.json_schema.expressions import slashed, sought, split
from ovspec.grammars.json_schema.rules import RuleWriter, quoted
from ovspec.grammars.json_schema.schemas import Schemas
from ovspec.grammars.json_schema.shapes import (
    NOTHING,
    Alternative,
    Arrays,
    Booleans,
    Node,
    Nulls,
    Numbers,
    Objects,
    Refused,
    Strings,
    both,
    closed,
)  # fmt: skip

MOST_STATES = 20_000  # of one object or array
MOST_ORDERED = 5  # values or properties that may come in any order


def grammar_of(rules: RuleWriter, close: bool) -> str:
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


def options_of(rules: RuleWriter, node: Node, close: bool) -> str:
    """Return the alternatives of a node; raises OvspecError if some can't be enforced and matter."""
    options: dict[str, None] = {}
    for alternatives in rules.schemas.shape(node).kinds.values():
        usable = [each for each in alternatives if not isinstance(each, Refused)]
        refused = [each for each in alternatives if isinstance(each, Refused) and not (usable and each.dispensable)]
        if refused:
            raise OvspecError(f"{refused[0].at}: {refused[0].why}; rewrite it, or set `json_schema_mode='checked'`.")
        options.update((alternative(rules, each, close), None) for each in usable)
    return " | ".join(options)


def alternative(rules: RuleWriter, each: Alternative, close: bool) -> str:
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


# ---------------------------------------------------------------- objects


def object_rule(rules: RuleWriter, each: Objects) -> str:
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


def extra(rules: RuleWriter, each: Objects, allowed: list[Strings], colon: str) -> str | None:
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


# ---------------------------------------------------------------- arrays, and lists of properties


def array(rules: RuleWriter, each: Arrays) -> str:
    if each.unique and (each.most is None or each.most > 1):
        values = few(rules, each)
        if values is not None:
            return unique(rules, each, values)
        rules.repeats = True
    comma = rules.separator(rules.style.item_separator)
    body = tail(rules, each, comma)
    for i in range(len(each.prefix) - 1, -1, -1):
        if each.most is not None and i >= each.most:
            continue
        item = rules.value(each.prefix[i])
        body = f"{comma + ' ' if i else ''}{item} {body}"
        body = body if i < each.least else f"({body})?"
    return f'"[" {body} "]"'


def tail(rules: RuleWriter, each: Arrays, comma: str) -> str:
    """Return what may follow the items of the prefix."""
    length = len(each.prefix)
    least, most = max(each.least - length, 0), None if each.most is None else each.most - length
    if (most is not None and most <= 0) or rules.schemas.empty(each.items):
        return ""
    item = rules.value(each.items)
    if length:
        return repeated(f"{comma} {item}", least, most)
    more = f"{item} {repeated(f'{comma} {item}', max(least - 1, 0), None if most is None else most - 1)}"
    return more if least else f"({more})?"


def few(rules: RuleWriter, each: Arrays) -> list[str] | None:
    """Return the expressions of all items that may be in an array; None if they aren't few."""
    if each.prefix or rules.schemas.empty(each.items):
        return None
    found: list[str] = []
    for alternatives in rules.schemas.shape(each.items).kinds.values():
        for one in alternatives:
            match one:
                case Nulls():
                    found.append('"null"')
                case Booleans():
                    found += [json.dumps(json.dumps(value)) for value in sorted(one.values)]
                case Numbers() if one.values is not None:
                    found += [f"/{numbers.spelt(value)}/" for value in sorted(one.values)]
                case Strings() if one.values is not None and not one.formats:
                    found += map(quoted, one.values)
                case _:
                    return None
    return list(dict.fromkeys(found))


def unique(rules: RuleWriter, each: Arrays, values: list[str]) -> str:
    """Return an array of different values: in any order if they are few, else in the order of the schema."""
    most = None if each.most is None or each.most >= len(values) else each.most
    comma = rules.separator(rules.style.item_separator)
    if len(values) <= MOST_ORDERED:
        body = any_order(rules, values, each.least, len(values) if most is None else most, comma)
    else:
        body = in_order(rules, [(value, False) for value in values], (each.least, most), None, comma)
    return f'"[" {body} "]"'


def any_order(rules: RuleWriter, items: list[str], least: int, most: int, comma: str) -> str:
    """Return ``least`` to ``most`` different ones of ``items``, in any order."""

    def state(left: tuple[str, ...]) -> str:
        count = len(items) - len(left)
        options = ['""'] if count >= least else []
        if count < most:
            sep = f"{comma} " if count else ""
            options += [f"{sep}{one} {state(tuple(x for x in left if x != one))}" for one in left]
        return rules.rule(" | ".join(options))

    return state(tuple(items))


def in_order(
    rules: RuleWriter, items: list[tuple[str, bool]], counts: tuple[int, int | None], extra: str | None, comma: str
) -> str:
    """Return some of ``items``, (expression, whether required), in their order, and then any number of ``extra``.

    counts: minimum and maximum of all together; all of ``extra`` count as one for the minimum, because they may
        be the same.
    """
    least, most = counts
    cap = max(least, 1) if most is None else max(most, 1)
    if len(items) * cap > MOST_STATES:
        rules.refuse("#", "the number of properties or items can't be enforced for so many")
        return in_order(rules, items, (0, None), extra, comma)
    made: dict[int, str | None] = {}
    for count in range(cap + 1):  # how many were written
        made[count] = extras(rules, count, least, None if most is None else most - count, extra, comma)
    for item, required in reversed(items):
        after = dict(made)
        for count in range(cap, -1, -1):
            following = after[min(count + 1, cap)] if most is None or count < most else None
            written = None if following is None else f"{comma + ' ' if count else ''}{item} {following}"
            skipped = None if required else after[count]
            options = [option for option in (written, skipped) if option is not None]
            made[count] = rules.rule(" | ".join(options)) if options else None
    if made[0] is None:
        raise OvspecError("#: no JSON text has so many properties or items; ask for fewer.")
    return made[0]


def extras(rules: RuleWriter, count: int, least: int, left: int | None, extra: str | None, comma: str) -> str | None:
    lacking = least - count
    if lacking > 1 or (lacking == 1 and (extra is None or left == 0)):
        return None
    if extra is None or left == 0:
        return '""'
    if count:
        return rules.rule(repeated(f"{comma} {extra}", max(lacking, 0), left))
    more = f"{extra} {repeated(f'{comma} {extra}', 0, None if left is None else left - 1)}"
    return rules.rule(more if lacking > 0 else f"({more})?")


def repeated(item: str, least: int, most: int | None) -> str:
    """Return the expression of ``item``, repeated."""
    if most is None:
        return f"({item}){'*' if not least else f'{{{least},}}'}"
    return f"({item}){{{least},{most}}}" if most else ""
