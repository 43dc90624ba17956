"""The worker process that renders chat templates for ``chat_template.py``."""

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
    """Support for ``{% generation %}``, which marks the assistant's text for training and has no effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Compile a template with the functions that Hugging Face provides."""

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's own filter escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    return environment.from_string(source)


def answer(request: dict[str, Any]) -> dict[str, str]:
    """Return {"text": ...} or {"error": one line} for a request {"source", "special_tokens", "messages", "open"}."""
    variables = {"tools": None, "documents": None, "add_generation_prompt": request["open"]}
    variables |= request["special_tokens"]
    try:
        parts, size = [], 0
        for part in compiled(request["source"]).generate(messages=request["messages"], **variables):
            size += len(part)
            if size > MAX_CHARACTERS:
                return {"error": f"the output is longer than {MAX_CHARACTERS // 1_000_000} million characters"}
            parts.append(part)
        return {"text": "".join(parts)}
    except Exception as error:  # a template can raise anything
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}


if __name__ == "__main__":
    serve(answer)
