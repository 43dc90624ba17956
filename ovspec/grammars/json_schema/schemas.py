"""Reads JSON schemas: the shapes of the values matching some schemas and not matching others.

Keywords are negated one by one, so ``not``, ``if`` and overlapping options of ``oneOf`` become alternatives.
https://json-schema.org/draft/2020-12/json-schema-core and .../json-schema-validation define the keywords.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.grammars.json_schema.checking import ANNOTATION_KEYWORDS, REFERENCE_KEYWORDS, resolve_reference
from ovspec.grammars.json_schema.expressions import split_lookaheads
from ovspec.grammars.json_schema.formats import ENFORCED_FORMATS

from ovspec.grammars.json_schema.keywords import (  # isort: skip
    find_unevaluated_keywords, list_allowed_types, list_dependencies, list_item_schemas, list_number_limits,
    read_allowed_numbers, read_allowed_strings,
)  # fmt: skip
from ovspec.grammars.json_schema.numbers import has_no_number

from ovspec.grammars.json_schema.shapes import (  # isort: skip
    ANY_SHAPE, JSON_TYPES, NO_VALUE, Alternative, Arrays, Booleans, Bound, Numbers, Objects, SchemaNode, Strings,
    UnenforceableValues, ValueShape, decimals_of, intersect_alternatives,  intersect_shapes, join_nodes,
    search_pattern, shape_if_type, shape_of_enum, shape_of_type, unite_shapes,
)  # fmt: skip

# Keywords without a restriction of their own, alone or next to a $ref.
UNRESTRICTING_KEYWORDS = {*ANNOTATION_KEYWORDS, "$defs", "definitions"}
MAX_ALTERNATIVES = 400  # of one type


class TooManyAlternativesError(Exception):
    """Merging yielded too many alternatives."""


def check_alternative_count(shape: ValueShape) -> ValueShape:
    """Return ``shape``; raises TooManyAlternativesError if it has too many."""
    if any(len(alternatives) > MAX_ALTERNATIVES for alternatives in shape.by_type.values()):
        raise TooManyAlternativesError
    return shape


class CircularSchemaError(Exception):
    """A schema refers to itself before any value has begun."""


@dataclass
class ValueRequirements:
    """The requirements on a value: ``shape``, an option of each of ``unions``, a single option of each of ``one_ofs``.

    Unions have the JSON pointers of their keywords.
    """

    shape: ValueShape = ANY_SHAPE
    unions: list[tuple[str, list[ValueShape | SchemaNode]]] = field(default_factory=list)
    one_ofs: list[tuple[str, list[SchemaNode]]] = field(default_factory=list)


class SchemaGraph:
    """All schemas within a schema, by number.

    Args:
        root: the whole schema; it has been checked.
        lenient: leave out unenforceable parts, instead of marking them as ``UnenforceableValues``.
        has_no_text: returns whether no string fits an alternative.
    """

    def __init__(self, root: JsonObject, lenient: bool, has_no_text: Callable[[Strings], bool]) -> None:
        self._root = root
        self.lenient = lenient
        self.has_no_text = has_no_text
        self.old_dialect = re.search(r"draft-0[3-7]", str(root.get("$schema"))) is not None
        self._numbers_by_schema: dict[str, int] = {}
        self._schemas: list[tuple[JsonObject | bool, str]] = []  # with JSON pointers
        self._shapes: dict[SchemaNode, ValueShape] = {}
        self._nodes_in_evaluation: set[SchemaNode] = set()
        self.make_node(False, "#")  # number 0, as in NO_VALUE
        self.root_node = self.make_node(root, "#")

    def make_node(self, schema: JsonObject | bool, pointer: str) -> SchemaNode:
        """Return the node of the values matching ``schema``, found at this JSON pointer."""
        passed_ids = set[int]()
        while isinstance(schema, dict) and "$ref" in schema:
            # Until draft 7, keywords next to a $ref are ignored.
            if not self.old_dialect and schema.keys() - {"$ref", *UNRESTRICTING_KEYWORDS}:
                break
            if id(schema) in passed_ids:
                raise CircularSchemaError(pointer)
            passed_ids.add(id(schema))
            schema, pointer = resolve_reference(self._root, schema["$ref"], f"{pointer}/$ref")
        if schema is True or (isinstance(schema, dict) and not schema.keys() - UNRESTRICTING_KEYWORDS):
            return frozenset()
        schema_text = json.dumps(schema)
        if schema_text not in self._numbers_by_schema:
            self._numbers_by_schema[schema_text] = len(self._schemas)
            self._schemas.append((schema, pointer))
        return frozenset({(self._numbers_by_schema[schema_text], True)})

    def make_reference_node(self, reference: str, pointer: str) -> SchemaNode:
        """Return the node of the schema referenced at this JSON pointer."""
        return self.make_node(*resolve_reference(self._root, reference, pointer))

    def make_list_nodes(self, schema: JsonObject, keyword: str, pointer: str) -> list[SchemaNode]:
        """Return the nodes of the schemas in a keyword's list; [] without the keyword."""
        return [
            self.make_node(subschema, f"{pointer}/{keyword}/{i}") for i, subschema in enumerate(schema.get(keyword, ()))
        ]

    def make_named_nodes(self, schema: JsonObject, keyword: str, pointer: str) -> dict[str, SchemaNode]:
        """Return the nodes of the schemas in a keyword's mapping, by name; {} without the keyword."""
        subschemas = schema.get(keyword, {}).items()
        return {
            property_name: self.make_node(subschema, f"{pointer}/{keyword}/{property_name}")
            for property_name, subschema in subschemas
        }

    def negate_node(self, node: SchemaNode) -> SchemaNode:
        """Return the node of the values not matching a node made by ``make_node``."""
        if not node:
            return NO_VALUE
        return frozenset((schema_number, not must_match) for schema_number, must_match in node)

    def find_shape(self, node: SchemaNode) -> ValueShape:
        """Return the alternatives of the values of ``node``, without empty alternatives."""
        if node not in self._shapes:
            if node in self._nodes_in_evaluation:
                raise CircularSchemaError(min((self._schemas[number][1] for number, _ in node if number), default="#"))
            self._nodes_in_evaluation.add(node)
            try:
                self._shapes[node] = self._evaluate_shape(node)
            finally:
                self._nodes_in_evaluation.remove(node)
        return self._shapes[node]

    def fits_no_value(self, node: SchemaNode) -> bool:
        """Return whether ``node`` has no values, as far as this is easy to see."""
        try:
            return node == NO_VALUE or not self.find_shape(node)
        except CircularSchemaError:  # only through values within values
            return False

    def find_unenforceable(self, node: SchemaNode) -> UnenforceableValues | None:
        """Return why no value of ``node`` can be generated, if all alternatives are dispensable."""
        try:
            shape = self.find_shape(node)
        except CircularSchemaError:
            return None
        first_unenforceable: UnenforceableValues | None = None
        for alternative in itertools.chain.from_iterable(shape.by_type.values()):
            if not (isinstance(alternative, UnenforceableValues) and alternative.dispensable):
                return None
            first_unenforceable = first_unenforceable or alternative
        return first_unenforceable

    def unenforceable_shape(self, pointer: str, reason: str, *json_types: str) -> ValueShape:
        """Return the shape for an unenforceable keyword about values of these types (all if none)."""
        if self.lenient:
            return ANY_SHAPE
        unenforceable = UnenforceableValues(pointer, reason, "negated" in reason)
        refused_alternatives = dict.fromkeys(json_types or JSON_TYPES, (unenforceable,))
        return ValueShape({**ANY_SHAPE.by_type, **refused_alternatives})

    def _evaluate_shape(self, node: SchemaNode) -> ValueShape:
        requirements = self._gather_requirements(node)
        shape = self._prune_shape(requirements.shape)
        for pointer, options in requirements.unions:
            shapes = (option if isinstance(option, ValueShape) else self.find_shape(option) for option in options)
            united_shape = unite_shapes(*shapes)
            with self._limit_alternatives(pointer):
                shape = self._intersect(shape, united_shape)
        for pointer, nodes in requirements.one_ofs:
            with self._limit_alternatives(pointer):
                shape = self._intersect_one_of(shape, nodes, pointer)
        return shape

    @contextlib.contextmanager
    def _limit_alternatives(self, pointer: str) -> Iterator[None]:
        """Refuse a keyword with too many alternatives, or leave it out if the reading is lenient."""
        try:
            yield
        except TooManyAlternativesError:
            if not self.lenient:
                reason = f"this keyword expands to more than {MAX_ALTERNATIVES} alternatives; simplify it."
                raise OvspecError(f"{pointer}: {reason}") from None

    def _gather_requirements(self, node: SchemaNode) -> ValueRequirements:
        requirements = ValueRequirements()
        gathered_conditions = set[tuple[int, bool]]()
        # Conditions, each with the numbers of its source schemas.
        pending_conditions: list[tuple[tuple[int, bool], tuple[int, ...]]] = [
            (condition, ()) for condition in sorted(node)
        ]
        while pending_conditions:
            (schema_number, must_match), ancestor_numbers = pending_conditions.pop(0)
            schema, pointer = self._schemas[schema_number]
            if schema_number in ancestor_numbers:
                raise CircularSchemaError(pointer)
            if (schema_number, must_match) in gathered_conditions:
                continue
            gathered_conditions.add((schema_number, must_match))
            nodes: list[SchemaNode] = []
            if not isinstance(schema, dict):
                if schema != must_match:
                    requirements.shape = ValueShape()
            elif must_match:
                requirements.shape = self._intersect(requirements.shape, read_type_keywords(schema, pointer, self))
                nodes = self._gather_unions(schema, pointer, requirements)
            else:
                options = list(negate_schema(schema, pointer, self))
                if len(options) == 1 and not isinstance(options[0], ValueShape):
                    nodes = [options[0]]
                else:
                    requirements.unions.append((pointer, options))
            pending_conditions += [
                (condition, (*ancestor_numbers, schema_number)) for condition in itertools.chain.from_iterable(nodes)
            ]
        return requirements

    def _gather_unions(self, schema: JsonObject, pointer: str, requirements: ValueRequirements) -> list[SchemaNode]:
        """Add the unions of a schema to ``requirements``; return the nodes a value must match in any case."""
        required_nodes = self.make_list_nodes(schema, "allOf", pointer)
        for keyword in REFERENCE_KEYWORDS:
            if keyword in schema:
                required_nodes.append(self.make_reference_node(schema[keyword], f"{pointer}/{keyword}"))
        if "not" in schema:
            required_nodes.append(self.negate_node(self.make_node(schema["not"], f"{pointer}/not")))
        if "anyOf" in schema:
            requirements.unions.append((f"{pointer}/anyOf", [*self.make_list_nodes(schema, "anyOf", pointer)]))
        if "oneOf" in schema:
            requirements.one_ofs.append((f"{pointer}/oneOf", self.make_list_nodes(schema, "oneOf", pointer)))
        if "if" in schema:
            cases = make_if_cases(schema, pointer, self)
            requirements.unions.append((f"{pointer}/if", [join_nodes(*case) for case in cases]))
        for property_name, requirement, dependency_pointer in list_dependencies(schema, pointer):
            shape_if_present: ValueShape | SchemaNode
            shape_if_absent = shape_if_type("object", Objects(((property_name, NO_VALUE),), unlisted_is_default=True))
            if isinstance(requirement, list):
                shape_if_present = shape_of_type("object", Objects(required=frozenset((property_name, *requirement))))
            else:
                shape_if_present = join_nodes(
                    self.make_presence_node(property_name, dependency_pointer),
                    self.make_node(requirement, dependency_pointer),
                )
            requirements.unions.append((dependency_pointer, [shape_if_absent, shape_if_present]))
        return required_nodes

    def make_presence_node(self, property_name: str, pointer: str) -> SchemaNode:
        """Return the node of the objects with the property ``property_name``."""
        return self.make_node({"type": "object", "required": [property_name]}, pointer)

    def are_disjoint_nodes(self, nodes: list[SchemaNode]) -> bool:
        """Return whether no value matches two of ``nodes``, as far as can be proven."""
        shapes = [self.find_shape(node).by_type for node in nodes]
        return all(
            self._are_disjoint(first_alternative, second_alternative)
            for first, second in itertools.combinations(shapes, 2)
            for json_type in first.keys() & second.keys()
            for first_alternative in first[json_type]
            for second_alternative in second[json_type]
        )

    # ------------------------------------------------------------ shapes

    def _intersect(self, first_shape: ValueShape, second_shape: ValueShape) -> ValueShape:
        """Return the intersection of two shapes, without empty alternatives."""
        return check_alternative_count(intersect_shapes(first_shape, second_shape, self._prune_alternative))

    def _prune_shape(self, shape: ValueShape) -> ValueShape:
        pruned_alternatives = {
            json_type: tuple(filter(None, map(self._prune_alternative, alternatives)))
            for json_type, alternatives in shape.by_type.items()
        }
        return ValueShape({json_type: pruned for json_type, pruned in pruned_alternatives.items() if pruned})

    def _prune_alternative(self, alternative: Alternative | None) -> Alternative | None:
        """Return an alternative with its required properties listed; None if no value fits it."""
        match alternative:
            case Strings() if alternative.values is None and self.has_no_text(alternative):
                return None
            case Numbers() if has_no_number(alternative):
                return None
            case Arrays():
                return self._prune_array(alternative)
            case Objects():
                return self._prune_object(alternative)
        return alternative

    def _prune_array(self, arrays: Arrays) -> Arrays | None:
        empty_positions = (i for i, node in enumerate((*arrays.prefix, arrays.items)) if self.fits_no_value(node))
        max_size = min(arrays.max_size, next(empty_positions, inf))
        if arrays.min_size > max_size:
            return None
        return replace(arrays, max_size=max_size)

    def _prune_object(self, objects: Objects) -> Alternative | None:
        listed_nodes = dict(objects.properties)
        unlisted_required = {
            property_name: objects.property_node(property_name)
            for property_name in sorted(objects.required)
            if property_name not in listed_nodes
        }
        if any(
            self.fits_no_value(node)
            for property_name, node in {**listed_nodes, **unlisted_required}.items()
            if property_name in objects.required
        ):
            return None
        is_possible_name = self._make_name_test(objects.name_node)
        if len(objects.required) > objects.max_size or not all(map(is_possible_name, objects.required)):
            return None
        for property_name in objects.required:
            if unenforceable := self.find_unenforceable(objects.property_node(property_name)):
                return unenforceable
        objects = replace(objects, properties=(*objects.properties, *unlisted_required.items()))
        if objects.min_size <= len(objects.required):
            return objects
        # All unlisted properties count as a single property, because they may have the same name.
        possible_count = sum(
            is_possible_name(name) and not self.fits_no_value(node) for name, node in objects.properties
        )
        unlisted_nodes = (objects.unlisted_node, *(node for _, node in objects.patterns))
        may_have_unlisted = not all(map(self.fits_no_value, unlisted_nodes))
        if objects.min_size <= possible_count + may_have_unlisted:
            return objects
        if self.lenient:
            return replace(objects, min_size=possible_count + may_have_unlisted)
        reason = f"minProperties {objects.min_size} can't be enforced, because the schema names fewer properties"
        return UnenforceableValues("#", reason) if may_have_unlisted else None

    def _make_name_test(self, names: SchemaNode) -> Callable[[str], bool]:
        """Return a function to test whether a name may match ``names``."""
        alternatives = self.find_shape(names).by_type.get("string", ()) if names else (Strings(),)
        return lambda name: any(
            not isinstance(strings, Strings) or strings.accepts_text(name) for strings in alternatives
        )

    def _intersect_one_of(self, shape: ValueShape, nodes: list[SchemaNode], pointer: str) -> ValueShape:
        """Return the values of ``shape`` matching a single option of a oneOf, given as ``nodes``."""
        shapes = [self._intersect(shape, self.find_shape(node)) for node in nodes]
        exclusive_shapes: list[ValueShape] = []
        for i, option_shape in enumerate(shapes):
            for json_type, alternatives in option_shape.by_type.items():
                for alternative in alternatives:
                    candidate = shape_of_type(json_type, alternative)
                    for j, rival_shape in enumerate(shapes):
                        rivals = rival_shape.by_type.get(json_type, ())
                        if j != i and not all(self._are_disjoint(alternative, rival) for rival in rivals):
                            candidate = self._intersect(candidate, self._complement_branch(nodes[j], pointer))
                    exclusive_shapes.append(candidate)
        return check_alternative_count(unite_shapes(*exclusive_shapes))

    def _complement_branch(self, node: SchemaNode, pointer: str) -> ValueShape:
        """Return the shape of the values not matching ``node``, an option of a oneOf."""
        by_type = dict(self.find_shape(self.negate_node(node)).by_type)
        for json_type, alternatives in by_type.items():
            enforceable = tuple(option for option in alternatives if not isinstance(option, UnenforceableValues))
            reason = "oneOf can't be enforced, because its options may overlap"
            by_type[json_type] = enforceable or (UnenforceableValues(pointer, reason),)
        return ValueShape(by_type)

    def _are_disjoint(self, first_alternative: Alternative, second_alternative: Alternative) -> bool:
        if isinstance(first_alternative, UnenforceableValues) or isinstance(second_alternative, UnenforceableValues):
            return False
        return self._prune_alternative(intersect_alternatives(first_alternative, second_alternative)) is None


# ---------------------------------------------------------------- keywords


def read_type_keywords(schema: JsonObject, pointer: str, graph: SchemaGraph) -> ValueShape:
    """Return the shape described by the keywords for single types."""
    readers: dict[str, Callable[[], Alternative | None]] = {
        **JSON_TYPES,
        "number": lambda: read_allowed_numbers(schema),
        "string": lambda: read_allowed_strings(schema),
        "array": lambda: read_allowed_arrays(schema, pointer, graph),
        "object": lambda: read_allowed_objects(schema, pointer, graph),
    }
    json_types = list_allowed_types(schema)
    if "integer" in json_types:
        json_types.add("number")
    alternatives = {json_type: read() for json_type, read in readers.items() if json_type in json_types}
    shape = ValueShape({json_type: (alternative,) for json_type, alternative in alternatives.items() if alternative})

    def make_value_node(value: JsonValue) -> SchemaNode:
        return graph.make_node({"const": value}, pointer)

    if "const" in schema:
        shape = intersect_shapes(shape, shape_of_enum([schema["const"]], make_value_node))
    if "enum" in schema:
        shape = intersect_shapes(shape, shape_of_enum(schema["enum"], make_value_node))
    unenforced_keywords = find_unevaluated_keywords(schema)
    if "contains" in schema:
        unenforced_keywords["contains"] = "array"
    for keyword, json_type in unenforced_keywords.items():
        refused_shape = graph.unenforceable_shape(f"{pointer}/{keyword}", f"{keyword} can't be enforced", json_type)
        shape = intersect_shapes(shape, refused_shape)
    return shape


def read_allowed_arrays(schema: JsonObject, pointer: str, graph: SchemaGraph) -> Arrays:
    prefix_schemas, items_schema = list_item_schemas(schema, pointer, graph.old_dialect)
    nodes = tuple(graph.make_node(*item) for item in prefix_schemas)
    min_size, max_size = schema.get("minItems", 0), schema.get("maxItems", inf)
    return Arrays(nodes, graph.make_node(*items_schema), min_size, max_size, schema.get("uniqueItems") is True)


def read_allowed_objects(schema: JsonObject, pointer: str, graph: SchemaGraph) -> Objects:
    pattern_nodes = graph.make_named_nodes(schema, "patternProperties", pointer)
    listed_nodes = graph.make_named_nodes(schema, "properties", pointer)
    for property_name, node in listed_nodes.items():
        matching_nodes = [pattern_nodes[pattern] for pattern in pattern_nodes if search_pattern(pattern, property_name)]
        listed_nodes[property_name] = join_nodes(node, *matching_nodes)
    return Objects(
        tuple(listed_nodes.items()),
        tuple(pattern_nodes.items()),
        graph.make_node(schema.get("additionalProperties", True), f"{pointer}/additionalProperties"),
        frozenset(schema.get("required", ())),
        schema.get("minProperties", 0),
        schema.get("maxProperties", inf),
        graph.make_node(schema.get("propertyNames", True), f"{pointer}/propertyNames"),
        unlisted_is_default="additionalProperties" not in schema,
    )


def make_if_cases(schema: JsonObject, pointer: str, graph: SchemaGraph) -> list[tuple[SchemaNode, SchemaNode]]:
    """Return (condition, consequence) for if, then and else."""
    condition = graph.make_node(schema["if"], f"{pointer}/if")
    then_node = graph.make_node(schema.get("then", True), f"{pointer}/then")
    else_node = graph.make_node(schema.get("else", True), f"{pointer}/else")
    return [(condition, then_node), (graph.negate_node(condition), else_node)]


# ---------------------------------------------------------------- broken keywords


def negate_schema(schema: JsonObject, pointer: str, graph: SchemaGraph) -> Iterator[ValueShape | SchemaNode]:
    """Yield the values breaking ``schema``: an option for each way to break it."""
    if "type" in schema:
        yield negate_types(list_allowed_types(schema), f"{pointer}/type", graph)
    if "const" in schema:
        yield negate_values([schema["const"]], f"{pointer}/const", graph)
    if "enum" in schema:
        yield negate_values(schema["enum"], f"{pointer}/enum", graph)
    for number_limit in list_number_limits(schema):
        if number_limit.low:
            yield shape_of_type("number", Numbers(high=Bound(number_limit.low.value, not number_limit.low.exclusive)))
        elif number_limit.high:
            yield shape_of_type("number", Numbers(low=Bound(number_limit.high.value, not number_limit.high.exclusive)))
        else:
            yield unenforceable_negation(f"{pointer}/multipleOf", "number", graph)
    size_keywords = ("Length", "string", Strings), ("Items", "array", Arrays), ("Properties", "object", Objects)
    for keyword_end, json_type, make_alternative in size_keywords:
        if schema.get(f"min{keyword_end}", 0) > 0:
            yield shape_of_type(json_type, make_alternative(max_size=schema[f"min{keyword_end}"] - 1))
        if f"max{keyword_end}" in schema:
            yield shape_of_type(json_type, make_alternative(min_size=schema[f"max{keyword_end}"] + 1))
    yield from negate_string_keywords(schema, pointer, graph)
    yield from negate_array_keywords(schema, pointer, graph)
    yield from negate_object_keywords(schema, pointer, graph)
    yield from map(graph.negate_node, graph.make_list_nodes(schema, "allOf", pointer))
    for keyword in REFERENCE_KEYWORDS:
        if keyword in schema:
            yield graph.negate_node(graph.make_reference_node(schema[keyword], f"{pointer}/{keyword}"))
    if "not" in schema:
        yield graph.make_node(schema["not"], f"{pointer}/not")
    if "anyOf" in schema:
        yield join_nodes(*map(graph.negate_node, graph.make_list_nodes(schema, "anyOf", pointer)))
    if "oneOf" in schema:
        options = graph.make_list_nodes(schema, "oneOf", pointer)
        if not graph.are_disjoint_nodes(options):
            yield graph.unenforceable_shape(f"{pointer}/oneOf", "a oneOf whose options overlap can't be negated")
        yield join_nodes(*map(graph.negate_node, options))
    if "if" in schema:
        for condition, consequence in make_if_cases(schema, pointer, graph):
            yield join_nodes(condition, graph.negate_node(consequence))
    for property_name, requirement, dependency_pointer in list_dependencies(schema, pointer):
        if isinstance(requirement, list):
            for required_name in requirement:
                objects = Objects(((required_name, NO_VALUE),), required=frozenset({property_name}))
                yield shape_of_type("object", objects)
        else:
            negated_requirement = graph.negate_node(graph.make_node(requirement, dependency_pointer))
            yield join_nodes(graph.make_presence_node(property_name, dependency_pointer), negated_requirement)
    for keyword, json_type in find_unevaluated_keywords(schema).items():
        yield unenforceable_negation(f"{pointer}/{keyword}", json_type, graph)


def unenforceable_negation(pointer: str, json_type: str, graph: SchemaGraph) -> ValueShape:
    """Return the shape of a type's values breaking the keyword at ``pointer``, marked as unenforceable."""
    refused_shape = graph.unenforceable_shape(pointer, f"{pointer.rpartition('/')[2]} can't be negated", json_type)
    return ValueShape({json_type: refused_shape.by_type[json_type]})


def negate_types(type_names: set[str], pointer: str, graph: SchemaGraph) -> ValueShape:
    """Return the shape of the values with none of these types."""
    by_type = {name: alternatives for name, alternatives in ANY_SHAPE.by_type.items() if name not in type_names}
    if "integer" in type_names and "number" not in type_names:
        reason = '"number but not integer" can\'t be enforced'
        (number_alternative,) = graph.unenforceable_shape(pointer, reason, "number").by_type["number"]
        if isinstance(number_alternative, UnenforceableValues):
            number_alternative = replace(number_alternative, non_integers=True)
        by_type["number"] = (number_alternative,)
    return ValueShape(by_type)


def negate_values(values: list[JsonValue], pointer: str, graph: SchemaGraph) -> ValueShape:
    """Return the shape of all values except ``values``."""
    excluded_texts = frozenset(value for value in values if isinstance(value, str))
    by_type: dict[str, tuple[Alternative, ...]] = {
        **ANY_SHAPE.by_type,
        "string": (Strings(excluded=excluded_texts),),
        "number": (Numbers(excluded=decimals_of(values)),),
        "boolean": (Booleans(frozenset({False, True}) - {value for value in values if isinstance(value, bool)}),),
    }
    if by_type["boolean"] == (Booleans(frozenset()),):
        del by_type["boolean"]
    if None in values:
        del by_type["null"]
    for json_type, python_type in (("array", list), ("object", dict)):
        if any(isinstance(value, python_type) for value in values):
            by_type |= unenforceable_negation(pointer, json_type, graph).by_type
    return ValueShape(by_type)


def negate_string_keywords(schema: JsonObject, pointer: str, graph: SchemaGraph) -> Iterator[ValueShape]:
    if "pattern" in schema:
        required_patterns, forbidden_patterns = split_lookaheads(schema["pattern"])
        for pattern in required_patterns:
            yield shape_of_type("string", Strings(absent_patterns=frozenset({pattern})))
        for pattern in forbidden_patterns:
            yield shape_of_type("string", Strings(patterns=frozenset({pattern})))
    if schema.get("format") in ENFORCED_FORMATS:
        yield unenforceable_negation(f"{pointer}/format", "string", graph)


def negate_array_keywords(schema: JsonObject, pointer: str, graph: SchemaGraph) -> Iterator[ValueShape]:
    if schema.get("uniqueItems") is True:
        yield unenforceable_negation(f"{pointer}/uniqueItems", "array", graph)
    prefix_schemas, (items_schema, items_pointer) = list_item_schemas(schema, pointer, graph.old_dialect)
    if prefix_schemas:
        yield unenforceable_negation(prefix_schemas[0][1].rpartition("/")[0], "array", graph)
    elif graph.make_node(items_schema, items_pointer):
        yield unenforceable_negation(items_pointer, "array", graph)
    if "contains" in schema:
        if schema.get("minContains", 1) != 1 or "maxContains" in schema:
            yield unenforceable_negation(f"{pointer}/contains", "array", graph)
        else:
            contained_node = graph.make_node(schema["contains"], f"{pointer}/contains")
            yield shape_of_type("array", Arrays(items=graph.negate_node(contained_node)))


def negate_object_keywords(schema: JsonObject, pointer: str, graph: SchemaGraph) -> Iterator[ValueShape]:
    for property_name, node in graph.make_named_nodes(schema, "properties", pointer).items():
        yield shape_of_type(
            "object", Objects(((property_name, graph.negate_node(node)),), required=frozenset({property_name}))
        )
    for property_name in schema.get("required", ()):
        yield shape_of_type("object", Objects(((property_name, NO_VALUE),)))
    for keyword in ("patternProperties", "additionalProperties", "propertyNames"):
        if schema.get(keyword) not in (None, True, {}):
            yield unenforceable_negation(f"{pointer}/{keyword}", "object", graph)
