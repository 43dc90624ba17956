"""Reads JSON schemas: what a value may look like that matches some of them and doesn't match others.

Keywords are negated one by one, so ``not``, ``if`` and overlapping options of ``oneOf`` become alternatives.
https://json-schema.org/draft/2020-12/json-schema-core and .../json-schema-validation define the keywords.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.grammars.json_schema.checking import ANNOTATIONS, REFERENCES, Schema, is_number, resolved
from ovspec.grammars.json_schema.expressions import split
from ovspec.grammars.json_schema.formats import FORMATS
from ovspec.grammars.json_schema.numbers import none_fits
from ovspec.grammars.json_schema.shapes import (
    ANYTHING,
    KINDS,
    NOTHING,
    Alternative,
    Arrays,
    Booleans,
    Bound,
    Node,
    Numbers,
    Objects,
    Refused,
    Shape,
    Strings,
    both,
    but,
    common,
    constants,
    decimal,
    meeting,
    only,
    search_pattern,
    union,
)

# Keywords that may be beside a $ref, or alone, without saying anything of a value.
ANNOTATING = {*ANNOTATIONS, "$defs", "definitions"}
REFERRING = {"$ref", *ANNOTATING}
MOST_ALTERNATIVES = 400  # of one type


class TooMany(Exception):
    """Merging gave too many alternatives."""


def bounded(shape: Shape) -> Shape:
    """Return ``shape``; raises TooMany if it has too many alternatives."""
    if any(len(some) > MOST_ALTERNATIVES for some in shape.kinds.values()):
        raise TooMany
    return shape


class Circular(Exception):
    """A schema was needed to say what itself means."""


@dataclass
class Gathered:
    """What a value must match at the same place: ``shape``, one option of each of ``unions``, and so on."""

    shape: Shape = ANYTHING
    unions: list[tuple[str, list[Shape | Node]]] = field(default_factory=list)
    exclusive: list[tuple[str, list[Node]]] = field(default_factory=list)


class Schemas:
    """All schemas within one schema, by number.

    Args:
        root: the whole schema; it has been checked.
        lenient: leave out what can't be enforced, instead of marking it as ``Refused``.
        no_text: returns whether no string fits an alternative.
    """

    def __init__(self, root: Schema | bool, lenient: bool, no_text: Callable[[Strings], bool]) -> None:
        self._root, self.lenient, self.no_text = root, lenient, no_text
        dialect = str(root.get("$schema")) if isinstance(root, dict) else ""
        self.old = re.search(r"draft-0[3-7]", dialect) is not None
        self._numbers: dict[str, int] = {}
        self._schemas: list[tuple[Schema | bool, str]] = []  # with JSON pointers
        self._shapes: dict[Node, Shape] = {}
        self._running: set[Node] = set()
        self.node(False, "#")  # number 0, as in NOTHING
        self.root = self.node(root, "#")

    def node(self, schema: Schema | bool, at: str) -> Node:
        """Return the node of the values that match ``schema``, which is at JSON pointer ``at``."""
        passed = set[int]()
        # Until draft 7, what is beside a $ref has no meaning.
        while isinstance(schema, dict) and "$ref" in schema and (self.old or not schema.keys() - REFERRING):
            if id(schema) in passed:
                raise Circular(at)
            passed.add(id(schema))
            schema, at = resolved(self._root, schema["$ref"], f"{at}/$ref")
        if schema is True or (isinstance(schema, dict) and not schema.keys() - ANNOTATING):
            return frozenset()
        key = json.dumps(schema)
        if key not in self._numbers:
            self._numbers[key] = len(self._schemas)
            self._schemas.append((schema, at))
        return frozenset({(self._numbers[key], True)})

    def shape(self, node: Node) -> Shape:
        """Return the alternatives of the values of ``node``, without those that no value fits."""
        if node not in self._shapes:
            if node in self._running:
                raise Circular(min((self._schemas[number][1] for number, _ in node if number), default="#"))
            self._running.add(node)
            try:
                self._shapes[node] = self._evaluated(node)
            finally:
                self._running.remove(node)
        return self._shapes[node]

    def empty(self, node: Node) -> bool:
        """Return whether no value fits ``node``, as far as that is easy to see."""
        try:
            return node == NOTHING or not self.shape(node)
        except Circular:  # only through values within values
            return False

    def hopeless(self, node: Node) -> Refused | None:
        """Return why no value of ``node`` can be generated, if all that there are are dispensable."""
        try:
            found = [each for some in self.shape(node).kinds.values() for each in some]
        except Circular:
            return None
        refused = [each for each in found if isinstance(each, Refused) and each.dispensable]
        return refused[0] if refused and len(refused) == len(found) else None

    def refused(self, at: str, why: str, *kinds: str) -> Shape:
        """Return the shape for a keyword that can't be enforced, which concerns values of these types (all if none)."""
        if self.lenient:
            return ANYTHING
        kinds = kinds or tuple(KINDS)
        refused = Refused(at, why, "negated" in why)
        return Shape({kind: (refused,) if kind in kinds else (make(),) for kind, make in KINDS.items()})

    def _evaluated(self, node: Node) -> Shape:
        """Work out ``shape``: what holds in any case, one option of each union, exactly one of each oneOf."""
        gathered = self._gathered(node)
        shape = self._settled(gathered.shape)
        for at, options in gathered.unions:
            either = union(*(option if isinstance(option, Shape) else self.shape(option) for option in options))
            with self._bounded(at):
                shape = self._meet(shape, either)
        for at, nodes in gathered.exclusive:
            with self._bounded(at):
                shape = self._one_of(shape, nodes, at)
        return shape

    @contextlib.contextmanager
    def _bounded(self, at: str) -> Iterator[None]:
        """Refuse a keyword that gives too many alternatives, or leave it out if the reading is lenient."""
        try:
            yield
        except TooMany:
            if not self.lenient:
                why = f"this gives more than {MOST_ALTERNATIVES} alternatives; simplify it."
                raise OvspecError(f"{at}: {why}") from None

    def _gathered(self, node: Node) -> Gathered:
        found, seen = Gathered(), set[tuple[int, bool]]()
        waiting: list[tuple[tuple[int, bool], tuple[int, ...]]] = [(each, ()) for each in sorted(node)]
        while waiting:
            (number, positive), above = waiting.pop(0)
            schema, at = self._schemas[number]
            if number in above:
                raise Circular(at)
            if (number, positive) in seen:
                continue
            seen.add((number, positive))
            if not isinstance(schema, dict):
                found.shape = Shape() if schema != positive else found.shape
            elif positive:
                found.shape = self._meet(found.shape, own(schema, at, self))
                more = self._gather_positive(schema, at, found)
                waiting += [(each, (*above, number)) for each in itertools.chain.from_iterable(more)]
            else:
                options = list(negated(schema, at, self))
                if len(options) == 1 and not isinstance(options[0], Shape):
                    waiting += [(each, (*above, number)) for each in options[0]]
                else:
                    found.unions.append((at, options))
        return found

    def _gather_positive(self, schema: Schema, at: str, found: Gathered) -> list[Node]:
        """Add the unions of a schema to ``found``; return the nodes that must match in any case."""
        more = listed_nodes(schema, "allOf", at, self)
        more += [self.target(schema[key], f"{at}/{key}") for key in REFERENCES if key in schema]
        if "not" in schema:
            more.append(self.opposite(self.node(schema["not"], f"{at}/not")))
        if "anyOf" in schema:
            found.unions.append((f"{at}/anyOf", [*listed_nodes(schema, "anyOf", at, self)]))
        if "oneOf" in schema:
            found.exclusive.append((f"{at}/oneOf", listed_nodes(schema, "oneOf", at, self)))
        if "if" in schema:
            found.unions.append((f"{at}/if", [both(*case) for case in cases_of(schema, at, self)]))
        for name, needed, below in dependencies(schema, at):
            absent = but("object", Objects(((name, NOTHING),), open=True))
            if isinstance(needed, list):
                present: list[Shape | Node] = [only("object", Objects(required=frozenset((name, *needed))))]
            else:
                present = [both(self.node({"type": "object", "required": [name]}, below), self.node(needed, below))]
            found.unions.append((below, [absent, *present]))
        return more

    def opposite(self, node: Node) -> Node:
        """Return the node of the values that don't match a node made by ``node``."""
        return frozenset((number, not positive) for number, positive in node) if node else NOTHING

    def target(self, reference: str, at: str) -> Node:
        """Return the node of what a reference at JSON pointer ``at`` refers to."""
        return self.node(*resolved(self._root, reference, at))

    def all_apart(self, nodes: list[Node]) -> bool:
        """Return whether no value matches two of ``nodes``, as far as that can be told."""
        shapes = [self.shape(node).kinds for node in nodes]
        pairs = itertools.combinations(shapes, 2)
        both_have = ((kind, one, two) for one, two in pairs for kind in one.keys() & two.keys())
        return all(self._apart(a, b) for kind, one, two in both_have for a in one[kind] for b in two[kind])

    # ------------------------------------------------------------ shapes

    def _meet(self, one: Shape, other: Shape) -> Shape:
        """Return what two shapes have in common, without alternatives that no value fits."""
        return bounded(meeting(one, other, self._settle))

    def _settled(self, shape: Shape) -> Shape:
        settled = {k: tuple(each for a in some if (each := self._settle(a))) for k, some in shape.kinds.items()}
        return Shape({kind: some for kind, some in settled.items() if some})

    def _settle(self, each: Alternative | None) -> Alternative | None:
        """Return an alternative with its required properties listed; None if no value fits it."""
        match each:
            case Strings() if each.values is None and self.no_text(each):
                return None
            case Numbers() if none_fits(each):
                return None
            case Arrays():
                usable = next((i for i, node in enumerate(each.prefix) if self.empty(node)), None)
                if usable is None and self.empty(each.items):
                    usable = len(each.prefix)
                most = usable if each.most is None else each.most if usable is None else min(each.most, usable)
                return None if most is not None and each.least > most else replace(each, most=most)
            case Objects():
                return self._settled_object(each)
        return each

    def _settled_object(self, each: Objects) -> Alternative | None:
        listed = dict(each.properties)
        missing = {name: each.node(name) for name in sorted(each.required) if name not in listed}
        if any(self.empty(node) for name, node in {**listed, **missing}.items() if name in each.required):
            return None
        namable = self._namable(each.names)
        if (each.most is not None and len(each.required) > each.most) or not all(map(namable, each.required)):
            return None
        for name in each.required:
            if why := self.hopeless(each.node(name)):
                return why
        each = replace(each, properties=(*each.properties, *missing.items()))
        if each.least <= len(each.required):
            return each
        # All properties that aren't listed count as one, because they may have the same name.
        possible = sum(namable(name) and not self.empty(node) for name, node in each.properties)
        free = not all(self.empty(node) for node in (each.rest, *(node for _, node in each.patterns)))
        if each.least <= possible + free:
            return each
        if self.lenient:
            return replace(each, least=possible + free)
        why = f"minProperties {each.least} can't be enforced for names that aren't listed"
        return Refused("#", why) if free else None

    def _namable(self, names: Node) -> Callable[[str], bool]:
        """Return a function that tells whether a name may match ``names``."""
        some = self.shape(names).kinds.get("string", ()) if names else (Strings(),)
        return lambda name: any(not isinstance(each, Strings) or each.fits(name) for each in some)

    def _one_of(self, shape: Shape, nodes: list[Node], at: str) -> Shape:
        shapes = [self._meet(shape, self.shape(node)) for node in nodes]
        kept: list[Shape] = []
        for i, mine in enumerate(shapes):
            for kind, alternatives in mine.kinds.items():
                for each in alternatives:
                    candidate = only(kind, each)
                    for j, other in enumerate(shapes):
                        if j != i and not all(self._apart(each, rival) for rival in other.kinds.get(kind, ())):
                            candidate = self._meet(candidate, self._without(nodes[j], at))
                    kept.append(candidate)
        return bounded(union(*kept))

    def _without(self, node: Node, at: str) -> Shape:
        """Return the shape of values that don't match ``node``, an option of a oneOf."""
        kinds = dict(self.shape(self.opposite(node)).kinds)
        for kind, some in kinds.items():
            usable = tuple(each for each in some if not isinstance(each, Refused))
            kinds[kind] = usable or (Refused(at, "its options may overlap, which can't be enforced"),)
        return Shape(kinds)

    def _apart(self, one: Alternative, other: Alternative) -> bool:
        if isinstance(one, Refused) or isinstance(other, Refused):
            return False
        return self._settle(common(one, other)) is None


# ---------------------------------------------------------------- keywords


def own(schema: Schema, at: str, nodes: Schemas) -> Shape:
    """Return the shape that the keywords for single types describe."""
    types = types_of(schema)
    makers: dict[str, Callable[[], Alternative | None]] = {
        **KINDS,
        "number": lambda: numbers_of(schema),
        "string": lambda: strings_of(schema),
        "array": lambda: arrays_of(schema, at, nodes),
        "object": lambda: objects_of(schema, at, nodes),
    }
    allowed = types | ({"number"} if "integer" in types else set())
    made = {kind: make() for kind, make in makers.items() if kind in allowed}
    shape = Shape({kind: (each,) for kind, each in made.items() if each})
    for key in ("const", "enum"):
        if key in schema:
            values = schema[key] if key == "enum" else [schema[key]]
            shape = meeting(shape, constants(values, lambda value: nodes.node({"const": value}, at)))
    unenforced = {**unevaluated(schema), **({"contains": "array"} if "contains" in schema else {})}
    for key, kind in unenforced.items():
        shape = meeting(shape, nodes.refused(f"{at}/{key}", f"{key} can't be enforced", kind))
    return shape


def types_of(schema: Schema) -> set[str]:
    """Return the types that a schema allows, as its keyword type names them."""
    if "type" not in schema:
        return {*KINDS, "integer"}
    given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {*given, *(["null"] if schema.get("nullable") is True else [])}


def numbers_of(schema: Schema) -> Numbers | None:
    whole: Alternative | None = Numbers(integer="number" not in types_of(schema))
    for each in numeric(schema):
        whole = common(whole, each) if whole else None
    return whole if isinstance(whole, Numbers) else None


def numeric(schema: Schema) -> Iterator[Numbers]:
    """Yield what each keyword for numbers demands."""
    for key in ("minimum", "maximum"):
        exclusive = schema.get(f"exclusive{key.capitalize()}")
        strict = [(key, exclusive is True)] if key in schema else []  # true in draft 4
        if exclusive is not None and not isinstance(exclusive, bool):
            strict.append((f"exclusive{key.capitalize()}", True))
        for name, excluded in strict:
            bound = Bound(decimal(schema[name]), excluded)
            yield Numbers(low=bound) if key == "minimum" else Numbers(high=bound)
    if "multipleOf" in schema:
        yield Numbers(multiple=decimal(schema["multipleOf"]))


def strings_of(schema: Schema) -> Strings | None:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if most is not None and least > most:
        return None
    patterns, absent = split(schema["pattern"]) if "pattern" in schema else ((), ())
    formats = frozenset({schema["format"]} if schema.get("format") in FORMATS else ())
    return Strings(least, most, frozenset(patterns), formats, absent=frozenset(absent))


def items_of(schema: Schema, at: str, nodes: Schemas) -> tuple[list[tuple[Any, str]], tuple[Any, str]]:
    """Return the schemas of the first items and that of the others, in any draft's notation, with JSON pointers."""
    old = nodes.old or isinstance(schema.get("items"), list)
    if old and not isinstance(schema.get("items"), list):
        return [], (schema.get("items", True), f"{at}/items")
    first, rest = ("items", "additionalItems") if old else ("prefixItems", "items")
    prefix = [(each, f"{at}/{first}/{i}") for i, each in enumerate(schema.get(first, ()))]
    return prefix, (schema.get(rest, True), f"{at}/{rest}")


def arrays_of(schema: Schema, at: str, nodes: Schemas) -> Arrays:
    prefix, rest = items_of(schema, at, nodes)
    return Arrays(
        tuple(nodes.node(*each) for each in prefix),
        nodes.node(*rest),
        schema.get("minItems", 0),
        schema.get("maxItems"),
        schema.get("uniqueItems") is True,
    )


def objects_of(schema: Schema, at: str, nodes: Schemas) -> Objects:
    below = f"{at}/patternProperties"
    patterns = {key: nodes.node(each, f"{below}/{key}") for key, each in schema.get("patternProperties", {}).items()}
    listed = {}
    for name, each in schema.get("properties", {}).items():
        matching = [node for pattern, node in patterns.items() if search_pattern(pattern, name)]
        listed[name] = both(nodes.node(each, f"{at}/properties/{name}"), *matching)
    return Objects(
        tuple(listed.items()),
        tuple(patterns.items()),
        nodes.node(schema.get("additionalProperties", True), f"{at}/additionalProperties"),
        frozenset(schema.get("required", ())),
        schema.get("minProperties", 0),
        schema.get("maxProperties"),
        nodes.node(schema.get("propertyNames", True), f"{at}/propertyNames"),
        open="additionalProperties" not in schema,
    )


def dependencies(schema: Schema, at: str) -> Iterable[tuple[str, Any, str]]:
    """Yield (property, the names or the schema that it requires, JSON pointer)."""
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needed in schema.get(key, {}).items():
            yield name, [needed] if isinstance(needed, str) else needed, f"{at}/{key}/{name}"


def cases_of(schema: Schema, at: str, nodes: Schemas) -> list[tuple[Node, Node]]:
    """Return (condition, what must match then) for if, then and else."""
    condition = nodes.node(schema["if"], f"{at}/if")
    then, otherwise = (nodes.node(schema.get(key, True), f"{at}/{key}") for key in ("then", "else"))
    return [(condition, then), (nodes.opposite(condition), otherwise)]


def listed_nodes(schema: Schema, key: str, at: str, nodes: Schemas) -> list[Node]:
    return [nodes.node(each, f"{at}/{key}/{i}") for i, each in enumerate(schema.get(key, ()))]


def unevaluated(schema: Schema) -> dict[str, str]:
    """Return the type of value that each keyword for what isn't mentioned concerns, of those that forbid something."""
    kinds = {"unevaluatedProperties": "object", "unevaluatedItems": "array"}
    return {key: kind for key, kind in kinds.items() if schema.get(key, True) is not True}


# ---------------------------------------------------------------- broken keywords


def negated(schema: Schema, at: str, nodes: Schemas) -> Iterator[Shape | Node]:
    """Yield the options of a value that doesn't match ``schema``: one for each way to break it."""
    if "type" in schema:
        yield other_types(types_of(schema), f"{at}/type", nodes)
    for key in ("const", "enum"):
        if key in schema:
            yield unequal(schema[key] if key == "enum" else [schema[key]], f"{at}/{key}", nodes)
    for each in numeric(schema):
        if bound := each.low or each.high:
            other = Bound(bound.value, not bound.strict)
            yield only("number", Numbers(high=other) if each.low else Numbers(low=other))
        else:
            yield refusal(f"{at}/multipleOf", "number", nodes)
    sized = ("Length", "string", Strings), ("Items", "array", Arrays), ("Properties", "object", Objects)
    for name, kind, make in sized:
        if schema.get(f"min{name}", 0) > 0:
            yield only(kind, make(most=schema[f"min{name}"] - 1))
        if f"max{name}" in schema:
            yield only(kind, make(least=schema[f"max{name}"] + 1))
    yield from negated_string(schema, at, nodes)
    yield from negated_array(schema, at, nodes)
    yield from negated_object(schema, at, nodes)
    yield from map(nodes.opposite, listed_nodes(schema, "allOf", at, nodes))
    for key in REFERENCES:
        if key in schema:
            yield nodes.opposite(nodes.target(schema[key], f"{at}/{key}"))
    if "not" in schema:
        yield nodes.node(schema["not"], f"{at}/not")
    if "anyOf" in schema:
        yield both(*map(nodes.opposite, listed_nodes(schema, "anyOf", at, nodes)))
    if "oneOf" in schema:
        options = listed_nodes(schema, "oneOf", at, nodes)
        if not nodes.all_apart(options):
            yield nodes.refused(f"{at}/oneOf", "a oneOf whose options overlap can't be negated")
        yield both(*map(nodes.opposite, options))
    if "if" in schema:
        yield from (both(condition, nodes.opposite(result)) for condition, result in cases_of(schema, at, nodes))
    for name, needed, below in dependencies(schema, at):
        if isinstance(needed, list):
            present = Objects(required=frozenset({name}))
            yield from (only("object", replace(present, properties=((each, NOTHING),))) for each in needed)
        else:
            without = nodes.opposite(nodes.node(needed, below))
            yield both(nodes.node({"type": "object", "required": [name]}, below), without)
    yield from (refusal(f"{at}/{key}", kind, nodes) for key, kind in unevaluated(schema).items())


def refusal(at: str, kind: str, nodes: Schemas) -> Shape:
    refused = nodes.refused(at, f"{at.rpartition('/')[2]} can't be negated", kind)
    return Shape({kind: refused.kinds[kind]})


def other_types(types: set[str], at: str, nodes: Schemas) -> Shape:
    kinds: dict[str, tuple[Alternative, ...]] = {kind: (make(),) for kind, make in KINDS.items() if kind not in types}
    if "integer" in types and "number" not in types:
        others = nodes.refused(at, "numbers that aren't integers can't be told apart", "number").kinds["number"]
        kinds["number"] = tuple(replace(each, fractions=True) if isinstance(each, Refused) else each for each in others)
    return Shape(kinds)


def unequal(values: list[Any], at: str, nodes: Schemas) -> Shape:
    """Return the shape of the values that equal none of ``values``."""
    texts = frozenset(value for value in values if isinstance(value, str))
    digits = filter(is_number, values)
    truths = frozenset({False, True}) - {value for value in values if isinstance(value, bool)}
    kinds: dict[str, tuple[Alternative, ...]] = {
        **ANYTHING.kinds,
        "string": (Strings(excluded=texts),),
        "number": (Numbers(excluded=frozenset(map(decimal, digits))),),
        "boolean": (Booleans(truths),) if truths else (),
        "null": () if None in values else ANYTHING.kinds["null"],
    }
    for kind, made in (("array", list), ("object", dict)):
        if any(isinstance(value, made) for value in values):
            kinds |= refusal(at, kind, nodes).kinds
    return Shape({kind: some for kind, some in kinds.items() if some})


def negated_string(schema: Schema, at: str, nodes: Schemas) -> Iterator[Shape]:
    if "pattern" in schema:
        present, absent = split(schema["pattern"])
        yield from (only("string", Strings(absent=frozenset({each}))) for each in present)
        yield from (only("string", Strings(patterns=frozenset({each}))) for each in absent)
    if schema.get("format") in FORMATS:
        yield refusal(f"{at}/format", "string", nodes)


def negated_array(schema: Schema, at: str, nodes: Schemas) -> Iterator[Shape]:
    if schema.get("uniqueItems") is True:
        yield refusal(f"{at}/uniqueItems", "array", nodes)
    prefix, (rest, place) = items_of(schema, at, nodes)
    if prefix:
        yield refusal(prefix[0][1].rpartition("/")[0], "array", nodes)
    elif nodes.node(rest, place):
        yield refusal(place, "array", nodes)
    if "contains" in schema:
        if schema.get("minContains", 1) != 1 or "maxContains" in schema:
            yield refusal(f"{at}/contains", "array", nodes)
        else:
            yield only("array", Arrays(items=nodes.opposite(nodes.node(schema["contains"], f"{at}/contains"))))


def negated_object(schema: Schema, at: str, nodes: Schemas) -> Iterator[Shape]:
    for name, each in schema.get("properties", {}).items():
        wrong = nodes.opposite(nodes.node(each, f"{at}/properties/{name}"))
        yield only("object", Objects(((name, wrong),), required=frozenset({name})))
    yield from (only("object", Objects(((name, NOTHING),))) for name in schema.get("required", ()))
    for key in ("patternProperties", "additionalProperties", "propertyNames"):
        if schema.get(key) not in (None, True, {}):
            yield refusal(f"{at}/{key}", "object", nodes)
