"""How an option is declared, and how its values are read from the command line."""

import difflib
import json
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])
# What other programs call an option.
OTHERWISE = {"temp": "temperature", "response_format": "json_schema", "drafts": "draft", "max_new_tokens": "max_tokens"}
LARGEST = 3e38  # what a float32 can hold


@dataclass(frozen=True)
class Limits:
    """The range of a number, and how messages describe it.

    above: ``least`` itself is out of range.
    special: a number outside of the range that is allowed, too.
    """

    least: float = -LARGEST
    most: float = LARGEST
    words: str = "a number from -3e38 to 3e38"
    above: bool = False
    special: float | None = None


@dataclass(frozen=True)
class Option:
    """The declaration of an option, except its name and type.

    default: the value, or a function that makes it.
    limits: the range of a number.
    usual: what the default means, in words, where the value doesn't show it.
    more: text that only Python's documentation adds to ``help``.
    flags: its spellings on the command line, if not ``--its-name``; empty if the command line doesn't have it.
    commands: the generating commands that have it, if not all.
    metavar, parse: what the command line calls its value, and the function that reads it or raises ValueError.
    request: whether a request, such as a line of a batch file, may set it.
    request_type: its type in a request, if not the one in Python.
    aliases: its other names in a request.
    truncates: whether it limits sampling to likely tokens, which needs a temperature; see ``sampling/warp.py``.
    help: what it does, in one or two sentences; set by ``declared``.
    """

    default: Any = None
    limits: Limits | None = None
    usual: str = ""
    more: str = ""
    flags: tuple[str, ...] | None = None
    commands: tuple[str, ...] = ()
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    request: bool = True
    request_type: Any = None
    aliases: tuple[str, ...] = ()
    truncates: bool = False
    help: str = ""

    @property
    def initial(self) -> Any:
        """The default value."""
        return self.default() if callable(self.default) else self.default

    @property
    def initially(self) -> str:
        """The default in words; empty for flags and empty defaults."""
        if self.usual or isinstance(self.default, bool) or not isinstance(self.default, (int, float, str)):
            return self.usual
        return str(self.default).removesuffix(".0")


def declared(table: Any) -> dict[str, tuple[Any, Option]]:
    """Return name -> (type, declaration) for each entry ``name: Annotated[type, help, Option(...)]`` of a TypedDict."""
    found = {}
    for name, hint in get_type_hints(table, include_extras=True).items():
        kind, help, *option = get_args(hint)
        found[name] = kind, replace(option[0] if option else Option(), help=help)
    return found


def fields_of(table: Mapping[str, tuple[Any, Option]]) -> Any:
    """Return a frozen dataclass with a field for each option."""
    entries = [
        (name, kind, field(default_factory=default) if callable(default := option.default) else field(default=default))
        for name, (kind, option) in table.items()
    ]
    return make_dataclass("Fields", entries, frozen=True)


def takes(table: Any) -> Callable[[F], F]:
    """Return a decorator that shows the options of ``table`` in the signature of a function that takes them."""
    named = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=option.initial, annotation=kind)
        for name, (kind, option) in declared(table).items()
    ]

    def decorate(function: F) -> F:
        made = signature(function)
        own = [each for each in made.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
        function.__signature__ = made.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
        return function

    return decorate


def documentation(table: Any) -> str:
    """Return a docstring paragraph for each option of ``table``."""
    lines = []
    for name, (_, option) in declared(table).items():
        usual = option.initially and f"By default {option.initially}."
        text = " ".join(filter(None, (f"{name}: {option.help}", option.more, usual)))
        lines.append(textwrap.fill(text, 112, subsequent_indent="    "))
    return "\n".join(lines)


def hint(name: str, known: Iterable[str]) -> str:
    """Return a question that names the one of ``known`` that ``name`` resembles, or an empty string."""
    close = difflib.get_close_matches(OTHERWISE.get(name, name), sorted(known), 1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else ""


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union type, or the type itself, without None."""
    each = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(one for one in each if one is not NoneType)


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Return the values that the literals in a type allow."""
    return tuple(value for one in alternatives(kind) if get_origin(one) is Literal for value in get_args(one))


def is_repeatable(kind: Any) -> bool:
    """Return whether the type is a collection, so that an option of it may be repeated."""
    origins: list[Any] = [get_origin(each) for each in alternatives(kind)]
    return any(isinstance(origin, type) and issubclass(origin, Collection) for origin in origins)


# ---------------------------------------------------------------- values on the command line


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
        found = json.loads(Path(text).read_text(encoding="utf-8-sig") if is_file else text)
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{text!r} is neither a file nor a JSON object, as '{{\"enable_thinking\": false}}' is.")
    return found


def place_or_text(text: str) -> int | str:
    return int(text[1:]) if re.fullmatch(r"@-?[0-9]+", text) else text
