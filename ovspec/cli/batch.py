"""ovspec batch"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.cli.options import chat_options, check_chat, generate_options, refuse, split_options

if TYPE_CHECKING:
    from ovspec.integrations.batch_run import BatchProgress

EVERY = 10.0  # seconds between two lines of progress where there is no terminal


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="[DIR] FILE")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The results.")
@click.option("--overwrite", is_flag=True, help="Replace an output that is there already.")
@chat_options
@generate_options
def batch(
    arguments: tuple[str, ...], output: Path, overwrite: bool, chat: bool, system: str | None, **others: Any
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
    refuse(len(arguments) > 2, "Too many arguments; give one FILE, and before it DIR.")
    file, folder = Path(arguments[-1]), Path(arguments[0]) if len(arguments) == 2 else None
    refuse(file.is_dir(), f"{file} is a folder; name the file with the prompts behind it.")
    check_chat(chat, system, others["heal"])
    refuse(str(output) == "-", "--output - : what is done has to be kept somewhere; name a file.")
    if output.exists():
        refuse(output.resolve() == file.resolve(), f"{output}: it is the input; name another --output.")
        refuse(not overwrite, f"{output}: it is there already; name another --output, or give --overwrite.")
    loading, options = split_options(others)
    refuse("logprobs" in options, "--logprobs can't be had in a batch; use 'ovspec generate --json'.")

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
        report.clear()
        click.echo(f"stopped; what is done is kept in {output}.partial, and the same command goes on from it", err=True)
        raise
    report.clear()
    click.echo(report.line(found), err=True)
    if found.failed:
        click.echo(f"{output}: {found.failed} of {found.total} lines have an error instead of a text", err=True)
        sys.exit(1)


class Report:
    """How far it is: a line that moves on a terminal, one every few seconds elsewhere. On stderr."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()

    def note(self, progress: BatchProgress) -> None:
        now = time.monotonic()
        if now - self._shown < (0.5 if self._live else EVERY):
            return
        self._shown = now
        self.clear()
        click.echo(self.line(progress), nl=not self._live, err=True)

    def line(self, progress: BatchProgress) -> str:
        elapsed = time.monotonic() - self._began
        parts = [f"{progress.before + progress.done} of {progress.total} done"]
        if progress.before:
            parts.append(f"{progress.before} of them earlier")
        if progress.failed:
            parts.append(f"{progress.failed} with an error")
        rate = progress.tokens / max(elapsed, 1e-9)
        parts.append(f"{progress.tokens} tokens in {elapsed:.0f} s ({rate:.0f} a second)")
        if progress.done and progress.left:
            parts.append(f"about {elapsed / progress.done * progress.left:.0f} s to go")
        return ", ".join(parts)

    def clear(self) -> None:
        if self._live and self._shown > self._began:
            click.echo("\r\x1b[K", nl=False, err=True)
