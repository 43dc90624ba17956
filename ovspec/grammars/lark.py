"""Merges a Lark grammar and the files it imports into the single text that llguidance reads.

llguidance supports ``%import`` only for its own ``common``. This module imports files too, as Lark does: an imported
rule brings what it depends on under prefixed names, without ``%ignore``. Files may import each other.

Sources: https://lark-parser.readthedocs.io/en/stable/grammar.html and
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import NamedTuple

from ovspec.errors import OvspecError

MAX_FILES = 100
MAX_BYTES = 1_000_000

_NAME = r"[A-Za-z_](?:\w|-(?!>))*"
_TOKEN = re.compile(
    rf"""(?P<blank> [^\S\n]+ | (?: // | \# ) [^\n]*)
       | (?P<newline> \n)
       | (?P<json> % (?: json | regex | llguidance ) \b \s*)
       | (?P<opaque> " (?: [^"\\\n] | \\. )* " i?         # strings
                   | / (?: [^/\\] | \\. )+ / [imslux]*    # regular expressions
                   | < [^<>\s]+ > | @[\w-]+ | \d[\w.]*    # special tokens, other grammars, numbers
                   | :: \s* \w+ (?: \( [^()\n]* \) )?     # a rule's parameter
                   | %if\b [^\n|/\#]*)                    # a condition on it
       | (?P<directive> % \w+)
       | (?P<name> {_NAME})
       | (?P<mark> -> | \.\. | [^"/])""",
    re.VERBOSE | re.ASCII,
)
_IMPORT = re.compile(
    rf"%import (?P<file>\. )?(?P<path>{_NAME}(?: \. {_NAME})*)"
    rf"(?: -> (?P<alias>{_NAME})| \( (?P<names>{_NAME}(?: , {_NAME})*) \))?",
    re.ASCII,
)


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    line: int


class _Import(NamedTuple):
    file: Path | None  # None for llguidance's own "common"
    start: int
    end: int
    line: int


@dataclass(eq=False)
class _File:
    """A grammar file, parsed only as far as imports need it."""

    path: Path
    label: str
    text: str
    definitions: dict[str, list[_Token]] = field(default_factory=dict)
    imports: list[_Import] = field(default_factory=list)
    sources: dict[str, tuple[_Import, str]] = field(default_factory=dict)


# The file that defines a name (None for llguidance's own "common"), and the name there.
_Key = tuple[_File | None, str]


@dataclass
class _Files:
    by_path: dict[Path, _File] = field(default_factory=dict)
    size: int = 0


def read_lark(path: Path) -> str:
    """Return the grammar in the file ``path``, with what it imports from other files.

    Raises:
        OvspecError: a file, a name or an ``%import`` is wrong; the message names the file and the line.
    """
    files = _Files()
    return _merge(files, _read(files, path, f"The grammar {path}", dependent=False))


def resolve(text: str, folder: Path | None, name: str) -> str:
    """Return the grammar ``text`` with what it imports, like ``read_lark``.

    Args:
        folder: where ``%import .file.rule`` looks for ``file.lark``; None refuses imports from files.
        name: the grammar's name in errors.
    """
    files = _Files(size=len(text.encode()))
    if files.size > MAX_BYTES:
        raise OvspecError(f"{name} is larger than {MAX_BYTES:,} bytes; use a smaller grammar.")
    path = (folder or Path()) / "grammar.lark"
    return _merge(files, _take_apart(text, path, name, dependent=False, allow_files=folder is not None))


def _error(file: _File, line: int, sentence: str) -> OvspecError:
    return OvspecError(f"{file.label}, line {line}: {sentence}")


def _read(files: _Files, path: Path, what: str, dependent: bool = True) -> _File:
    """Return the file ``path``, from ``files`` if it is there; ``what`` begins the error messages."""
    try:
        if not path.is_file():
            raise OvspecError(f"{what} can't be read, because there is no such file; create it or correct the name.")
        key = path.resolve()
        if key in files.by_path:
            return files.by_path[key]
        if len(files.by_path) >= MAX_FILES:
            raise OvspecError(f"{what} would be file {MAX_FILES + 1} of the grammar; use at most {MAX_FILES}.")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1 - files.size)
        files.size += len(data)
        if files.size > MAX_BYTES:
            raise OvspecError(f"{what} takes the grammar over {MAX_BYTES:,} bytes; use smaller files.")
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise OvspecError(f"{what} can't be read ({error.strerror}); check its name and permissions.") from error
    except UnicodeDecodeError as error:
        raise OvspecError(f"{what} isn't UTF-8 (byte {error.start}); save it as UTF-8.") from error
    files.by_path[key] = _take_apart(text, path, str(path), dependent)
    return files.by_path[key]


def _statements(file: _File) -> Iterator[list[_Token]]:
    """Yield the tokens of each definition or directive; a line that begins with ``|`` continues the one before."""
    statement: list[_Token] = []
    position, line, ended = 0, 1, False
    while position < len(file.text):
        match = _TOKEN.match(file.text, position)
        if match is None:
            kind = "string" if file.text[position] == '"' else "regular expression"
            raise _error(file, line, f"a {kind} isn't closed; close it with {file.text[position]}.")
        end = match.end()
        if match["json"]:
            try:
                end = JSONDecoder().raw_decode(file.text, end)[1]
            except (JSONDecodeError, RecursionError) as error:
                why = f"{match[0].rstrip()} isn't followed by JSON ({error}); correct it."
                raise _error(file, line, why) from error
        text = file.text[position:end]
        if match["newline"]:
            ended = True
        elif not match["blank"]:
            if ended and text != "|" and statement:
                yield statement
                statement = []
            statement.append(_Token(match.lastgroup or "", text, position, line))
            ended = False
        position, line = end, line + text.count("\n")
    if statement:
        yield statement


def _take_apart(text: str, path: Path, label: str, dependent: bool, allow_files: bool = True) -> _File:
    """Return a grammar with its definitions and imports.

    llguidance won't see the rest of a ``dependent`` (imported) grammar, so that is checked here.
    """
    file = _File(path, label, text)
    for statement in _statements(file):
        first = statement[0]
        if first.text == "%import":
            _add_import(file, statement, allow_files)
        elif dependent and first.kind == "directive" and first.text not in ("%ignore", "%declare"):
            raise _error(file, first.line, f"{first.text} can't be used in an imported grammar; remove it.")
        elif first.kind not in ("directive", "json"):
            named = next((token for token in statement if token.kind == "name"), None)
            if dependent and (named is None or all(token.text != ":" for token in statement)):
                raise _error(file, first.line, "this isn't a rule; write a name, a colon and what it matches.")
            if dependent and named and named.text in file.definitions:
                raise _error(file, named.line, f"{named.text} is defined twice; rename one of the two.")
            if named:
                file.definitions.setdefault(named.text, statement)
    for name, (source, _) in file.sources.items():
        if name in file.definitions:
            raise _error(file, source.line, f"{name} is imported and defined; import it with -> another_name.")
    return file


def _add_import(file: _File, statement: list[_Token], allow_files: bool) -> None:
    first, last = statement[0], statement[-1]
    match = _IMPORT.fullmatch(" ".join(token.text for token in statement))
    *folders, name = match["path"].split(" . ") if match else [""]
    if match and match["names"]:
        folders, names = [*folders, name], {name: name for name in match["names"].split(" , ")}
    else:
        names = {match["alias"] or name: name} if match else {}
    if not match or not folders:
        example = "%import .file.rule, %import .file.rule -> alias or %import .file (rule, TERMINAL)"
        raise _error(file, first.line, f"this %import isn't understood; write it as {example}.")
    if match["file"] and not allow_files:
        raise _error(file, first.line, "a grammar given as text can't import files; put it into a file.")
    if not match["file"] and folders != ["common"]:
        place = ".".join(folders)
        raise _error(file, first.line, f"there is no library {place}; to import {name} from a file write .{place}.")
    path = file.path.parent.joinpath(*folders).with_suffix(".lark") if match["file"] else None
    imported = _Import(path, first.start, last.start + len(last.text), first.line)
    for here, there in names.items():
        if _is_terminal(here) != _is_terminal(there):
            why = f"{here} can't be an alias of {there}; name rules in lower case, terminals in upper."
            raise _error(file, first.line, why)
        if here in file.sources:
            raise _error(file, first.line, f"{here} is imported twice; import it with -> another_name.")
        file.sources[here] = imported, there
    file.imports.append(imported)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _find(files: _Files, file: _File, name: str, line: int) -> _Key:
    """Return where ``name``, which ``file`` uses in ``line``, is defined."""
    seen: set[_Key] = set()
    asking = file
    while name not in file.definitions:
        if name not in file.sources:
            if file is asking:
                raise _error(asking, line, f"{name} isn't defined; define it in {file.label}, or import it.")
            raise _error(asking, line, f"{file.label} doesn't define {name}; define it there, or correct the name.")
        imported, there = file.sources[name]
        if (file, name) in seen:
            raise _error(file, imported.line, f"{name} is imported in a circle; define it in one of the files.")
        seen.add((file, name))
        if imported.file is None:
            return None, there
        asking, line, name = file, imported.line, there
        file = _read(files, imported.file, f"{file.label}, line {imported.line}: {imported.file}")
    return file, name


def _prefixed(key: _Key, taken: Container[str]) -> str:
    """Return a new name that shows its origin, such as ``select__expr``, ``SELECT__NAME`` or ``_SELECT__SPACE``."""
    file, name = key
    prefix = "common" if file is None else file.path.stem.strip("_")
    under = "_" if name.startswith("_") else ""
    wanted = under + (prefix.upper() if _is_terminal(name) else prefix.lower()) + "__" + name.lstrip("_")
    return next(name for number in count(1) if (name := wanted if number == 1 else f"{wanted}_{number}") not in taken)


def _renamed(definition: list[_Token], name: str, spell: Callable[[str, int], str]) -> str:
    """Return ``definition`` renamed to ``name``; each name that it uses is replaced by ``spell(name, line)``."""
    words: list[str] = []
    body = False
    for before, token in pairwise([definition[0], *definition]):
        body = body or token.text == ":"
        if token.kind != "name" or (body and before.text == "->"):
            words.append(token.text)
        elif body or before.text == "=":
            words.append(spell(token.text, token.line))
        elif words and words[-1] not in "?!":
            words.append(token.text)  # an attribute's own name
        else:
            words = [name]  # drops the marks before it, ? and !, which concern only syntax trees
    return " ".join(words)


def _merge(files: _Files, root: _File) -> str:
    """Return the text of ``root`` without its imports from files, followed by all that it needs from them."""
    names: dict[_Key, str] = {(root, name): name for name in root.definitions}
    taken = {*root.definitions, *root.sources}
    waiting: deque[_Key] = deque()
    lines: list[str] = []

    def spell(key: _Key) -> str:
        if key not in names:
            names[key] = _prefixed(key, taken)
            taken.add(names[key])
            waiting.append(key)
        return names[key]

    text = root.text
    for imported in reversed(root.imports):
        if imported.file:
            text = text[: imported.start] + text[imported.end :]
    for here, (imported, _) in root.sources.items():
        if imported.file:
            key = _find(files, root, here, imported.line)
            if key in names:
                lines.append(f"{here}: {names[key]}")
            else:
                names[key] = here
                waiting.append(key)
    while waiting:
        file, name = key = waiting.popleft()
        if file:
            find = partial(_find, files, file)
            lines.append(_renamed(file.definitions[name], names[key], lambda *used, find=find: spell(find(*used))))
        else:
            lines.append(f"%import common.{name} -> {names[key]}")
    return "\n".join([text.rstrip("\n"), *lines, ""]) if lines else text
