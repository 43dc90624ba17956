"""Reads bodies, in bounded time and memory: from bytes to the fields of a request."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from ovspec.serving.errors import ApiError
from ovspec.serving.models import Fields
from ovspec.serving.wording import in_words

F = TypeVar("F", bound=Fields)

DEEPEST = 100  # levels of JSON
MOST_COMMAS = 1_000_000  # so many values at most; parsing holds Python's lock and so stops everything else


def read_fields(raw: bytes, request: type[F]) -> F:
    """Return the fields of a ``request`` in ``raw``; raises ApiError for the first that is wrong."""
    try:
        return request.model_validate(read_json(raw))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ApiError(400, *in_words(first, request)) from None


def read_json(raw: bytes) -> Any:
    """Return the JSON value in ``raw``, without the fields that are null, which clients send for those not set.

    Raises ApiError for what isn't JSON, is too large or too deep, or isn't Unicode.
    """

    def refuse(name: str) -> None:
        raise ApiError(400, f"{name} is not JSON; leave it out.")

    if raw.count(b",") > MOST_COMMAS:
        raise ApiError(413, f"The body has more than {MOST_COMMAS} commas; send fewer values.")
    try:
        found = json.loads(raw.decode("utf-8-sig"), parse_constant=refuse)
        if b"\\u" in raw:  # only an escape can still be half of a character
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error.msg} at character {error.pos}.") from None
    except UnicodeError:
        raise ApiError(400, "The body is not valid Unicode.") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is nested too deeply, or a number in it has too many digits.") from None
    if depth(found) > DEEPEST:
        raise ApiError(400, f"The body is nested more than {DEEPEST} levels deep.")
    return {name: each for name, each in found.items() if each is not None} if isinstance(found, dict) else found


def depth(value: Any) -> int:
    """Return how many levels of lists and objects ``value`` has."""
    levels, inside = 0, [value]
    while inside := [each for each in inside if isinstance(each, (dict, list))]:
        levels += 1
        inside = [child for each in inside for child in (each.values() if isinstance(each, dict) else each)]
    return levels
