"""Writes the grammar of the JSON texts of a schema, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.grammars.json_schema import numbers
from ovspec.grammars.json_schema.expressions import in_ascii, none_of, slashed, sought, split
from ovspec.grammars.json_schema.formats import STRICTER
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
# Without \uXXXX: a key would have several spellings.
ESCAPES = 'nrbtf\\"'
UNESCAPED = r'[^"\\\x00-\x1f\x7f]'
MOST_BOUNDED = 1000
CHARACTER = r'([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])'


@dataclass(frozen=True)
class Style:
    """How texts are laid out: expressions of the white space between tokens, and of the separators."""

    white_space: str | None
    item_separator: str = ","
    key_separator: str = ":"


@dataclass
class RuleWriter:
    """Writes rules and terminals; those of equal content are written once.

    ``waiting``: nodes whose rules have names and aren't written yet.
    """

    schemas: Schemas
    style: Style
    patterns_apart: Callable[[str, str], bool]
    repeats: bool = False  # whether the grammar allows arrays to repeat items that must differ: see ``tracks_of``
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # content -> name of a rule or terminal
    _nodes: dict[Node, str] = field(default_factory=dict)
    waiting: list[tuple[Node, str]] = field(default_factory=list)

    # ------------------------------------------------------------ names

    def terminal(self, content: str) -> str:
        return self.rule(content, "T")

    def rule(self, content: str, letter: str = "r") -> str:
        if content not in self.names:
            self.names[content] = f"{letter}{len(self.names)}"
            self.lines.append(f"{self.names[content]}: {content}")
        return self.names[content]

    def value(self, node: Node) -> str:
        """Return the rule of a node, which is written later."""
        if node not in self._nodes:
            name = self._nodes[node] = f"v{len(self._nodes)}"
            self.waiting.append((node, name))
        return self._nodes[node]

    # ------------------------------------------------------------ values

    def number(self, each: Numbers) -> str:
        if each.multiple:
            exact = all(bound is None or abs(bound.value) <= numbers.EXACT for bound in (each.low, each.high))
            if each.excluded or not exact:
                self.refuse("#", "multipleOf can't be enforced beside excluded numbers or bounds beyond 2**53")
            return self._leaf(multiple_schema(each))
        right, wrong = numbers.expressions(each)
        return self.terminal(" & ".join([*(f"/{slashed(part)}/" for part in right), *(f"~/{part}/" for part in wrong)]))

    def string(self, each: Strings) -> str:
        if each.values is not None and not each.formats:
            return self.terminal(" | ".join(map(quoted, each.values)))
        if each.absent:
            return self._unescaped(each)
        if not each.patterns and not each.formats:
            return self._without_excluded([f'/"{CHARACTER}{lengths(each)}"/'], each)
        return self._leaf(string_schema(each))

    def _unescaped(self, each: Strings) -> str:
        """Return the texts without any escape that fit ``each``: only they can be compared with ``absent``."""
        present = [sought(in_ascii(pattern)) for pattern in sorted(each.patterns)]
        absent = [sought(pattern) for pattern in sorted(each.absent)]
        if each.formats or None in present or None in absent:
            self.refuse(f"the pattern {min(each.absent)!r}", "it can't be negated here")
            return self.string(replace(each, absent=frozenset()))
        parts = [
            f'/"{UNESCAPED}{lengths(each)}"/',
            *(f"/{part}/" for part in present),
            *(f"~/{part}/" for part in absent),
        ]
        return self._without_excluded(parts, each)

    def _without_excluded(self, parts: list[str], each: Strings) -> str:
        excluded = " | ".join(map(quoted, sorted(each.excluded)))
        return self.terminal(" & ".join([*parts, f"~({excluded})"] if excluded else parts))

    def _leaf(self, schema: dict[str, Any]) -> str:
        """Return the rule of a number or string that llguidance's own JSON schemas describe."""
        white_space = self.style.white_space
        style = {"whitespace_pattern": white_space} if white_space else {"whitespace_flexible": False}
        guided = {**schema, "x-guidance": {**style, "json_allowed_escapes": ESCAPES}}
        return self.rule(f"%json {json.dumps(guided)}")

    def separator(self, expression: str) -> str:
        return quoted_text(expression) if expression in (",", ":") else self.terminal(f"/{slashed(expression)}/")

    def refuse(self, at: str, why: str) -> None:
        """Raise OvspecError, unless what can't be enforced is to be left out."""
        if not self.schemas.lenient:
            raise OvspecError(f"{at}: {why}; rewrite it, or set `json_schema_mode='checked'`.")


def grammar_of(rules: RuleWriter, close_objects: bool) -> str:
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
        rules.lines.append(f"{name}: {options_of(rules, node, close_objects)}")
    return "\n".join([*head, f"start: {start}", *rules.lines])


def options_of(rules: RuleWriter, node: Node, close_objects: bool) -> str:
    """Return the alternatives of a node; raises OvspecError if some can't be enforced and matter."""
    options: dict[str, None] = {}
    for alternatives in rules.schemas.shape(node).kinds.values():
        usable = [each for each in alternatives if not isinstance(each, Refused)]
        refused = [each for each in alternatives if isinstance(each, Refused) and not (usable and each.dispensable)]
        if refused:
            raise OvspecError(f"{refused[0].at}: {refused[0].why}; rewrite it, or set `json_schema_mode='checked'`.")
        options.update((alternative(rules, each, close_objects), None) for each in usable)
    return " | ".join(options)


def alternative(rules: RuleWriter, each: Alternative, close_objects: bool) -> str:
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
            return object_rule(rules, closed(each) if close_objects else each)
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


# ---------------------------------------------------------------- numbers and strings


def multiple_schema(each: Numbers) -> dict[str, Any]:
    """Return llguidance's own schema of the multiples of a number, with a bounded number of digits."""
    assert each.multiple
    schema = {"type": "integer" if each.integer else "number", "multipleOf": as_number(each.multiple)}
    bounded = each.multiple < MOST_BOUNDED  # else the bounds would take llguidance too long
    for bound, key, usual in ((each.low, "minimum", -numbers.EXACT), (each.high, "maximum", numbers.EXACT)):
        if bound or bounded:
            name = f"exclusive{key.capitalize()}" if bound and bound.strict else key
            schema[name] = as_number(bound.value) if bound else usual
    return schema


def lengths(each: Strings) -> str:
    return "*" if not each.least and each.most is None else f"{{{each.least},{'' if each.most is None else each.most}}}"


def string_schema(each: Strings) -> dict[str, Any]:
    """Return llguidance's own schema of a string."""
    schema: dict[str, Any] = {"type": "string", "minLength": each.least}
    if each.values is not None:
        schema["enum"] = list(each.values)
    if each.most is not None:
        schema["maxLength"] = each.most
    patterns = [*sorted(each.patterns), *(STRICTER[form] for form in sorted(each.formats) if form in STRICTER)]
    parts = [{"pattern": pattern} for pattern in patterns] + [{"format": form} for form in sorted(each.formats)]
    if each.excluded:
        parts.append({"pattern": none_of(each.excluded)})
    return {**schema, "allOf": parts}


def quoted(value: str) -> str:
    """Return a literal of Lark that is the JSON string of ``value``."""
    return quoted_text(json.dumps(value, ensure_ascii=False))


def quoted_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def as_number(value: Any) -> int | float:
    return int(value) if value == value.to_integral_value() else float(value)
