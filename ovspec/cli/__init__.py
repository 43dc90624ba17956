"""The command line: one file per command, imported only when the command runs."""

import importlib
import io
import re
import sys
import warnings
from typing import Any

import click

from ovspec import __version__
from ovspec.base.errors import DISK_FULL_ERRNOS, OvspecError, WriteError

# An option in a message, in Python's form: `name`, or with a value `name=value`.
OPTION_PATTERN = re.compile(r"`(\w+)(?:=([^`]*))?`")
# Name of a command -> its line in 'ovspec --help', the beginning of the command's own help.
COMMANDS = {
    "batch": "Generate a text for each line of FILE.",
    "bench": "Benchmark MODEL with plain decoding and each drafter.",
    "chat": "Chat with MODEL.",
    "devices": "List the available devices.",
    "distill": "Train a draft for MODEL, to generate faster with speculative decoding.",
    "export": "Export TARGET, a Hugging Face checkpoint or a GGUF file, to OpenVINO IR.",
    "generate": "Continue PROMPT with MODEL.",
    "inspect": "Describe the model in DIR: weights, context, engine, rollback, memory.",
    "models": "List or delete the models in the cache.",
    "perplexity": "Measure the perplexity of the model in DIR on the text in FILE.",
    "serve": "Serve MODEL over HTTP, with an OpenAI-compatible API.",
    "tune": "Find the fastest settings for the model in DIR, and use them.",
    "verify": "Check every token in RESULT against the model's own choice.",
}


class LazyCommands(click.Group):
    """A group that imports commands on demand."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"ovspec.cli.{cmd_name}"), cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OvspecError as error:
            raise OvspecError(
                replace_option_names_by_flags(error, self.get_command(ctx, ctx.invoked_subcommand or ""))
            ) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyCommands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ovspec")
def cli() -> None:
    """Fast, lossless text generation on OpenVINO.

    MODEL is a folder made by 'ovspec export'; or a Hugging Face hub id (org/model, org/model@REVISION,
    org/model:Q4_K_M), a checkpoint folder or a GGUF file, exported at its first use into the user's cache. DIR is a
    folder made by 'ovspec export', or the name of a model in the cache.

    With --draft, a small draft proposes tokens, and MODEL verifies several of them per forward pass: the text stays
    the same. In the examples, the folder my-pair contains a model and its draft. Without MODEL, commands use the demo
    pair embedded in the source checkout.

    \b
    Examples:
      ovspec chat org/model
      ovspec export models/demo-hf/target --draft models/demo-hf/draft -o my-pair
      ovspec generate my-pair "def fib(" --draft --stats
    """


def main() -> None:
    """Run the command line and exit with 0, 1 (the work failed), 2 (wrong usage), 3 (no gain) or 130 (Ctrl-C)."""
    prepare_output_streams()
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {replace_option_names_by_flags(message)}\n"
    try:
        cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    except (OvspecError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS and not isinstance(error, WriteError):
            error = WriteError(error.filename or "stdout", error)
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except Exception as error:
        if is_caused_by_ctrl_c(error):
            sys.exit(130)
        raise


def prepare_output_streams() -> None:
    """Let stdout and stderr take any text, the same bytes on all systems, and consoles erase a line."""
    if sys.platform == "win32":
        import colorama

        colorama.just_fix_windows_console()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace", newline="\n")


def replace_option_names_by_flags(message: object, command: click.Command | None = None) -> str:
    """Return ``message`` with the options of ``command``, by default the running command, as flags.

    `name` and `name=True` become --name, and `name='value'` --name value.
    """
    context = click.get_current_context(silent=True)
    command = command or (context and context.command)
    click_params = command.params if command else []
    flags_by_option = {
        param.name: max(param.opts, key=len) for param in click_params if isinstance(param, click.Option)
    }

    def replace_option(match: re.Match[str]) -> str:
        name, value = match.groups()
        if name not in flags_by_option:
            return match[0]
        if value in (None, "True", "False"):
            return flags_by_option[name]
        return f"{flags_by_option[name]} {value.strip(chr(39))}"

    return OPTION_PATTERN.sub(replace_option, str(message))


def is_caused_by_ctrl_c(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused ``error``: an interrupted import raises its own kind of error."""
    while error and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
