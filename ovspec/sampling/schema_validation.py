"""Checks finished texts against their JSON schemas, in a separate process if the check may take long."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ovspec.base.errors import OvspecError, UnavailableError
from ovspec.base.files import read_text
from ovspec.base.json_types import JsonObject, JsonValue
from ovspec.base.sandbox import SandboxLimitExceeded, SandboxPool, serve_requests
from ovspec.grammars.response_format import unwrap_response_format

MAX_VALIDATION_SECONDS = 5.0
MAX_VALIDATION_BYTES = 1_000_000_000
# Keywords slower than the sizes of schema and text suggest: regular expressions (an uninterruptible search),
# references, comparisons of items, and repeated checks of parts.
SLOW_KEYWORDS = re.compile(r'"(?:pattern|\$|uniqueItems|unevaluated)')
MAX_ERRORS = 20
MAX_DIRECT_SIZE = 10_000_000  # schema characters times text characters, at most, for a check in this process

VALIDATION_POOL = SandboxPool(
    "ovspec.sampling.schema_validation",
    "validates texts against JSON schemas",
    MAX_VALIDATION_SECONDS,
    MAX_VALIDATION_BYTES,
)


def find_schema_errors(schema: JsonValue | Path, prompt_part: str, text: str) -> list[str]:
    """Return the violations of a schema in ``prompt_part + text``: JSON pointers with messages; [] for none.

    If the check takes too much time or memory, the only entry says so.

    Args:
        schema: the schema, its JSON text, or the Path of a file.
        prompt_part: the part of the JSON text in the prompt.

    Raises:
        OvspecError: the schema can't be used for validation.
    """
    if isinstance(schema, Path):
        schema = read_text(schema)
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        schema = unwrap_response_format(schema)
        schema_text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise unusable_schema_error(f"{error}") from None
    request = {"schema": schema, "text": prompt_part + text}
    is_slow = SLOW_KEYWORDS.search(schema_text) or len(schema_text) * len(request["text"]) > MAX_DIRECT_SIZE
    try:
        reply = VALIDATION_POOL.ask(json.dumps(request)) if is_slow else answer_validation_request(request)
    except SandboxLimitExceeded as reason:
        return [f"the JSON schema check {reason}, so the text may be invalid"]
    except UnavailableError:
        return ["the JSON schema check crashed, so the text may be invalid"]
    if "unusable" in reply:
        raise unusable_schema_error(reply["unusable"])
    return reply["errors"]


def unusable_schema_error(reason: str) -> OvspecError:
    return OvspecError(f"`json_schema` can't be used to check a text: {reason}.")


def answer_validation_request(request: JsonObject) -> JsonObject:
    """Return {"errors": [...]} or {"unusable": why the schema can't be used} for a request {"schema", "text"}."""
    from jsonschema import Draft202012Validator  # deferred, because this takes 0.2 s
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

    schema = request["schema"]
    try:
        instance = json.loads(request["text"])
    except (ValueError, RecursionError) as error:
        return {"errors": [f"the text isn't JSON: {error}"]}
    try:
        validator_class = validator_for(schema, Draft202012Validator)
        # With this registry, references are never downloaded.
        validator = validator_class(schema, registry=REGISTRY)
        errors = sorted(validator.iter_errors(instance), key=lambda error: error.json_path)
    except Exception as error:  # a schema, or Python's regular expressions, may raise anything
        return {"unusable": str(error).partition("\n")[0][:200] or type(error).__name__}
    return {
        "errors": [f"{format_json_pointer(error.absolute_path)}: {error.message:.300}" for error in errors[:MAX_ERRORS]]
    }


def format_json_pointer(error_path: Iterable[str | int]) -> str:
    return "/".join(("#", *(str(path_part).replace("~", "~0").replace("/", "~1") for path_part in error_path)))


if __name__ == "__main__":
    serve_requests(answer_validation_request)
