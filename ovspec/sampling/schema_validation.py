"""Judges finished texts by their JSON schemas, in a process of its own if that may take long."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ovspec.base.errors import OvspecError, UnavailableError
from ovspec.base.files import read_text
from ovspec.base.sandbox import Stopped, Worker, serve
from ovspec.grammars.response_format import unwrap_response_format

MAX_SECONDS = 5.0
MAX_BYTES = 1_000_000_000
# What takes more time than the sizes of the schema and the text account for: regular expressions, whose search can't be
# interrupted, references, and keywords that compare items with each other or judge parts again.
SLOW = re.compile(r'"(?:pattern|\$|uniqueItems|unevaluated)')
MOST_ERRORS = 20
QUICK = 10_000_000  # characters of the schema times those of the text that are judged in this process

JUDGE = Worker("ovspec.sampling.schema_validation", "judges texts by schemas", MAX_SECONDS, MAX_BYTES)


def schema_errors(schema: Any, before: str, text: str) -> list[str]:
    """Return how ``before + text`` breaks a schema: JSON pointers with messages; [] if it doesn't.

    If judging takes too much time or memory, the only entry says so.

    Args:
        schema: the schema, its JSON text, or the Path of a file.
        before: the part of the JSON text that is in the prompt.

    Raises:
        OvspecError: the schema can't be used to judge a text.
    """
    schema = read_text(schema) if isinstance(schema, Path) else schema
    try:
        schema = unwrap_response_format(json.loads(schema) if isinstance(schema, str) else schema)
        written = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise unusable(f"{error}") from None
    request = {"schema": schema, "text": before + text}
    slow = SLOW.search(written) or len(written) * len(request["text"]) > QUICK
    try:
        found = JUDGE.ask(json.dumps(request)) if slow else answer(request)
    except Stopped as why:
        return [f"#: the check {why}, so whether the text is valid is unknown"]
    except UnavailableError:
        return ["#: the process that checks it ended without an answer, so whether the text is valid is unknown"]
    if "unusable" in found:
        raise unusable(found["unusable"])
    return found["errors"]


def unusable(why: str) -> OvspecError:
    return OvspecError(f"`json_schema` can't be used to judge a text: {why}.")


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"errors": [...]} or {"unusable": why the schema can't be used} for a request {"schema", "text"}."""
    from jsonschema import Draft202012Validator  # deferred, because this takes 0.2 s
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY

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
