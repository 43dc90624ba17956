"""What a JSON value may look like: alternatives for each JSON type, and what two of them have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import lcm
from typing import Any

# The numbers of schemas (see ``Schemas``) that a value must match (True) or must not match (False).
Node = frozenset[tuple[int, bool]]
EVERYTHING: Node = frozenset()
NOTHING: Node = frozenset({(0, True)})


@dataclass(frozen=True)
class Refused:
    """Values that can't be told apart from forbidden ones while a text is generated.

    ``dispensable``: leaving them out forbids only values that break a schema which needn't match. ``fractions``: they
    are numbers, but no integers.
    """

    at: str  # JSON pointer of the keyword
    why: str
    dispensable: bool = False
    fractions: bool = False


@dataclass(frozen=True)
class Nulls:
    pass


@dataclass(frozen=True)
class Booleans:
    values: frozenset[bool] = frozenset({False, True})


@dataclass(frozen=True)
class Bound:
    value: Decimal
    strict: bool  # the bound itself is excluded


@dataclass(frozen=True)
class Numbers:
    """``values``: the only ones, if not None. ``multiple``: all are multiples of it."""

    integer: bool = False
    low: Bound | None = None
    high: Bound | None = None
    multiple: Decimal | None = None
    values: frozenset[Decimal] | None = None
    excluded: frozenset[Decimal] = frozenset()

    def fits(self, value: Decimal) -> bool:
        low, high, step = self.low, self.high, self.multiple
        above = not low or value > low.value or (value == low.value and not low.strict)
        below = not high or value < high.value or (value == high.value and not high.strict)
        whole = not self.integer or value == value.to_integral_value()
        return above and below and whole and value not in self.excluded and (not step or not remainder(value, step))


def remainder(value: Decimal, step: Decimal) -> int:
    """Return the rest of a division, exactly."""
    shift = 10 ** max(0, -int(value.as_tuple().exponent), -int(step.as_tuple().exponent))
    return int(value * shift) % int(step * shift)


@dataclass(frozen=True)
class Strings:
    """``patterns``, ``absent``: expressions that must or must not be found. ``values``: the only ones, if not None."""

    least: int = 0
    most: int | None = None
    patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    values: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()

    def fits(self, value: str) -> bool:
        """Return whether ``value`` meets everything but the formats."""
        right = self.least <= len(value) and (self.most is None or len(value) <= self.most)
        right = right and value not in self.excluded and (self.values is None or value in self.values)
        right = right and all(search_pattern(pattern, value) for pattern in self.patterns)
        return right and not any(search_pattern(pattern, value, False) for pattern in self.absent)


def search_pattern(pattern: str, text: str, unknown: bool = True) -> bool:
    """Return whether ``pattern`` is found in ``text``, or ``unknown`` if Python can't read it."""
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return unknown


@dataclass(frozen=True)
class Arrays:
    prefix: tuple[Node, ...] = ()
    items: Node = EVERYTHING
    least: int = 0
    most: int | None = None
    unique: bool = False

    def item(self, index: int) -> Node:
        return self.prefix[index] if index < len(self.prefix) else self.items


@dataclass(frozen=True)
class Objects:
    """Objects by their properties.

    ``properties``: listed names with all that applies to them. ``patterns``: (pattern of other names, node).
    ``rest``: of names that are neither; ``open``: the schema says nothing of them. ``names``: of all names.
    ``any_order``: the properties may come in any order.
    """

    properties: tuple[tuple[str, Node], ...] = ()
    patterns: tuple[tuple[str, Node], ...] = ()
    rest: Node = EVERYTHING
    required: frozenset[str] = frozenset()
    least: int = 0
    most: int | None = None
    names: Node = EVERYTHING
    any_order: bool = False
    open: bool = True

    def node(self, name: str) -> Node:
        """Return what applies to the property ``name``."""
        listed = dict(self.properties)
        if name in listed:
            return listed[name]
        matching = [node for pattern, node in self.patterns if search_pattern(pattern, name)]
        return both(*matching) if matching else self.rest


Alternative = Refused | Nulls | Booleans | Numbers | Strings | Arrays | Objects
KINDS: dict[str, Callable[[], Alternative]] = {
    "null": Nulls,
    "boolean": Booleans,
    "number": Numbers,
    "string": Strings,
    "array": Arrays,
    "object": Objects,
}


@dataclass(frozen=True)
class Shape:
    """The alternatives for each JSON type; a type that is missing isn't allowed."""

    kinds: dict[str, tuple[Alternative, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.kinds.values())


ANYTHING = Shape({kind: (make(),) for kind, make in KINDS.items()})


def only(kind: str, *alternatives: Alternative) -> Shape:
    """Return the shape of values of one type."""
    return Shape({kind: alternatives})


def but(kind: str, *alternatives: Alternative) -> Shape:
    """Return the shape of values that may have any other type, or these alternatives."""
    return Shape({**ANYTHING.kinds, kind: alternatives})


def union(*shapes: Shape) -> Shape:
    kinds: dict[str, dict[Alternative, None]] = {}
    for shape in shapes:
        for kind, alternatives in shape.kinds.items():
            kinds.setdefault(kind, {}).update(dict.fromkeys(alternatives))
    return Shape({kind: tuple(found) for kind, found in kinds.items() if found})


def both(*nodes: Node) -> Node:
    """Return the node of values that match all ``nodes``."""
    joined = frozenset().union(*nodes)
    contradiction = any((number, not sign) in joined for number, sign in joined)
    return NOTHING if contradiction or joined >= NOTHING else joined


def common(one: Alternative, other: Alternative) -> Alternative | None:
    """Return what two alternatives of one type have in common; None if that is nothing."""
    if one == other:
        return one
    match one, other:
        case (Refused(fractions=True), Numbers(integer=True)) | (Numbers(integer=True), Refused(fractions=True)):
            return None
        case Refused(), _:
            return one
        case _, Refused():
            return other
        case Booleans(), Booleans():
            values = one.values & other.values
            return Booleans(values) if values else None
        case Numbers(), Numbers():
            return common_numbers(one, other)
        case Strings(), Strings():
            return common_strings(one, other)
        case Arrays(), Arrays():
            return common_arrays(one, other)
        case Objects(), Objects():
            return common_objects(one, other)
    return None


def meeting(
    one: Shape, other: Shape, settle: Callable[[Alternative | None], Alternative | None] = lambda a: a
) -> Shape:
    """Return what two shapes have in common; ``settle`` may drop or change an alternative."""
    kinds: dict[str, tuple[Alternative, ...]] = {}
    for kind, mine in one.kinds.items():
        pairs = ((a, b) for a in mine for b in other.kinds.get(kind, ()))
        if joined := dict.fromkeys(each for a, b in pairs if (each := settle(common(a, b)))):
            kinds[kind] = tuple(joined)
    return Shape(kinds)


def common_numbers(one: Numbers, other: Numbers) -> Numbers | None:
    lows = [each.low for each in (one, other) if each.low]
    highs = [each.high for each in (one, other) if each.high]
    steps = [each.multiple for each in (one, other) if each.multiple]
    low = max(lows, key=lambda bound: (bound.value, bound.strict), default=None)
    high = min(highs, key=lambda bound: (bound.value, not bound.strict), default=None)
    if low and high and (low.value > high.value or (low.value == high.value and (low.strict or high.strict))):
        return None
    multiple = steps[0] if steps else None
    if len(steps) == 2:
        shift = 10 ** max(0, *(-int(step.as_tuple().exponent) for step in steps))
        multiple = Decimal(lcm(*(int(step * shift) for step in steps))) / shift
    found = Numbers(one.integer or other.integer, low, high, multiple, None, one.excluded | other.excluded)
    given = [each.values for each in (one, other) if each.values is not None]
    if not given:
        return found
    values = frozenset(value for value in frozenset.intersection(*given) if found.fits(value))
    return Numbers(values=values) if values else None


def common_sizes(one: Strings | Arrays | Objects, other: Strings | Arrays | Objects) -> tuple[int, int | None]:
    mosts = [each.most for each in (one, other) if each.most is not None]
    return max(one.least, other.least), min(mosts, default=None)


def common_strings(one: Strings, other: Strings) -> Strings | None:
    least, most = common_sizes(one, other)
    if most is not None and least > most:
        return None
    found = Strings(
        least,
        most,
        one.patterns | other.patterns,
        one.formats | other.formats,
        None,
        one.excluded | other.excluded,
        one.absent | other.absent,
    )
    given = [each.values for each in (one, other) if each.values is not None]
    if not given:
        return found
    both_have = set(given[0]).intersection(given[-1])
    values = tuple(value for value in given[0] if value in both_have and found.fits(value))
    return Strings(formats=found.formats, values=values) if values else None


def common_arrays(one: Arrays, other: Arrays) -> Arrays | None:
    least, most = common_sizes(one, other)
    if most is not None and least > most:
        return None
    length = max(len(one.prefix), len(other.prefix))
    prefix = tuple(both(one.item(i), other.item(i)) for i in range(length))
    return Arrays(prefix, both(one.items, other.items), least, most, one.unique or other.unique)


def common_objects(one: Objects, other: Objects) -> Objects | None:
    (least, most), required = common_sizes(one, other), one.required | other.required
    if most is not None and max(least, len(required)) > most:
        return None
    names = dict.fromkeys(name for each in (one, other) for name, _ in each.properties)
    properties = tuple((name, both(one.node(name), other.node(name))) for name in names)
    mine, theirs = dict(one.patterns), dict(other.patterns)
    # A name that has a pattern of one side only belongs to the rest of the other; if it has a pattern there too, this
    # is stricter than necessary.
    patterns = tuple(
        (pattern, both(mine.get(pattern, one.rest), theirs.get(pattern, other.rest)))
        for pattern in dict.fromkeys((*mine, *theirs))
    )
    return Objects(
        properties,
        patterns,
        both(one.rest, other.rest),
        required,
        least,
        most,
        both(one.names, other.names),
        one.any_order or other.any_order,
        one.open and other.open,
    )


def constant(value: Any, number_of: Callable[[Any], Node]) -> Shape:
    """Return the shape of null, a list or an object."""
    if value is None:
        return only("null", Nulls())
    if isinstance(value, list):
        return only("array", Arrays(tuple(map(number_of, value)), NOTHING, len(value), len(value)))
    properties = tuple((name, number_of(each)) for name, each in value.items())
    required = frozenset(value)
    return only("object", Objects(properties, rest=NOTHING, required=required, any_order=True, open=False))


def constants(values: list[Any], number_of: Callable[[Any], Node]) -> Shape:
    """Return the shape of the values in an enum; all of its strings are one alternative, and all of its numbers.

    ``number_of`` returns the node of the values that equal its argument.
    """
    texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
    digits = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    truths = frozenset(value for value in values if isinstance(value, bool))
    others = [constant(value, number_of) for value in values if value is None or isinstance(value, list | dict)]
    grouped = {
        "string": (Strings(values=texts),) if texts else (),
        "number": (Numbers(values=frozenset(map(decimal, digits))),) if digits else (),
        "boolean": (Booleans(truths),) if truths else (),
    }
    return union(Shape(grouped), *others)


def decimal(value: int | float) -> Decimal:
    return Decimal(repr(value or 0))  # without -0


def closed(shape: Objects) -> Objects:
    """Return the object without names that its schema doesn't mention, if it lists any."""
    return replace(shape, rest=NOTHING, open=False) if shape.open and shape.properties else shape
