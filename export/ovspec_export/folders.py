"""The folder of an export in progress: next to the output, locked, and renamed to the output's name at the end.

A killed process leaves ``.NAME.partial-*`` or, between two renames, ``.NAME.old``. The next export to the same place
cleans up; loading the folder restores ``.NAME.old`` (``ovspec.setup.manifest.restore_backup``). Only folders with a
manifest of ovspec are ever deleted; an unfinished folder has a manifest, too, marked as unfinished.
"""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ovspec.base.errors import OvspecError
from ovspec.base.files import check_file_name, read_json
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import format_size
from ovspec.setup.manifest import MANIFEST_FILE, UNFINISHED_MANIFEST, backup_path, has_manifest, restore_backup

SYSTEM_FILES = (".DS_Store", "Thumbs.db", "desktop.ini")  # left by file managers in every folder


def check_output_folder(output: Path, overwrite: bool) -> None:
    """Raise OvspecError if ``output`` has files not made by ovspec or, without ``overwrite``, a pair."""
    if output.exists() and not output.is_dir():
        raise OvspecError(f"{output}: is a file; choose another `output`.")
    restore_backup(output)
    if output.exists() and (foreign_name := find_foreign_file(output)):
        raise OvspecError(
            f"{output}: contains files not exported by ovspec ({foreign_name}); choose another `output`, or move "
            "them away."
        )
    check_file_name(output)
    if not overwrite and has_manifest(output) and not read_raw_manifest(output).get("unfinished"):
        raise OvspecError(f"{output} already exists; choose another `output`, or add `overwrite=True`.")
    backup = backup_path(output)
    if backup.exists() and (not has_manifest(backup) or find_foreign_file(backup)):
        raise OvspecError(
            f"{backup}: the export needs this name for a backup, but this folder contains files not exported by "
            "ovspec; rename the folder."
        )


def check_files_closed(output: Path) -> None:
    """Raise OvspecError if an export can't be replaced because its files are open, as on Windows."""
    if sys.platform == "win32" and has_manifest(output):
        try:
            output.rename(backup_path(output))
        except PermissionError:
            raise open_files_error(output) from None
        restore_backup(output)


def open_files_error(output: Path) -> OvspecError:
    """Return the error for an export with open files."""
    advice = "stop the program using these files, such as 'ovspec serve'"
    return OvspecError(f"{output}: its files are open, so the old export was kept; {advice}, and export again.")


def find_foreign_file(folder: Path) -> str | None:
    """Return a file in ``folder`` missing in its manifest, or None."""
    return next(find_foreign_files(folder), None)


def find_foreign_files(folder: Path) -> Iterator[str]:
    """Yield the files in ``folder`` missing in its manifest; in an unfinished export all files are ours."""
    manifest = read_raw_manifest(folder)
    if manifest.get("unfinished"):
        return
    exported_files = manifest.get("files")
    our_files: set[str] = set()
    if has_manifest(folder) and isinstance(exported_files, dict):
        our_files = {*exported_files, MANIFEST_FILE}
    for path in folder.rglob("*"):
        file_name = path.relative_to(folder).as_posix()
        if (path.is_symlink() or not path.is_dir()) and file_name not in our_files and path.name not in SYSTEM_FILES:
            yield file_name


def read_raw_manifest(folder: Path) -> JsonObject:
    """Return the manifest in ``folder`` as JSON; {} if it is missing or unreadable."""
    try:
        return read_json(folder / MANIFEST_FILE)
    except OvspecError:
        return {}


@contextlib.contextmanager
def open_partial_folder(output: Path, overwrite: bool) -> Iterator[Path]:
    """Make a folder next to ``output`` for ``replace_folder`` to move into place; it is always gone afterwards.

    Raises:
        OvspecError: like ``check_output_folder``, or another export is writing ``output``, or its parent folder can't
            be written.
    """
    # Next to the output, visible to every process that could write the output.
    lock_file = output.with_name(f".{output.name}.lock")
    lock = FileLock(lock_file)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise OvspecError(
            f"{output}: another export is writing to this folder; wait until the other export ends, or choose another "
            "`output`."
        ) from None
    except OSError as error:
        raise OvspecError(f"{output.parent}: cannot be written ({error.strerror}); choose another `output`.") from None
    try:
        check_output_folder(output, overwrite)
        check_files_closed(output)
        for partial_folder in output.parent.glob(f".{glob.escape(output.name)}.partial-*"):
            remove_export_folder(partial_folder)  # of a killed export, since we hold the lock
        new_folder = name_partial_folder(output)
        new_folder.mkdir()
        (new_folder / MANIFEST_FILE).write_text(UNFINISHED_MANIFEST, encoding="utf-8", newline="\n")
        try:
            yield new_folder
        finally:
            remove_export_folder(new_folder)
    finally:
        with contextlib.suppress(OSError):  # Windows can't delete an open file
            lock_file.unlink()
        lock.release()
        with contextlib.suppress(OSError):
            lock_file.unlink()


def replace_folder(new_folder: Path, output: Path) -> None:
    """Replace ``output`` by ``new_folder`` with renames only, which also works on Windows."""
    backup = backup_path(output)
    discard_backup(backup)  # of a replacement killed before its cleanup
    with contextlib.suppress(OSError):
        output.rmdir()  # an empty folder need not be kept
    for attempt in range(5):
        try:
            if output.exists():
                output.rename(backup)
            new_folder.rename(output)
            break
        except BaseException as error:
            restore_backup(output)
            # Try again: a load may have restored the backup meanwhile, or a virus scanner may hold a file briefly.
            if not isinstance(error, OSError) or not new_folder.exists() or attempt == 4:
                if sys.platform == "win32" and isinstance(error, PermissionError):
                    raise open_files_error(output) from None
                raise
            time.sleep(0.1)
    if has_manifest(backup):
        for file_name in list(find_foreign_files(backup)):  # added during the export
            if not (output / file_name).exists():
                (output / file_name).parent.mkdir(parents=True, exist_ok=True)
                (backup / file_name).rename(output / file_name)
    discard_backup(backup)


def discard_backup(backup: Path) -> None:
    """Delete a backup, if it holds only an export.

    It is renamed first, because half a folder must never pass for an export.
    """
    if has_manifest(backup) and not find_foreign_file(backup):
        output = backup.with_name(backup.name.removeprefix(".").removesuffix(".old"))
        partial_folder = name_partial_folder(output)
        backup.rename(partial_folder)
        remove_export_folder(partial_folder)


def remove_export_folder(folder: Path) -> None:
    """Delete a folder made by ovspec; its manifest goes last, to keep the folder recognisable until then."""
    if has_manifest(folder):
        for path in folder.iterdir():
            if path.name != MANIFEST_FILE:
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if [path.name for path in folder.iterdir()] == [MANIFEST_FILE]:
            (folder / MANIFEST_FILE).unlink()
    with contextlib.suppress(OSError):  # already gone, or not ours and not empty
        folder.rmdir()


def name_partial_folder(output: Path) -> Path:
    """Return a name for a folder before it becomes an export, or before its deletion."""
    return output.with_name(f".{output.name}.partial-{secrets.token_hex(4)}")


def check_disk_space(
    folder: Path,
    needed_bytes: float,
    purpose: str = "the export",
    advice: str = "free some space, or choose another `output`",
) -> None:
    """Raise OvspecError unless the bytes are free on the disk of ``folder`` or its nearest existing parent."""
    existing_folder = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing_folder).free
    if free_bytes < needed_bytes:
        sizes = f"about {format_size(needed_bytes)} there, but only {format_size(free_bytes)} is free"
        raise OvspecError(f"{folder}: {purpose} needs {sizes}; {advice}.")


def link_or_copy(source_file: Path, new_file: Path) -> None:
    """Make ``new_file`` a link to the same file, or a copy if the disk has no links."""
    try:
        os.link(source_file, new_file)
    except OSError:
        shutil.copy2(source_file, new_file)
