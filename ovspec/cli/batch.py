"""ovspec batch"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.cli.options import generate_options, split_options

if TYPE_CHECKING:
    from ovspec.integrations.batch_run import BatchProgress

EVERY = 10.0  # seconds between two lines of progress where there is no terminal


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="[DIR] FILE")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The results.")
@click.option("--overwrite", is_flag=True, help="Replace an output that is there already.")
@click.option("--chat/--raw", default=False, help="Apply the model's chat template to plain prompts.  [default: raw]")
@click.option("--system", metavar="TEXT", help="System message for plain prompts; needs --chat.")
@generate_options
def batch(
    arguments: tuple[str, ...],
    output: Path,
    overwrite: bool,
    chat: bool,
    system: str | None,
    **others: Any,
) -> None:
    """Generate a text for each line of FILE with the model in DIR (by default the embedded pair).

    A line of FILE is a request of OpenAI's batch API, a JSON object with a prompt or messages and options such as
    max_tokens, temperature, stop or response_format, or a JSON string; in a .txt file, a prompt as it is. Options of
    a line win over those given here.

    The output has a line for each, in the same order, with its id (or the number of the line). A line that can't be
    done says why, and the exit code is 1. After a kill or Ctrl-C the same command goes on from OUTPUT.partial.

    \b
    Examples:
      ovspec batch my-pair requests.jsonl -o results.jsonl
      ovspec batch my-pair prompts.txt -o results.jsonl --draft --max-tokens 64 --batch-size 8
    """
    if len(arguments) > 2:
        raise click.UsageError("Too many arguments; give one FILE, and before it DIR.")
    paths = [Path(argument) for argument in arguments]
    file, folder = paths[-1], paths[0] if len(paths) == 2 else None
    if file.is_dir():
        raise click.UsageError(f"{file} is a folder; name the file with the prompts behind it.")
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat.")
    if chat and others["heal"]:
        raise click.UsageError("--heal can't be combined with --chat: behind the template's text nothing is healed.")
    if str(output) == "-":
        raise click.UsageError("--output - : what is done has to be kept somewhere; name a file.")
    if output.exists() and output.resolve() == file.resolve():
        raise click.UsageError(f"{output}: it is the input; name another --output.")
    if output.exists() and not overwrite:
        raise click.UsageError(f"{output}: it is there already; name another --output, or give --overwrite.")
    loading, options = split_options(others)
    if "logprobs" in options:
        raise click.UsageError("--logprobs can't be had in a batch; use 'ovspec generate --json'.")

    import ovspec
    from ovspec.integrations.batch_run import run_file
    from ovspec.integrations.openai_batch import as_chat, read_requests

    requests = read_requests(file)
    if chat:
        requests = [as_chat(request, system) for request in requests]
    lm = ovspec.load(folder, **loading)
    report = Report()
    try:
        found = run_file(lm, requests, output, options, report.note)  # type: ignore[typeddict-item]
    except KeyboardInterrupt:
        report.end()
        click.echo(f"stopped; what is done is kept in {output}.partial, and the same command goes on from it", err=True)
        raise
    report.end()
    click.echo(report.line(found), err=True)
    if found.failed:
        click.echo(f"{output}: {found.failed} of {found.total} lines have an error instead of a text", err=True)
        sys.exit(1)


class Report:
    """How far it is: a line that moves on a terminal, one every few seconds elsewhere. On stderr."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()
        self._last: BatchProgress | None = None

    def note(self, progress: BatchProgress) -> None:
        now = time.monotonic()
        if now - self._shown < (0.5 if self._live else EVERY):
            return
        self._shown, self._last = now, dataclasses.replace(progress)
        if self._live:
            click.echo(f"\r\x1b[K{self.line(progress)}", nl=False, err=True)
        else:
            click.echo(self.line(progress), err=True)

    def line(self, progress: BatchProgress) -> str:
        elapsed = time.monotonic() - self._began
        parts = [f"{progress.before + progress.done} of {progress.total} done"]
        if progress.before:
            parts.append(f"{progress.before} of them earlier")
        if progress.failed:
            parts.append(f"{progress.failed} with an error")
        parts.append(
            f"{progress.tokens} tokens in {elapsed:.0f} s ({progress.tokens / max(elapsed, 1e-9):.0f} a second)"
        )
        if progress.done and progress.left:
            parts.append(f"about {elapsed / progress.done * progress.left:.0f} s to go")
        return ", ".join(parts)

    def end(self) -> None:
        if self._live and self._last:
            click.echo("\r\x1b[K", nl=False, err=True)
