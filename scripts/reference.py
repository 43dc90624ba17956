"""Write docs/reference/cli.md, python.md and endpoints.md from the code; with --check, fail if they are out of date."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin

import click

import ovspec
from ovspec.api.async_texts import AsyncTextStream
from ovspec.cli import cli
from ovspec.engine.row import TextStream
from ovspec.engine.scoring import Perplexity
from ovspec.integrations.gptfast import gpt_fast
from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.loading import LOAD_OPTIONS
from ovspec.params.option import Option
from ovspec.params.serving import ServeParams
from ovspec.protocols.bodies import HAS_NO_EFFECT, NOT_SUPPORTED
from ovspec.sampling.logprobs import TokenLogprob
from ovspec.server.app import make_app
from ovspec.server.openapi import ERROR_DESCRIPTIONS

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
MADE = "Generated from the code by `scripts/reference.py`; do not edit.\n"
SECTION = re.compile(r"(Args|Raises|Returns|Yields):$")
ITEM = re.compile(r"(\*{0,2}[A-Za-z_]+(?:, [A-Za-z_]+)*): (.*)")


def cli_reference() -> str:
    """Return the help of the group and of each command."""
    parts = [f"# Command line\n\n{MADE}"]
    settings: dict[str, Any] = {**cli.context_settings, "terminal_width": 100}
    with click.Context(cli, info_name="ovspec", **settings) as group:
        parts.append(f"```text\n{cli.get_help(group)}\n```\n")
        for name in cli.list_commands(group):
            command = cli.get_command(group, name)
            assert command
            with click.Context(command, parent=group, info_name=name, **settings) as context:
                parts.append(f"## ovspec {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def python_reference() -> str:
    """Return signatures, docstrings and options of the public names."""
    parts = [
        f"# Python\n\n{MADE}\nImport names from `ovspec`, except the return types `TextStream`, `AsyncTextStream`, "
        "`TokenLogprob` and `Perplexity`. Shapes of arrays are in parentheses, such as (1, vocab). A prompt is a "
        "string, a list of token ids, a chat message (a dict with `role` and `content`), or a list of messages.\n",
        f"## load\n\n{signature('ovspec.load', ovspec.load)}\n\n{prose(ovspec.load, leave_out=LOAD_OPTIONS)}\n",
        f"Options:\n\n{option_table(LOAD_OPTIONS)}\n",
        "## Options of generating calls\n\nKeywords of `generate`, `stream`, `samples`, `agenerate` and `astream` of a "
        f"model, and of `generate` and `stream` of a session.\n\n{option_table(GENERATE_OPTIONS)}\n",
        "## SamplingParams\n\nThe sampling options in a single object: the options from `max_tokens` to `logprobs` "
        "in the table above.\n",
    ]
    for kind in (ovspec.LanguageModel, ovspec.Session, TextStream, AsyncTextStream, ovspec.Drafter):
        parts.append(f"## {kind.__name__}\n\n{prose(kind)}\n")
        for name, value in members(kind):
            head = "" if isinstance(value, property) else f"{signature(name, value)}\n\n"
            parts.append(f"### {kind.__name__}.{name}\n\n{head}{prose(value)}\n")
    for kind in (ovspec.Result, ovspec.Stats, ovspec.Piece, TokenLogprob, ovspec.Score, ovspec.Selection, Perplexity):
        listed = [f"{field.name}: {field.type}" for field in dataclasses.fields(kind)]
        rates = [f"- `{name}`: {prose(value)}" for name, value in members(kind) if isinstance(value, property)]
        fields = "```text\n" + "\n".join(listed) + "\n```\n"
        parts.append("\n".join([f"## {kind.__name__}\n", prose(kind), "", fields, *rates, *([""] if rates else [])]))
    mark = "A saved state of a session's text, made by `Session.mark`; `Session.rewind` restores it."
    read = ovspec.result_from_json
    parts.append(f"## result_from_json\n\n{signature('ovspec.result_from_json', read)}\n\n{prose(read)}\n")
    parts.append(f"## Mark\n\n{mark}\n")
    parts.append(f"## OvspecError\n\n{prose(ovspec.OvspecError)}\n")
    parts.append(f"## ovspec.compat\n\n{signature('ovspec.compat.gpt_fast', gpt_fast)}\n\n{prose(gpt_fast)}\n")
    parts.append("## ovspec.guidance\n\nSee [the guidance library](../how-to/guidance.md).\n")
    return "\n".join(parts)


def endpoints_reference() -> str:
    """Return the endpoints of 'ovspec serve' with the fields of their requests."""
    document = make_app(SimpleNamespace(lm=None, model_names=[], options=ServeParams())).openapi()  # type: ignore[arg-type]
    schemas, paths = document["components"]["schemas"], dict[str, str]()  # body -> its first path
    texts = [field_rows(schema) for schema in schemas.values() if "return_record" in schema.get("properties", ())]
    common = [row for row in texts[0] if all(row in rows for rows in texts)]
    parts = [
        f"# Endpoints\n\n{MADE}\nThe endpoints of `ovspec serve` ([how to use it](../how-to/serve.md)). The OpenAPI "
        "document is at `/openapi.json`. Fields may be left out or null, unless marked as required. Unknown fields are "
        "ignored, and up to 16 of them are listed in the response header `X-Ovspec-Ignored`; with `--strict-fields` "
        "they are refused. Names in the same row are synonyms.\n",
        f"## Common fields\n\nThe fields of all endpoints for texts:\n\n{field_table(common)}",
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"## {method.upper()} {path}\n\n{operation['summary']}\n")
            if "requestBody" in operation:
                name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                rows = field_rows(schemas[name])
                if (first := paths.setdefault(name, path)) != path:
                    parts.append(f"Fields: as for `{first}`.\n")
                    continue
                parts += ["The [common fields](#common-fields), and:\n"] * (rows in texts)
                parts.append(field_table(row for row in rows if row not in common))
    titles = {HAS_NO_EFFECT: "Ignored fields", NOT_SUPPORTED: "Fields refused except with null or these values"}
    for kind, title in titles.items():
        users = dict[str, list[str]]()  # field -> paths
        for name, path in paths.items():
            for field, entry in schemas[name]["properties"].items():
                if entry["description"] == kind:
                    values = " or ".join(f"`{json.dumps(value)}`" for value in entry.get("enum", [None])[:-1])
                    users.setdefault(f"`{field}`" + f" ({values})" * bool(values), []).append(f"`{path}`")
        table = field_table(((field, ", ".join(users[field])) for field in users), "fields | endpoints")
        parts.append(f"## {title}\n\n{table}")
    parts.append(
        '## Errors\n\nThe body is `{"error": {"message", "type", "param", "code"}}`, as in OpenAI\'s API. Under '
        '`/v1/messages` it is `{"type": "error", "error": {"type", "message"}, "request_id"}`, as in Anthropic\'s.\n'
    )
    return "\n".join([*parts, field_table(((str(s), m) for s, m in ERROR_DESCRIPTIONS.items()), "status | meaning")])


def field_rows(schema: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, type and meaning) of a request's fields, if supported and with an effect."""
    return [
        (
            f"`{name}`" + " (required)" * (name in schema.get("required", ())),
            f"{json_type(field)} | {field['description']}",
        )
        for name, field in schema["properties"].items()
        if field["description"] not in (HAS_NO_EFFECT, NOT_SUPPORTED)
    ]


def field_table(rows: Iterable[tuple[str, str]], head: str = "field | type | meaning") -> str:
    """Return a table of (name, other cells), with one row for all names with the same cells."""
    names = dict[str, list[str]]()
    for name, cells in rows:
        names.setdefault(cells, []).append(name)
    lines = [f"| {', '.join(same)} | {cells} |" for cells, same in names.items()]
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *lines]) + "\n"


def json_type(field: dict[str, Any]) -> str:
    """Return the type of a field of a JSON schema in words."""
    if "anyOf" in field:
        types = [json_type(branch) for branch in field["anyOf"] if branch.get("type") != "null"]
        return " or ".join(dict.fromkeys(types))
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "$ref" in field or field.get("type") == "object":
        return "object"
    if field.get("type") == "array":
        kind = json_type(field["items"])
        return f"list of {kind.replace('list', 'lists', 1)}" if kind.startswith("list") else f"list of {kind}s"
    return field.get("type", "any")


def signature(name: str, what: Any) -> str:
    """Return the call of a function in a code block."""
    call = inspect.signature(what)
    if "__signature__" in vars(what):  # its options have their own table
        own = [parameter for parameter in call.parameters.values() if parameter.kind is not parameter.KEYWORD_ONLY]
        call = call.replace(parameters=[*own, inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)])
    text = str(call).replace("'", "").replace("self, ", "").replace("(self)", "()").removesuffix(" -> None")
    return f"```text\n{name}{text}\n```"


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each documented public method and property."""
    attributes = {name: value for base in reversed(kind.__mro__[:-1]) for name, value in vars(base).items()}
    for name, value in attributes.items():
        if not name.startswith("_") and value.__doc__ and (isinstance(value, property) or inspect.isfunction(value)):
            yield name, value


def option_table(table: Mapping[str, Option]) -> str:
    """Return a table of options with their types, defaults and help."""
    rows = []
    for name, option in table.items():
        default = option.default_text or str(option.default) * isinstance(option.default, bool)
        meaning = markdown(" ".join(filter(None, (option.help, option.python_extra_help))))
        cells = (f"`{type_name(option.value_type)}`", default, meaning)
        rows.append((f"`{name}`", " | ".join(cell.replace("|", "\\|") for cell in cells)))
    return field_table(rows, "option | type | default | meaning").rstrip()


def type_name(kind: Any) -> str:
    """Return a type in the form of annotations, without modules."""
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(type_name, get_args(kind)))
    text = "None" if kind is NoneType else inspect.formatannotation(kind)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)


def prose(what: Any, leave_out: Collection[str] = ()) -> str:
    """Return a docstring as Markdown: arguments become list items, and a paragraph's lines a single line."""
    paragraphs: list[list[str]] = [[]]
    for line in (inspect.getdoc(what) or "").split("\n"):
        bare = line.strip()
        item = ITEM.match(bare)
        if not bare or SECTION.match(bare):
            paragraphs += [[bare], []] if bare else [[]]
        elif item:
            paragraphs.append([f"- `{item[1]}`: {item[2]}"])
        else:
            paragraphs[-1].append(bare)
    texts = [" ".join(lines) for lines in paragraphs if lines]
    texts = [text for text in texts if not any(text.startswith(f"- `{name}`:") for name in leave_out)]
    items = re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", "\n\n".join(texts))
    return markdown(items)


def markdown(text: str) -> str:
    return text.replace("``", "`")


def main() -> None:
    pages = {"cli.md": cli_reference(), "python.md": python_reference(), "endpoints.md": endpoints_reference()}
    for name, text in pages.items():
        file = FOLDER / name
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8", newline="\n")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            sys.exit(f"docs/reference/{name} is out of date: run python scripts/reference.py")


if __name__ == "__main__":
    main()
