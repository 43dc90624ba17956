"""The jobs of a distillation, as the parent calls them: each runs for about some seconds in a process of its own.

Each returns whether it came to its own end, and not because Ctrl-C asked it to stop. A job tells how many ``tokens`` it
has got through over all runs, how many ``per_second``, and in training how many are ``accepted`` in a round and how
often a guess at each depth is right, its ``agreement``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ovspec.base.files import read_text
from ovspec.base.json_types import JsonObject
from ovspec_export.convert import run_job
from ovspec_export.distill.plan import DistillPlan
from ovspec_export.distill.work_folder import GAIN_STAGE, WorkFolder
from ovspec_export.sources import HeadSource, Source

ProgressCallback = Callable[[JsonObject], None]
UNLIMITED_TOKENS = 2**62  # tokens, which no time is enough for


def find_exported_target(plan: DistillPlan, work: WorkFolder) -> Source:
    """Return the exported target."""
    folder = plan.target.folder.resolve() if plan.target.is_ir else work.target
    return Source(plan.target.name, folder, is_ir=True, revision=plan.target.revision)


def run_texts_job(plan: DistillPlan, work: WorkFolder, seconds: float, on_progress: ProgressCallback) -> bool:
    """Let the model write, and take in given texts."""
    target = find_exported_target(plan, work)
    topics = list[str]()
    if plan.options.topics:
        lines = read_text(plan.options.topics.expanduser()).splitlines()
        topics = [line.strip() for line in lines if line.strip()]
    folders = {"model": str(target.folder), "work": str(work.folder)}
    limits = {"seconds": seconds, "tokens": UNLIMITED_TOKENS}
    texts = {"texts": plan.settings.text, "topics": topics}
    return run_job("write_texts", target, work.scratch, on_progress, **folders, **limits, **texts)


def run_features_job(plan: DistillPlan, work: WorkFolder, seconds: float, on_progress: ProgressCallback) -> bool:
    """Compute what the target makes of the texts."""
    target = find_exported_target(plan, work)
    by_torch = JsonObject()
    if plan.checkpoint:
        by_torch = {"checkpoint": str(plan.checkpoint.folder), "model_type": plan.checkpoint.model_type}
        by_torch |= {"torch_device": plan.options.torch_device}
    return run_job(
        "write_features",
        plan.checkpoint or target,
        work.scratch,
        on_progress,
        model=str(target.folder),
        work=str(work.folder),
        layers=plan.layers,
        seconds=seconds,
        most=plan.options.size_limit * 1e9,
        **by_torch,
    )


def run_training_job(plan: DistillPlan, work: WorkFolder, seconds: float, on_progress: ProgressCallback) -> bool:
    """Train a head, or teach a draft."""
    common: JsonObject = {"work": str(work.folder), "seconds": seconds, "torch_device": plan.options.torch_device}
    common["tokens"] = plan.options.tokens or UNLIMITED_TOKENS
    if plan.makes_head:
        target = find_exported_target(plan, work)
        head = {"layers": plan.layers, "draft_vocabulary": plan.draft_vocabulary}
        head |= {"start": str(plan.draft.folder) if isinstance(plan.draft, HeadSource) else ""}
        return run_job("train_head", target, work.scratch, on_progress, model=str(target.folder), **head, **common)
    draft = find_working_draft(plan, work)
    checkpoint = {"source": str(draft.folder), "model_type": draft.model_type, "trust_remote_code": False}
    return run_job("train_draft", draft, work.scratch, on_progress, **checkpoint, **common)


def run_costs_job(plan: DistillPlan, work: WorkFolder, on_progress: ProgressCallback) -> bool:
    """Time the target, so that it can be said what to expect."""
    target = find_exported_target(plan, work)
    return run_job("measure_costs", target, work.scratch, on_progress, model=str(target.folder))


def run_gain_job(plan: DistillPlan, work: WorkFolder, old: Path | None, output: Path, seconds: float) -> None:
    """Time plain decoding, the old draft and the new one; Ctrl-C ends it at once."""
    target = find_exported_target(plan, work)
    paths = {"model": target.folder, "new": work.ir, "documents": work.documents, "output": output}
    arguments: JsonObject = {name: str(path) for name, path in paths.items()} | {"old": str(old) if old else ""}
    with work.time_stage(GAIN_STAGE):
        run_job("measure_gain", target, work.scratch, None, **arguments, seconds=seconds)


def find_working_draft(plan: DistillPlan, work: WorkFolder) -> Source:
    """Return the draft as a checkpoint that transformers can load."""
    assert plan.draft
    if not work.draft.is_dir():
        return plan.draft
    return Source(plan.draft.name, work.draft, is_ir=False, revision=plan.draft.revision)
