"""ovspec inspect"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ovspec.cli.options import refuse, runtime_options
from ovspec.errors import OvspecError


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path), metavar="[DIR]")
@click.option("--verify", is_flag=True, help="Compare the checksums of all files with those of the export.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@runtime_options
def inspect(folder: Path | None, verify: bool, as_json: bool, **runtime: Any) -> None:
    """Show what is in DIR (by default the embedded pair): weights, states, how they roll back, memory.

    \b
    Examples:
      ovspec inspect my-pair
      ovspec inspect my-pair --verify --json
    """
    from ovspec.loading import device_options, model_folder
    from ovspec.options.loading import load_options
    from ovspec.setup import inspection

    folder = model_folder(folder)
    refuse(runtime["draft_device"], "--draft-device is not used here; inspect the draft's folder with --device.")
    given = load_options(runtime)  # type: ignore[arg-type]
    if verify and not (folder / "ovspec.json").is_file():
        raise OvspecError(f"{folder}: --verify needs the manifest of 'ovspec export', which is not there.")
    found = inspection.inspect(folder, device_options(given), given.engine, given.tune is not False, verify)
    if as_json:
        click.echo(json.dumps({name: asdict(model) for name, model in found.items()}, ensure_ascii=False))
        return
    for name, model in found.items():
        click.echo("\n".join(inspection.summary(name, model)))
    if verify:
        click.echo("All checksums are those of the export.")
