"""How an option is declared."""

import difflib
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, make_dataclass
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])
# What other programs call an option.
OTHERWISE = {"temp": "temperature", "response_format": "json_schema", "drafts": "draft", "max_new_tokens": "max_tokens"}
LARGEST = 3e38  # what a float32 can hold
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}


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

    help: what it does, in one or two sentences.
    default: the value, or a function that makes it.
    limits: the range of a number.
    usual: what the default means, in words, where the value doesn't show it.
    more: text that only Python's documentation adds to ``help``.
    flags: its spellings on the command line, if not ``--its-name``; empty if the command line doesn't have it.
    commands: the generating commands that have it, if not all.
    metavar, parse: what the command line calls its value, and the function that reads it or raises ValueError.
    request: whether a line of a batch file may set it; or the type it must have there, if not Python's.
    aliases: other names in a request.
    """

    help: str
    default: Any = None
    limits: Limits | None = None
    usual: str = ""
    more: str = ""
    flags: tuple[str, ...] | None = None
    commands: tuple[str, ...] = ()
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    request: Any = True
    aliases: tuple[str, ...] = ()

    @property
    def initial(self) -> Any:
        """The default value."""
        return self.default() if callable(self.default) else self.default

    @property
    def initially(self) -> str:
        """The default in words; empty for flags and empty defaults."""
        told = isinstance(self.default, (int, float, str)) and not isinstance(self.default, bool)
        return self.usual or (str(self.default).removesuffix(".0") if told else "")


def declared(table: Any) -> dict[str, tuple[Any, Option]]:
    """Return name -> (type, declaration) for each entry of a TypedDict."""
    return {name: get_args(hint)[:2] for name, hint in get_type_hints(table, include_extras=True).items()}  # type: ignore[misc]


def fields_of(table: Mapping[str, tuple[Any, Option]]) -> Any:
    """Return a frozen dataclass with a field for each option."""
    entries = []
    for name, (kind, option) in table.items():
        made = callable(option.default)
        default = field(default_factory=option.default) if made else field(default=option.default)
        entries.append((name, kind, default))
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
