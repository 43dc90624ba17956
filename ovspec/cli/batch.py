from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.cli.options import chat_option, check_chat, generate_options, load, refuse, split_options, system_option

if TYPE_CHECKING:
    from ovspec.openai.batch_file import BatchProgress

EVERY = 10.0  # seconds between two lines of progress if stderr is not a terminal


@click.command()
@click.argument("arguments", nargs=-1, required=True, metavar="[DIR] FILE")
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="File for the results."
)
@click.option("--overwrite", is_flag=True, help="Replace the output file if it exists.")
@chat_option
@system_option
@generate_options
def batch(
    arguments: tuple[str, ...], output: Path, overwrite: bool, chat: bool | None, system: str | None, **others: Any
) -> None:
    """Generate a text for each line of FILE with the model in DIR (by default the embedded demo pair).

    FILE may be -, which is stdin. Each line is a request of OpenAI's batch API, a JSON object with a prompt or
    messages and options such as max_tokens, temperature, stop or response_format, or a JSON string with a prompt. In
    a .txt file, each line is a prompt as it is. Options of a line override those given here. --chat and --system
    apply only to plain prompts. Lines without a seed of their own share the one given here.

    The output has one line for each, in the same order, with its id (by default the line number). If a line fails,
    its output has the error instead of a text, and the exit code is 1. After Ctrl-C or a kill, the same command
    continues from OUTPUT.partial.

    \b
    Examples:
      ovspec batch my-pair requests.jsonl -o results.jsonl
      ovspec batch my-pair prompts.txt -o results.jsonl --draft --max-tokens 64 --batch-size 8
    """
    refuse(len(arguments) > 2, "Too many arguments; give FILE, or DIR and FILE.")
    file, folder = Path(arguments[-1]), Path(arguments[0]) if len(arguments) == 2 else None
    check_chat(chat, system, others["heal"])
    refuse(str(output) == "-", "--output can't be stdout, because finished results must be kept; name a file.")
    if output.exists():
        refuse(output.resolve() == file.resolve(), f"{output} is the input file; name another --output.")
        refuse(not overwrite, f"{output} already exists; name another --output, or add --overwrite.")
    loading, options = split_options(others)

    from ovspec.openai.batch_file import as_chat, read_requests, requests_of, run_file

    requests = requests_of(read_stdin()) if str(file) == "-" else read_requests(file)
    if chat:
        requests = [as_chat(request, system) for request in requests]
    lm = load(folder, **loading)
    report = Report()
    try:
        found = run_file(lm, requests, output, options, report.note)  # type: ignore[typeddict-item]
    except KeyboardInterrupt:
        report.clear()
        click.echo(f"stopped; the same command continues from the results kept in {output}.partial", err=True)
        raise
    report.clear()
    click.echo(report.line(found), err=True)
    if found.failed:
        click.echo(f"{output}: {found.failed} of {found.total} lines have an error instead of a text", err=True)
        sys.exit(1)


def read_stdin() -> str:
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise click.UsageError("stdin: not UTF-8 text.") from None
    refuse(not text.strip(), "stdin: contains no text.")
    return text


class Report:
    """Progress on stderr: a line that is updated on a terminal, a new line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._began = self._shown = time.monotonic()

    def note(self, progress: BatchProgress) -> None:
        if time.monotonic() - self._shown >= (0.5 if self._live else EVERY):
            self._shown = time.monotonic()
            self.clear()
            click.echo(self.line(progress), nl=not self._live, err=True)

    def line(self, progress: BatchProgress) -> str:
        elapsed = time.monotonic() - self._began
        parts = [f"{progress.before + progress.done} of {progress.total} done"]
        if progress.before:
            parts.append(f"{progress.before} of them by an earlier run")
        if progress.failed:
            parts.append(f"{progress.failed} with an error")
        rate = progress.tokens / max(elapsed, 1e-9)
        parts.append(f"{progress.tokens} tokens in {elapsed:.0f} s ({rate:.0f} tokens/s)")
        if progress.done and progress.left:
            parts.append(f"about {elapsed / progress.done * progress.left:.0f} s left")
        return ", ".join(parts)

    def clear(self) -> None:
        if self._live and self._shown > self._began:
            click.echo("\r\x1b[K", nl=False, err=True)
