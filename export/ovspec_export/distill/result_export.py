"""The export of what a distillation has made so far."""

from __future__ import annotations

import shutil
from pathlib import Path

from ovspec.base.files import rename_with_retries
from ovspec.setup.identity import compute_files_revision
from ovspec_export.compression import INT8
from ovspec_export.convert import check_converted_files, convert_head, convert_source
from ovspec_export.distill.plan import DistillPlan
from ovspec_export.distill.stages import find_exported_target, find_working_draft
from ovspec_export.distill.work_folder import EXPORTING_STAGE, WorkFolder
from ovspec_export.draft_vocabulary import read_proposed_ids, trim_ir
from ovspec_export.head_fit import check_head_fits
from ovspec_export.sources import HeadSource, Source, copy_missing_files, make_source


def export_result(plan: DistillPlan, work: WorkFolder) -> None:
    """Export the result so far into ``work.ir``."""
    if plan.kind == "draft":
        copy_missing_files(find_working_draft(plan, work).folder, work.checkpoint)
    with work.time_stage(EXPORTING_STAGE):
        export_draft(plan, work, make_result_source(plan, work), work.ir)


def export_draft(plan: DistillPlan, work: WorkFolder, draft: Source, folder: Path) -> None:
    """Export a head or a draft model into ``folder``, unless it is there."""
    if folder.is_dir():
        return
    partial = work.scratch / folder.name
    target = find_exported_target(plan, work)
    shutil.rmtree(partial, ignore_errors=True)
    if isinstance(draft, HeadSource):
        convert_head(draft, partial, INT8, target, check_head_fits(target, draft), work.scratch / "no states")
    else:
        convert_source(draft, partial, INT8)
        ids = read_proposed_ids(draft, target)
        if ids is not None and not draft.is_ir:
            trim_ir(partial, ids, draft.name)
    check_converted_files(draft, partial)
    rename_with_retries(partial, folder)


def make_result_source(plan: DistillPlan, work: WorkFolder) -> Source:
    """Return the result so far as a source, which has the result's name: a checkpoint, or a trimmed IR."""
    return make_source(work.checkpoint, plan.name, compute_files_revision(work.checkpoint))
