"""Converts the grammars that params ask for, and checks finished answers against their schemas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.params import Params
from ovspec.sampling.schema_validation import schema_errors
from ovspec.text.answer import AnswerFormat, ToolCall


def grammar_of(params: Params) -> tuple[str | None, str]:
    """Return (the requested grammar in llguidance's notation, its name in messages), or (None, "").

    Raises:
        OvspecError: it is wrong.
    """
    if not (name := params.grammar_option):
        return None, ""
    from ovspec.grammars.conversion import convert_grammar

    given = getattr(params, name)
    value = readable(name, given)
    what = f"`{name}` {value}" if isinstance(value, Path) else f"`{name}`"
    if name != "json_schema":
        return convert_grammar(name, value, what), what
    more = params.additional_properties
    if more is None and not isinstance(given, (dict, bool, str, Path)):
        more = False  # a Python type has the fields it has
    reading = {
        "lenient": params.json_schema_mode == "checked",
        "close_objects": None if more is None else not more,
        "compact": bool(params.compact_json),
    }
    return convert_grammar(name, value, what, **reading), what


def grammar_of_answer(params: Params, answer: AnswerFormat) -> str | None:
    """Return the grammar of calls, or of all that follows thinking; None if it is the grammar of ``params`` or none.

    Raises:
        OvspecError: a tool's schema can't be used; the message names the tool.
    """
    use = params.tool_use
    other = None if use.required else grammar_of(params)[0]
    if not use.names and not (other and answer.thinking):
        return None
    from ovspec.grammars.conversion import convert_grammar

    called = [tool["function"] for tool in params.tools if tool["function"]["name"] in use.names]
    given = {
        "format": answer.tools.name if answer.tools else "generic",
        "tools": [{"name": tool["name"], "parameters": tool["parameters"]} for tool in called],
        "parallel": params.parallel_tool_calls and not use.once,
        "tokens": [*answer.tokens],
        "header": answer.thinking.header if answer.thinking else None,
        "text": answer.thinking.text if answer.thinking else "",
        "other": other,
        "reading": {
            "lenient": params.json_schema_mode == "checked",
            "close_objects": params.additional_properties is not True,
            "compact": params.compact_json,
        },
    }
    return convert_grammar("tools", given, "`tools`")


def errors_of(params: Params, before: str, text: str, calls: Sequence[ToolCall]) -> list[str]:
    """Return how an answer, ``before + text`` with calls of tools, breaks its schemas; see ``schema_errors``."""
    found, schemas = list[str](), {tool["function"]["name"]: tool["function"]["parameters"] for tool in params.tools}
    if params.json_schema is not None and (text or not calls):
        found += schema_errors(readable("json_schema", params.json_schema), before, text)
    for call in calls:
        found += (f"{call.name}: {error}" for error in schema_errors(schemas[call.name or ""], "", call.arguments))
    return found


def readable(name: str, value: Any) -> Any:
    """Return the value of a grammar option for ``convert_grammar``; raises OvspecError if it is of another kind."""
    if isinstance(value, Path):
        if value.is_dir():
            raise OvspecError(f"{value} is a folder; name a file.")
        if name in ("json_schema", "grammar", "gbnf"):
            return value
    if name == "json_schema":
        if value is not None and not isinstance(value, (dict, bool, str)):
            return schema_of_type(value)
        if isinstance(value, str) and not value.lstrip().startswith(("{", "[", '"', "true", "false")):
            raise OvspecError(f"`{name}` {value[:80]!r} isn't JSON; give the schema's text, or a Path for a file.")
        return value
    if name == "choice":
        listed: Any = value if isinstance(value, Iterable) and not isinstance(value, str) else ()
        texts = list(listed)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise OvspecError("`choice` must be a list of texts with at least one entry.")
        return texts
    if name == "regex" and isinstance(value, Path):
        return str(value)
    if not isinstance(value, str):
        raise OvspecError(f"`{name}` must be a string or a Path, not {type(value).__name__}.")
    if name != "regex" and ":" not in value:
        raise OvspecError(f"`{name}` {value[:80]!r} isn't a grammar; give its text, or a Path for a file.")
    return value


def schema_of_type(value: Any) -> Any:
    """Return the JSON schema of a pydantic model or of another type that pydantic knows, such as list[str]."""
    from pydantic import PydanticUserError, TypeAdapter  # deferred, because few need it

    try:
        made = getattr(value, "model_json_schema", None)
        return made() if made else TypeAdapter(value).json_schema()
    except PydanticUserError as error:
        why = str(error).splitlines()[0].rstrip(".")
        raise OvspecError(f"`json_schema` {value!r:.80} has no JSON schema: {why}.") from None
