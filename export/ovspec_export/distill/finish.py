"""The end of a distillation: export the result, measure what it brings, and put everything into its place."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from ovspec.base.files import read_json
from ovspec.base.progress import print_note, show_step
from ovspec.ir.compile import MODEL_FILE
from ovspec.setup.manifest import DRAFT_FOLDER, read_manifest
from ovspec_export.distill import stages
from ovspec_export.distill.card import made_in
from ovspec_export.distill.exported import export_draft, export_result
from ovspec_export.distill.gain import gained, no_gain
from ovspec_export.distill.plan import Plan
from ovspec_export.distill.result import describe_made, put_beside, write_result
from ovspec_export.distill.work import Work

LEAST_GAIN = 15.0  # seconds


class Ended(enum.IntEnum):
    """How a distillation ended: the exit codes of ``ovspec distill``."""

    GAINED = 0
    NOTHING_GAINED = 3
    STOPPED = 130


def finish(plan: Plan, work: Work) -> Ended:
    """Export the result, measure what it brings, and put everything into its place, as far as that isn't done."""
    if not is_finished(plan, work):
        export_result(plan, work)
        write_result(plan, work, describe_made(plan, work, True, measured(plan, work)))
    finished, manifest = made_in(plan.output), read_manifest(plan.output)
    assert finished and manifest
    if not gained(finished.rows):
        print_note(no_gain(plan.name, finished.rows))
        return Ended.NOTHING_GAINED
    print_note(f"{plan.output}: finished")
    put_beside(plan, work.ir, manifest.target)
    return Ended.GAINED


def is_finished(plan: Plan, work: Work) -> bool:
    """Return whether the output has the result of all that has been done."""
    found = made_in(plan.output)
    return bool(found and found.run == work.run and found.complete and found.seconds == work.spent.seconds)


def measured(plan: Plan, work: Work) -> list[dict[str, Any]]:
    """Return the rows of a benchmark of plain decoding, the old draft if there is one, and the result."""
    from ovspec.api.timing import format_mode_table

    old, output = old_draft(plan, work), work.scratch / "gain.json"
    seconds = max(plan.budget - work.spent.seconds_of(), LEAST_GAIN)
    with show_step(f"{plan.name}: measuring what it brings on texts that were held out", keep=True):
        stages.measure_gain(plan, work, old, output, seconds)
    rows = read_json(output)["rows"]
    print_note(format_mode_table(rows))
    return rows


def old_draft(plan: Plan, work: Work) -> Path | None:
    """Return the folder of the draft that the result is compared with: what was taught, or what the target has."""
    if plan.draft:
        given = Path(plan.options.draft or "").expanduser()
        if (given / MODEL_FILE).is_file():
            return given.resolve()
        export_draft(plan, work, plan.draft if plan.of_head else stages.draft_checkpoint(plan, work), work.old)
        return work.old
    beside = plan.target.folder.resolve() / DRAFT_FOLDER
    return beside if plan.target.is_ir and beside.is_dir() else None


def keep(plan: Plan, work: Work) -> None:
    """Write the result so far, if there is one, and say how to go on."""
    if is_finished(plan, work):
        print_note(f"{plan.output}: finished, but perhaps not put beside its target; the same command does that")
    elif work.has_result:
        export_result(plan, work)
        write_result(plan, work, describe_made(plan, work, False, []))
        print_note(f"{plan.output}: the result so far; the same command goes on")
    else:
        print_note(f"{plan.name}: stopped before anything was trained; the same command goes on")
