"""ovspec export"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

    def compression(name: str) -> Any:
        """The options that mean something for a format; export_pair refuses those that fit neither model."""
        int4 = name == "int4" or "int4" not in formats
        return package.Compression(
            name,
            group_size if int4 else None,
            ratio if int4 else None,
            sym and (name in ("int4", "int8") or not formats & {"int4", "int8"}),
        )

    formats = {weight_format, draft_weight_format or weight_format}
    package.export_pair(
        target,
        draft,
        output,
        compression(weight_format),
        compression(draft_weight_format or weight_format),
        report=lambda line: click.echo(line, err=True),
    )
