"""The work folder of a distillation: what was asked for, what is done, and one process at a time.

Every file in it is only appended to or replaced whole, so that after a kill the same command goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass, write_atomically
from ovspec.ir.compile import MODEL_FILE

SETTINGS, SPENT, LOCK = "settings.json", "spent.json", "lock"
DOCUMENTS, FEATURES, TARGET = "documents.jsonl", "features", "target.safetensors"
STATE, CHECKPOINT = "training.pt", "checkpoint"
SAVED = 10.0  # seconds after which what is spent is written again
DATA, TEXTS, READING, TRAINING = ("texts", "features"), "texts", "features", "training"  # stages
COSTS, EXPORTING, GAIN = "timing", "exporting", "measuring"  # stages around them; the first tells costs


@dataclass(frozen=True)
class Settings:
    """What decides which files a work folder holds.

    model: identity of the target. text, topics: files and folders. draft: its checkpoint's name.
    """

    model: str
    text: list[str]
    topics: str | None
    draft: str | None
    trim_vocabulary: int | None
    draft_vocabulary: int | None


@dataclass(frozen=True)
class Begun:
    """The settings of the command that began the work, and what tells its result from others'."""

    run: str
    settings: Settings


@dataclass
class Spent:
    """What each stage has taken, over all runs: its seconds, and the last figures that its job has told."""

    seconds: dict[str, float] = field(default_factory=dict)
    told: dict[str, dict[str, Any]] = field(default_factory=dict)

    def tokens(self, stage: str) -> int:
        """Return the tokens that a stage has got through."""
        return self.told.get(stage, {}).get("tokens", 0)

    def seconds_of(self, *stages: str) -> float:
        """Return the seconds of these stages, or of all."""
        return sum(self.seconds.get(stage, 0.0) for stage in stages or self.seconds)


class Work:
    """An open work folder.

    target: the target's export, if it was given as a checkpoint.
    draft: the checkpoint of a draft that was given as something else. old: the export of the draft as it was.
    checkpoint, ir: the result so far, and its export.
    """

    def __init__(self, folder: Path, run: str, spent: Spent) -> None:
        self.folder, self.run, self.spent = folder, run, spent
        self.documents, self.features, self.checkpoint = (folder / name for name in (DOCUMENTS, FEATURES, CHECKPOINT))
        own = ("target", "draft", "old", "ir", "scratch")
        self.target, self.draft, self.old, self.ir, self.scratch = (folder / name for name in own)

    @property
    def has_features(self) -> bool:
        return any(self.features.glob("*.safetensors"))

    @property
    def features_size(self) -> int:
        """The size of the features in bytes."""
        return sum(file.stat().st_size for file in self.features.glob("*.safetensors"))

    @property
    def has_result(self) -> bool:
        return any(self.checkpoint.glob("model*.safetensors")) or (self.checkpoint / MODEL_FILE).is_file()

    def save_spent(self) -> None:
        write_atomically(self.folder / SPENT, json.dumps(asdict(self.spent), indent=1))

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[Stopwatch]:
        """Count the seconds of the block, and what its job tells, for ``stage``."""
        watch = Stopwatch(self, stage)
        try:
            yield watch
        finally:
            watch.save()


class Stopwatch:
    """Counts what a stage takes."""

    def __init__(self, work: Work, stage: str) -> None:
        self._work, self._stage, self._began, self._saved = work, stage, time.monotonic(), time.monotonic()
        self._seconds = work.spent.seconds.get(stage, 0.0)

    def tell(self, figures: dict[str, Any]) -> None:
        """Take the figures that the job has told."""
        told = self._work.spent.told
        told[self._stage] = told.get(self._stage, {}) | figures
        self.count()
        if time.monotonic() - self._saved > SAVED:
            self.save()

    def count(self) -> None:
        self._work.spent.seconds[self._stage] = self._seconds + time.monotonic() - self._began

    def save(self) -> None:
        self.count()
        self._saved = time.monotonic()
        self._work.save_spent()


def begun_in(folder: Path) -> Begun | None:
    """Return what a work folder was begun for, or None if it holds nothing yet.

    Raises:
        OvspecError: it holds something else.
    """
    if (folder / SETTINGS).is_file():
        return read_dataclass(Begun, folder / SETTINGS)
    if folder.exists() and not folder.is_dir():
        raise OvspecError(f"{folder}: is a file; name another `work`.")
    other = next((path.name for path in folder.iterdir() if path.name != LOCK), None) if folder.exists() else None
    if other:
        raise OvspecError(f"{folder}: holds files of something else ({other}); name another `work`.")
    return None


def check_settings(folder: Path, begun: Begun | None, settings: Settings) -> None:
    """Raise OvspecError if the work in a folder was begun with other settings."""
    if begun and begun.settings != settings:
        ours = asdict(settings)
        others = [name for name, value in asdict(begun.settings).items() if value != ours[name]]
        given = " and ".join("another model" if name == "model" else f"another `{name}`" for name in others)
        raise OvspecError(
            f"{folder}: was begun with {given}; give the same to go on, name another `output`, or delete that folder."
        )


@contextlib.contextmanager
def open_work(folder: Path, run: str, settings: Settings) -> Iterator[Work]:
    """Lock a work folder, which is made if need be, and yield it.

    Raises:
        OvspecError: another process works in it, it was begun for something else, or it can't be written.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise OvspecError(f"{folder}: another distillation works there; wait for it, or name another `work`.") from None
    except OSError as error:
        raise OvspecError(f"{folder}: cannot be written ({error.strerror}); name another `work`.") from None
    try:
        begun = begun_in(folder)
        check_settings(folder, begun, settings)
        if not begun:
            write_atomically(folder / SETTINGS, json.dumps(asdict(begun := Begun(run, settings)), indent=1))
        work = Work(folder, begun.run, read_dataclass(Spent, folder / SPENT))
        shutil.rmtree(work.scratch, ignore_errors=True)  # of a run that was killed
        try:
            yield work
        finally:
            shutil.rmtree(work.scratch, ignore_errors=True)
    finally:
        lock.release()
        if not (folder / SETTINGS).exists():  # deleted, but for the lock, which Windows can't delete while it is held
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()
                folder.rmdir()


def delete_work(work: Work) -> None:
    """Delete a work folder; what says that it is one goes last."""
    for path in work.folder.iterdir():
        if path.name not in (SETTINGS, LOCK):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(work.folder, ignore_errors=True)
