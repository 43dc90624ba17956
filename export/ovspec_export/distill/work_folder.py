"""The work folder of a distillation: its options, its finished work, and a lock for a single process at a time.

Every file in it is only appended to or replaced as a whole, so the same command can continue after a kill.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass, write_atomically
from ovspec.base.json_types import JsonObject
from ovspec.ir.compile import MODEL_FILE

SETTINGS_FILE = "settings.json"
STAGE_FIGURES_FILE = "spent.json"
LOCK_FILE = "lock"
DOCUMENTS_FILE, FEATURES_FOLDER, TARGET_TABLES_FILE = "documents.jsonl", "features", "target.safetensors"
TRAINING_STATE_FILE = "training.pt"
CHECKPOINT_FOLDER = "checkpoint"
FIGURES_SAVE_SECONDS = 10.0  # seconds between writes of the figures
TEXTS_STAGE = "texts"
FEATURES_STAGE = "features"
TRAINING_STAGE = "training"
DATA_STAGES = (TEXTS_STAGE, FEATURES_STAGE)
COSTS_STAGE = "timing"
EXPORTING_STAGE = "exporting"
GAIN_STAGE = "measuring"


@dataclass(frozen=True)
class DistillSettings:
    """The settings with an effect on the contents of a work folder.

    model: identity of the target. text, topics: files and folders. draft: its checkpoint's name. kind: "mtp", or None
    for other kinds.
    """

    model: str
    text: list[str]
    topics: str | None
    draft: str | None
    trim_vocabulary: int | None
    draft_vocabulary: int | None
    kind: str | None = None


@dataclass(frozen=True)
class WorkHeader:
    """The settings of the first command in the work folder, and an id to recognise its result."""

    run: str
    settings: DistillSettings


@dataclass
class StageFigures:
    """The costs of each stage, over all runs: its seconds, and the last figures reported by its job."""

    seconds: dict[str, float] = field(default_factory=dict)
    told: dict[str, JsonObject] = field(default_factory=dict)

    def get_stage_figures(self, stage: str) -> JsonObject:
        return self.told.get(stage, {})

    def update_figures(self, stage: str, figures: JsonObject) -> None:
        self.told[stage] = self.get_stage_figures(stage) | figures

    def count_tokens(self, stage: str) -> int:
        """Return the tokens finished by a stage."""
        return self.get_stage_figures(stage).get("tokens", 0)

    def sum_seconds(self, *stages: str) -> float:
        """Return the seconds of these stages, or of all."""
        return sum(self.seconds.get(stage, 0.0) for stage in stages or self.seconds)


class WorkFolder:
    """An open work folder.

    target_folder: the target's export, if the target is a checkpoint.
    draft_checkpoint: of a draft in another format. old_draft_ir: the export of the original draft.
    result_checkpoint, result_ir: the result so far, and its export.
    """

    def __init__(self, folder: Path, run_id: str, stage_figures: StageFigures) -> None:
        self.path, self.run_id, self.stage_figures = folder, run_id, stage_figures
        self.documents_file = folder / DOCUMENTS_FILE
        self.features_folder = folder / FEATURES_FOLDER
        self.result_checkpoint = folder / CHECKPOINT_FOLDER
        self.target_folder = folder / "target"
        self.draft_checkpoint = folder / "draft"
        self.old_draft_ir = folder / "old"
        self.result_ir = folder / "ir"
        self.scratch_folder = folder / "scratch"

    @property
    def has_features(self) -> bool:
        return any(self.features_folder.glob("*.safetensors"))

    @property
    def features_bytes(self) -> int:
        """The size of the features in bytes."""
        return sum(file.stat().st_size for file in self.features_folder.glob("*.safetensors"))

    @property
    def has_result(self) -> bool:
        return any(self.result_checkpoint.glob("model*.safetensors")) or (self.result_checkpoint / MODEL_FILE).is_file()

    def save_stage_figures(self) -> None:
        write_atomically(self.path / STAGE_FIGURES_FILE, json.dumps(asdict(self.stage_figures), indent=1))

    @contextlib.contextmanager
    def time_stage(self, stage: str) -> Iterator[StageRecorder]:
        """Record the seconds of the block, and its job's figures, for ``stage``."""
        timer = StageRecorder(self, stage)
        try:
            yield timer
        finally:
            timer.save_seconds()


class StageRecorder:
    """Records the costs of a stage."""

    def __init__(self, work_folder: WorkFolder, stage: str) -> None:
        self._work_folder, self._stage, self._start_time, self._last_save_time = (
            work_folder,
            stage,
            time.monotonic(),
            time.monotonic(),
        )
        self._earlier_seconds = work_folder.stage_figures.seconds.get(stage, 0.0)

    def record_figures(self, figures: JsonObject) -> None:
        """Record the figures reported by the job."""
        self._work_folder.stage_figures.update_figures(self._stage, figures)
        self.update_seconds()
        if time.monotonic() - self._last_save_time > FIGURES_SAVE_SECONDS:
            self.save_seconds()

    def update_seconds(self) -> None:
        self._work_folder.stage_figures.seconds[self._stage] = (
            self._earlier_seconds + time.monotonic() - self._start_time
        )

    def save_seconds(self) -> None:
        self.update_seconds()
        self._last_save_time = time.monotonic()
        self._work_folder.save_stage_figures()


def read_work_header(folder: Path) -> WorkHeader | None:
    """Return the header of a work folder, or None if the folder is new or empty.

    Raises:
        OvspecError: it has other contents.
    """
    if (folder / SETTINGS_FILE).is_file():
        return read_dataclass(WorkHeader, folder / SETTINGS_FILE)
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise OvspecError(f"{folder}: is a file, not a folder; choose another `work`.")
    if foreign_name := next((path.name for path in folder.iterdir() if path.name != LOCK_FILE), None):
        raise OvspecError(
            f"{folder}: contains files of another origin ({foreign_name}); choose an empty folder as `work`."
        )
    return None


def check_settings(folder: Path, work_header: WorkHeader | None, settings: DistillSettings) -> None:
    """Raise OvspecError if the work in a folder was started with other settings."""
    if work_header and work_header.settings != settings:
        new_settings = asdict(settings)
        changed_names = [
            name for name, setting in asdict(work_header.settings).items() if setting != new_settings[name]
        ]
        differences = " and ".join(
            "another model" if name == "model" else f"another `{name}`" for name in changed_names
        )
        raise OvspecError(
            f"{folder}: contains an earlier distillation with {differences}; repeat the earlier options to resume "
            "this distillation, or delete the folder to start a new distillation."
        )


@contextlib.contextmanager
def lock_work_folder(folder: Path, run_id: str, settings: DistillSettings) -> Iterator[WorkFolder]:
    """Lock a work folder, creating it if needed, and yield it.

    Raises:
        OvspecError: another process works in it, it belongs to other settings, or it can't be written.
    """
    lock = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise OvspecError(
            f"{folder}: another distillation uses this folder; wait until the other distillation ends, or choose "
            "another `work`."
        ) from None
    except OSError as error:
        raise OvspecError(f"{folder}: cannot be written ({error.strerror}); choose another `work`.") from None
    try:
        work_header = read_work_header(folder)
        check_settings(folder, work_header, settings)
        if not work_header:
            write_atomically(
                folder / SETTINGS_FILE, json.dumps(asdict(work_header := WorkHeader(run_id, settings)), indent=1)
            )
        work_folder = WorkFolder(folder, work_header.run, read_dataclass(StageFigures, folder / STAGE_FIGURES_FILE))
        shutil.rmtree(work_folder.scratch_folder, ignore_errors=True)  # left by a killed run
        try:
            yield work_folder
        finally:
            shutil.rmtree(work_folder.scratch_folder, ignore_errors=True)
    finally:
        lock.release()
        # Deleted, except for the lock: Windows can't delete a lock in use.
        if not (folder / SETTINGS_FILE).exists():
            with contextlib.suppress(OSError):
                (folder / LOCK_FILE).unlink()
                folder.rmdir()


def delete_work_folder(work_folder: WorkFolder) -> None:
    """Delete a work folder; its identifying file goes last."""
    for path in work_folder.path.iterdir():
        if path.name not in (SETTINGS_FILE, LOCK_FILE):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    shutil.rmtree(work_folder.path, ignore_errors=True)
