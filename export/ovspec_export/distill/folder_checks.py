"""The files and folders of a distillation, checked before any work."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.progress import print_note
from ovspec.setup.manifest import has_manifest, restore_backup
from ovspec_export.distill.card import read_record
from ovspec_export.distill.documents import read_user_texts
from ovspec_export.folders import check_output_folder, read_raw_manifest
from ovspec_export.sources import Source


def check_folders_apart(target: Source, output: Path, work_folder: Path) -> None:
    """Raise OvspecError if the output or work folder overlaps with the target or the other folder."""
    target_folder = target.path.resolve()
    for option, folder in (("output", output), ("work", work_folder)):
        if folder == target_folder or target_folder in folder.parents or folder in target_folder.parents:
            raise OvspecError(
                f"{folder}: contains the model {target.name}, or lies in the model's folder; choose another `{option}`."
            )
    if work_folder == output or output in work_folder.parents or work_folder in output.parents:
        raise OvspecError(f"{work_folder}: contains `output`, or lies in `output`; choose another `work`.")


def check_text_files(text_paths: Iterable[Path], topics_file: Path | None) -> None:
    """Raise OvspecError if a file is missing, or has content other than texts, chats or topics."""
    if skipped_files := read_user_texts(path.expanduser() for path in text_paths).skipped_files:
        print_note(f"{skipped_files} file{'s' * (skipped_files > 1)} in the folders hold no text, and are left out")
    if topics_file:
        read_text(topics_file.expanduser())


def check_result_folder(output: Path, run_id: str | None, overwrite: bool) -> None:
    """Raise OvspecError if ``output`` has other contents than a result, or a result not to be replaced.

    The result of an earlier process with the same ``run_id`` is replaced in any case.
    """
    restore_backup(output)
    record = read_record(output)
    if has_manifest(output) and not record and not read_raw_manifest(output).get("unfinished"):
        raise OvspecError(
            f"{output}: contains an exported model, not the result of distilling; choose another `output`."
        )
    check_output_folder(output, overwrite or bool(record and record.run == run_id))
