"""Files: read with an error that names them, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ovspec.errors import OvspecError


def read_text(path: Path) -> str:
    """The text in ``path``; raises OvspecError where there is none, or it is not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OvspecError(f"{path}: {(error.strerror or str(error)).lower()}; name a text file.") from None
    except UnicodeDecodeError:
        raise OvspecError(f"{path}: not UTF-8 text; name a text file.") from None
    if not text.strip():
        raise OvspecError(f"{path}: holds no text.")
    return text


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 to ``path``, whose folder is made; readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to be written beside ``path``, which takes its place in the end, if it is reached."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OvspecError(f"{path}: not valid JSON ({error}); export the model again.") from None


def remembered(path: Path | None) -> dict[str, Any]:
    """What ``remember`` wrote to ``path``; {} where nothing is there, or something damaged."""
    try:
        return read_json(path) if path else {}
    except OvspecError:
        return {}


def remember(path: Path | None, data: dict[str, Any]) -> bool:
    """Write ``data`` to a file of the cache; returns whether it could be written, which is no error."""
    if not path:
        return False
    try:
        write_atomically(path, json.dumps(data, indent=1))
    except OSError:
        return False
    return True
