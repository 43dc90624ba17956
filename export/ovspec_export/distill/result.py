"""What a distillation leaves: a checkpoint, its export and its card in one folder, and the export beside its target."""

from __future__ import annotations

import os
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
from ovspec_export.distill.card import DocumentCounts, ResultRecord, write_record
from ovspec_export.distill.documents import read_documents
from ovspec_export.distill.folder_checks import check_result_folder
from ovspec_export.distill.plan import DistillPlan
from ovspec_export.distill.result_export import make_result_source
from ovspec_export.distill.stages import find_exported_target
from ovspec_export.distill.work_folder import TRAINING_STAGE, WorkFolder
from ovspec_export.folders import find_foreign_file, open_work_folder, replace_folder
from ovspec_export.manifests import complete_export, describe_model, installed_versions


def make_record(plan: DistillPlan, work: WorkFolder, finished: bool, rows: list[dict[str, Any]]) -> ResultRecord:
    """Return what was made, and how."""
    data = dict[str, DocumentCounts]()
    held_out = DocumentCounts()
    spent = work.spent
    for document in read_documents(work.documents):
        if document.held_out:
            held_out = held_out.add(document)
        else:
            data[document.source] = data.get(document.source, DocumentCounts()).add(document)
    name, revision = plan.origin
    return ResultRecord(
        run=work.run,
        kind=plan.kind,
        model=name,
        revision=revision,
        draft=plan.draft.name if plan.draft else None,
        complete=finished,
        seconds=spent.seconds,
        tokens=spent.count_tokens(TRAINING_STAGE),
        data=data,
        held_out=held_out,
        machine=dict(list_available_devices()).get("CPU", "an unknown processor"),
        agreement=spent.figures_of(TRAINING_STAGE).get("agreement") or [],
        lost=spent.figures_of("trimming").get("lost"),
        rows=rows,
    )


def write_result(plan: DistillPlan, work: WorkFolder, record: ResultRecord) -> None:
    """Write the result into the output, completely or not at all."""
    check_result_folder(plan.output, work.run, plan.options.overwrite)
    unwanted = shutil.ignore_patterns(MANIFEST_FILE, f"*{PARTIAL_SUFFIX}")
    with open_work_folder(plan.output, overwrite=True) as partial:
        for folder in (work.checkpoint, work.ir):  # whose config says more
            shutil.copytree(folder, partial, dirs_exist_ok=True, ignore=unwanted)
        write_record(record, plan.name, partial)
        entry = describe_model(make_result_source(plan, work), partial, INT8, find_exported_target(plan, work).folder)
        complete_export(partial, plan.output, Manifest(entry, None, installed_versions(), {}))


def add_draft_to_target(plan: DistillPlan, ir: Path, entry: ExportedModel) -> None:
    """Put the exported result into an exported target that has no draft, and say so."""
    model = plan.target.folder.resolve()
    if not plan.target.is_ir or not has_manifest(model):
        return
    try:
        manifest = read_manifest(model)
        foreign = find_foreign_file(model)
        if manifest and manifest.draft == entry:
            return
        if not manifest or manifest.draft or (model / DRAFT_FOLDER).exists():
            print_note(f"{model.name}: has a draft, which stays there; name {plan.name} to use the new one")
        elif foreign:
            print_note(
                f"{model.name}: holds a file that ovspec did not export ({foreign}), so {plan.name} isn't put into it"
            )
        else:
            replace_with_draft(model, manifest, ir, entry)
            print_note(f"{model.name}: {plan.name} is its draft now")
    except (OvspecError, OSError) as error:
        print_note(f"warning: {plan.name} could not be put into {model.name} ({error})")


def replace_with_draft(model: Path, manifest: Manifest, ir: Path, entry: ExportedModel) -> None:
    """Replace an exported model by itself with a draft; a kill leaves one or the other, as of an export.

    The new folder's files are links to the old one's, where the disk has links.
    """
    with open_work_folder(model, overwrite=True) as work:
        for name in manifest.files:
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy((model / name).resolve(), work / name)
        shutil.copytree(ir, work / DRAFT_FOLDER, ignore=shutil.ignore_patterns(MANIFEST_FILE))
        new = [path for path in (work / DRAFT_FOLDER).rglob("*") if path.is_file()]
        manifest.draft = entry
        manifest.files |= {
            path.relative_to(work).as_posix(): ExportedFile(path.stat().st_size, hash_file(path)) for path in new
        }
        manifest.write_to_folder(work)
        replace_folder(work, model)


def link_or_copy(file: Path, new: Path) -> None:
    try:
        os.link(file, new)
    except OSError:
        shutil.copy2(file, new)
