"""The values of options: how they are read from the command line, and checked."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from numbers import Integral, Number, Real
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from ovspec.base.errors import OvspecError
from ovspec.params.limits import LARGEST_NUMBER, Limits
from ovspec.params.option import Option, is_collection_type, literal_values, suggest_name, union_members

PLURAL_TYPE_NAMES = {str: "strings", int: "whole numbers", float: "numbers"}
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
MAX_SHOWN_CHARACTERS = 80  # characters of a value in an error
SHORT_REPR = reprlib.Repr()  # a request's value may have megabytes
SHORT_REPR.maxstring = SHORT_REPR.maxother = MAX_SHOWN_CHARACTERS

# ---------------------------------------------------------------- checks


def check_value(value: Any, option: Option) -> None:
    """Raise OvspecError if ``value`` is not of the type of ``option`` or is out of range."""
    if wrong := describe_problem(value, option.value_type, option.limits):
        raise OvspecError(f"`{option.name}` {wrong}.")


def describe_problem(value: Any, kind: Any, limits: Limits | None) -> str | None:
    """Return the problem of a value that is not of the type ``kind`` or is out of range, as the end of a sentence."""
    if not is_of_type(value, kind):
        if (choices := literal_values(kind)) and not limits:
            return f"is {describe_value(value)}; it must be one of {', '.join(choices)}"
        return f"must be {describe_type(kind)}, not {describe_value(value)}"
    if limits and isinstance(value, Number) and not is_in_range(limits, value):
        return f"is {describe_value(value)}; it must be {limits.description}"
    return None


def is_in_range(limits: Limits, number: Any) -> bool:
    """Return whether a number is in range."""
    inside = limits.minimum <= number <= limits.maximum and not (limits.excludes_minimum and number == limits.minimum)
    return inside or number == limits.special_value


def is_of_type(value: Any, kind: Any) -> bool:
    """Return whether ``value`` is of the type ``kind``, written as in annotations."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(is_of_type(value, member) for member in inner)
    if origin is Literal:
        return any(value is choice or (type(value) is type(choice) and value == choice) for choice in inner)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if origin and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            is_of_type(k, inner[0]) and is_of_type(v, inner[1]) for k, v in value.items()
        )
    if origin and issubclass(origin, Collection):
        listed = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
        return listed and all(is_of_type(item, inner[0]) for item in value)
    return isinstance(value, origin or kind)


def check_option_names(options: Mapping[str, Any], table: Mapping[str, Option]) -> None:
    """Raise TypeError if ``options`` has an unknown name."""
    for name in sorted(options.keys() - table.keys()):
        meant = suggest_name(name, table) or f"the options are {', '.join(table)}"
        raise TypeError(f"unknown option {name!r}; {meant}")


# ---------------------------------------------------------------- in words


def describe_value(value: Any) -> str:
    """Return ``value`` as error messages show it."""
    if isinstance(value, (int, float)) and LARGEST_NUMBER < abs(value) < float("inf"):
        return f"beyond {LARGEST_NUMBER}, the limit of any option"  # Python may refuse to print so many digits
    return str(value) if isinstance(value, Number) else SHORT_REPR.repr(value)[:MAX_SHOWN_CHARACTERS]


def describe_type(kind: Any) -> str:
    """Return the values of a type in words."""
    words = list[str]()
    for member in map(strip_annotations, union_members(kind)):
        origin = get_origin(member)
        if origin is Callable:
            words.append("a function")
        elif origin is Literal:
            words += [json.dumps(value) for value in get_args(member)]
        elif is_collection_type(member):
            inner = get_args(member)
            words.append(describe_mapping(*inner) if len(inner) == 2 else f"a list of {describe_plural(inner[0])}")
        else:
            words.append(
                TYPE_NAMES.get(member) or ("an object" if hasattr(member, "model_fields") else member.__name__)
            )
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def describe_mapping(keys: Any, values: Any) -> str:
    """Return a mapping in words."""
    return "an object" if keys is str else f"an object that maps {describe_plural(keys)} to {describe_plural(values)}"


def describe_plural(kind: Any) -> str:
    """Return several values of a type in words."""
    kind = strip_annotations(kind)
    inner = get_args(kind)
    return (
        f"lists of {describe_plural(inner[0])}" if get_origin(kind) is list else PLURAL_TYPE_NAMES.get(kind, "objects")
    )


def strip_annotations(kind: Any) -> Any:
    """Return a type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


# ---------------------------------------------------------------- on the command line


def element_type(kind: Any) -> Any:
    """Return the type of one value of an option that may be repeated; other types as they are."""
    for member in union_members(kind):
        if is_collection_type(member) and len(inner := get_args(member)) == 1:
            return inner[0]
    return kind


def parse_number_or_text(text: str, kind: Any) -> Any:
    """Return the number or string in a text; text that should be a number but isn't stays, for the check to refuse."""
    try:
        return int(text) if int in union_members(kind) else float(text) if float in union_members(kind) else text
    except ValueError:
        return text


def parse_lookahead(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"{text!r} is neither auto nor a number of tokens.")
    return text if text == "auto" else int(text)


def parse_token_bias(text: str) -> dict[int, float]:
    token, _, bias = text.partition("=")
    try:
        return {int(token): float(bias)}
    except ValueError:
        raise ValueError(f"{text!r} is not ID=VALUE, as in --logit-bias 50=-2.5.") from None


def parse_key_value(text: str) -> dict[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{text!r} is not KEY=VALUE, as in --property NUM_STREAMS=1.")
    return {key.strip(): value.strip()}


def parse_folder(text: str) -> Path:
    if Path(text).is_file():
        raise ValueError(f"{text!r} is a file; name a folder.")
    return Path(text)


def parse_file_or_name(text: str) -> str | Path:
    return Path(text) if Path(text).is_file() else text


def parse_schema_or_file(text: str) -> str | Path:
    return text if not text.strip() or text.lstrip().startswith(("{", "[", '"', "true", "false")) else Path(text)


def parse_json_object(text: str) -> dict[str, Any]:
    try:
        is_file = not text.lstrip().startswith("{") and Path(text).is_file()
        value = json.loads(Path(text).read_text(encoding="utf-8-sig") if is_file else text)
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is neither a file nor a JSON object, as '{{\"enable_thinking\": false}}' is.")
    return value


def parse_position_or_text(text: str) -> int | str:
    return int(text[1:]) if re.fullmatch(r"@-?[0-9]+", text) else text
