"""The end of a distillation: export the result, measure its gain, and move everything into its place."""

from __future__ import annotations

import enum
from pathlib import Path

from ovspec.base.files import read_json
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import print_note, show_step
from ovspec.ir.compile import MODEL_FILE
from ovspec.setup.known_drafts import remember_distilled_draft
from ovspec.setup.manifest import DRAFT_FOLDER, read_manifest
from ovspec.setup.model_names import require_model_source
from ovspec_export.distill import stages
from ovspec_export.distill.card import read_record
from ovspec_export.distill.gain_benchmark import describe_missing_gain, is_new_draft_fastest
from ovspec_export.distill.plan import DistillPlan
from ovspec_export.distill.result import add_draft_to_target, make_result_record, write_result
from ovspec_export.distill.result_export import export_draft, export_result
from ovspec_export.distill.work_folder import WorkFolder

MIN_GAIN_SECONDS = 15.0  # seconds


class DistillOutcome(enum.IntEnum):
    """The outcome of a distillation: the exit codes of ``ovspec distill``."""

    GAINED = 0
    NOTHING_GAINED = 3
    STOPPED = 130


def finish_distillation(plan: DistillPlan, work_folder: WorkFolder) -> DistillOutcome:
    """Export the result, measure its gain, and move everything into its place, skipping finished steps."""
    if not is_distillation_finished(plan, work_folder):
        export_result(plan, work_folder)
        write_result(
            plan, work_folder, make_result_record(plan, work_folder, True, benchmark_result(plan, work_folder))
        )
    finished_record = read_record(plan.output)
    manifest = read_manifest(plan.output)
    assert finished_record and manifest
    if not is_new_draft_fastest(finished_record.rows):
        print_note(describe_missing_gain(plan.result_name, finished_record.rows))
        return DistillOutcome.NOTHING_GAINED
    print_note(f"{plan.output}: finished")
    add_draft_to_target(plan, work_folder.result_ir, manifest.target)
    if not plan.target.is_ir:
        remember_distilled_draft(require_model_source(plan.options.model).name, plan.output, plan.kind == "head")
    return DistillOutcome.GAINED


def is_distillation_finished(plan: DistillPlan, work_folder: WorkFolder) -> bool:
    """Return whether the output has the result of all work so far."""
    record = read_record(plan.output)
    return bool(
        record
        and record.run == work_folder.run_id
        and record.complete
        and record.seconds == work_folder.stage_figures.seconds
    )


def benchmark_result(plan: DistillPlan, work_folder: WorkFolder) -> list[JsonObject]:
    """Return the rows of a benchmark of plain decoding, the old draft, if any, and the result."""
    from ovspec.api.timing import format_mode_table

    old_draft = find_old_draft(plan, work_folder)
    gain_file = work_folder.scratch_folder / "gain.json"
    measuring_seconds = max(plan.budget_seconds - work_folder.stage_figures.sum_seconds(), MIN_GAIN_SECONDS)
    with show_step(f"{plan.result_name}: measuring what it brings on texts that were held out", keep_line=True):
        stages.run_gain_job(plan, work_folder, old_draft, gain_file, measuring_seconds)
    benchmark_rows = read_json(gain_file)["rows"]
    print_note(format_mode_table(benchmark_rows))
    return benchmark_rows


def find_old_draft(plan: DistillPlan, work_folder: WorkFolder) -> Path | None:
    """Return the folder of the draft to compare the result with: the draft before training, or the target's draft."""
    if plan.draft:
        draft_folder = Path(plan.options.draft or "").expanduser()
        if (draft_folder / MODEL_FILE).is_file():
            return draft_folder.resolve()
        draft = plan.draft if plan.makes_head else stages.find_working_draft(plan, work_folder)
        export_draft(plan, work_folder, draft, work_folder.old_draft_ir)
        return work_folder.old_draft_ir
    target_draft = plan.target.path.resolve() / DRAFT_FOLDER
    if plan.target.is_ir and target_draft.is_dir():
        return target_draft
    return None


def write_partial_result(plan: DistillPlan, work_folder: WorkFolder) -> None:
    """Write the result so far, if any, and report how to continue."""
    if is_distillation_finished(plan, work_folder):
        print_note(f"{plan.output}: finished, but perhaps not put beside its target; the same command does that")
    elif work_folder.has_result:
        export_result(plan, work_folder)
        write_result(plan, work_folder, make_result_record(plan, work_folder, False, []))
        print_note(f"{plan.output}: the result so far; run the same command to continue")
    else:
        print_note(f"{plan.result_name}: stopped before any training; run the same command to continue")
