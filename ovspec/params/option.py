"""The declaration of options, as fields of a class."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from ovspec.params.limits import NumberLimits

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
TypeForm: TypeAlias = Any  # a type as in annotations, such as `int | None`
OptionValue: TypeAlias = Any  # checked against the option's declaration when params are made from it
# Other programs' names for our options.
FOREIGN_NAMES = {
    "temp": "temperature",
    "response_format": "json_schema",
    "drafts": "draft",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True)
class Option:
    """The declaration of an option.

    help: its purpose, in a sentence or two.
    limits: the range of a number.
    default_meaning: the default in words, if the value doesn't explain itself.
    python_extra_help: added to ``help`` in Python's documentation only.
    flags: its spellings on the command line, if not ``--its-name``; empty if it isn't on the command line.
    commands: the generating commands with this option, if not all.
    metavar, parse: the command line's name for its value, and its parser (raises ValueError).
    request: whether a request, such as a line of a batch file, may set it.
    request_type: its type in a request, if it differs from Python's.
    aliases: its other names in a request.
    truncates: whether it limits sampling to likely tokens; it then needs a temperature; see ``sampling/warp.py``.
    choices: the allowed strings, if the annotation can't list them.
    name, value_type, default: the field's; set by ``collect_options``.
    """

    help: str
    limits: NumberLimits | None = None
    default_meaning: str = ""
    python_extra_help: str = ""
    flags: tuple[str, ...] | None = None
    commands: tuple[str, ...] = ()
    metavar: str | None = None
    parse: Callable[[str], OptionValue] | None = None
    request: bool = True
    request_type: TypeForm = None
    aliases: tuple[str, ...] = ()
    truncates: bool = False
    choices: Collection[str] = ()
    name: str = ""
    value_type: TypeForm = Any
    default: OptionValue = None

    @property
    def default_text(self) -> str:
        """The default in words; empty for flags and empty defaults."""
        if self.default_meaning or isinstance(self.default, bool) or not isinstance(self.default, (int, float, str)):
            return self.default_meaning
        return str(self.default).removesuffix(".0")


def option(
    help: str, *, default: OptionValue = MISSING, default_factory: OptionValue = MISSING, **declaration_fields: Any
) -> Any:
    """Return a field declaring an option; ``declaration_fields``: the other fields of its ``Option``."""
    declaration = Option(help, **declaration_fields)
    return field(default=default, default_factory=default_factory, metadata={"option": declaration})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, field))
def options_dataclass(cls: type[S]) -> type[S]:
    """Make an immutable dataclass of a class with options as fields; they are keywords of its ``__init__``."""
    return dataclass(frozen=True, kw_only=True)(cls)


def collect_options(cls: Any) -> dict[str, Option]:
    """Return name -> declaration for each option of a class."""
    cls = get_origin(cls) or cls
    value_types = get_type_hints(cls)
    options: dict[str, Option] = {}
    for option_field in fields(cls):
        if declaration := option_field.metadata.get("option"):
            default = (
                option_field.default if option_field.default_factory is MISSING else option_field.default_factory()
            )
            value_type = value_types[option_field.name]
            if declaration.choices:
                literal_form: TypeForm = Literal
                value_type = literal_form[(*declaration.choices,)] | None
            options[option_field.name] = replace(
                declaration, name=option_field.name, value_type=value_type, default=default
            )
    return options


def accepts_options(options_type: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Return a decorator to add the options of a class to a function's signature.

    ``options_type``: the class; type checkers and editors show its fields as the function's arguments.
    """
    option_parameters = [
        Parameter(entry.name, Parameter.KEYWORD_ONLY, default=entry.default, annotation=entry.value_type)
        for entry in collect_options(options_type).values()
    ]

    def decorate(function: Any) -> Any:
        plain_signature = signature(function)
        own_parameters = [
            parameter
            for parameter in plain_signature.parameters.values()
            if parameter.kind is not Parameter.VAR_KEYWORD
        ]
        function.__signature__ = plain_signature.replace(parameters=[*own_parameters, *option_parameters])
        return function

    return decorate


def method_accepts_options(
    options_type: Callable[P, Any],
) -> Callable[[Callable[Concatenate[S, ...], R]], Callable[Concatenate[S, P], R]]:
    """Return the decorator ``accepts_options`` for a method."""
    decorate: Any = accepts_options(options_type)
    return decorate


def format_option_documentation(options: Mapping[str, Option]) -> str:
    """Return a docstring paragraph for each option."""
    paragraphs = []
    for name, declaration in options.items():
        default = declaration.default_text and f"By default {declaration.default_text}."
        paragraph = " ".join(filter(None, (f"{name}: {declaration.help}", declaration.python_extra_help, default)))
        paragraphs.append(textwrap.fill(paragraph, 112, subsequent_indent="    "))
    return "\n".join(paragraphs)


def make_did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question with the name in ``names`` closest to ``name``, or an empty string."""
    similar_names = difflib.get_close_matches(FOREIGN_NAMES.get(name, name), sorted(names), 1, cutoff=0.75)
    return "".join(f"did you mean {similar_name}?" for similar_name in similar_names)


def union_members(value_type: TypeForm) -> tuple[TypeForm, ...]:
    """Return the members of a union type, or the type itself, without None."""
    members = get_args(value_type) if get_origin(value_type) in (Union, UnionType) else (value_type,)
    return tuple(member for member in members if member is not NoneType)


def literal_values(value_type: TypeForm) -> tuple[Any, ...]:
    """Return the values of the literals in a type."""
    literals = [member for member in union_members(value_type) if get_origin(member) is Literal]
    return tuple(value for literal in literals for value in get_args(literal))


def is_collection_type(value_type: TypeForm) -> bool:
    """Return whether the type is a collection, so its option may be repeated."""
    origins: list[TypeForm] = [get_origin(member) for member in union_members(value_type)]
    return any(isinstance(origin, type) and issubclass(origin, Collection) for origin in origins)
