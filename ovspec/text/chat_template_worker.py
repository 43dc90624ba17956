"""The process that renders chat templates, for ``chat_template.py``."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ovspec.sandbox import serve

MAX_CHARACTERS = 50_000_000


class Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """A template with the functions that Hugging Face gives it."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own would escape for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    return environment.from_string(source)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """{"text": ...} or {"error": a sentence} for {"source", "special_tokens", "messages", "open"}."""
    variables = {"tools": None, "documents": None, "add_generation_prompt": request["open"]}
    variables |= request["special_tokens"]
    try:
        parts, size = [], 0
        for part in compiled(request["source"]).generate(messages=request["messages"], **variables):
            size += len(part)
            if size > MAX_CHARACTERS:
                return {"error": f"it writes more than {MAX_CHARACTERS // 1_000_000} million characters"}
            parts.append(part)
        return {"text": "".join(parts)}
    except Exception as error:  # whatever a template can do wrong
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}


if __name__ == "__main__":
    serve(answer)
