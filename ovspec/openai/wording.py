"""Says in words what is wrong with a request's fields, because pydantic's sentences are for programmers."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ovspec.openai.bodies import ChatBody, CompletionBody, RequestError, StreamOptions
from ovspec.options.option import NAMES, alternatives, hint

BODIES: dict[str, type[BaseModel]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
NO_OBJECT = "The body must be a JSON object."
B = TypeVar("B", bound=BaseModel)
LONGEST = 80  # characters of a client's name for a field
SEVERAL = {str: "strings", int: "whole numbers", float: "numbers"}


def read_body(value: Any, body: type[B]) -> B:
    """Return ``value``, made from JSON, as a ``body``; raises RequestError for the first field that is wrong."""
    try:
        return body.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise RequestError(*in_words(first, body)) from None


def in_words(error: Any, request: type[BaseModel]) -> tuple[str, str | None]:
    """Return what is wrong with a field of ``request``, and its name, from one of pydantic's errors."""
    path = [str(each)[:LONGEST] for each in error["loc"]]
    if not path:
        return NO_OBJECT, None
    name = shown = path[0]
    inside, own = request, name
    if name == "stream_options" and len(path) > 1:  # the only field with fields of its own
        inside, own, shown = StreamOptions, path[1], f"{name}.{path[1]}"
    if error["type"] == "extra_forbidden":
        return f"{shown} is not a field of this request{elsewhere(own, inside)}", name
    if error["type"] == "missing":
        return f"{name} is missing.", name
    if error["type"] == "too_short":
        return f"{shown} must not be empty.", name
    if error["type"] in ("limits", "bias"):
        return f"{shown} {error['msg']}.", name
    return f"{shown} must be {described(inside.model_fields[own].annotation)}.", name


def elsewhere(name: str, request: type[BaseModel]) -> str:
    """Return what to do about a field that ``request`` doesn't have, as the end of a sentence."""
    if request in BODIES.values():
        for path, other in BODIES.items():
            if name in other.model_fields:
                return f", but of {path}; leave it out."
    return f"; {hint(name, request.model_fields) or 'leave it out.'}"


def described(kind: Any) -> str:
    """Return the values of a type in words."""
    words = list[str]()
    for each in map(bare, alternatives(kind)):
        if get_origin(each) is Literal:
            words += [json.dumps(value) for value in get_args(each)]
        elif get_origin(each) is list:
            words.append(f"a list of {several(get_args(each)[0])}")
        else:
            words.append(NAMES.get(each, "an object"))
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def several(kind: Any) -> str:
    """Return several values of a type in words."""
    kind = bare(kind)
    return f"lists of {several(get_args(kind)[0])}" if get_origin(kind) is list else SEVERAL.get(kind, "objects")


def bare(kind: Any) -> Any:
    """Return a type without what is annotated to it."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind
