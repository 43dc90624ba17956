"""Sets of JSON values: alternatives for each JSON type, and their intersections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import inf, lcm

from ovspec.base.json_types import JsonValue
from ovspec.grammars.json_schema.checking import is_number

# The numbers of schemas (see ``SchemaGraph``) a value must match (True) or must not match (False).
SchemaNode = frozenset[tuple[int, bool]]
ANY_VALUE: SchemaNode = frozenset()
NO_VALUE: SchemaNode = frozenset({(0, True)})


@dataclass(frozen=True)
class UnenforceableValues:
    """Values not distinguishable from forbidden values during generation.

    ``dispensable``: they only break a schema without a need to match, so they may be left out. ``non_integers``: they
    are numbers, but not integers.
    """

    pointer: str  # JSON pointer of the keyword
    obstacle: str
    dispensable: bool = False
    non_integers: bool = False


@dataclass(frozen=True)
class Nulls:
    pass


@dataclass(frozen=True)
class Booleans:
    values: frozenset[bool] = frozenset({False, True})


@dataclass(frozen=True)
class Bound:
    value: Decimal
    exclusive: bool


@dataclass(frozen=True)
class Numbers:
    """``values``: the only values, if not None. ``multiple_of``: all are multiples of it."""

    integer: bool = False
    low: Bound | None = None
    high: Bound | None = None
    multiple_of: Decimal | None = None
    values: frozenset[Decimal] | None = None
    excluded: frozenset[Decimal] = frozenset()

    def accepts_number(self, value: Decimal) -> bool:
        if self.low and (value < self.low.value or (value == self.low.value and self.low.exclusive)):
            return False
        if self.high and (value > self.high.value or (value == self.high.value and self.high.exclusive)):
            return False
        if value in self.excluded or (self.integer and value != value.to_integral_value()):
            return False
        return not self.multiple_of or not exact_remainder(value, self.multiple_of)


def exact_remainder(value: Decimal, divisor: Decimal) -> int:
    """Return the remainder of ``value / divisor``, in units of the smaller number's last digit."""
    scale = 10 ** max(0, -int(value.as_tuple().exponent), -int(divisor.as_tuple().exponent))
    return int(value * scale) % int(divisor * scale)


@dataclass(frozen=True)
class Strings:
    """Strings by their lengths and contents.

    ``patterns``, ``absent_patterns``: the required and the forbidden expressions. ``values``: the only strings, if not
    None.
    """

    min_size: int = 0
    max_size: float = inf
    patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    values: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()
    absent_patterns: frozenset[str] = frozenset()

    def accepts_text(self, text: str) -> bool:
        """Return whether ``text`` satisfies everything except formats."""
        if not self.min_size <= len(text) <= self.max_size:
            return False
        if text in self.excluded or (self.values is not None and text not in self.values):
            return False
        if not all(search_pattern(pattern, text) for pattern in self.patterns):
            return False
        return not any(search_pattern(pattern, text, False) for pattern in self.absent_patterns)


def search_pattern(pattern: str, text: str, if_unreadable: bool = True) -> bool:
    """Return whether ``pattern`` is found in ``text``, or ``if_unreadable`` if Python can't parse the pattern."""
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return if_unreadable


@dataclass(frozen=True)
class Arrays:
    prefix: tuple[SchemaNode, ...] = ()
    items: SchemaNode = ANY_VALUE
    min_size: int = 0
    max_size: float = inf
    unique: bool = False

    def item_node(self, index: int) -> SchemaNode:
        return self.prefix[index] if index < len(self.prefix) else self.items


@dataclass(frozen=True)
class Objects:
    """Objects by their properties.

    ``properties``: the nodes of listed properties, by name. ``patterns``: (pattern of other names, node).
    ``unlisted_node``: the node of all remaining properties; ``unlisted_is_default``: the schema doesn't mention them.
    ``name_node``: the node of all names. ``any_order``: the properties may come in any order.
    """

    properties: tuple[tuple[str, SchemaNode], ...] = ()
    patterns: tuple[tuple[str, SchemaNode], ...] = ()
    unlisted_node: SchemaNode = ANY_VALUE
    required: frozenset[str] = frozenset()
    min_size: int = 0
    max_size: float = inf
    name_node: SchemaNode = ANY_VALUE
    any_order: bool = False
    unlisted_is_default: bool = True

    def property_node(self, property_name: str) -> SchemaNode:
        """Return the node of the values of the property ``property_name``."""
        listed_nodes = dict(self.properties)
        if property_name in listed_nodes:
            return listed_nodes[property_name]
        matching_nodes = [node for pattern, node in self.patterns if search_pattern(pattern, property_name)]
        if not matching_nodes:
            return self.unlisted_node
        return join_nodes(*matching_nodes)


Alternative = UnenforceableValues | Nulls | Booleans | Numbers | Strings | Arrays | Objects
# JSON type -> the alternative with all of its values.
JSON_TYPES: dict[str, Callable[[], Alternative]] = {
    "null": Nulls, "boolean": Booleans, "number": Numbers, "string": Strings, "array": Arrays, "object": Objects,
}  # fmt: skip


@dataclass(frozen=True)
class ValueShape:
    """The alternatives for each JSON type; missing types aren't allowed."""

    by_type: dict[str, tuple[Alternative, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any(self.by_type.values())


ANY_SHAPE = ValueShape({json_type: (make_all(),) for json_type, make_all in JSON_TYPES.items()})


def shape_of_type(json_type: str, *alternatives: Alternative) -> ValueShape:
    """Return the shape of values of a single type."""
    return ValueShape({json_type: alternatives})


def shape_if_type(json_type: str, *alternatives: Alternative) -> ValueShape:
    """Return the shape of all values, limited to ``alternatives`` for this type."""
    return ValueShape({**ANY_SHAPE.by_type, json_type: alternatives})


def unite_shapes(*shapes: ValueShape) -> ValueShape:
    alternatives_by_type: dict[str, dict[Alternative, None]] = {}
    for shape in shapes:
        for json_type, alternatives in shape.by_type.items():
            alternatives_by_type.setdefault(json_type, {}).update(dict.fromkeys(alternatives))
    return ValueShape(
        {json_type: tuple(alternatives) for json_type, alternatives in alternatives_by_type.items() if alternatives}
    )


def join_nodes(*nodes: SchemaNode) -> SchemaNode:
    """Return the node of the values matching all ``nodes``."""
    joined_conditions = frozenset().union(*nodes)
    if joined_conditions >= NO_VALUE or any(
        (schema_number, not must_match) in joined_conditions for schema_number, must_match in joined_conditions
    ):
        return NO_VALUE
    return joined_conditions


def intersect_alternatives(first: Alternative, second: Alternative) -> Alternative | None:
    """Return the intersection of two alternatives of the same type; None if it is empty."""
    if first == second:
        return first
    match first, second:
        case (UnenforceableValues(non_integers=True), Numbers(integer=True)):
            return None
        case (Numbers(integer=True), UnenforceableValues(non_integers=True)):
            return None
        case UnenforceableValues(), _:
            return first
        case _, UnenforceableValues():
            return second
        case Booleans(), Booleans():
            values = first.values & second.values
            return Booleans(values) if values else None
        case Numbers(), Numbers():
            return intersect_numbers(first, second)
        case Strings(), Strings():
            return intersect_strings(first, second)
        case Arrays(), Arrays():
            return intersect_arrays(first, second)
        case Objects(), Objects():
            return intersect_objects(first, second)
    return None


def intersect_shapes(
    first: ValueShape,
    second: ValueShape,
    prune_alternative: Callable[[Alternative | None], Alternative | None] = lambda alternative: alternative,
) -> ValueShape:
    """Return the intersection of two shapes; ``prune_alternative`` may drop or change an alternative."""
    by_type: dict[str, tuple[Alternative, ...]] = {}
    for json_type, alternatives in first.by_type.items():
        alternative_pairs = ((a, b) for a in alternatives for b in second.by_type.get(json_type, ()))
        pruned_alternatives = (prune_alternative(intersect_alternatives(a, b)) for a, b in alternative_pairs)
        if intersection := dict.fromkeys(alternative for alternative in pruned_alternatives if alternative):
            by_type[json_type] = tuple(intersection)
    return ValueShape(by_type)


def intersect_numbers(first: Numbers, second: Numbers) -> Numbers | None:
    lower_bounds = [numbers.low for numbers in (first, second) if numbers.low]
    upper_bounds = [numbers.high for numbers in (first, second) if numbers.high]
    low = max(lower_bounds, key=lambda bound: (bound.value, bound.exclusive), default=None)
    high = min(upper_bounds, key=lambda bound: (bound.value, not bound.exclusive), default=None)
    if low and high and (low.value > high.value or (low.value == high.value and (low.exclusive or high.exclusive))):
        return None
    multiple = first.multiple_of or second.multiple_of
    if first.multiple_of and second.multiple_of:
        multiple = common_multiple(first.multiple_of, second.multiple_of)
    intersection = Numbers(first.integer or second.integer, low, high, multiple, None, first.excluded | second.excluded)
    value_sets = [numbers.values for numbers in (first, second) if numbers.values is not None]
    if not value_sets:
        return intersection
    values = frozenset(value for value in frozenset.intersection(*value_sets) if intersection.accepts_number(value))
    return Numbers(values=values) if values else None


def common_multiple(*multiples: Decimal) -> Decimal:
    scale = 10 ** max(0, *(-int(multiple.as_tuple().exponent) for multiple in multiples))
    return Decimal(lcm(*(int(multiple * scale) for multiple in multiples))) / scale


def intersect_sizes(first: Strings | Arrays | Objects, second: Strings | Arrays | Objects) -> tuple[int, float]:
    """Return the smallest and largest size allowed by both."""
    return max(first.min_size, second.min_size), min(first.max_size, second.max_size)


def intersect_strings(first: Strings, second: Strings) -> Strings | None:
    min_size, max_size = intersect_sizes(first, second)
    if min_size > max_size:
        return None
    patterns, absent_patterns = first.patterns | second.patterns, first.absent_patterns | second.absent_patterns
    formats, excluded = first.formats | second.formats, first.excluded | second.excluded
    intersection = Strings(min_size, max_size, patterns, formats, None, excluded, absent_patterns)
    value_lists = [strings.values for strings in (first, second) if strings.values is not None]
    if not value_lists:
        return intersection
    common_values = set(value_lists[0]).intersection(value_lists[-1])
    values = tuple(value for value in value_lists[0] if value in common_values and intersection.accepts_text(value))
    return Strings(formats=intersection.formats, values=values) if values else None


def intersect_arrays(first: Arrays, second: Arrays) -> Arrays | None:
    min_size, max_size = intersect_sizes(first, second)
    if min_size > max_size:
        return None
    prefix_length = max(len(first.prefix), len(second.prefix))
    prefix = tuple(join_nodes(first.item_node(i), second.item_node(i)) for i in range(prefix_length))
    return Arrays(prefix, join_nodes(first.items, second.items), min_size, max_size, first.unique or second.unique)


def intersect_objects(first: Objects, second: Objects) -> Objects | None:
    min_size, max_size = intersect_sizes(first, second)
    required = first.required | second.required
    if max(min_size, len(required)) > max_size:
        return None
    property_names = dict.fromkeys(name for objects in (first, second) for name, _ in objects.properties)
    properties = tuple(
        (property_name, join_nodes(first.property_node(property_name), second.property_node(property_name)))
        for property_name in property_names
    )
    first_patterns, second_patterns = dict(first.patterns), dict(second.patterns)
    # A name with a pattern of one side only counts as unlisted on the other side; if the name also has a pattern there,
    # this is stricter than necessary.
    patterns = tuple(
        (
            pattern,
            join_nodes(
                first_patterns.get(pattern, first.unlisted_node), second_patterns.get(pattern, second.unlisted_node)
            ),
        )
        for pattern in dict.fromkeys((*first_patterns, *second_patterns))
    )
    unlisted_node = join_nodes(first.unlisted_node, second.unlisted_node)
    name_node = join_nodes(first.name_node, second.name_node)
    any_order = first.any_order or second.any_order
    is_default = first.unlisted_is_default and second.unlisted_is_default
    return Objects(properties, patterns, unlisted_node, required, min_size, max_size, name_node, any_order, is_default)


def shape_of_constant(value: list | dict | None, make_value_node: Callable[[JsonValue], SchemaNode]) -> ValueShape:
    """Return the shape of null, a list or an object."""
    if value is None:
        return shape_of_type("null", Nulls())
    if isinstance(value, list):
        return shape_of_type("array", Arrays(tuple(map(make_value_node, value)), NO_VALUE, len(value), len(value)))
    properties = tuple((name, make_value_node(member)) for name, member in value.items())
    names = frozenset(value)
    objects = Objects(properties, (), NO_VALUE, names, any_order=True, unlisted_is_default=False)
    return shape_of_type("object", objects)


def shape_of_enum(values: list[JsonValue], make_value_node: Callable[[JsonValue], SchemaNode]) -> ValueShape:
    """Return the shape of the values in an enum; all its strings form one alternative, and so do all its numbers.

    ``make_value_node`` returns the node of the values equal to its argument.
    """
    texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
    numbers = decimals_of(values)
    booleans = frozenset(value for value in values if isinstance(value, bool))
    nulls_and_containers = [value for value in values if value is None or isinstance(value, list | dict)]
    alternatives_by_type: dict[str, tuple[Alternative, ...]] = {}
    if texts:
        alternatives_by_type["string"] = (Strings(values=texts),)
    if numbers:
        alternatives_by_type["number"] = (Numbers(values=numbers),)
    if booleans:
        alternatives_by_type["boolean"] = (Booleans(booleans),)
    return unite_shapes(
        ValueShape(alternatives_by_type), *(shape_of_constant(value, make_value_node) for value in nulls_and_containers)
    )


def decimals_of(values: Iterable[JsonValue]) -> frozenset[Decimal]:
    """Return the numbers among some JSON values."""
    return frozenset(to_decimal(value) for value in values if is_number(value))


def to_decimal(value: int | float) -> Decimal:
    return Decimal(repr(value or 0))  # without -0


def close_object(objects: Objects) -> Objects:
    """Return the objects without names unmentioned in their schema, if it lists any."""
    if objects.unlisted_is_default and objects.properties:
        return replace(objects, unlisted_node=NO_VALUE, unlisted_is_default=False)
    return objects
