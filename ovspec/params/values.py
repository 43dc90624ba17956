"""The values of options: checks, and parsers for the command line."""

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
from ovspec.base.json_types import JsonObject
from ovspec.params.limits import LARGEST_NUMBER, NumberLimits
from ovspec.params.option import (
    Option,
    OptionValue,
    TypeForm,
    is_collection_type,
    literal_values,
    make_did_you_mean,
    union_members,
)

PLURAL_TYPE_NAMES = {str: "strings", int: "whole numbers", float: "numbers"}
TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
MAX_SHOWN_CHARACTERS = 80  # characters of a value in an error
SHORT_REPR = reprlib.Repr()  # a value in a request may be megabytes long
SHORT_REPR.maxstring = SHORT_REPR.maxother = MAX_SHOWN_CHARACTERS

# ---------------------------------------------------------------- checks


def check_value(value: object, option: Option) -> None:
    """Raise OvspecError if ``value`` is not of the type of ``option`` or is out of range."""
    if problem := describe_value_problem(value, option.value_type, option.limits):
        raise OvspecError(f"`{option.name}` {problem}.")


def describe_value_problem(value: object, value_type: TypeForm, limits: NumberLimits | None) -> str | None:
    """Return the problem of a value of the wrong type or out of range, as the end of a sentence."""
    if not is_of_type(value, value_type):
        if (choices := literal_values(value_type)) and not limits:
            return f"is {describe_value(value)}; it must be one of {', '.join(choices)}"
        return f"must be {describe_type(value_type)}, not {describe_value(value)}"
    if limits and isinstance(value, Number) and not is_in_range(limits, value):
        return f"is {describe_value(value)}; it must be {limits.description}"
    return None


def is_in_range(limits: NumberLimits, number: OptionValue) -> bool:
    """Return whether a number is in range."""
    is_within_bounds = limits.minimum <= number <= limits.maximum and not (
        limits.excludes_minimum and number == limits.minimum
    )
    return is_within_bounds or number == limits.special_value


def is_of_type(value: object, value_type: TypeForm) -> bool:
    """Return whether ``value`` is of ``value_type``, written as in annotations."""
    origin = get_origin(value_type)
    type_arguments = get_args(value_type)
    if value_type is Any:
        return True
    if origin in (Union, UnionType):
        return any(is_of_type(value, member) for member in type_arguments)
    if origin is Literal:
        return any(
            value is literal_choice or (type(value) is type(literal_choice) and value == literal_choice)
            for literal_choice in type_arguments
        )
    if value_type in (int, float):
        return isinstance(value, Integral if value_type is int else Real) and not isinstance(value, bool)
    if origin and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return False
        return all(is_of_type(k, type_arguments[0]) and is_of_type(v, type_arguments[1]) for k, v in value.items())
    if origin and issubclass(origin, Collection):
        if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)):
            return False
        return all(is_of_type(list_element, type_arguments[0]) for list_element in value)
    return isinstance(value, origin or value_type)


def check_option_names(options: Mapping[str, object], declarations: Mapping[str, Option]) -> None:
    """Raise TypeError if ``options`` has an undeclared name."""
    for name in sorted(options.keys() - declarations.keys()):
        remedy = make_did_you_mean(name, declarations) or f"the options are {', '.join(declarations)}"
        raise TypeError(f"unknown option {name!r}; {remedy}")


# ---------------------------------------------------------------- in words


def describe_value(value: object) -> str:
    """Return ``value`` in the form for error messages."""
    if isinstance(value, (int, float)) and LARGEST_NUMBER < abs(value) < float("inf"):
        return f"beyond {LARGEST_NUMBER}, the limit of any option"  # Python may refuse to print that many digits
    if isinstance(value, Number):
        return str(value)
    return SHORT_REPR.repr(value)[:MAX_SHOWN_CHARACTERS]


def describe_type(value_type: TypeForm) -> str:
    """Return the values of a type in words."""
    type_words = list[str]()
    for member_type in map(strip_annotations, union_members(value_type)):
        origin = get_origin(member_type)
        if origin is Callable:
            type_words.append("a function")
        elif origin is Literal:
            type_words += [json.dumps(value) for value in get_args(member_type)]
        elif is_collection_type(member_type):
            type_arguments = get_args(member_type)
            is_mapping = len(type_arguments) == 2
            type_words.append(
                describe_mapping(*type_arguments)
                if is_mapping
                else f"a list of {describe_values_of_type(type_arguments[0])}"
            )
        elif hasattr(member_type, "model_fields"):
            type_words.append("an object")
        else:
            type_words.append(TYPE_NAMES.get(member_type) or member_type.__name__)
    return " or ".join(filter(None, (", ".join(type_words[:-1]), type_words[-1])))


def describe_mapping(key_type: TypeForm, value_type: TypeForm) -> str:
    """Return the type of a mapping in words."""
    if key_type is str:
        return "an object"
    return f"an object that maps {describe_values_of_type(key_type)} to {describe_values_of_type(value_type)}"


def describe_values_of_type(value_type: TypeForm) -> str:
    """Return several values of a type in words."""
    value_type = strip_annotations(value_type)
    if get_origin(value_type) is list:
        return f"lists of {describe_values_of_type(get_args(value_type)[0])}"
    return PLURAL_TYPE_NAMES.get(value_type, "objects")


def strip_annotations(value_type: TypeForm) -> TypeForm:
    """Return a type without its annotations."""
    return get_args(value_type)[0] if get_origin(value_type) is Annotated else value_type


# ---------------------------------------------------------------- on the command line


def single_value_type(value_type: TypeForm) -> TypeForm:
    """Return the type of a single value of a repeatable option; other types as they are."""
    for member_type in union_members(value_type):
        if is_collection_type(member_type) and len(type_arguments := get_args(member_type)) == 1:
            return type_arguments[0]
    return value_type


def parse_number_or_text(text: str, value_type: TypeForm) -> int | float | str:
    """Return the number or string in a text; leave malformed numbers for the check to refuse."""
    try:
        if int in union_members(value_type):
            return int(text)
        if float in union_members(value_type):
            return float(text)
    except ValueError:
        pass
    return text


def parse_lookahead(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise ValueError(f"{text!r} is neither auto nor a number of tokens.")
    return int(text)


def parse_token_bias(text: str) -> dict[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return {int(token_id): float(bias)}
    except ValueError:
        raise ValueError(f"{text!r} is not ID=VALUE, as in --logit-bias 50=-2.5.") from None


def parse_key_value(text: str) -> dict[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{text!r} is not KEY=VALUE, as in --property NUM_STREAMS=1.")
    return {key.strip(): value.strip()}


def parse_folder(text: str) -> Path:
    if Path(text).is_file():
        raise ValueError(f"{text!r} is a file; give a folder.")
    return Path(text)


def parse_file_or_name(text: str) -> str | Path:
    return Path(text) if Path(text).is_file() else text


def parse_schema_or_file(text: str) -> str | Path:
    if not text.strip() or text.lstrip().startswith(("{", "[", '"', "true", "false")):
        return text
    return Path(text)


def parse_json_object(text: str) -> JsonObject:
    try:
        is_file = not text.lstrip().startswith("{") and Path(text).is_file()
        content = json.loads(Path(text).read_text(encoding="utf-8-sig") if is_file else text)
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{text!r} is neither a file nor a JSON object, such as '{{\"enable_thinking\": false}}'.")
    return content


def parse_position_or_text(text: str) -> int | str:
    if re.fullmatch(r"@-?[0-9]+", text):
        return int(text[1:])
    return text
