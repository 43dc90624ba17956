import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ovspec.base.progress import show_step
from ovspec.cli.loading import load_model
from ovspec.cli.options import read_text_or_stdin, target_options
from ovspec.cli.path_type import PATH


@click.command()
@click.argument("folder", type=PATH, metavar="DIR")
@click.argument("file", type=PATH)
@click.option(
    "--context", type=click.IntRange(2), help="Tokens of a window.  [default: the model's context, up to 1024]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@target_options
def perplexity(folder: Path, file: Path, context: int | None, as_json: bool, **runtime: Any) -> None:
    """Measure how well the model in DIR predicts the text in FILE; - is stdin.

    The text is read in windows that overlap by half. Every token except the first is scored once; after the first
    window, each is predicted from at least half a window of text.

    \b
    Example:
      ovspec perplexity my-pair notes.txt
    """
    text = read_text_or_stdin(file)
    lm = load_model(folder, **runtime)
    with show_step(f"{file}: reading"):
        found = lm.perplexity(text, context)
    if as_json:
        click.echo(json.dumps(asdict(found)))
        return
    result = f"perplexity {found.perplexity:.4f} ({found.nats:.5f} nats per token)"
    speed = found.scored / found.seconds
    click.echo(f"{result}, {found.scored} tokens in windows of {found.context}, {speed:.0f} tokens/s")
