"""The jobs of a distillation, as the parent calls them: each runs for about some seconds in a process of its own.

Each returns whether it came to its own end, and not because Ctrl-C asked it to stop. A job tells ``tokens`` (of this
run), ``per_second``, and in training ``accepted`` (tokens a round beside the model's own) and ``agreement`` (at each
depth).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ovspec_export.convert import run_job
from ovspec_export.distill.plan import Plan
from ovspec_export.distill.work import Work
from ovspec_export.sources import HeadSource, Source

Told = Callable[[dict[str, Any]], None]


def exported_target(plan: Plan, work: Work) -> Path:
    """Return the folder of the exported target."""
    return plan.target.folder.resolve() if plan.target.is_ir else work.target


def write_texts(plan: Plan, work: Work, seconds: float, told: Told) -> bool:
    """Let the model write, and take in given texts."""
    return run_job(
        "write_texts",
        plan.target,
        work.scratch,
        told,
        model=str(exported_target(plan, work)),
        work=str(work.folder),
        seconds=seconds,
        texts=plan.settings.text,
        topics=plan.settings.topics,
    )


def write_features(plan: Plan, work: Work, seconds: float, told: Told) -> bool:
    """Compute what the target makes of the texts."""
    return run_job(
        "write_features",
        plan.target,
        work.scratch,
        told,
        model=str(exported_target(plan, work)),
        work=str(work.folder),
        layers=plan.layers,
        seconds=seconds,
        most=plan.options.size_limit * 1e9,
    )


def train(plan: Plan, work: Work, seconds: float, tokens: int | None, told: Told) -> bool:
    """Train a head, or teach a draft, with up to so many ``tokens``."""
    common: dict[str, Any] = {
        "model": str(exported_target(plan, work)),
        "work": str(work.folder),
        "seconds": seconds,
        "tokens": tokens,
        "device": plan.options.torch_device,
    }
    if not plan.of_head:
        draft = draft_checkpoint(plan, work)
        return run_job("teach_draft", draft, work.scratch, told, **common, draft=str(draft.folder))
    start = str(plan.draft.folder) if isinstance(plan.draft, HeadSource) else None
    layers = {"layers": plan.layers, "draft_vocabulary": plan.vocabulary, "start": start}
    return run_job("train_head", plan.target, work.scratch, told, **common, **layers)


def trim(plan: Plan, work: Work) -> None:
    """Write the draft with the ids that the texts use most as the result."""
    draft = draft_checkpoint(plan, work)
    where = {"draft": str(draft.folder), "documents": str(work.documents), "folder": str(work.checkpoint)}
    run_job("trim_vocabulary", draft, work.scratch, None, **where, vocabulary=plan.options.trim_vocabulary)


def measure_gain(plan: Plan, work: Work, old: Path | None, output: Path) -> None:
    """Time plain decoding, the old draft and the new one; Ctrl-C ends it at once."""
    where = {"model": exported_target(plan, work), "new": work.ir, "documents": work.documents, "output": output}
    arguments: dict[str, Any] = {name: str(place) for name, place in where.items()} | {"old": str(old) if old else ""}
    run_job("measure_gain", plan.target, work.scratch, None, **arguments)


def draft_checkpoint(plan: Plan, work: Work) -> Source:
    """Return the draft as a checkpoint that transformers can load."""
    assert plan.draft
    if not work.draft.is_dir():
        return plan.draft
    return Source(plan.draft.name, work.draft, is_ir=False, revision=plan.draft.revision)
