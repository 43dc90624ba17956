"""ovspec export"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

FORMATS = ("fp32", "fp16", "int8", "int4")


@click.command()
@click.argument("target")
@click.option("--draft", metavar="DRAFT", help="Draft model: a checkpoint folder or a hub id.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option(
    "--weight-format", type=click.Choice(FORMATS), default="int8", show_default=True, help="Target's weights."
)
@click.option("--draft-weight-format", type=click.Choice(FORMATS), help="Draft's weights.  [default: the target's]")
@click.option("--group-size", type=int, help="int4: weights that share a scale.  [default: optimum's]")
@click.option("--ratio", type=float, help="int4: share of the layers, the others are int8.  [default: optimum's]")
@click.option("--sym", is_flag=True, help="int8 and int4: symmetric, without zero points.")
def export(
    target: str,
    draft: str | None,
    output: Path,
    weight_format: str,
    draft_weight_format: str | None,
    group_size: int | None,
    ratio: float | None,
    sym: bool,
) -> None:
    """Export TARGET, a Hugging Face checkpoint folder or hub id, to OpenVINO IR.

    With --draft, the draft is exported beside it, after a check that both speak of the same tokens.
    The folder is replaced at the very end: an interrupted export leaves what was there before.

    \b
    Example:
      ovspec export models/demo-hf/target --draft models/demo-hf/draft -o my-pair --weight-format int8
    """
    if draft_weight_format and not draft:
        raise click.UsageError("--draft-weight-format needs --draft.")
    from ovspec.exporting import export_package

    package = export_package()
    compression = package.Compression(weight_format, group_size, ratio, sym)
    draft_compression = compression
    if draft_weight_format and draft_weight_format != weight_format:
        # The options of the target's format mean nothing for another one.
        draft_compression = package.Compression(draft_weight_format)
    elif draft_weight_format:
        draft_compression = dataclasses.replace(compression, weight_format=draft_weight_format)
    package.export_pair(
        target, draft, output, compression, draft_compression, report=lambda line: click.echo(line, err=True)
    )
