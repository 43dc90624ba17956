"""The store: models exported by name, in the folder ``models`` of the user's cache.

Each model has a folder with its record (``entry.json``), its export (``ir``), and a marker for each process using it
(``uses``). The folder is written under a temporary name and renamed when complete, so a killed process never leaves an
incomplete model.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from ovspec.base.errors import OvspecError
from ovspec.base.files import HOST_CODE, name_write_errors, read_dataclass, rename_with_retries, write_atomically
from ovspec.base.progress import show_step
from ovspec.ir.device import default_cache_dir
from ovspec.ir.heads import is_head_folder
from ovspec.setup.manifest import DRAFT_FOLDER, Manifest, read_manifest, restore_backup

RECORD_FILE = "entry.json"
IR_FOLDER = "ir"
USES_FOLDER = "uses"
REMOVED_PREFIX = ".removed-"  # prefix of folders being deleted
SECONDS_PER_DAY = 86400.0
CLOCK_TOLERANCE_SECONDS = 3.0  # apparent shift of a process's start when the clock is set


@dataclass(frozen=True)
class ModelRecord:
    """The source and options of an export in the store.

    source: the absolute path of a folder or GGUF file, or a hub id without its revision.
    revision: the requested revision of a hub id, None for its main branch; for a path, a checksum of its files.
    draft: the source of the draft named at the export.
    """

    source: str
    revision: str | None
    draft: str | None = None


@dataclass(frozen=True)
class StoredModel:
    """A complete export in the store."""

    folder: Path
    record: ModelRecord
    manifest: Manifest

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def ir_folder(self) -> Path:
        return self.folder / IR_FOLDER

    @property
    def last_used(self) -> float:
        """The time of its last use, in seconds since the epoch."""
        return (self.folder / RECORD_FILE).stat().st_mtime

    @property
    def size_in_bytes(self) -> int:
        return sum(file.size for file in self.manifest.files.values())

    @property
    def draft_kind(self) -> str:
        """The kind of its draft: "head" (an MTP layer, too), "draft" or nothing."""
        if not self.manifest.draft:
            return ""
        return "head" if is_head_folder(self.ir_folder / DRAFT_FOLDER) else "draft"

    def is_of(self, source: str, revision: str | None) -> bool:
        """Return whether it was exported from this source in this revision, or in the commit of this name."""
        is_same_commit = revision is not None and revision == self.manifest.target.revision
        return self.record.source == source and (self.record.revision == revision or is_same_commit)


def store_folder() -> Path:
    return default_cache_dir() / "models"


def name_folder(folder: Path) -> str:
    """Return the name of an exported model or its draft for messages: its name in the store, or its folder."""
    if not folder.is_relative_to(store_folder()):
        return str(folder)
    entry_name, *inner_folders = folder.relative_to(store_folder()).parts
    return "/".join([entry_name, *inner_folders[1:]])


def list_entry_folders() -> list[Path]:
    """Return the store's folders made by ovspec, complete or not; other folders there are left alone."""
    with contextlib.suppress(OSError):
        return sorted(
            path for path in store_folder().iterdir() if path.name[0] != "." and (path / RECORD_FILE).is_file()
        )
    return []


def read_stored_model(folder: Path) -> StoredModel:
    """Return the model in a folder of the store; raises OvspecError if it is damaged."""
    restore_backup(folder / IR_FOLDER)
    record = read_dataclass(ModelRecord, folder / RECORD_FILE)
    manifest = read_manifest(folder / IR_FOLDER)
    if not manifest:
        raise OvspecError(
            f"{folder}: the exported files are missing; run 'ovspec models rm {folder.name}', and load the model again."
        )
    return StoredModel(folder, record, manifest)


def list_stored_models() -> list[StoredModel]:
    """Return the complete models in the store; damaged models are left out."""
    models: list[StoredModel] = []
    for folder in list_entry_folders():
        with contextlib.suppress(OvspecError, OSError):
            models.append(read_stored_model(folder))
    return models


def find_stored_model(
    source: str,
    revision: str | None,
    weight_format: str | None = None,
    draft: str | None = None,
    needs_draft: bool = False,
) -> StoredModel | None:
    """Return the model exported from a source, the most recently used if there are several; None without any.

    Args:
        source, revision: as in ``ModelRecord``; the revision may also be a hub commit.
        weight_format: the format of its weights; None for any.
        draft: the source of the draft it must have been exported with; None for any or none.
        needs_draft: whether it must have a draft.
    """
    matching_models = [
        model
        for model in list_stored_models()
        if model.is_of(source, revision)
        and weight_format in (None, model.manifest.target.weight_format)
        and draft in (None, model.record.draft)
        and (model.manifest.draft or not needs_draft)
    ]
    return max(matching_models, key=lambda model: model.last_used, default=None)


@contextlib.contextmanager
def lock_source(source: str, shown_name: str) -> Iterator[Path]:
    """Let only this process export a source; yield a folder for the export, deleted afterwards.

    Waits while another process exports the source.
    """
    source_code = hashlib.sha256(source.encode()).hexdigest()[:12]
    new_folder = store_folder() / f".new-{source_code}"
    lock = FileLock(store_folder() / f".{source_code}.lock")
    with name_write_errors(store_folder()):
        store_folder().mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        with show_step(f"{shown_name}: waiting for another process, which exports it"):
            lock.acquire()
    try:
        shutil.rmtree(new_folder, ignore_errors=True)  # left by a killed process
        yield new_folder
    finally:
        shutil.rmtree(new_folder, ignore_errors=True)
        lock.release()


def publish_model(new_folder: Path, record: ModelRecord, name: str, outdated_folders: list[Path]) -> StoredModel:
    """Move a finished export with its record to its place in the store, under ``name`` or a numbered variant.

    ``outdated_folders``: models to replace, unless a process uses them.
    """
    write_atomically(new_folder / RECORD_FILE, json.dumps(asdict(record)))
    plain_name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"
    number = 1
    while True:
        folder = store_folder() / (plain_name if number == 1 else f"{plain_name}-{number}")
        if is_damaged_entry(folder) or (folder in outdated_folders and not list_users(folder)):
            delete_folder(folder)
        if not folder.exists():
            with contextlib.suppress(FileExistsError, NotADirectoryError):
                rename_with_retries(new_folder, folder)
                break
        number += 1
    for outdated_folder in set(outdated_folders) - {folder}:
        with contextlib.suppress(OvspecError, OSError):
            remove_model(outdated_folder)
    return read_stored_model(folder)


def is_damaged_entry(folder: Path) -> bool:
    """Return whether a folder of the store is ovspec's and unusable."""
    if folder not in list_entry_folders():
        return False
    try:
        read_stored_model(folder)
    except (OvspecError, OSError):
        return True
    return False


def mark_used(folder: Path) -> None:
    """Note that this process uses the export in ``folder``, if it is in the store, until the process ends.

    Raises:
        OvspecError: the model has just been removed.
    """
    entry_folder = folder.resolve().parent
    if entry_folder.parent != store_folder().resolve() or folder.name != IR_FOLDER:
        return
    process = psutil.Process()
    marker = entry_folder / USES_FOLDER / f"{HOST_CODE}-{process.pid}-{round(process.create_time())}"
    with contextlib.suppress(OSError):  # a read-only cache still works
        os.utime(entry_folder / RECORD_FILE)
        marker.parent.mkdir(exist_ok=True)
        if not marker.exists():
            marker.touch()
            atexit.register(marker.unlink, missing_ok=True)
    if not folder.is_dir():
        raise OvspecError(f"{entry_folder.name}: just removed from the store by another process; load the model again.")


def list_users(entry_folder: Path) -> list[str]:
    """Return the ids of the processes that use a model of the store; on other machines as far as recorded."""
    user_descriptions: list[str] = []
    for marker in (entry_folder / USES_FOLDER).glob("*-*-*"):
        host_code, process_id, start_time = marker.name.split("-")
        if host_code != HOST_CODE:
            user_descriptions.append(f"process {process_id} of another machine")
            continue
        with contextlib.suppress(psutil.Error, ValueError):
            if abs(psutil.Process(int(process_id)).create_time() - int(start_time)) < CLOCK_TOLERANCE_SECONDS:
                user_descriptions.append(f"process {process_id}")
    return user_descriptions


def remove_model(folder: Path) -> None:
    """Delete a model of the store; raises OvspecError if a process uses it."""
    check_unused(folder, folder.name)
    doomed_folder = folder.with_name(f"{REMOVED_PREFIX}{secrets.token_hex(4)}")
    try:
        folder.rename(doomed_folder)
    except PermissionError:  # Windows' error for open files
        raise OvspecError(
            f"{folder.name}: another program uses files of this model; stop the other program first."
        ) from None
    try:
        check_unused(doomed_folder, folder.name)  # a process may just have started to use it
    except OvspecError:
        doomed_folder.rename(folder)
        raise
    shutil.rmtree(doomed_folder, ignore_errors=True)


def check_unused(entry_folder: Path, name: str) -> None:
    if users := list_users(entry_folder):
        raise OvspecError(f"{name}: in use by {', '.join(users)}; stop each process first.")


def delete_folder(folder: Path) -> None:
    """Delete a model of the store, used or not."""
    doomed_folder = folder.with_name(f"{REMOVED_PREFIX}{secrets.token_hex(4)}")
    folder.rename(doomed_folder)
    shutil.rmtree(doomed_folder, ignore_errors=True)


def list_unused_models(days: float) -> list[Path]:
    """Return the folders of models unused for so many days, and of damaged models."""
    oldest_time = time.time() - days * SECONDS_PER_DAY
    return [
        folder
        for folder in list_entry_folders()
        if (folder / RECORD_FILE).stat().st_mtime <= oldest_time or is_damaged_entry(folder)
    ]


def delete_leftovers() -> None:
    """Delete the leftovers of killed processes in the store."""
    for doomed_folder in store_folder().glob(f"{REMOVED_PREFIX}*"):
        shutil.rmtree(doomed_folder, ignore_errors=True)
    for new_folder in store_folder().glob(".new-*"):
        source_code = new_folder.name.removeprefix(".new-")
        with contextlib.suppress(Timeout), FileLock(store_folder() / f".{source_code}.lock", timeout=0):
            shutil.rmtree(new_folder, ignore_errors=True)
