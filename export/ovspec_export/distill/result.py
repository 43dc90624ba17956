"""The output of a distillation: a folder with checkpoint, export and card, and the export in its target's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.files import PARTIAL_SUFFIX
from ovspec.base.progress import print_note
from ovspec.ir.device import list_available_devices
from ovspec.setup.manifest import (
    DRAFT_FOLDER,
    MANIFEST_FILE,
    ExportedFile,
    ExportedModel,
    Manifest,
    has_manifest,
    hash_file,
    read_manifest,
)
from ovspec_export.compression import INT8
from ovspec_export.distill.card import DocumentCounts, ResultRecord, write_record_and_card
from ovspec_export.distill.documents import read_documents
from ovspec_export.distill.folder_checks import check_result_folder
from ovspec_export.distill.plan import DistillPlan
from ovspec_export.distill.result_export import make_result_source
from ovspec_export.distill.stages import find_exported_target
from ovspec_export.distill.work_folder import TRAINING_STAGE, WorkFolder
from ovspec_export.folders import find_foreign_file, link_or_copy, open_partial_folder, replace_folder
from ovspec_export.manifests import complete_export, make_manifest_entry, read_installed_versions


def make_result_record(
    plan: DistillPlan, work_folder: WorkFolder, is_complete: bool, benchmark_rows: list[dict[str, Any]]
) -> ResultRecord:
    """Return the record of the result."""
    counts_by_source = dict[str, DocumentCounts]()
    held_out_counts = DocumentCounts()
    stage_figures = work_folder.stage_figures
    for document in read_documents(work_folder.documents_file):
        if document.held_out:
            held_out_counts = held_out_counts.add_document(document)
        else:
            counts_by_source[document.source] = counts_by_source.get(document.source, DocumentCounts()).add_document(
                document
            )
    model_name, revision = plan.origin
    return ResultRecord(
        run=work_folder.run_id,
        kind=plan.kind,
        model=model_name,
        revision=revision,
        draft=plan.draft.name if plan.draft else None,
        complete=is_complete,
        seconds=stage_figures.seconds,
        tokens=stage_figures.count_tokens(TRAINING_STAGE),
        data=counts_by_source,
        held_out=held_out_counts,
        machine=dict(list_available_devices()).get("CPU", "an unknown processor"),
        agreement=stage_figures.get_stage_figures(TRAINING_STAGE).get("agreement") or [],
        lost=stage_figures.get_stage_figures("trimming").get("lost"),
        rows=benchmark_rows,
    )


def write_result(plan: DistillPlan, work_folder: WorkFolder, record: ResultRecord) -> None:
    """Write the result into the output, atomically."""
    check_result_folder(plan.output, work_folder.run_id, plan.options.overwrite)
    ignored_patterns = shutil.ignore_patterns(MANIFEST_FILE, f"*{PARTIAL_SUFFIX}")
    with open_partial_folder(plan.output, overwrite=True) as partial_folder:
        for folder in (work_folder.result_checkpoint, work_folder.result_ir):  # its config has more entries
            shutil.copytree(folder, partial_folder, dirs_exist_ok=True, ignore=ignored_patterns)
        write_record_and_card(record, plan.result_name, partial_folder)
        manifest_entry = make_manifest_entry(
            make_result_source(plan, work_folder), partial_folder, INT8, find_exported_target(plan, work_folder).path
        )
        complete_export(partial_folder, plan.output, Manifest(manifest_entry, None, read_installed_versions(), {}))


def add_draft_to_target(plan: DistillPlan, ir_folder: Path, manifest_entry: ExportedModel) -> None:
    """Add the exported result to an exported target without a draft, and report it."""
    target_folder = plan.target.path.resolve()
    if not plan.target.is_ir or not has_manifest(target_folder):
        return
    try:
        manifest = read_manifest(target_folder)
        foreign_file = find_foreign_file(target_folder)
        if manifest and manifest.draft == manifest_entry:
            return
        if not manifest or manifest.draft or (target_folder / DRAFT_FOLDER).exists():
            print_note(
                f"{target_folder.name}: has a draft, which stays there; name {plan.result_name} to use the new one"
            )
        elif foreign_file:
            print_note(
                f"{target_folder.name}: holds a file that ovspec did not export ({foreign_file}), so "
                f"{plan.result_name} isn't put into it"
            )
        else:
            rewrite_target_with_draft(target_folder, manifest, ir_folder, manifest_entry)
            print_note(f"{target_folder.name}: {plan.result_name} is its draft now")
    except (OvspecError, OSError) as error:
        print_note(f"warning: {plan.result_name} could not be put into {target_folder.name} ({error})")


def rewrite_target_with_draft(
    target_folder: Path, manifest: Manifest, ir_folder: Path, manifest_entry: ExportedModel
) -> None:
    """Replace an exported model by itself plus a draft; after a kill, the old or the new export remains.

    The new folder's files are links to the old folder's, if the disk supports links.
    """
    with open_partial_folder(target_folder, overwrite=True) as new_folder:
        for file_name in manifest.files:
            (new_folder / file_name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy((target_folder / file_name).resolve(), new_folder / file_name)
        shutil.copytree(ir_folder, new_folder / DRAFT_FOLDER, ignore=shutil.ignore_patterns(MANIFEST_FILE))
        draft_files = [path for path in (new_folder / DRAFT_FOLDER).rglob("*") if path.is_file()]
        manifest.draft = manifest_entry
        manifest.files |= {
            path.relative_to(new_folder).as_posix(): ExportedFile(path.stat().st_size, hash_file(path))
            for path in draft_files
        }
        manifest.write_to_folder(new_folder)
        replace_folder(new_folder, target_folder)
