"""Judges texts by their JSON schemas with the library jsonschema: what ``judging.py`` runs in a process of its own."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY

from ovspec.sandbox import serve

MOST_ERRORS = 20


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"errors": [...]} or {"unusable": why the schema can't be used} for a request {"schema", "text"}."""
    schema = request["schema"]
    try:
        value = json.loads(request["text"])
    except (ValueError, RecursionError) as error:
        return {"errors": [f"#: it isn't JSON: {error}"]}
    try:
        judge = validator_for(schema, Draft202012Validator)
        # With this registry, nothing is downloaded that a schema refers to.
        found = sorted(judge(schema, registry=REGISTRY).iter_errors(value), key=lambda error: error.json_path)
    except Exception as error:  # whatever a schema or Python's regular expressions can raise
        return {"unusable": str(error).partition("\n")[0][:200] or type(error).__name__}
    return {"errors": [f"{pointer(error.absolute_path)}: {error.message:.300}" for error in found[:MOST_ERRORS]]}


def pointer(path: Any) -> str:
    return "/".join(("#", *(str(part).replace("~", "~0").replace("/", "~1") for part in path)))


if __name__ == "__main__":
    serve(answer)
