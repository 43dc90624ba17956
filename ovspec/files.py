"""Read files with errors that name them; write files completely or not at all."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import secrets
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from ovspec.errors import OvspecError

PARTIAL = ".partial"  # ends the names of files that are being written
HOST = f"{zlib.crc32(platform.node().encode()):x}"  # in their names, because machines may share a folder


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
    """Yield a temporary path beside ``path``; on success its file replaces ``path``, else it is deleted.

    The new file keeps the old one's permissions, and stays behind a symbolic link. It is on the disk before it takes
    the old one's place, so that even a power failure leaves one of the two.
    """
    path = path.resolve()
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        host, _, process = left.name.split(".")[-3].partition("-")
        if host == HOST and process.isdecimal() and not psutil.pid_exists(int(process)):
            left.unlink(missing_ok=True)  # of a process that was killed
    partial = path.with_name(f".{path.name}.{HOST}-{os.getpid()}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        yield partial
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, partial)
        on_disk(partial)
        partial.replace(path)
        on_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def on_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk, where the system can tell."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} if there is no such file; raise an OvspecError if it is not valid."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise OvspecError(f"{path}: not valid JSON ({error}); export the model again.") from None
    if not isinstance(found, dict):
        raise OvspecError(f"{path}: not a JSON object; export the model again.")
    return found


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
