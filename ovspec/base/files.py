"""Read files, naming them in errors; write files atomically."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import secrets
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from ovspec.base.errors import OvspecError, UnavailableError, WriteError
from ovspec.base.json_types import JsonObject

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RENAME_ATTEMPTS = 10  # because another process may have the file open for a moment
RENAME_PAUSE_SECONDS = 0.1  # seconds between attempts
WINDOWS_DEVICE_NAMES = {
    "CON",
    "PRN",
    "AUX",
    "NUL",
    *(f"{name}{digit}" for name in ("COM", "LPT") for digit in range(10)),
}
PARTIAL_SUFFIX = ".partial"  # suffix of partly written files
T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")
HOST_CODE = f"{zlib.crc32(platform.node().encode()):x}"  # part of the temporary names: machines may share a folder


def read_text(path: Path) -> str:
    """Return the text in ``path``; raise an OvspecError if it can't be read, is not UTF-8 or is blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OvspecError(f"{path}: {(error.strerror or str(error)).lower()}; give a text file.") from None
    except UnicodeDecodeError:
        raise OvspecError(f"{path}: not UTF-8 text; save the file as UTF-8.") from None
    if not text.strip():
        raise OvspecError(f"{path}: contains no text; give a file with text.")
    return text


def require_model_path(path: Path) -> Path:
    """Return ``path``, the path of a loaded model; raise UnavailableError if it has been deleted since."""
    if not path.exists():
        raise UnavailableError(
            f"{path}: deleted since the model was loaded; restore the file, or load the model again."
        )
    return path


@contextlib.contextmanager
def name_write_errors(file: object) -> Iterator[None]:
    """Name ``file`` in the error if it can't be written: for a full disk, the system's error names no file."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(file, error) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content``, text in UTF-8, to ``path``, creating its folder. Readers see the old file or the new one."""
    with name_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with open_replacement(path) as partial_path:
        if isinstance(content, str):
            partial_path.write_text(content, encoding="utf-8", newline="\n")
        else:
            partial_path.write_bytes(content)


@contextlib.contextmanager
def open_replacement(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; on success its file replaces ``path``, else it is deleted.

    The new file keeps the old file's permissions and symbolic link. After a power failure, the old or the new file is
    intact.
    """
    check_file_name(path)
    path = path.resolve()
    for leftover_path in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL_SUFFIX}"):
        host_code, _, process_id = leftover_path.name.split(".")[-3].partition("-")
        if host_code == HOST_CODE and process_id.isdecimal() and not psutil.pid_exists(int(process_id)):
            leftover_path.unlink(missing_ok=True)  # left by a killed process
    partial_path = path.with_name(f".{path.name}.{HOST_CODE}-{os.getpid()}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")
    try:
        with name_write_errors(path):
            yield partial_path
            with contextlib.suppress(FileNotFoundError):
                shutil.copymode(path, partial_path)
            flush_to_disk(partial_path)
            rename_with_retries(partial_path, path)
            flush_to_disk(path.parent)
    finally:
        partial_path.unlink(missing_ok=True)


def check_file_name(path: Path) -> None:
    """On Windows, raise an OvspecError if a file or folder of this name can't be created there.

    Windows would open another file, a device or another file's stream instead, and the content would be lost.
    """
    stem = path.name.partition(".")[0].rstrip().upper()
    is_forbidden = (
        set('<>:"|?*').intersection(path.name) or path.name.endswith((".", " ")) or stem in WINDOWS_DEVICE_NAMES
    )
    if sys.platform == "win32" and is_forbidden:
        raise OvspecError(f"{path}: not a valid file name on Windows; choose another name.")


def rename_with_retries(old_path: Path, new_path: Path) -> None:
    """Rename a file to ``new_path``, replacing it; Windows refuses while another process has either file open."""
    for _ in range(RENAME_ATTEMPTS - 1):
        try:
            old_path.replace(new_path)
            return
        except PermissionError:
            if sys.platform != "win32":
                raise
            time.sleep(RENAME_PAUSE_SECONDS)
    old_path.replace(new_path)


def flush_to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk, on systems that can flush it."""
    with contextlib.suppress(OSError):
        # Windows flushes only files open for writing, and no folders.
        descriptor = os.open(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(path: Path) -> JsonObject:
    """Return the object in a JSON file, or {} if there is no such file; raise an OvspecError if it is invalid."""
    if not path.is_file():
        return {}
    try:
        text = path.read_bytes().decode("utf-8-sig")
        content = json.loads(text)
        if "\\ud" in text.lower():  # perhaps half of a surrogate pair, which is invalid in texts and file names
            json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise OvspecError(f"{path}: not valid JSON ({str(error)[:200]}); export the model again.") from None
    if not isinstance(content, dict):
        raise OvspecError(f"{path}: not a JSON object; export the model again.")
    return content


def read_dataclass(dataclass_type: type[T], path: Path) -> T:
    """Return the object in a JSON file, or {} if there is no such file, as the dataclass ``dataclass_type``.

    Entries not declared in ``dataclass_type`` are ignored. Raises OvspecError like ``read_json``, or if a value doesn't
    fit.
    """
    import msgspec  # deferred, because it takes 40 ms

    try:
        return msgspec.convert(read_json(path), dataclass_type, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        problem = str(error).replace("`", "").replace(" - at $.", ": ")
        raise OvspecError(f"{path}: invalid ({problem[:200]}); export the model again.") from None


def read_cached(dataclass_type: type[T], path: Path | None) -> T | None:
    """Return the dataclass written to ``path`` by ``write_cached``; None if it is missing, damaged or outdated."""
    try:
        return read_dataclass(dataclass_type, path) if path and path.is_file() else None
    except (OvspecError, OSError):
        return None


def write_cached(path: Path | None, dataclass_instance: D) -> D:
    """Write a dataclass to a cache file and return it. Failure is not an error."""
    if path:
        with contextlib.suppress(OSError):
            write_atomically(path, json.dumps(asdict(dataclass_instance), indent=1))
    return dataclass_instance
