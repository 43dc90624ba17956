"""Compare exported models with their checkpoints on a text."""

from __future__ import annotations

import json
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.progress import format_size, print_note, show_step
from ovspec.engine.scoring import DEFAULT_PERPLEXITY_CONTEXT
from ovspec_export.convert import run_worker_job
from ovspec_export.sources import HeadSource, Source


def evaluate_exports(
    sources: list[Source], folders: list[Path], text: Path, work_folder: Path, trust_remote_code: bool
) -> list[tuple[str, dict[str, float]]]:
    """Compare each model with its checkpoint; return the figures of ``evaluate.py`` with the models' names.

    A draft made from the first layers is compared with these layers.
    """
    quality = []
    for source, folder in zip(sources, folders, strict=False):
        if isinstance(source, HeadSource):  # meaningless without the target
            continue
        checkpoint_description = f"the checkpoint of {format_size(source.size_in_bytes)}"
        with show_step(f"{source.name}: comparing with {checkpoint_description} on {text.name}", keep_line=True):
            figures_file = work_folder / "evaluation.json"
            try:
                run_worker_job(
                    "evaluate_ir",
                    source,
                    work_folder,
                    source=str(source.path),
                    folder=str(folder),
                    text=str(text.absolute()),
                    context=DEFAULT_PERPLEXITY_CONTEXT,
                    output=str(figures_file),
                    trust_remote_code=source.runs_own_code(trust_remote_code),
                )
            except OvspecError as error:
                print_note(f"warning: {error}")  # no reason to discard a finished export
                continue
            quality.append((source.name, json.loads(figures_file.read_text(encoding="utf-8"))))
            figures_file.unlink()
    return quality


def format_quality_table(quality: list[tuple[str, dict[str, float]]]) -> list[str]:
    """Return the table of ``quality`` as lines for a terminal."""
    if not quality:
        return []
    lines = [f"{'':28} {'perplexity':>10} {'checkpoint':>10} {'KL, nats':>10} {'same top-1':>10} {'tokens':>8}"]
    for name, figures in quality:
        short_name = name if len(name) <= 28 else "…" + name[-27:]
        lines.append(
            f"{short_name:28} {figures['perplexity']:10.3f} {figures['perplexity_of_the_checkpoint']:10.3f} "
            f"{figures['kl']:10.2e} {figures['top1']:10.2%} {figures['tokens']:8}"
        )
    return lines
