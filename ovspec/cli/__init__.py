"""The command line: one file a command. What a command needs is imported when it runs."""

from __future__ import annotations

import io
import sys
import warnings

import click

from ovspec import __version__
from ovspec.cli.batch import batch
from ovspec.cli.bench import bench
from ovspec.cli.chat import chat
from ovspec.cli.devices import devices
from ovspec.cli.export import export
from ovspec.cli.generate import generate
from ovspec.cli.inspect import inspect
from ovspec.cli.perplexity import perplexity
from ovspec.cli.tune import tune
from ovspec.errors import OvspecError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ovspec")
def cli() -> None:
    """Fast, lossless text generation on OpenVINO.

    \b
    Example:
      ovspec export models/demo-hf/target --draft models/demo-hf/draft -o my-pair
      ovspec generate my-pair "def fib(" --draft --stats
    """


cli.add_command(generate)
cli.add_command(chat)
cli.add_command(batch)
cli.add_command(export)
cli.add_command(devices)
cli.add_command(inspect)
cli.add_command(perplexity)
cli.add_command(tune)
cli.add_command(bench)


def main() -> None:
    """Run the command line; exit code 0, 1 (the work failed), 2 (wrong usage) or 130 (Ctrl-C)."""
    # A text may hold any character; a console's own encoding may not.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (OvspecError, OSError) as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
