"""The end of a distillation: export the result, measure what it brings, and put everything into its place."""

from __future__ import annotations

import enum
from pathlib import Path

from ovspec.base.files import read_json
from ovspec.base.json_types import JsonObject
from ovspec.base.progress import print_note, show_step
from ovspec.ir.compile import MODEL_FILE
from ovspec.setup.manifest import DRAFT_FOLDER, read_manifest
from ovspec_export.distill import stages
from ovspec_export.distill.card import read_record
from ovspec_export.distill.gain_benchmark import describe_missing_gain, is_faster
from ovspec_export.distill.plan import DistillPlan
from ovspec_export.distill.result import add_draft_to_target, make_record, write_result
from ovspec_export.distill.result_export import export_draft, export_result
from ovspec_export.distill.work_folder import WorkFolder

MIN_GAIN_SECONDS = 15.0  # seconds


class Outcome(enum.IntEnum):
    """How a distillation ended: the exit codes of ``ovspec distill``."""

    GAINED = 0
    NOTHING_GAINED = 3
    STOPPED = 130


def finish_distillation(plan: DistillPlan, work: WorkFolder) -> Outcome:
    """Export the result, measure what it brings, and put everything into its place, as far as that isn't done."""
    if not is_finished(plan, work):
        export_result(plan, work)
        write_result(plan, work, make_record(plan, work, True, measure_result(plan, work)))
    finished = read_record(plan.output)
    manifest = read_manifest(plan.output)
    assert finished and manifest
    if not is_faster(finished.rows):
        print_note(describe_missing_gain(plan.name, finished.rows))
        return Outcome.NOTHING_GAINED
    print_note(f"{plan.output}: finished")
    add_draft_to_target(plan, work.ir, manifest.target)
    return Outcome.GAINED


def is_finished(plan: DistillPlan, work: WorkFolder) -> bool:
    """Return whether the output has the result of all that has been done."""
    record = read_record(plan.output)
    return bool(record and record.run == work.run and record.complete and record.seconds == work.spent.seconds)


def measure_result(plan: DistillPlan, work: WorkFolder) -> list[JsonObject]:
    """Return the rows of a benchmark of plain decoding, the old draft if there is one, and the result."""
    from ovspec.api.timing import format_mode_table

    old = find_old_draft(plan, work)
    output = work.scratch / "gain.json"
    seconds = max(plan.budget_seconds - work.spent.sum_seconds(), MIN_GAIN_SECONDS)
    with show_step(f"{plan.name}: measuring what it brings on texts that were held out", keep_line=True):
        stages.run_gain_job(plan, work, old, output, seconds)
    rows = read_json(output)["rows"]
    print_note(format_mode_table(rows))
    return rows


def find_old_draft(plan: DistillPlan, work: WorkFolder) -> Path | None:
    """Return the folder of the draft that the result is compared with: what was taught, or what the target has."""
    if plan.draft:
        draft_folder = Path(plan.options.draft or "").expanduser()
        if (draft_folder / MODEL_FILE).is_file():
            return draft_folder.resolve()
        draft = plan.draft if plan.makes_head else stages.find_working_draft(plan, work)
        export_draft(plan, work, draft, work.old_draft_ir)
        return work.old_draft_ir
    target_draft = plan.target.folder.resolve() / DRAFT_FOLDER
    if plan.target.is_ir and target_draft.is_dir():
        return target_draft
    return None


def write_partial_result(plan: DistillPlan, work: WorkFolder) -> None:
    """Write the result so far, if there is one, and say how to go on."""
    if is_finished(plan, work):
        print_note(f"{plan.output}: finished, but perhaps not put beside its target; the same command does that")
    elif work.has_result:
        export_result(plan, work)
        write_result(plan, work, make_record(plan, work, False, []))
        print_note(f"{plan.output}: the result so far; the same command goes on")
    else:
        print_note(f"{plan.name}: stopped before anything was trained; the same command goes on")
