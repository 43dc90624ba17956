"""Lists the messages of all errors, and counts the words that make English hard to read.

    python tests/support/english.py              relative words per 100 words: docs page by page, help, and errors
    python tests/support/english.py --messages   write tests/messages.txt, in which the messages can be read through

Relative words point at a thing instead of naming it. Code in pages isn't counted.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import click
import sentences
from sentences import called_name

ROOT = Path(__file__).resolve().parents[2]
MESSAGES_FILE = ROOT / "tests" / "messages.txt"
RELATIVE_WORD = re.compile(r"\b(that|which|who|whom|whose|what|those|ones?)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z']+")
CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)
HEADER = """The error messages of ovspec, by source file, written by tests/support/english.py. Words in braces stand for
values: {label} for an option, a field or a tool; {folder} and {path} for paths. On the command line, `option` reads
--option.

"""
MAX_RELATIVE_WORDS = 1.5  # per 100
# In the names of functions that make messages.
MESSAGE_MAKER = re.compile(r"error|problem|failure|refusal|refuse|explain|invalid|suggest_field|death")
ERROR_CLASS = re.compile(r"Error$|^(NotPaged|PagedCheck)$|^Sandbox.*(Died|Exceeded)$|^raise_usage_error_if$")
MESSAGE_VARIABLE = re.compile(r"(^|_)(message|problem|reason|refusal|sentence)$")
MESSAGE_CONSTANT = re.compile(
    r"(_ADVICE|_ERRORS?|_FAILURES|_REASONS|_WORDINGS|_FORMATS|_INSTEAD|_MODEL_KINDS)$|^(UNSUPPORTED|UNUSABLE|NOT_AN)"
)
MIN_MESSAGE_WORDS = 3
# Parts that reach their sentence through another process or a library, by folder or file; {} is the part. A frame that
# ends with its part is for whole sentences, too.
FRAMES = {
    "export/": "{model}: {what failed} ({}).",
    "export/ovspec_export/gguf_file.py": "{file}: damaged or truncated ({}); download the file again.",
    "ovspec/grammars/gbnf/": "{label}, {}",
    "ovspec/grammars/json_schema/": "{label}, at {}",
    "ovspec/protocols/": "{field} {}.",
    "ovspec/text/chat_template_worker.py": "The model's chat template cannot render these messages: {}.",
}
NO_MESSAGES = {"replace", "startswith", "endswith", "removeprefix", "removesuffix"}  # calls

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


def outer_strings(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the strings in a syntax tree that aren't parts of others, except regular expressions."""
    if isinstance(node, ast.Call) and (ast.unparse(node.func).startswith("re.") or called_name(node) in NO_MESSAGES):
        return
    if isinstance(node, ast.expr) and render(node):
        yield node
        return
    if isinstance(node, ast.Dict):  # its keys are no messages
        node = ast.Tuple(node.values)
    for child in ast.iter_child_nodes(node):
        yield from outer_strings(child)


def is_error(node: ast.AST) -> bool:
    """Return whether a node raises or makes an error; a PagedCheck(True, …) is none."""
    if isinstance(node, ast.Call) and ERROR_CLASS.search(called_name(node)):
        return not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value is True)
    return isinstance(node, ast.Raise)


def messages_of(function: Function) -> Iterator[ast.expr]:
    """Yield the messages of a function: of its errors, or all of one that makes messages."""
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    if MESSAGE_MAKER.search(function.name):
        returned = [node for node in nodes if isinstance(node, ast.Return | ast.Raise | ast.Assign | ast.Yield)]
        yield from (string for node in returned for string in outer_strings(node))
        return
    errors = [node for node in nodes if is_error(node)]
    names = {name.id for error in errors for name in ast.walk(error) if isinstance(name, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Dict):  # the answer of a process
            keys = [getattr(key, "value", "") for key in node.keys]
            yield from (value for key, value in zip(keys, node.values, strict=True) if key == "error")
        targets = [getattr(target, "id", "") for target in node.targets] if isinstance(node, ast.Assign) else []
        is_part = any(name in names or MESSAGE_VARIABLE.search(name) for name in targets)
        if is_part or node in errors:
            yield from outer_strings(node)


def messages_of_class(error_class: ast.ClassDef) -> Iterator[ast.expr]:
    """Yield the messages that an error's class passes to its base."""
    if ERROR_CLASS.search(error_class.name):
        calls = [node for node in ast.walk(error_class) if called_name(node) == "__init__"]
        yield from (string for call in calls for string in outer_strings(call))


def constants_in_errors(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the constants that errors are made with."""
    errors = filter(is_error, ast.walk(tree))
    yield from (
        name.id for error in errors for name in ast.walk(error) if isinstance(name, ast.Name) and name.id.isupper()
    )


def messages_of_constant(assignment: ast.Assign | ast.AnnAssign, used_names: Set[str]) -> Iterator[ast.expr]:
    """Yield the strings of a module's constant if it is among ``used_names``, or its name says what it is."""
    targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
    names = [getattr(target, "id", "") for target in targets]
    if not assignment.value or not any(name in used_names or MESSAGE_CONSTANT.search(name) for name in names):
        return
    match assignment.value:
        case ast.Tuple(elts=[ast.Tuple(), *_] as pairs):  # of a pattern and the message for it
            rows = [pair for pair in pairs if isinstance(pair, ast.Tuple)]
            yield from (string for row in rows for string in outer_strings(row.elts[-1]))
        case value:
            yield from outer_strings(value)


def messages_in(tree: ast.Module, used_names: Set[str]) -> Iterator[ast.expr]:
    """Yield the messages in a file, in no particular order, some of them twice.

    used_names: the constants that errors are made with, in all files.
    """
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield from messages_of_constant(node, used_names)
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield from messages_of(node)
        elif isinstance(node, ast.ClassDef):
            yield from messages_of_class(node)


def is_message(text: str) -> bool:
    """Return whether a string has words, and isn't a code such as model_not_found."""
    return " " in text and len(WORD.findall(text)) >= MIN_MESSAGE_WORDS


def parse_code() -> dict[str, ast.Module]:
    """Return the syntax trees of both packages, by path."""
    return {
        file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for package in ("ovspec", "export/ovspec_export")
        for file in sorted((ROOT / package).rglob("*.py"))
    }


def message_nodes(trees: Mapping[str, ast.Module]) -> dict[str, list[ast.expr]]:
    """Return the strings of each file's messages and parts of messages."""
    used_names = {name for tree in trees.values() for name in constants_in_errors(tree)}
    return {
        path: [node for node in dict.fromkeys(messages_in(tree, used_names)) if not re.fullmatch(r"\W+", render(node))]
        for path, tree in trees.items()
    }


@functools.cache
def messages() -> dict[str, list[str]]:
    """Return the messages of the errors in each file, each once, and parts of messages alone."""
    found: dict[str, list[str]] = {}
    for path, nodes in message_nodes(parse_code()).items():
        texts = dict.fromkeys(" ".join(render(node).split()) for node in nodes)
        if kept_texts := [text for text in texts if is_message(text)]:
            found[path] = kept_texts
    return found


def listing() -> str:
    """Return the contents of the file of messages: whole sentences."""
    trees = parse_code()
    found = sentences.sentences(message_nodes(trees), sentences.index_code(trees.values()), is_message)
    return HEADER + "\n".join(
        f"{file}\n" + "".join(f"  {put_into_frame(text, file)}\n" for text in texts) for file, texts in found.items()
    )


def put_into_frame(part: str, file: str) -> str:
    """Return the sentence with a part of a message; a whole sentence stays as it is."""
    frame = max((prefix for prefix in FRAMES if file.startswith(prefix)), key=len, default="")
    is_part = part[0].islower() and not part.endswith((".", "?"))
    if not frame or not (is_part or FRAMES[frame].endswith("{}")):
        return part
    if FRAMES[frame].endswith("at {}"):  # a place in a schema: its top reads "the top"
        part = re.sub("^#:", "the top:", part if re.match(r"(\{pointer\}|#)\S*:", part) else "{pointer}: " + part)
    return FRAMES[frame].replace("{}", part)


def texts_for_users() -> dict[str, str]:
    """Return the prose of the pages, the help and the errors, by name."""
    return {**pages(), "help": help_texts(), "errors": "\n".join(itertools.chain(*messages().values()))}


def main() -> None:
    if "--messages" in sys.argv[1:]:
        MESSAGES_FILE.write_text(listing(), encoding="utf-8", newline="\n")
        return
    texts = texts_for_users()
    for name, text in sorted(texts.items(), key=lambda entry: rate(entry[1])):
        print(f"{rate(text):5.2f} {len(WORD.findall(text)):6} {name}")
    print(f"{rate(' '.join(texts.values())):5.2f} in all")


if __name__ == "__main__":
    main()
