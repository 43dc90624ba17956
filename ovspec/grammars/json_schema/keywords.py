"""What single keywords of JSON Schema say of a value, and what it means that one of them is broken.

https://json-schema.org/draft/2020-12/json-schema-validation defines them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from ovspec.grammars.json_schema.checking import REFERENCES, Schema
from ovspec.grammars.json_schema.expressions import split
from ovspec.grammars.json_schema.formats import FORMATS
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
    common,
    constants,
    decimal,
    finds,
    meeting,
    only,
)


class Nodes(Protocol):
    """What the keywords need to know of the schemas within a schema."""

    old: bool  # of draft 7 or before

    def node(self, schema: Schema | bool, at: str) -> Node: ...
    def target(self, reference: str, at: str) -> Node: ...
    def opposite(self, node: Node) -> Node: ...
    def refused(self, at: str, why: str, *kinds: str) -> Shape: ...
    def all_apart(self, nodes: list[Node]) -> bool: ...


def own(schema: Schema, at: str, nodes: Nodes) -> Shape:
    """Return the shape that the keywords for single types describe."""
    types = types_of(schema)
    kinds: dict[str, tuple[Alternative, ...]] = {}
    for kind, make in KINDS.items():
        if kind in types or (kind == "number" and "integer" in types):
            made: Alternative | None = make()
            match kind:
                case "number":
                    made = numbers_of(schema)
                case "string":
                    made = strings_of(schema)
                case "array":
                    made = arrays_of(schema, at, nodes)
                case "object":
                    made = objects_of(schema, at, nodes)
            if made:
                kinds[kind] = (made,)
    shape = Shape(kinds)
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


def items_of(schema: Schema, at: str, nodes: Nodes) -> tuple[list[tuple[Any, str]], tuple[Any, str]]:
    """Return the schemas of the first items and that of the others, in any draft's notation, with JSON pointers."""
    old = nodes.old or isinstance(schema.get("items"), list)
    if old and not isinstance(schema.get("items"), list):
        return [], (schema.get("items", True), f"{at}/items")
    first, rest = ("items", "additionalItems") if old else ("prefixItems", "items")
    prefix = [(each, f"{at}/{first}/{i}") for i, each in enumerate(schema.get(first, ()))]
    return prefix, (schema.get(rest, True), f"{at}/{rest}")


def arrays_of(schema: Schema, at: str, nodes: Nodes) -> Arrays:
    prefix, rest = items_of(schema, at, nodes)
    return Arrays(
        tuple(nodes.node(*each) for each in prefix),
        nodes.node(*rest),
        schema.get("minItems", 0),
        schema.get("maxItems"),
        schema.get("uniqueItems") is True,
    )


def objects_of(schema: Schema, at: str, nodes: Nodes) -> Objects:
    below = f"{at}/patternProperties"
    patterns = {key: nodes.node(each, f"{below}/{key}") for key, each in schema.get("patternProperties", {}).items()}
    listed = {}
    for name, each in schema.get("properties", {}).items():
        matching = [node for pattern, node in patterns.items() if finds(pattern, name)]
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


def cases_of(schema: Schema, at: str, nodes: Nodes) -> list[tuple[Node, Node]]:
    """Return (condition, what must match then) for if, then and else."""
    condition = nodes.node(schema["if"], f"{at}/if")
    then, otherwise = (nodes.node(schema.get(key, True), f"{at}/{key}") for key in ("then", "else"))
    return [(condition, then), (nodes.opposite(condition), otherwise)]


def listed_nodes(schema: Schema, key: str, at: str, nodes: Nodes) -> list[Node]:
    return [nodes.node(each, f"{at}/{key}/{i}") for i, each in enumerate(schema.get(key, ()))]


def unevaluated(schema: Schema) -> dict[str, str]:
    """Return the type of value that each keyword for what isn't mentioned concerns, of those that forbid something."""
    kinds = {"unevaluatedProperties": "object", "unevaluatedItems": "array"}
    return {key: kind for key, kind in kinds.items() if schema.get(key, True) is not True}


# ---------------------------------------------------------------- broken keywords


def negated(schema: Schema, at: str, nodes: Nodes) -> Iterator[Shape | Node]:
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


def refusal(at: str, kind: str, nodes: Nodes) -> Shape:
    refused = nodes.refused(at, f"{at.rpartition('/')[2]} can't be negated", kind)
    return Shape({kind: refused.kinds[kind]})


def other_types(types: set[str], at: str, nodes: Nodes) -> Shape:
    kinds: dict[str, tuple[Alternative, ...]] = {kind: (make(),) for kind, make in KINDS.items() if kind not in types}
    if "integer" in types and "number" not in types:
        others = nodes.refused(at, "numbers that aren't integers can't be told apart", "number").kinds["number"]
        kinds["number"] = tuple(replace(each, fractions=True) if isinstance(each, Refused) else each for each in others)
    return Shape(kinds)


def unequal(values: list[Any], at: str, nodes: Nodes) -> Shape:
    """Return the shape of the values that equal none of ``values``."""
    texts = frozenset(value for value in values if isinstance(value, str))
    digits = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
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


def negated_string(schema: Schema, at: str, nodes: Nodes) -> Iterator[Shape]:
    if schema.get("minLength", 0) > 0:
        yield only("string", Strings(most=schema["minLength"] - 1))
    if "maxLength" in schema:
        yield only("string", Strings(least=schema["maxLength"] + 1))
    if "pattern" in schema:
        present, absent = split(schema["pattern"])
        yield from (only("string", Strings(absent=frozenset({each}))) for each in present)
        yield from (only("string", Strings(patterns=frozenset({each}))) for each in absent)
    if schema.get("format") in FORMATS:
        yield refusal(f"{at}/format", "string", nodes)


def negated_array(schema: Schema, at: str, nodes: Nodes) -> Iterator[Shape]:
    if schema.get("minItems", 0) > 0:
        yield only("array", Arrays(most=schema["minItems"] - 1))
    if "maxItems" in schema:
        yield only("array", Arrays(least=schema["maxItems"] + 1))
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


def negated_object(schema: Schema, at: str, nodes: Nodes) -> Iterator[Shape]:
    for name, each in schema.get("properties", {}).items():
        wrong = nodes.opposite(nodes.node(each, f"{at}/properties/{name}"))
        yield only("object", Objects(((name, wrong),), required=frozenset({name})))
    yield from (only("object", Objects(((name, NOTHING),))) for name in schema.get("required", ()))
    if schema.get("minProperties", 0) > 0:
        yield only("object", Objects(most=schema["minProperties"] - 1))
    if "maxProperties" in schema:
        yield only("object", Objects(least=schema["maxProperties"] + 1))
    for key in ("patternProperties", "additionalProperties", "propertyNames"):
        if schema.get(key) not in (None, True, {}):
            yield refusal(f"{at}/{key}", "object", nodes)
