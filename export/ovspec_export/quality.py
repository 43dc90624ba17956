"""How exported models compare with their checkpoints on a text."""

from __future__ import annotations

import json
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.progress import format_size, print_note, show_step
from ovspec.engine.scoring import DEFAULT_PERPLEXITY_CONTEXT
from ovspec_export.convert import run_job
from ovspec_export.sources import HeadSource, Source


def evaluate_exports(
    sources: list[Source], folders: list[Path], text: Path, work: Path, trust_remote_code: bool
) -> list[tuple[str, dict[str, float]]]:
    """Compare each model with its checkpoint, by name; a draft of first layers is compared with those layers."""
    found = []
    for source, folder in zip(sources, folders, strict=False):
        if isinstance(source, HeadSource):  # says nothing without the target
            continue
        with show_step(
            f"{source.name}: comparing with the checkpoint of {format_size(source.size_in_bytes)} on {text.name}",
            keep=True,
        ):
            result = work / "evaluation.json"
            where = {"source": str(source.folder), "folder": str(folder), "text": str(text.absolute())}
            runs_code = source.runs_code(trust_remote_code)
            options = {"context": DEFAULT_PERPLEXITY_CONTEXT, "output": str(result), "trust_remote_code": runs_code}
            try:
                run_job("evaluate_ir", source, work, **where, **options)
            except OvspecError as error:
                print_note(f"warning: {error}")  # no reason to discard a finished export
                continue
            found.append((source.name, json.loads(result.read_text(encoding="utf-8"))))
            result.unlink()
    return found


def format_quality_table(quality: list[tuple[str, dict[str, float]]]) -> list[str]:
    """Return the table of ``quality`` as lines for a terminal."""
    if not quality:
        return []
    lines = [f"{'':28} {'perplexity':>10} {'checkpoint':>10} {'KL, nats':>10} {'same top-1':>10} {'tokens':>8}"]
    for name, found in quality:
        shown = name if len(name) <= 28 else "…" + name[-27:]
        lines.append(
            f"{shown:28} {found['perplexity']:10.3f} {found['perplexity_of_the_checkpoint']:10.3f} "
            f"{found['kl']:10.2e} {found['top1']:10.2%} {found['tokens']:8}"
        )
    return lines
