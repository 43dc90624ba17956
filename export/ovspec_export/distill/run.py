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
from ovspec_export.distill.expected import expected_speedup, share_of
from ovspec_export.distill.finish import Ended, finish, keep
from ovspec_export.distill.gain import PROMPTS, TOKENS
from ovspec_export.distill.models import check_target, number_of
from ovspec_export.distill.plan import DistillOptions, Plan, planned, trained_weights
from ovspec_export.distill.trimming import most_used, share_without, trim
from ovspec_export.distill.work import COSTS, DATA, EXPORTING, READING, TEXTS, TRAINING, Work, delete_work, open_work
from ovspec_export.export import export_pair, make_checkpoint

FIRST, GROWTH = 360.0, 1.6  # seconds of the first round, and how much longer than the one before each later one takes
SHORT = 240.0  # seconds that are one round: each loads models anew
AFTER, MOST_AFTER = 20.0, 0.3  # seconds to export the result, and the largest share of all time for that and the gain
LEAST = 5.0  # seconds; no job is started for less
USUAL_TEXTS, LEAST_TEXTS = 2 / 3, 0.2  # of the time for data: before speeds are known, and in any case


def distill_model(options: DistillOptions) -> Ended:
    """Make a head or a draft in ``options.output``.

    The first Ctrl-C ends it with the result so far, and the same options go on later; the second one ends it at once.

    Raises:
        OvspecError: an option, a model or a folder can't be used, or a job failed.
    """
    plan = planned(options)
    with open_work(plan.work, secrets.token_hex(8), plan.settings) as work:
        try:
            prepare(plan, work)
            ended = finish(plan, work) if run(plan, work) else None
        except KeyboardInterrupt:
            ended = None
        if ended is None:
            keep(plan, work)
            return Ended.STOPPED
    if not plan.options.work:
        delete_work(work)
    return ended


def prepare(plan: Plan, work: Work) -> None:
    """Export the target, and make a checkpoint of the draft, where they are something else."""
    if not plan.target.is_ir:
        if not work.target.is_dir():
            with work.timed(EXPORTING):
                export_pair(plan.options.model, None, work.target, INT8)
        try:
            check_target(work.target, plan.target.name, plan.of_head)
        except OvspecError:
            delete_work(work)  # which is of no use
            raise
    if plan.draft and plan.kind == "draft" and not work.draft.is_dir():
        partial = work.scratch / "draft"
        if make_checkpoint(plan.draft, partial, "bf16") is not plan.draft:
            rename_with_retries(partial, work.draft)


# ---------------------------------------------------------------- rounds


def round_ends(budget: float) -> list[float]:
    """Return when rounds end, in seconds of all stages together; none is much shorter than the one before."""
    length, end, ends = min(FIRST, budget / 2) if budget > SHORT else budget, 0.0, list[float]()
    while end + 1.5 * length < budget:
        end += length
        ends.append(end)
        length *= GROWTH
    return [*ends, budget]


def end_of_rounds(plan: Plan, work: Work) -> float:
    """Return when texts and training end, in seconds of all stages, so that what follows ends with the time."""
    costs = work.spent.told.get(COSTS, {}).get("costs")
    modes = 2 + bool(plan.draft)
    needed = AFTER + 1.2 * modes * PROMPTS * TOKENS * (costs[0] if costs else math.inf)
    return plan.budget - min(needed, MOST_AFTER * plan.budget)


def run(plan: Plan, work: Work) -> bool:
    """Run all rounds that are left; return whether they came to their end, and weren't stopped."""
    if plan.kind == "trimmed draft":
        return run_trimming(plan, work)
    if not work.spent.told.get(COSTS) and not measure_costs(plan, work):
        return False
    ends = round_ends(end_of_rounds(plan, work))
    for number, end in enumerate(ends, 1):
        if is_full(plan, work):
            end = ends[-1]
        elif not run_data(plan, work, number, end):
            return False
        left = end - work.spent.seconds_of()
        if work.has_features and not run_stage(plan, work, number, TRAINING, left):
            return False
    if work.has_features and not work.has_result and not run_stage(plan, work, len(ends), TRAINING, LEAST):
        return False
    if not work.has_result:
        raise OvspecError(f"{plan.name}: nothing was trained in so short a time; give more `minutes`.")
    return True


def measure_costs(plan: Plan, work: Work) -> bool:
    """Time what an inference of the target takes, so that it can be said what to expect."""
    with show_step(f"{plan.name}: timing {plan.target.name}", keep=True), work.timed(COSTS) as watch:
        return stages.measure_costs(plan, work, watch.tell)


def run_trimming(plan: Plan, work: Work) -> bool:
    """Write the texts in which ids are counted, and trim the draft's vocabulary; return whether it wasn't stopped."""
    if not run_stage(plan, work, 1, TEXTS, end_of_rounds(plan, work) - work.spent.seconds_of()):
        return False
    if not work.has_result:
        trim_draft(plan, work)
    return True


def trim_draft(plan: Plan, work: Work) -> None:
    """Leave the draft the ids that the texts use most, and say how many tokens it can't propose any more."""
    draft, count = plan.draft, plan.options.trim_vocabulary
    assert draft and count
    tokenizer = Tokenizer(stages.exported_target(plan, work).folder)
    documents = read_documents(work.documents)
    learnt = [document.ids for document in documents if not document.held_out]
    ids = most_used(learnt, count, number_of(draft, "vocab"), tokenizer.added_tokens.values())
    lost = share_without([document.ids[document.answer :] for document in documents if document.held_out], ids)
    print_note(
        f"{plan.name}: {count:,} ids, without which are {lost:.1%} of the tokens in the texts that were held out"
    )
    trim(draft, ids, work.checkpoint)
    work.spent.told["trimming"] = {"lost": lost}
    work.save_spent()


def is_full(plan: Plan, work: Work) -> bool:
    """Return whether the features have reached their limit."""
    return work.features_size >= plan.options.size_limit * 1e9


def run_data(plan: Plan, work: Work, number: int, end: float) -> bool:
    """Write texts and compute features, so that data take half of the time up to ``end``, or all if there are none."""
    spent = work.spent
    left = end / 2 - spent.seconds_of(*DATA) if work.has_features else end - spent.seconds_of()
    if left < LEAST:
        return True
    share = 1 if work.has_features else 0.5
    began, texts = spent.seconds_of(), share * seconds_for_texts(work, left)
    if not run_stage(plan, work, number, TEXTS, texts):
        return False
    reading = max(share * left - (spent.seconds_of() - began), LEAST)
    return run_stage(plan, work, number, READING, reading)


def seconds_for_texts(work: Work, left: float) -> float:
    """Return for how long texts are to be written, so that there is time left to compute the features of all of them.

    left: seconds for both.
    """
    spent = work.spent
    if not all(spent.tokens(stage) and spent.seconds_of(stage) for stage in DATA):
        return USUAL_TEXTS * left
    written, read = (spent.seconds_of(stage) / spent.tokens(stage) for stage in DATA)  # per token
    behind = max(0, spent.tokens(TEXTS) - spent.tokens(READING)) * read
    return max((left - behind) * written / (written + read), LEAST_TEXTS * left)


def run_stage(plan: Plan, work: Work, number: int, stage: str, seconds: float) -> bool:
    """Run a stage for about so many seconds and show how far it is; return whether it wasn't stopped."""
    if seconds < LEAST or (plan.options.tokens and work.spent.tokens(TRAINING) >= plan.options.tokens):
        return True
    what = f"{plan.name}: round {number}, {stage}"
    with show_step(what, keep=True) as shown, work.timed(stage) as watch:

        def told(figures: dict[str, Any]) -> None:
            stopping = figures.pop("stopping", False)
            watch.tell(figures)
            shown.text = f"{what}: {progress(plan, work, stage)}{', stopping' if stopping else ''}"

        if stage == TEXTS:
            return stages.write_texts(plan, work, seconds, told)
        if stage == READING:
            return stages.write_features(plan, work, seconds, told)
        shutil.rmtree(work.ir, ignore_errors=True)  # of an earlier result
        return stages.train(plan, work, seconds, told)


def progress(plan: Plan, work: Work, stage: str) -> str:
    """Return how far a distillation is, for the line that is shown while a stage runs."""
    spent, speed = work.spent, work.spent.told.get(stage, {}).get("per_second")
    parts = [f"{spent.tokens(stage):,} tokens"]
    if begun := spent.told.get(stage, {}).get("begun"):
        parts.append(f"{begun:,} more begun")
    if speed:
        parts.append(f"{speed:,.0f} tokens/s")
    if accepted := spent.told.get(TRAINING, {}).get("accepted"):
        parts.append(f"{accepted[-1]:.2f} accepted tokens a round")
        if costs := spent.told.get(COSTS, {}).get("costs"):
            share = share_of(stages.exported_target(plan, work).folder, trained_weights(plan))
            parts.append(f"about {expected_speedup(accepted, costs, share):.2f} times as fast")
    left = plan.budget - spent.seconds_of()
    if plan.options.tokens and stage == TRAINING and speed:
        left = min(left, (plan.options.tokens - spent.tokens(stage)) / speed)
    left = max(left, 0)
    return ", ".join([*parts, f"{left / 60:.0f} min left" if left > 90 else f"{left:.0f} s left"])
