"""Reads a JSON schema's keywords without references to other schemas, and lists the keywords with references."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.grammars.json_schema.checking import as_list
from ovspec.grammars.json_schema.expressions import split_lookaheads
from ovspec.grammars.json_schema.formats import ENFORCED_FORMATS

from ovspec.grammars.json_schema.shapes import (  # isort: skip
    JSON_TYPES, Bound, Numbers, Strings, intersect_numbers, to_decimal,
)  # fmt: skip


def list_allowed_types(schema: JsonObject) -> set[str]:
    """Return the types allowed by a schema, as named in its keyword type."""
    type_names = set(as_list(schema.get("type", [*JSON_TYPES, "integer"])))
    if schema.get("nullable") is True:
        type_names.add("null")
    return type_names


def read_allowed_numbers(schema: JsonObject) -> Numbers | None:
    """Return the numbers allowed by a schema; None if there are none."""
    numbers: Numbers | None = Numbers(integer="number" not in list_allowed_types(schema))
    for number_limit in list_number_limits(schema):
        numbers = numbers and intersect_numbers(numbers, number_limit)
    return numbers


def list_number_limits(schema: JsonObject) -> Iterator[Numbers]:
    """Yield the numbers allowed by each keyword for numbers."""
    for keyword in ("minimum", "maximum"):
        exclusive_bound = schema.get(f"exclusive{keyword.capitalize()}")
        bounds: list[Bound] = []
        if keyword in schema:
            bounds.append(Bound(to_decimal(schema[keyword]), exclusive_bound is True))  # true in draft 4
        if exclusive_bound is not None and not isinstance(exclusive_bound, bool):
            bounds.append(Bound(to_decimal(exclusive_bound), True))
        for bound in bounds:
            yield Numbers(low=bound) if keyword == "minimum" else Numbers(high=bound)
    if "multipleOf" in schema:
        yield Numbers(multiple_of=to_decimal(schema["multipleOf"]))


def read_allowed_strings(schema: JsonObject) -> Strings | None:
    """Return the strings allowed by a schema; None if there are none."""
    min_size, max_size = schema.get("minLength", 0), schema.get("maxLength", inf)
    if min_size > max_size:
        return None
    formats = frozenset(name for name in ENFORCED_FORMATS if name == schema.get("format"))
    if "pattern" not in schema:
        return Strings(min_size, max_size, formats=formats)
    required_patterns, forbidden_patterns = map(frozenset, split_lookaheads(schema["pattern"]))
    return Strings(min_size, max_size, required_patterns, formats, absent_patterns=forbidden_patterns)


def list_item_schemas(
    schema: JsonObject, pointer: str, old_dialect: bool
) -> tuple[list[tuple[JsonValue, str]], tuple[JsonValue, str]]:
    """Return the schemas of the first items and of the others, in any draft's notation, with JSON pointers."""
    has_item_list = isinstance(schema.get("items"), list)
    if old_dialect and not has_item_list:
        return [], (schema.get("items", True), f"{pointer}/items")
    prefix_keyword, rest_keyword = ("items", "additionalItems") if has_item_list else ("prefixItems", "items")
    prefix_schemas = [
        (item_schema, f"{pointer}/{prefix_keyword}/{i}") for i, item_schema in enumerate(schema.get(prefix_keyword, ()))
    ]
    return prefix_schemas, (schema.get(rest_keyword, True), f"{pointer}/{rest_keyword}")


def list_dependencies(schema: JsonObject, pointer: str) -> Iterator[tuple[str, JsonValue, str]]:
    """Yield (property, the required names or schema, JSON pointer)."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        for property_name, requirement in schema.get(keyword, {}).items():
            yield (
                property_name,
                [requirement] if isinstance(requirement, str) else requirement,
                f"{pointer}/{keyword}/{property_name}",
            )


def find_unevaluated_keywords(schema: JsonObject) -> dict[str, str]:
    """Return the JSON type of each keyword that forbids properties or items not mentioned by other keywords."""
    json_types = {"unevaluatedProperties": "object", "unevaluatedItems": "array"}
    return {keyword: json_type for keyword, json_type in json_types.items() if schema.get(keyword, True) is not True}
