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
from ovspec.params.limits import LARGEST, Limits
from ovspec.params.option import Option, alternatives, choices_of, hint, is_repeatable

SEVERAL = {str: "strings", int: "whole numbers", float: "numbers"}
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
SHOWN = 80  # characters of a value in an error
SHORT = reprlib.Repr()  # a request's value may have megabytes
SHORT.maxstring = SHORT.maxother = SHOWN

# ---------------------------------------------------------------- checks


def check(value: Any, option: Option) -> None:
    """Raise OvspecError if ``value`` is not of the type of ``option`` or is out of range."""
    if wrong := problem(value, option.kind, option.limits):
        raise OvspecError(f"`{option.name}` {wrong}.")


def problem(value: Any, kind: Any, limits: Limits | None) -> str | None:
    """Return the problem of a value that is not of the type ``kind`` or is out of range, as the end of a sentence."""
    if not fits(value, kind):
        if (choices := choices_of(kind)) and not limits:
            return f"is {in_words(value)}; it must be one of {', '.join(choices)}"
        return f"must be {type_in_words(kind)}, not {in_words(value)}"
    if limits and isinstance(value, Number) and not within(limits, value):
        return f"is {in_words(value)}; it must be {limits.words}"
    return None


def within(limits: Limits, number: Any) -> bool:
    """Return whether a number is in range."""
    inside = limits.least <= number <= limits.most and not (limits.above and number == limits.least)
    return inside or number == limits.special


def fits(value: Any, kind: Any) -> bool:
    """Return whether ``value`` is of the type ``kind``, written as in annotations."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(fits(value, member) for member in inner)
    if origin is Literal:
        return any(value is choice or (type(value) is type(choice) and value == choice) for choice in inner)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if origin and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if origin and issubclass(origin, Collection):
        listed = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
        return listed and all(fits(item, inner[0]) for item in value)
    return isinstance(value, origin or kind)


def check_names(options: Mapping[str, Any], table: Mapping[str, Option]) -> None:
    """Raise TypeError if ``options`` has an unknown name."""
    for name in sorted(options.keys() - table.keys()):
        meant = hint(name, table) or f"the options are {', '.join(table)}"
        raise TypeError(f"unknown option {name!r}; {meant}")


# ---------------------------------------------------------------- in words


def in_words(value: Any) -> str:
    """Return ``value`` as error messages show it."""
    if isinstance(value, (int, float)) and LARGEST < abs(value) < float("inf"):
        return f"beyond {LARGEST}, the limit of any option"  # Python may refuse to print so many digits
    return str(value) if isinstance(value, Number) else SHORT.repr(value)[:SHOWN]


def type_in_words(kind: Any) -> str:
    """Return the values of a type in words."""
    words = list[str]()
    for member in map(bare, alternatives(kind)):
        origin = get_origin(member)
        if origin is Callable:
            words.append("a function")
        elif origin is Literal:
            words += [json.dumps(value) for value in get_args(member)]
        elif is_repeatable(member):
            inner = get_args(member)
            words.append(object_in_words(*inner) if len(inner) == 2 else f"a list of {several_in_words(inner[0])}")
        else:
            words.append(NAMES.get(member) or ("an object" if hasattr(member, "model_fields") else member.__name__))
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def object_in_words(keys: Any, values: Any) -> str:
    """Return a mapping in words."""
    return "an object" if keys is str else f"an object that maps {several_in_words(keys)} to {several_in_words(values)}"


def several_in_words(kind: Any) -> str:
    """Return several values of a type in words."""
    kind = bare(kind)
    inner = get_args(kind)
    return f"lists of {several_in_words(inner[0])}" if get_origin(kind) is list else SEVERAL.get(kind, "objects")


def bare(kind: Any) -> Any:
    """Return a type without its annotations."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


# ---------------------------------------------------------------- on the command line


def item_kind(kind: Any) -> Any:
    """Return the type of one value of an option that may be repeated; other types as they are."""
    for member in alternatives(kind):
        if is_repeatable(member) and len(inner := get_args(member)) == 1:
            return inner[0]
    return kind


def from_text(text: str, kind: Any) -> Any:
    """Return the number or string in a text; text that should be a number but isn't stays, for the check to refuse."""
    try:
        return int(text) if int in alternatives(kind) else float(text) if float in alternatives(kind) else text
    except ValueError:
        return text


def auto_or_number(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"{text!r} is neither auto nor a number of tokens.")
    return text if text == "auto" else int(text)


def token_bias(text: str) -> dict[int, float]:
    token, _, bias = text.partition("=")
    try:
        return {int(token): float(bias)}
    except ValueError:
        raise ValueError(f"{text!r} is not ID=VALUE, as in --logit-bias 50=-2.5.") from None


def key_value(text: str) -> dict[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{text!r} is not KEY=VALUE, as in --property NUM_STREAMS=1.")
    return {key.strip(): value.strip()}


def folder(text: str) -> Path:
    if Path(text).is_file():
        raise ValueError(f"{text!r} is a file; name a folder.")
    return Path(text)


def file_or_name(text: str) -> str | Path:
    return Path(text) if Path(text).is_file() else text


def schema_or_file(text: str) -> str | Path:
    return text if not text.strip() or text.lstrip().startswith(("{", "[", '"', "true", "false")) else Path(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        is_file = not text.lstrip().startswith("{") and Path(text).is_file()
        value = json.loads(Path(text).read_text(encoding="utf-8-sig") if is_file else text)
    except (OSError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is neither a file nor a JSON object, as '{{\"enable_thinking\": false}}' is.")
    return value


def place_or_text(text: str) -> int | str:
    return int(text[1:]) if re.fullmatch(r"@-?[0-9]+", text) else text
