"""Lists the messages of all errors, and counts the words that make English hard to read.

    python tests/support/english.py              relative words per 100 words: docs page by page, help, and errors
    python tests/support/english.py --messages   write tests/messages.txt, in which the messages can be read through

Relative words point at a thing instead of naming it. Code in pages isn't counted.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
MESSAGES_FILE = ROOT / "tests" / "messages.txt"
RELATIVE_WORD = re.compile(r"\b(that|which|who|whom|whose|what|those|ones?)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z']+")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
MAX_RELATIVE_WORDS = 1.5  # per 100
MESSAGE_MAKER = re.compile(r"error|problem|failure|refusal|refuse|explain")  # in names of functions
MIN_MESSAGE_WORDS = 3

Function = ast.FunctionDef | ast.AsyncFunctionDef


def rate(text: str) -> float:
    """Return the relative words per 100 words."""
    return 100 * len(RELATIVE_WORD.findall(text)) / max(len(WORD.findall(text)), 1)


def pages() -> dict[str, str]:
    """Return the prose of README and docs, by path; the command line's page is counted as help."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    texts = {file.relative_to(ROOT).as_posix(): CODE.sub(" ", file.read_text(encoding="utf-8")) for file in files}
    return {path: text for path, text in texts.items() if not path.startswith("docs/records/")}


def help_texts() -> str:
    """Return the help of all commands and their options."""
    from ovspec.cli import cli

    commands: list[click.Command] = [cli]
    with click.Context(cli) as context:
        commands += [command for name in cli.list_commands(context) if (command := cli.get_command(context, name))]
    parts = [command.help or "" for command in commands]
    parts += [getattr(option, "help", None) or "" for command in commands for option in command.params]
    return "\n".join(parts)


def render(node: ast.expr) -> str:
    """Return a message as it reads, with names in braces in place of values; "" for what isn't a string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(render(value) for value in values)
        case ast.FormattedValue(value=value):
            return "{" + ast.unparse(value) + "}"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return render(left) + render(right)
        case _:
            return ""


def outer_strings(node: ast.AST) -> Iterator[str]:
    """Yield the strings in a syntax tree that aren't parts of others."""
    if isinstance(node, ast.expr) and (text := render(node)):
        yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from outer_strings(child)


def messages_of(function: Function) -> Iterator[str]:
    """Yield the messages of a function: of its errors, or all of one that makes messages."""
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    if MESSAGE_MAKER.search(function.name):
        returned = [node for node in nodes if isinstance(node, ast.Return | ast.Raise | ast.Assign | ast.Yield)]
        yield from (text for node in returned for text in outer_strings(node))
        return
    raised = [node for node in nodes if isinstance(node, ast.Raise)]
    names = {name.id for error in raised for name in ast.walk(error) if isinstance(name, ast.Name)}
    for node in nodes:
        is_named = isinstance(node, ast.Assign) and any(getattr(name, "id", "") in names for name in node.targets)
        if is_named or isinstance(node, ast.Raise):
            yield from outer_strings(node)


def messages() -> dict[str, list[str]]:
    """Return the messages of the errors in each file, each once, in the file's order."""
    found: dict[str, list[str]] = {}
    for package in ("ovspec", "export/ovspec_export"):
        for file in sorted((ROOT / package).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
            texts = [" ".join(text.split()) for function in functions for text in messages_of(function)]
            if texts := [text for text in dict.fromkeys(texts) if len(WORD.findall(text)) >= MIN_MESSAGE_WORDS]:
                found[file.relative_to(ROOT).as_posix()] = texts
    return found


def listing() -> str:
    """Return the contents of the file of messages."""
    parts = [f"{file}\n" + "".join(f"  {text}\n" for text in texts) for file, texts in messages().items()]
    return "\n".join(parts)


def main() -> None:
    if "--messages" in sys.argv[1:]:
        MESSAGES_FILE.write_text(listing(), encoding="utf-8", newline="\n")
        return
    texts = {**pages(), "help": help_texts(), "errors": "\n".join(itertools.chain(*messages().values()))}
    for name, text in sorted(texts.items(), key=lambda entry: rate(entry[1])):
        print(f"{rate(text):5.2f} {len(WORD.findall(text)):6} {name}")
    print(f"{rate(' '.join(texts.values())):5.2f} in all")


if __name__ == "__main__":
    main()
