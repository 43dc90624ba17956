"""The worker process of ``chat_template.py`` for rendering chat templates."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ovspec.base.sandbox import serve_requests

MAX_CHARACTERS = 50_000_000


class GenerationTag(Extension):
    """Support for ``{% generation %}``, a mark of the assistant's text for training, without effect on a prompt."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        tag_line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=tag_line)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.cache
def jinja_environment() -> jinja2.Environment:
    """Return an environment with Hugging Face's functions."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda time_format: datetime.now().strftime(time_format)
    environment.filters["tojson"] = tojson
    return environment


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> jinja2.Template:
    return jinja_environment().from_string(source)


@functools.lru_cache(maxsize=8)
def find_variables(source: str) -> frozenset[str]:
    """Return the variables used by a template."""
    return frozenset(meta.find_undeclared_variables(jinja_environment().parse(source)))


def render_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"text": ...} or {"error": one line} for a request {"source", "variables", "needed"}.

    If the template doesn't use a "needed" variable, return {"unread": its name, "reads": others}. Without "variables",
    return {"reads": all used variables}.
    """
    source, variables = request["source"], request.get("variables")
    try:
        if variables is None:
            return {"reads": sorted(find_variables(source))}
        for variable in request["needed"]:
            if variable not in (known_variables := find_variables(source)):
                standard_variables = {
                    "messages",
                    "add_generation_prompt",
                    *(variable for variable in known_variables if variable.endswith("_token")),
                }
                return {"unread": variable, "reads": sorted(known_variables - standard_variables)}
        text_parts, text_length = [], 0
        for text_part in compile_template(source).generate(**variables):
            text_length += len(text_part)
            if text_length > MAX_CHARACTERS:
                return {"error": f"the output is longer than {MAX_CHARACTERS // 1_000_000} million characters"}
            text_parts.append(text_part)
        return {"text": "".join(text_parts)}
    except Exception as error:  # a template can raise anything
        return {"error": " ".join(str(error).split())[:300] or type(error).__name__}


if __name__ == "__main__":
    serve_requests(render_request)
