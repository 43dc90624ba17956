"""The folder an export writes: beside the output, locked, and put in its place by renaming.

A process that is killed leaves ``.NAME.partial-*`` or, between two renames, ``.NAME.old``. The next export
to the same place clears up, and so does loading the folder (``ovspec.manifest.restore_backup``). Nothing is
ever deleted but what carries a manifest of ours; an unfinished folder carries one that says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ovspec.device import default_cache_dir
from ovspec.errors import OvspecError
from ovspec.files import write_atomically
from ovspec.manifest import MANIFEST_FILE, UNFINISHED, backup_of, is_ours, restore_backup


def check_output(output: Path) -> None:
    """Raises OvspecError where ``output`` holds something that ovspec did not make."""
    if output.exists() and not output.is_dir():
        raise OvspecError(f"{output}: is a file; choose another folder with -o.")
    restore_backup(output)
    if output.exists() and any(output.iterdir()) and not is_ours(output):
        raise OvspecError(f"{output}: holds files that ovspec did not export; choose another folder with -o.")
    if backup_of(output).exists() and not is_ours(backup_of(output)):
        raise OvspecError(f"{backup_of(output)}: is in the way and not made by ovspec; rename it.")


@contextlib.contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """A new folder beside ``output``, to be handed to ``replace_folder``; gone afterwards, whatever happens.

    Raises:
        OvspecError: somebody else exports to ``output``, or it can't be written there.
    """
    lock = FileLock(lock_file(output))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise OvspecError(f"{output}: another export is writing it; wait for that, or choose another folder.") from None
    try:
        check_output(output)
        for left in output.parent.glob(f".{glob_escape(output.name)}.partial-*"):
            remove(left)  # of an export that was killed: we hold the lock
        work = output.with_name(f".{output.name}.partial-{secrets.token_hex(4)}")
        try:
            work.mkdir(parents=True)
            (work / MANIFEST_FILE).write_text(UNFINISHED, encoding="utf-8")
        except OSError as error:
            raise OvspecError(f"{work.parent}: cannot be written ({error.strerror}); choose another place.") from None
        try:
            yield work
        finally:
            remove(work)
    finally:
        lock.release()


def replace_folder(new: Path, output: Path) -> None:
    """Put ``new`` in the place of ``output``. Renames only, which also works on Windows."""
    backup = backup_of(output)
    if backup.exists():
        remove(backup)  # of a replacement that was killed before it had tidied up
    if output.exists():
        output.rename(backup)
    try:
        new.rename(output)
    except BaseException:
        restore_backup(output)
        raise
    remove(backup)


def remove(folder: Path) -> None:
    """Delete a folder of ours. Its manifest goes last and says so before, should the deletion be stopped."""
    if is_ours(folder):
        write_atomically(folder / MANIFEST_FILE, UNFINISHED)
        for path in folder.iterdir():
            if path.name != MANIFEST_FILE:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        (folder / MANIFEST_FILE).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there any more, or not ours and not empty
        folder.rmdir()


def check_space(folder: Path, needed: float) -> None:
    """Raises OvspecError where the disk of ``folder``, or of its first parent that exists, has no ``needed`` bytes."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OvspecError(
            f"{folder}: the export needs about {needed / 1e9:.1f} GB there and {free / 1e9:.1f} GB are free."
        )


def lock_file(output: Path) -> Path:
    """In the user's cache, because it stays behind."""
    folder = default_cache_dir() / "locks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:24]}.lock"


def glob_escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
