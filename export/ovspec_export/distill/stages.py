"""The jobs of a distillation, as called by the parent: each runs for about some seconds in a separate process.

Each returns whether it ran to completion, without being stopped by Ctrl-C. A job reports its finished ``tokens`` over
all runs, its ``per_second``, and in training the mean ``accepted`` tokens per round and the accuracy of guesses at each
depth, its ``agreement``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ovspec.base.files import read_text, rename_with_retries
from ovspec.base.json_types import JsonObject
from ovspec_export.convert import run_worker_job
from ovspec_export.distill.plan import DistillPlan
from ovspec_export.distill.work_folder import GAIN_STAGE, WorkFolder
from ovspec_export.readable_checkpoint import ensure_readable_checkpoint
from ovspec_export.sources import HeadSource, Source

ProgressCallback = Callable[[JsonObject], None]
UNLIMITED_TOKENS = 2**62  # more tokens than any time allows


def find_exported_target(plan: DistillPlan, work_folder: WorkFolder) -> Source:
    """Return the exported target."""
    target_folder = plan.target.path.resolve() if plan.target.is_ir else work_folder.target_folder
    return Source(plan.target.name, target_folder, is_ir=True, revision=plan.target.revision)


def write_draft_checkpoint(draft: Source, work_folder: WorkFolder) -> None:
    """Write the draft's checkpoint, if training can't read its source."""
    partial_folder = work_folder.scratch_folder / "draft"
    if ensure_readable_checkpoint(draft, partial_folder, "bf16") is not draft:
        rename_with_retries(partial_folder, work_folder.draft_checkpoint)


def run_mtp_check(plan: DistillPlan, work_folder: WorkFolder) -> None:
    """Raise OvspecError if no MTP layer can be made for the target."""
    target = find_exported_target(plan, work_folder)
    run_worker_job("check_mtp_possible", target, work_folder.scratch_folder, model=str(target.path))


def run_texts_job(plan: DistillPlan, work_folder: WorkFolder, seconds: float, on_progress: ProgressCallback) -> bool:
    """Let the model write texts, and add the user's texts."""
    target = find_exported_target(plan, work_folder)
    topics = list[str]()
    if plan.options.topics:
        lines = read_text(plan.options.topics.expanduser()).splitlines()
        topics = [line.strip() for line in lines if line.strip()]
    folder_arguments = {"model": str(target.path), "work_folder": str(work_folder.path)}
    limit_arguments = {"seconds": seconds, "tokens": UNLIMITED_TOKENS}
    text_arguments = {"texts": plan.settings.text, "topics": topics}
    return run_worker_job(
        "write_texts",
        target,
        work_folder.scratch_folder,
        on_progress,
        **folder_arguments,
        **limit_arguments,
        **text_arguments,
    )


def run_features_job(plan: DistillPlan, work_folder: WorkFolder, seconds: float, on_progress: ProgressCallback) -> bool:
    """Compute the target's features for the texts."""
    target = find_exported_target(plan, work_folder)
    torch_checkpoint_arguments = JsonObject()
    if plan.torch_checkpoint:
        torch_checkpoint_arguments = {
            "checkpoint": str(plan.torch_checkpoint.path),
            "model_type": plan.torch_checkpoint.model_type,
        }
        torch_checkpoint_arguments |= {"torch_device": plan.options.torch_device}
    return run_worker_job(
        "write_features",
        plan.torch_checkpoint or target,
        work_folder.scratch_folder,
        on_progress,
        model=str(target.path),
        work_folder=str(work_folder.path),
        layers=plan.tap_layers,
        seconds=seconds,
        max_bytes=plan.options.size_limit * 1e9,
        **torch_checkpoint_arguments,
    )


def run_training_job(plan: DistillPlan, work_folder: WorkFolder, seconds: float, on_progress: ProgressCallback) -> bool:
    """Train a head or a draft."""
    common_arguments: JsonObject = {
        "work_folder": str(work_folder.path),
        "seconds": seconds,
        "torch_device": plan.options.torch_device,
    }
    common_arguments["tokens"] = plan.options.tokens or UNLIMITED_TOKENS
    if plan.makes_head:
        target = find_exported_target(plan, work_folder)
        head_arguments: JsonObject = {"draft_vocabulary": plan.draft_vocab_size}
        head_arguments |= {"start_checkpoint": str(plan.draft.path) if isinstance(plan.draft, HeadSource) else ""}
        head_arguments |= {"layers": plan.tap_layers} if plan.kind == "head" else {}
        return run_worker_job(
            "train_head" if plan.kind == "head" else "train_mtp",
            target,
            work_folder.scratch_folder,
            on_progress,
            model=str(target.path),
            **head_arguments,
            **common_arguments,
        )
    draft = find_working_draft(plan, work_folder)
    checkpoint_arguments = {"source": str(draft.path), "model_type": draft.model_type, "trust_remote_code": False}
    return run_worker_job(
        "train_draft", draft, work_folder.scratch_folder, on_progress, **checkpoint_arguments, **common_arguments
    )


def run_costs_job(plan: DistillPlan, work_folder: WorkFolder, on_progress: ProgressCallback) -> bool:
    """Time the target, for an estimate of the speedup."""
    target = find_exported_target(plan, work_folder)
    return run_worker_job("measure_costs", target, work_folder.scratch_folder, on_progress, model=str(target.path))


def run_gain_job(
    plan: DistillPlan, work_folder: WorkFolder, old_draft: Path | None, output: Path, seconds: float
) -> None:
    """Time plain decoding, the old draft and the new draft; Ctrl-C ends it at once."""
    target = find_exported_target(plan, work_folder)
    path_arguments = {
        "model": target.path,
        "new_draft": work_folder.result_ir,
        "documents_file": work_folder.documents_file,
        "output": output,
    }
    arguments: JsonObject = {name: str(path) for name, path in path_arguments.items()} | {
        "old_draft": str(old_draft) if old_draft else ""
    }
    with work_folder.time_stage(GAIN_STAGE):
        run_worker_job("measure_gain", target, work_folder.scratch_folder, None, **arguments, seconds=seconds)


def find_working_draft(plan: DistillPlan, work_folder: WorkFolder) -> Source:
    """Return the draft as a checkpoint for transformers."""
    assert plan.draft
    if not work_folder.draft_checkpoint.is_dir():
        return plan.draft
    return Source(plan.draft.name, work_folder.draft_checkpoint, is_ir=False, revision=plan.draft.revision)
