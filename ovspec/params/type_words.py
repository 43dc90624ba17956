"""The types of options in words, for error messages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from ovspec.params.option import alternatives, is_repeatable

SEVERAL = {str: "strings", int: "whole numbers", float: "numbers"}
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a string", Path: "a path"}


def type_in_words(kind: Any) -> str:
    """Return the values of a type in words, for error messages."""
    words = list[str]()
    for each in map(bare, alternatives(kind)):
        origin = get_origin(each)
        if origin is Callable:
            words.append("a function")
        elif origin is Literal:
            words += [json.dumps(value) for value in get_args(each)]
        elif is_repeatable(each):
            inner = get_args(each)
            words.append("an object" if len(inner) == 2 else f"a list of {several_in_words(inner[0])}")
        else:
            words.append(NAMES.get(each) or ("an object" if hasattr(each, "model_fields") else each.__name__))
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def several_in_words(kind: Any) -> str:
    """Return several values of a type in words."""
    kind = bare(kind)
    inner = get_args(kind)
    return f"lists of {several_in_words(inner[0])}" if get_origin(kind) is list else SEVERAL.get(kind, "objects")


def bare(kind: Any) -> Any:
    """Return a type without what is annotated to it."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind
