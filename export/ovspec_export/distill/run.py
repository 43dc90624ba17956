"""Distil a head or a draft: rounds of texts, features and training until the time is up, then the result.

In each round, data and training take turns, so there is a head after minutes. Rounds grow; finished work is in the work
folder, and the same command continues from there.
"""

from __future__ import annotations

import math
import secrets
import shutil
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.progress import print_note, show_step
from ovspec.text.tokenizer import Tokenizer
from ovspec_export.distill import stages
from ovspec_export.distill.documents import read_documents
from ovspec_export.distill.gain_benchmark import MAX_GENERATED_TOKENS, MAX_PROMPTS
from ovspec_export.distill.models import check_target_ir, require_config_number
from ovspec_export.distill.outcome import DistillOutcome, finish_distillation, write_partial_result
from ovspec_export.distill.plan import DistillOptions, DistillPlan, count_trained_weights, make_plan
from ovspec_export.distill.speedup_estimate import estimate_speedup, estimate_step_share
from ovspec_export.distill.trimming import compute_missing_share, trim_draft_model
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
from ovspec_export.draft_vocabulary import choose_most_used_ids
from ovspec_export.export import export_pair

FIRST_ROUND_SECONDS = 360.0
ROUND_GROWTH = 1.6  # duration of each later round, relative to the last
SINGLE_ROUND_SECONDS = 240.0  # seconds of a single round: each loads models anew
RESULT_EXPORT_SECONDS = 20.0
MAX_FINISHING_SHARE = 0.3  # of all time, for exporting the result and measuring the gain
MIN_JOB_SECONDS = 5.0  # seconds; shorter jobs aren't started
DEFAULT_TEXT_SHARE = 2 / 3  # of the time for data, before speeds are known
MIN_TEXT_SHARE = 0.2  # of the time for data


def distill_model(options: DistillOptions) -> DistillOutcome:
    """Make a head or a draft in ``options.output``.

    The first Ctrl-C ends it with the result so far, and the same options continue later; the second ends it at once.

    Raises:
        OvspecError: an option, a model or a folder can't be used, or a job failed.
    """
    plan = make_plan(options)
    with lock_work_folder(plan.work_folder, secrets.token_hex(8), plan.settings) as work_folder:
        try:
            prepare_models(plan, work_folder)
            outcome = finish_distillation(plan, work_folder) if run_rounds(plan, work_folder) else None
        except KeyboardInterrupt:
            outcome = None
        if outcome is None:
            write_partial_result(plan, work_folder)
            return DistillOutcome.STOPPED
    if not plan.options.work:
        delete_work_folder(work_folder)
    return outcome


def prepare_models(plan: DistillPlan, work_folder: WorkFolder) -> None:
    """Export the target, and make a checkpoint of the draft, if they have other formats."""
    if not plan.target.is_ir:
        if not work_folder.target_folder.is_dir():
            with work_folder.time_stage(EXPORTING_STAGE):
                export_pair(plan.options.model, "none", work_folder.target_folder)
        try:
            check_target_ir(work_folder.target_folder, plan.target.name, plan.kind)
        except OvspecError:
            delete_work_folder(work_folder)  # no longer useful
            raise
    if plan.kind == "mtp" and not plan.draft:
        stages.run_mtp_check(plan, work_folder)
    if plan.draft and plan.kind == "draft" and not work_folder.draft_checkpoint.is_dir():
        stages.write_draft_checkpoint(plan.draft, work_folder)


# ---------------------------------------------------------------- rounds


def compute_round_ends(budget_seconds: float) -> list[float]:
    """Return the ends of rounds, in seconds of all stages together; no round is much shorter than the one before."""
    round_seconds = budget_seconds
    if budget_seconds > SINGLE_ROUND_SECONDS:
        round_seconds = min(FIRST_ROUND_SECONDS, budget_seconds / 2)
    round_end = 0.0
    round_ends = list[float]()
    while round_end + 1.5 * round_seconds < budget_seconds:
        round_end += round_seconds
        round_ends.append(round_end)
        round_seconds *= ROUND_GROWTH
    return [*round_ends, budget_seconds]


def compute_training_end(plan: DistillPlan, work_folder: WorkFolder) -> float:
    """Return the end of texts and training, in seconds of all stages, with time left for the remaining steps."""
    inference_costs = work_folder.stage_figures.get_stage_figures(COSTS_STAGE).get("costs")
    mode_count = 2 + bool(plan.draft)
    needed_seconds = RESULT_EXPORT_SECONDS + 1.2 * mode_count * MAX_PROMPTS * MAX_GENERATED_TOKENS * (
        inference_costs[0] if inference_costs else math.inf
    )
    return plan.budget_seconds - min(needed_seconds, MAX_FINISHING_SHARE * plan.budget_seconds)


def run_rounds(plan: DistillPlan, work_folder: WorkFolder) -> bool:
    """Run all remaining rounds; return whether they ran to completion, without being stopped."""
    if plan.kind == "trimmed draft":
        return run_trimming(plan, work_folder)
    if not work_folder.stage_figures.get_stage_figures(COSTS_STAGE) and not time_target_inference(plan, work_folder):
        return False
    round_ends = compute_round_ends(compute_training_end(plan, work_folder))
    for round_number, round_end in enumerate(round_ends, 1):
        if are_features_full(plan, work_folder):
            round_end = round_ends[-1]
        elif not run_data_stages(plan, work_folder, round_number, round_end):
            return False
        seconds_left = round_end - work_folder.stage_figures.sum_seconds()
        if work_folder.has_features and not run_stage(plan, work_folder, round_number, TRAINING_STAGE, seconds_left):
            return False
    is_untrained = work_folder.has_features and not work_folder.has_result
    if is_untrained and not run_stage(plan, work_folder, len(round_ends), TRAINING_STAGE, MIN_JOB_SECONDS):
        return False
    if not work_folder.has_result:
        raise OvspecError(f"{plan.result_name}: the time was too short to train anything; raise `minutes`.")
    return True


def time_target_inference(plan: DistillPlan, work_folder: WorkFolder) -> bool:
    """Time forward passes of the target, for an estimate of the speedup."""
    with (
        show_step(f"{plan.result_name}: timing {plan.target.name}", keep_line=True),
        work_folder.time_stage(COSTS_STAGE) as timer,
    ):
        return stages.run_costs_job(plan, work_folder, timer.record_figures)


def run_trimming(plan: DistillPlan, work_folder: WorkFolder) -> bool:
    """Write the texts for counting ids, and trim the draft's vocabulary; return whether it wasn't stopped."""
    if not run_stage(
        plan,
        work_folder,
        1,
        TEXTS_STAGE,
        compute_training_end(plan, work_folder) - work_folder.stage_figures.sum_seconds(),
    ):
        return False
    if not work_folder.has_result:
        trim_draft_to_texts(plan, work_folder)
    return True


def trim_draft_to_texts(plan: DistillPlan, work_folder: WorkFolder) -> None:
    """Reduce the draft to the ids used most in the texts, and report how many tokens it can no longer propose."""
    draft = plan.draft
    id_count = plan.options.trim_vocabulary
    assert draft and id_count
    tokenizer = Tokenizer(stages.find_exported_target(plan, work_folder).path)
    documents = read_documents(work_folder.documents_file)
    training_texts = [document.ids for document in documents if not document.held_out]
    kept_ids = choose_most_used_ids(
        training_texts, id_count, require_config_number(draft, "vocab"), tokenizer.added_tokens.values()
    )
    missing_share = compute_missing_share(
        [document.ids[document.answer :] for document in documents if document.held_out], kept_ids
    )
    print_note(
        f"{plan.result_name}: {id_count:,} ids, without which are {missing_share:.1%} of the tokens in the texts "
        "that were held out"
    )
    trim_draft_model(draft, kept_ids, work_folder.result_checkpoint)
    work_folder.stage_figures.update_figures("trimming", {"lost": missing_share})
    work_folder.save_stage_figures()


def are_features_full(plan: DistillPlan, work_folder: WorkFolder) -> bool:
    """Return whether the features have reached their limit."""
    return work_folder.features_bytes >= plan.options.size_limit * 1e9


def run_data_stages(plan: DistillPlan, work_folder: WorkFolder, round_number: int, round_end: float) -> bool:
    """Write texts and compute features: all data take half of the time to ``round_end``, or all of it at first."""
    stage_figures = work_folder.stage_figures
    seconds_left = round_end - stage_figures.sum_seconds()
    if work_folder.has_features:
        seconds_left = round_end / 2 - stage_figures.sum_seconds(*DATA_STAGES)
    if seconds_left < MIN_JOB_SECONDS:
        return True
    data_share = 1 if work_folder.has_features else 0.5
    seconds_before = stage_figures.sum_seconds()
    text_seconds = data_share * estimate_text_seconds(work_folder, seconds_left)
    if not run_stage(plan, work_folder, round_number, TEXTS_STAGE, text_seconds):
        return False
    feature_seconds = max(data_share * seconds_left - (stage_figures.sum_seconds() - seconds_before), MIN_JOB_SECONDS)
    return run_stage(plan, work_folder, round_number, FEATURES_STAGE, feature_seconds)


def estimate_text_seconds(work_folder: WorkFolder, seconds_left: float) -> float:
    """Return the time for writing texts, leaving time to compute the features of all texts.

    seconds_left: for both.
    """
    stage_figures = work_folder.stage_figures
    if not all(stage_figures.count_tokens(stage) and stage_figures.sum_seconds(stage) for stage in DATA_STAGES):
        return DEFAULT_TEXT_SHARE * seconds_left
    text_cost, feature_cost = (
        stage_figures.sum_seconds(stage) / stage_figures.count_tokens(stage) for stage in DATA_STAGES
    )  # per token
    pending_seconds = (
        max(0, stage_figures.count_tokens(TEXTS_STAGE) - stage_figures.count_tokens(FEATURES_STAGE)) * feature_cost
    )
    return max((seconds_left - pending_seconds) * text_cost / (text_cost + feature_cost), MIN_TEXT_SHARE * seconds_left)


def run_stage(plan: DistillPlan, work_folder: WorkFolder, round_number: int, stage: str, seconds: float) -> bool:
    """Run a stage for about so many seconds and show its progress; return whether it wasn't stopped."""
    if seconds < MIN_JOB_SECONDS:
        return True
    if plan.options.tokens and work_folder.stage_figures.count_tokens(TRAINING_STAGE) >= plan.options.tokens:
        return True
    title = f"{plan.result_name}: round {round_number}, {stage}"
    with show_step(title, keep_line=True) as progress_step, work_folder.time_stage(stage) as timer:

        def show_progress(figures: dict[str, Any]) -> None:
            is_stopping = figures.pop("stopping", False)
            timer.record_figures(figures)
            progress_step.text = (
                f"{title}: {describe_progress(plan, work_folder, stage)}{', stopping' if is_stopping else ''}"
            )

        if stage == TEXTS_STAGE:
            return stages.run_texts_job(plan, work_folder, seconds, show_progress)
        if stage == FEATURES_STAGE:
            return stages.run_features_job(plan, work_folder, seconds, show_progress)
        shutil.rmtree(work_folder.result_ir, ignore_errors=True)  # of an earlier result
        return stages.run_training_job(plan, work_folder, seconds, show_progress)


def describe_progress(plan: DistillPlan, work_folder: WorkFolder, stage: str) -> str:
    """Return the progress of a distillation, for the line shown during a stage."""
    stage_figures = work_folder.stage_figures
    tokens_per_second = work_folder.stage_figures.get_stage_figures(stage).get("per_second")
    progress_parts = [f"{stage_figures.count_tokens(stage):,} tokens"]
    if begun_tokens := stage_figures.get_stage_figures(stage).get("begun"):
        progress_parts.append(f"{begun_tokens:,} more begun")
    if tokens_per_second:
        progress_parts.append(f"{tokens_per_second:,.0f} tokens/s")
    if accepted_tokens := stage_figures.get_stage_figures(TRAINING_STAGE).get("accepted"):
        progress_parts.append(f"{accepted_tokens[-1]:.2f} accepted tokens a round")
        if costs := stage_figures.get_stage_figures(COSTS_STAGE).get("costs"):
            step_share = estimate_step_share(
                stages.find_exported_target(plan, work_folder).path, count_trained_weights(plan)
            )
            progress_parts.append(f"about {estimate_speedup(accepted_tokens, costs, step_share):.2f} times as fast")
    seconds_left = plan.budget_seconds - stage_figures.sum_seconds()
    if plan.options.tokens and stage == TRAINING_STAGE and tokens_per_second:
        seconds_left = min(seconds_left, (plan.options.tokens - stage_figures.count_tokens(stage)) / tokens_per_second)
    return ", ".join(
        [
            *progress_parts,
            f"{seconds_left / 60:.0f} min left" if seconds_left > 90 else f"{max(seconds_left, 0):.0f} s left",
        ]
    )
