"""The export of a distillation's result so far."""

from __future__ import annotations

import shutil
from pathlib import Path

from ovspec.base.files import rename_with_retries
from ovspec.setup.identity import compute_files_revision
from ovspec_export.compression import INT8
from ovspec_export.convert import check_converted_files, convert_head, convert_mtp_layer, convert_source
from ovspec_export.distill.plan import DistillPlan
from ovspec_export.distill.stages import find_exported_target, find_working_draft
from ovspec_export.distill.work_folder import EXPORTING_STAGE, WorkFolder
from ovspec_export.draft_vocabulary import read_proposed_ids, trim_ir
from ovspec_export.head_fit import check_head_fits
from ovspec_export.sources import HeadSource, MtpSource, Source, copy_missing_files, make_source


def export_result(plan: DistillPlan, work_folder: WorkFolder) -> None:
    """Export the result so far into ``result_ir``."""
    if plan.kind == "draft":
        copy_missing_files(find_working_draft(plan, work_folder).path, work_folder.result_checkpoint)
    with work_folder.time_stage(EXPORTING_STAGE):
        export_draft(plan, work_folder, make_result_source(plan, work_folder), work_folder.result_ir)


def export_draft(plan: DistillPlan, work_folder: WorkFolder, draft: Source, ir_folder: Path) -> None:
    """Export a head or a draft model into ``ir_folder``, unless it exists."""
    if ir_folder.is_dir():
        return
    partial_folder = work_folder.scratch_folder / ir_folder.name
    target = find_exported_target(plan, work_folder)
    shutil.rmtree(partial_folder, ignore_errors=True)
    no_states = work_folder.scratch_folder / "no states"
    if isinstance(draft, MtpSource):
        convert_mtp_layer(draft, partial_folder, INT8, read_proposed_ids(draft, target), no_states)
    elif isinstance(draft, HeadSource):
        convert_head(draft, partial_folder, INT8, target, check_head_fits(target, draft), no_states)
    else:
        convert_source(draft, partial_folder, INT8)
        proposed_ids = read_proposed_ids(draft, target)
        if proposed_ids is not None and not draft.is_ir:
            trim_ir(partial_folder, proposed_ids, draft.name)
    check_converted_files(draft, partial_folder)
    rename_with_retries(partial_folder, ir_folder)


def make_result_source(plan: DistillPlan, work_folder: WorkFolder) -> Source:
    """Return the result so far as a source, with the result's name: a checkpoint, or a trimmed IR."""
    return make_source(
        work_folder.result_checkpoint, plan.result_name, compute_files_revision(work_folder.result_checkpoint)
    )
