"""ovspec perplexity"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ovspec.cli.options import refuse, runtime_options


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--context", type=click.IntRange(min=2), help="Tokens a window.  [default: the model's, at most 1024]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@runtime_options
def perplexity(folder: Path, file: Path, context: int | None, as_json: bool, **runtime: Any) -> None:
    """How well the model in DIR foresees the text in FILE.

    Windows overlap by half, so that every token but the first is scored once, and those after the first
    window have at least half a window in front of them.

    \b
    Example:
      ovspec perplexity my-pair notes.txt
    """
    import ovspec
    from ovspec.files import read_text

    refuse(runtime["draft_device"], "--draft-device is not used here: only the target is measured.")
    text = read_text(file)
    found = ovspec.load(folder, **runtime).perplexity(text, context)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    result = f"perplexity {found.perplexity:.4f} ({found.nats:.5f} nats a token)"
    speed = found.scored / found.seconds
    click.echo(f"{result}, {found.scored} tokens in windows of {found.context}, {speed:.0f} tokens/s")
