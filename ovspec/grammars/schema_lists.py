"""Writes the rules of JSON arrays, and of lists of properties."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

from ovspec.errors import OvspecError
from ovspec.grammars import numbers
from ovspec.grammars.schema_rules import Rules, quoted
from ovspec.grammars.shapes import Arrays, Booleans, Node, Nulls, Numbers, Strings, both

MOST_STATES = 20_000  # of one object or array
MOST_ORDERED = 5  # values or properties that may come in any order


def array(rules: Rules, each: Arrays) -> str:
    if each.unique and (each.most is None or each.most > 1):
        values = None if each.contains else few(rules, each)
        if values is not None:
            return unique(rules, each, values)
        rules.repeats = True
    comma = rules.separator(rules.style.item_separator)
    if each.contains:
        return containing(rules, each, comma)
    body = tail(rules, each, comma)
    for i in range(len(each.prefix) - 1, -1, -1):
        if each.most is not None and i >= each.most:
            continue
        item = rules.value(each.prefix[i])
        body = f"{comma + ' ' if i else ''}{item} {body}"
        body = body if i < each.least else f"({body})?"
    return f'"[" {body} "]"'


def tail(rules: Rules, each: Arrays, comma: str) -> str:
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


def containing(rules: Rules, each: Arrays, comma: str) -> str:
    """Return an array of which some items match a node of their own, counted in the states of its rules."""
    (wanted, least, most), sizes = each.contains[0], max(each.least, each.most or 0, len(each.prefix), 1)
    matches = most if most is not None else least
    if len(each.contains) > 1 or sizes * (matches + 1) > MOST_STATES:
        rules.refuse(rules.schemas.place(wanted), "contains can't be enforced with others or with such large bounds")
        return array(rules, replace(each, contains=()))

    @functools.cache
    def options(count: int, matched: int) -> list[tuple[Node, int, int]]:
        """Return (item, new count, new number of matches) for each item that may follow ``count`` items."""
        item, after = each.item(count), min(count + 1, sizes)
        # Where the number of matches is limited, the others must not match.
        other = both(item, rules.schemas.opposite(wanted)) if most is not None else item
        found = [(both(item, wanted), after, min(matched + 1, matches))] if most is None or matched < most else []
        found += [(other, after, matched)]
        return [one for one in found if not rules.schemas.empty(one[0])] if count != each.most else []

    @functools.cache
    def ends(count: int, matched: int) -> bool:
        """Return whether the array can come to its end."""
        further = (state[1:] for state in options(count, matched) if state[1:] != (count, matched))
        return (count >= each.least and matched >= least) or any(ends(*state) for state in further)

    def state(count: int, matched: int) -> str:
        key = f"contains {each} {count} {matched}"
        if key in rules.names:
            return rules.names[key]
        name = rules.names[key] = f"r{len(rules.names)}"
        sep = f"{comma} " if count else ""
        following = [
            f"{sep}{rules.value(item)} {state(*after)}" for item, *after in options(count, matched) if ends(*after)
        ]
        rules.write(name, " | ".join([*['""'] * (count >= each.least and matched >= least), *following]))
        return name

    if not ends(0, 0):
        raise OvspecError(f"{rules.schemas.place(wanted)}: no JSON text has an array with so many of these items.")
    return f'"[" {state(0, 0)} "]"'


def few(rules: Rules, each: Arrays) -> list[str] | None:
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


def unique(rules: Rules, each: Arrays, values: list[str]) -> str:
    """Return an array of different values: in any order if they are few, else in the order of the schema."""
    most = None if each.most is None or each.most >= len(values) else each.most
    comma = rules.separator(rules.style.item_separator)
    if len(values) <= MOST_ORDERED:
        body = any_order(rules, values, each.least, len(values) if most is None else most, comma)
    else:
        body = in_order(rules, [(value, False) for value in values], (each.least, most), None, comma)
    return f'"[" {body} "]"'


def any_order(rules: Rules, items: list[str], least: int, most: int, comma: str) -> str:
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
    rules: Rules, items: list[tuple[str, bool]], counts: tuple[int, int | None], extra: str | None, comma: str
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


def extras(rules: Rules, count: int, least: int, left: int | None, extra: str | None, comma: str) -> str | None:
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
