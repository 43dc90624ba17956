"""Read files with errors that name them; write files completely or not at all."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ovspec.errors import OvspecError


def read_text(path: Path) -> str:
    """Return the text in ``path``; raise an OvspecError if it can't be read, is not UTF-8 or is blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OvspecError(f"{path}: {(error.strerror or str(error)).lower()}; name a text file.") from None
    except UnicodeDecodeError:
        raise OvspecError(f"{path}: not UTF-8 text; name a text file.") from None
    if not text.strip():
        raise OvspecError(f"{path}: contains no text.")
    return text


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in UTF-8, creating its folder. Readers see either the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success its file replaces ``path``, else it is deleted."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no such file; raise an OvspecError if it is not valid."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise OvspecError(f"{path}: not valid JSON ({error}); export the model again.") from None


def remembered(path: Path | None) -> dict[str, Any]:
    """Return what ``remember`` wrote to ``path``; {} if the file is missing or damaged."""
    try:
        return read_json(path) if path else {}
    except OvspecError:
        return {}


def remember(path: Path | None, data: dict[str, Any]) -> bool:
    """Write ``data`` to a cache file; return whether that succeeded. Failure is not an error."""
    if not path:
        return False
    try:
        write_atomically(path, json.dumps(data, indent=1))
    except OSError:
        return False
    return True
