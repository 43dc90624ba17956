"""Judges finished texts by their JSON schema, with the library jsonschema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ovspec.errors import OvspecError
from ovspec.files import read_text
from ovspec.grammars.wrapped import unwrapped

MOST_ERRORS = 20


def schema_errors(schema: Any, before: str, text: str) -> list[str]:
    """Return how ``before + text`` breaks a schema: JSON pointers with messages; [] if it doesn't.

    Args:
        schema: the schema, its JSON text, or the Path of a file.
        before: the part of the JSON text that is in the prompt.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(before + text)
    except ValueError as error:
        return [f"#: it isn't JSON: {error}"]
    schema = read_text(schema) if isinstance(schema, Path) else schema
    schema = unwrapped(json.loads(schema) if isinstance(schema, str) else schema)
    judge = validator_for(schema, Draft202012Validator)
    try:
        errors = sorted(judge(schema).iter_errors(value), key=lambda error: error.json_path)
    except (SchemaError, Unresolvable, RecursionError, TypeError, ValueError) as error:
        raise OvspecError(f"`json_schema` can't be used to judge a text: {str(error).splitlines()[0]:.200}.") from None
    return [f"{pointer(error.absolute_path)}: {error.message:.300}" for error in errors[:MOST_ERRORS]]


def pointer(path: Any) -> str:
    return "/".join(("#", *(str(part).replace("~", "~0").replace("/", "~1") for part in path)))
