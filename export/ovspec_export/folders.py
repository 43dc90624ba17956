"""The folder an export writes: beside the output, locked, and put in its place by renaming.

A process that is killed leaves ``.NAME.partial-*`` or, between two renames, ``.NAME.old``. The next export
to the same place clears up, and so does loading the folder (``ovspec.setup.manifest.restore_backup``). Nothing is
ever deleted but what carries a manifest of ours; an unfinished folder carries one that says so.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from ovspec.errors import OvspecError
from ovspec.files import read_json
from ovspec.setup.manifest import MANIFEST_FILE, UNFINISHED, backup_of, is_ours, restore_backup

OF_THE_SYSTEM = (".DS_Store", "Thumbs.db", "desktop.ini")  # that file managers leave in every folder


def check_output(output: Path) -> None:
    """Raises OvspecError where ``output`` holds something that ovspec did not make."""
    if output.exists() and not output.is_dir():
        raise OvspecError(f"{output}: is a file; choose another folder with -o.")
    restore_backup(output)
    if output.exists() and (foreign := foreign_file(output)):
        raise OvspecError(
            f"{output}: holds files that ovspec did not export ({foreign}); choose another folder with -o, "
            "or move them away."
        )
    if backup_of(output).exists() and not is_ours(backup_of(output)):
        raise OvspecError(f"{backup_of(output)}: is in the way and not made by ovspec; rename it.")


def foreign_file(folder: Path) -> str | None:
    """A file in ``folder`` that its manifest doesn't list, None where there is none."""
    try:
        listed = read_json(folder / MANIFEST_FILE).get("files", {})
    except OvspecError:
        listed = {}
    known = {*listed, MANIFEST_FILE} if is_ours(folder) else set()
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return next((name for name in names if name not in known and Path(name).name not in OF_THE_SYSTEM), None)


@contextlib.contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """A new folder beside ``output``, to be handed to ``replace_folder``; gone afterwards, whatever happens.

    Raises:
        OvspecError: somebody else exports to ``output``, or it can't be written there.
    """
    # Beside the output, where everybody who could write it sees it.
    place = output.with_name(f".{output.name}.lock")
    lock = FileLock(place)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise OvspecError(f"{output}: another export is writing it; wait for that, or choose another folder.") from None
    except OSError as error:
        raise OvspecError(
            f"{output.parent}: cannot be written ({error.strerror}); choose another place with -o."
        ) from None
    try:
        check_output(output)
        for left in output.parent.glob(f".{glob_escape(output.name)}.partial-*"):
            remove(left)  # of an export that was killed: we hold the lock
        work = partial_of(output)
        work.mkdir()
        (work / MANIFEST_FILE).write_text(UNFINISHED, encoding="utf-8")
        try:
            yield work
        finally:
            remove(work)
    finally:
        with contextlib.suppress(OSError):  # Windows keeps an open file
            place.unlink()
        lock.release()
        with contextlib.suppress(OSError):
            place.unlink()


def replace_folder(new: Path, output: Path) -> None:
    """Put ``new`` in the place of ``output``. Renames only, which also works on Windows."""
    backup = backup_of(output)
    discard(backup)  # of a replacement that was killed before it had tidied up
    with contextlib.suppress(OSError):
        output.rmdir()  # an empty one is nothing to keep
    for attempt in range(5):
        try:
            if output.exists():
                output.rename(backup)
            new.rename(output)
            break
        except BaseException as error:
            restore_backup(output)
            # A load may have put the backup back in between, or a virus scanner holds a file for a moment.
            if not isinstance(error, OSError) or not new.exists() or attempt == 4:
                raise
            time.sleep(0.1)
    discard(backup)


def discard(backup: Path) -> None:
    """Delete a backup. It is renamed first: half deleted it must not be taken for an export."""
    if is_ours(backup):
        output = backup.with_name(backup.name.removeprefix(".").removesuffix(".old"))
        left = partial_of(output)
        backup.rename(left)
        remove(left)


def remove(folder: Path) -> None:
    """Delete a folder of ours; its manifest goes last, so that it is known as ours until then."""
    if is_ours(folder):
        for path in folder.iterdir():
            if path.name != MANIFEST_FILE:
                with contextlib.suppress(OSError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        if [path.name for path in folder.iterdir()] == [MANIFEST_FILE]:
            (folder / MANIFEST_FILE).unlink()
    with contextlib.suppress(OSError):  # not there any more, or not ours and not empty
        folder.rmdir()


def partial_of(output: Path) -> Path:
    """A name for a folder that is not an export yet, or not any more."""
    return output.with_name(f".{output.name}.partial-{secrets.token_hex(4)}")


def check_space(folder: Path, needed: float) -> None:
    """Raises OvspecError where the disk of ``folder``, or of its first parent that exists, has no ``needed`` bytes."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OvspecError(
            f"{folder}: the export needs about {needed / 1e9:.1f} GB there and {free / 1e9:.1f} GB are free."
        )


def glob_escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
