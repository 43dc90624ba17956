"""Distil a head or a draft: rounds of texts, features and training until the time is over, then the result.

A round is the unit in which data and training take turns, so that there is a head after minutes. Rounds grow; what has
been done is in the work folder, from which the same command goes on.
"""

from __future__ import annotations

import math
import secrets
import shutil
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.files import rename_with_retries
from ovspec.base.progress import print_note, show_step
from ovspec.text.tokenizer import Tokenizer
from ovspec_export.compression import INT8
from ovspec_export.distill import stages
from ovspec_export.distill.documents import read_documents
from ovspec_export.distill.gain_benchmark import MAX_PROMPT_TOKENS, MAX_PROMPTS
from ovspec_export.distill.models import check_target_ir, require_config_number
from ovspec_export.distill.outcome import Outcome, finish_distillation, write_partial_result
from ovspec_export.distill.plan import DistillOptions, DistillPlan, count_trained_weights, make_plan
from ovspec_export.distill.speedup_estimate import estimate_speedup, estimate_step_share
from ovspec_export.distill.trimming import choose_most_used_ids, compute_missing_share, trim_draft_model
from ovspec_export.distill.work_folder import (
    COSTS_STAGE,
    DATA_STAGES,
    EXPORTING_STAGE,
    FEATURES_STAGE,
    TEXTS_STAGE,
    TRAINING_STAGE,
    WorkFolder,
    delete_work_folder,
    lock_work_folder,
)
from ovspec_export.export import export_pair, make_checkpoint

FIRST_ROUND_SECONDS = 360.0
ROUND_GROWTH = 1.6  # how much longer each later round takes than the one before
ONE_ROUND_SECONDS = 240.0  # seconds that are one round: each loads models anew
RESULT_EXPORT_SECONDS = 20.0
MAX_END_SHARE = 0.3  # of all time, for exporting the result and measuring the gain
MIN_JOB_SECONDS = 5.0  # seconds; no job is started for less
DEFAULT_TEXT_SHARE = 2 / 3  # of the time for data, before speeds are known
MIN_TEXT_SHARE = 0.2  # of the time for data


def distill_model(options: DistillOptions) -> Outcome:
    """Make a head or a draft in ``options.output``.

    The first Ctrl-C ends it with the result so far, and the same options go on later; the second one ends it at once.

    Raises:
        OvspecError: an option, a model or a folder can't be used, or a job failed.
    """
    plan = make_plan(options)
    with lock_work_folder(plan.work, secrets.token_hex(8), plan.settings) as work:
        try:
            prepare_models(plan, work)
            ended = finish_distillation(plan, work) if run_rounds(plan, work) else None
        except KeyboardInterrupt:
            ended = None
        if ended is None:
            write_partial_result(plan, work)
            return Outcome.STOPPED
    if not plan.options.work:
        delete_work_folder(work)
    return ended


def prepare_models(plan: DistillPlan, work: WorkFolder) -> None:
    """Export the target, and make a checkpoint of the draft, where they are something else."""
    if not plan.target.is_ir:
        if not work.target.is_dir():
            with work.time_stage(EXPORTING_STAGE):
                export_pair(plan.options.model, None, work.target, INT8)
        try:
            check_target_ir(work.target, plan.target.name, plan.makes_head)
        except OvspecError:
            delete_work_folder(work)  # which is of no use
            raise
    if plan.draft and plan.kind == "draft" and not work.draft.is_dir():
        partial = work.scratch / "draft"
        if make_checkpoint(plan.draft, partial, "bf16") is not plan.draft:
            rename_with_retries(partial, work.draft)


# ---------------------------------------------------------------- rounds


def compute_round_ends(budget: float) -> list[float]:
    """Return when rounds end, in seconds of all stages together; none is much shorter than the one before."""
    length = min(FIRST_ROUND_SECONDS, budget / 2) if budget > ONE_ROUND_SECONDS else budget
    end = 0.0
    ends = list[float]()
    while end + 1.5 * length < budget:
        end += length
        ends.append(end)
        length *= ROUND_GROWTH
    return [*ends, budget]


def compute_training_end(plan: DistillPlan, work: WorkFolder) -> float:
    """Return when texts and training end, in seconds of all stages, so that what follows ends with the time."""
    costs = work.spent.figures_of(COSTS_STAGE).get("costs")
    modes = 2 + bool(plan.draft)
    needed = RESULT_EXPORT_SECONDS + 1.2 * modes * MAX_PROMPTS * MAX_PROMPT_TOKENS * (costs[0] if costs else math.inf)
    return plan.budget_seconds - min(needed, MAX_END_SHARE * plan.budget_seconds)


def run_rounds(plan: DistillPlan, work: WorkFolder) -> bool:
    """Run all rounds that are left; return whether they came to their end, and weren't stopped."""
    if plan.kind == "trimmed draft":
        return run_trimming(plan, work)
    if not work.spent.figures_of(COSTS_STAGE) and not time_target(plan, work):
        return False
    ends = compute_round_ends(compute_training_end(plan, work))
    for number, end in enumerate(ends, 1):
        if are_features_full(plan, work):
            end = ends[-1]
        elif not run_data_stages(plan, work, number, end):
            return False
        left = end - work.spent.sum_seconds()
        if work.has_features and not run_stage(plan, work, number, TRAINING_STAGE, left):
            return False
    untrained = work.has_features and not work.has_result
    if untrained and not run_stage(plan, work, len(ends), TRAINING_STAGE, MIN_JOB_SECONDS):
        return False
    if not work.has_result:
        raise OvspecError(f"{plan.name}: nothing was trained in so short a time; give more `minutes`.")
    return True


def time_target(plan: DistillPlan, work: WorkFolder) -> bool:
    """Time what an inference of the target takes, so that it can be said what to expect."""
    with show_step(f"{plan.name}: timing {plan.target.name}", keep_line=True), work.time_stage(COSTS_STAGE) as timer:
        return stages.run_costs_job(plan, work, timer.record_figures)


def run_trimming(plan: DistillPlan, work: WorkFolder) -> bool:
    """Write the texts in which ids are counted, and trim the draft's vocabulary; return whether it wasn't stopped."""
    if not run_stage(plan, work, 1, TEXTS_STAGE, compute_training_end(plan, work) - work.spent.sum_seconds()):
        return False
    if not work.has_result:
        trim_to_texts(plan, work)
    return True


def trim_to_texts(plan: DistillPlan, work: WorkFolder) -> None:
    """Leave the draft the ids that the texts use most, and say how many tokens it can't propose any more."""
    draft = plan.draft
    count = plan.options.trim_vocabulary
    assert draft and count
    tokenizer = Tokenizer(stages.find_exported_target(plan, work).folder)
    documents = read_documents(work.documents)
    learnt = [document.ids for document in documents if not document.held_out]
    ids = choose_most_used_ids(learnt, count, require_config_number(draft, "vocab"), tokenizer.added_tokens.values())
    lost = compute_missing_share([document.ids[document.answer :] for document in documents if document.held_out], ids)
    print_note(
        f"{plan.name}: {count:,} ids, without which are {lost:.1%} of the tokens in the texts that were held out"
    )
    trim_draft_model(draft, ids, work.checkpoint)
    work.spent.record("trimming", {"lost": lost})
    work.save_spent()


def are_features_full(plan: DistillPlan, work: WorkFolder) -> bool:
    """Return whether the features have reached their limit."""
    return work.features_size >= plan.options.size_limit * 1e9


def run_data_stages(plan: DistillPlan, work: WorkFolder, number: int, end: float) -> bool:
    """Write texts and compute features, so that data take half of the time up to ``end``, or all if there are none."""
    spent = work.spent
    left = end / 2 - spent.sum_seconds(*DATA_STAGES) if work.has_features else end - spent.sum_seconds()
    if left < MIN_JOB_SECONDS:
        return True
    share = 1 if work.has_features else 0.5
    began = spent.sum_seconds()
    texts = share * estimate_text_seconds(work, left)
    if not run_stage(plan, work, number, TEXTS_STAGE, texts):
        return False
    reading = max(share * left - (spent.sum_seconds() - began), MIN_JOB_SECONDS)
    return run_stage(plan, work, number, FEATURES_STAGE, reading)


def estimate_text_seconds(work: WorkFolder, left: float) -> float:
    """Return for how long texts are to be written, so that there is time left to compute the features of all of them.

    left: seconds for both.
    """
    spent = work.spent
    if not all(spent.count_tokens(stage) and spent.sum_seconds(stage) for stage in DATA_STAGES):
        return DEFAULT_TEXT_SHARE * left
    written, read = (spent.sum_seconds(stage) / spent.count_tokens(stage) for stage in DATA_STAGES)  # per token
    unread = max(0, spent.count_tokens(TEXTS_STAGE) - spent.count_tokens(FEATURES_STAGE)) * read
    return max((left - unread) * written / (written + read), MIN_TEXT_SHARE * left)


def run_stage(plan: DistillPlan, work: WorkFolder, number: int, stage: str, seconds: float) -> bool:
    """Run a stage for about so many seconds and show how far it is; return whether it wasn't stopped."""
    if seconds < MIN_JOB_SECONDS:
        return True
    if plan.options.tokens and work.spent.count_tokens(TRAINING_STAGE) >= plan.options.tokens:
        return True
    title = f"{plan.name}: round {number}, {stage}"
    with show_step(title, keep_line=True) as shown, work.time_stage(stage) as timer:

        def show_progress(figures: dict[str, Any]) -> None:
            stopping = figures.pop("stopping", False)
            timer.record_figures(figures)
            shown.text = f"{title}: {describe_progress(plan, work, stage)}{', stopping' if stopping else ''}"

        if stage == TEXTS_STAGE:
            return stages.run_texts_job(plan, work, seconds, show_progress)
        if stage == FEATURES_STAGE:
            return stages.run_features_job(plan, work, seconds, show_progress)
        shutil.rmtree(work.ir, ignore_errors=True)  # of an earlier result
        return stages.run_training_job(plan, work, seconds, show_progress)


def describe_progress(plan: DistillPlan, work: WorkFolder, stage: str) -> str:
    """Return how far a distillation is, for the line that is shown while a stage runs."""
    spent = work.spent
    speed = work.spent.figures_of(stage).get("per_second")
    parts = [f"{spent.count_tokens(stage):,} tokens"]
    if begun := spent.figures_of(stage).get("begun"):
        parts.append(f"{begun:,} more begun")
    if speed:
        parts.append(f"{speed:,.0f} tokens/s")
    if accepted := spent.figures_of(TRAINING_STAGE).get("accepted"):
        parts.append(f"{accepted[-1]:.2f} accepted tokens a round")
        if costs := spent.figures_of(COSTS_STAGE).get("costs"):
            share = estimate_step_share(stages.find_exported_target(plan, work).folder, count_trained_weights(plan))
            parts.append(f"about {estimate_speedup(accepted, costs, share):.2f} times as fast")
    left = plan.budget_seconds - spent.sum_seconds()
    if plan.options.tokens and stage == TRAINING_STAGE and speed:
        left = min(left, (plan.options.tokens - spent.count_tokens(stage)) / speed)
    return ", ".join([*parts, f"{left / 60:.0f} min left" if left > 90 else f"{max(left, 0):.0f} s left"])
