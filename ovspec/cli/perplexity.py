import json
from dataclasses import asdict
from pathlib import Path

import click

from ovspec.base.progress import show_step
from ovspec.cli.loading import load_model
from ovspec.cli.options import read_text_or_stdin, target_options
from ovspec.cli.path_type import PATH_TYPE
from ovspec.params.option import OptionValue


@click.command()
@click.argument("folder", type=PATH_TYPE, metavar="DIR")
@click.argument("file", type=PATH_TYPE)
@click.option(
    "--context", type=click.IntRange(2), help="Window size in tokens.  [default: the model's context, up to 1024]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@target_options
def perplexity(folder: Path, file: Path, context: int | None, as_json: bool, **runtime: OptionValue) -> None:
    """Measure the perplexity of the model in DIR on the text in FILE; - is stdin.

    The text is scored in windows; each window overlaps the previous window by half. Every token except the first is
    scored once. After the first window, each token has at least half a window of context.

    \b
    Example:
      ovspec perplexity my-pair notes.txt
    """
    text = read_text_or_stdin(file)
    lm = load_model(folder, **runtime)
    with show_step(f"{file}: reading"):
        measurement = lm.perplexity(text, context)
    if as_json:
        click.echo(json.dumps(asdict(measurement)))
        return
    perplexity_text = f"perplexity {measurement.perplexity:.4f} ({measurement.nats:.5f} nats per token)"
    speed_text = f"{measurement.scored / measurement.seconds:.0f} tokens/s"
    click.echo(f"{perplexity_text}, {measurement.scored} tokens in windows of {measurement.context}, {speed_text}")
