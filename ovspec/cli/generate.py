"""ovspec generate"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ovspec.cli.options import generate_options, looks_like_path, session_options, split_options
from ovspec.drafting.choice import EXPORTED, DraftChoice


@click.command()
@click.argument("arguments", nargs=-1, metavar="[DIR] [PROMPT]")
@click.option("-p", "--prompt", "prompt_option", metavar="TEXT", help="The prompt, where DIR PROMPT is ambiguous.")
@click.option("-f", "--file", "prompt_file", type=click.Path(), help="Read the prompt from a file; - is stdin.")
@click.option("--token-ids", metavar="IDS", help="The prompt as token ids, separated by commas or spaces.")
@click.option("--chat/--raw", default=False, help="Apply the model's chat template, or not.  [default: raw]")
@click.option("--system", metavar="TEXT", help="System message; needs --chat.")
@click.option("--stats", is_flag=True, help="Print statistics on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option("--compare", is_flag=True, help="Generate without and with --draft; show both times, compare the texts.")
@session_options
@generate_options
def generate(
    arguments: tuple[str, ...],
    prompt_option: str | None,
    prompt_file: str | None,
    token_ids: str | None,
    chat: bool,
    system: str | None,
    stats: bool,
    as_json: bool,
    compare: bool,
    session: Path | None,
    context: int | None,
    **others: Any,
) -> None:
    """Continue PROMPT with the model in DIR (by default the embedded pair).

    The prompt comes from the argument, --prompt, --file, --token-ids or stdin. Text goes to stdout,
    statistics to stderr.

    \b
    Examples:
      ovspec generate "def fib("
      ovspec generate my-pair "import os" --draft --stats
      ovspec generate my-pair "Once upon" --draft lookup,draft --temperature 0.8 --top-p 0.95 --seed 1
      ovspec generate my-pair "Tom is 7: " --json-schema schema.json --draft
      git diff | ovspec generate my-pair -f - --draft --compare
      ovspec generate my-pair "It was" --session story.ov && ovspec generate my-pair --session story.ov
    """
    draft = others["draft"]
    if compare and draft is None:
        draft = DraftChoice(model=EXPORTED)
    ambiguous = not (prompt_option or prompt_file or token_ids or len(arguments) > 1)
    if isinstance(draft, str) and ambiguous and not looks_like_path(draft):
        # '--draft "def f("': the option took what was meant as the prompt.
        arguments, draft = (*arguments, draft), DraftChoice(model=EXPORTED)
    others["draft"] = draft
    folder, text = split_arguments(arguments, bool(prompt_option or prompt_file or token_ids))
    goes_on = session is not None and session.exists()
    prompt = read_prompt(text, prompt_option, prompt_file, token_ids, needed=not goes_on)
    if system is not None and not chat:
        raise click.UsageError("--system needs --chat.")
    if chat and others["heal"]:
        raise click.UsageError("--heal can't be combined with --chat: behind the template's text nothing is healed.")
    if system is not None and goes_on:
        raise click.UsageError("--system can only begin a chat; take another --session.")
    if chat and prompt is not None:
        if not isinstance(prompt, str):
            raise click.UsageError("--chat needs a text, not --token-ids.")
        messages = [{"role": "system", "content": system}] if system is not None else []
        prompt = [*messages, {"role": "user", "content": prompt}]
    if compare and not draft:
        raise click.UsageError("--compare needs a draft; leave --draft none out.")
    loading, options = split_options(others)
    if compare and options.get("accept") == "rejection":
        raise click.UsageError("--compare needs the same text with and without a draft, so not --accept rejection.")
    if "logprobs" in options and not as_json:
        raise click.UsageError("--logprobs needs --json.")
    if compare and options.get("n", 1) > 1:
        raise click.UsageError("--compare needs a single text; leave --samples out.")
    if session and not session.parent.is_dir():
        raise click.UsageError(f"--session {session}: there is no folder {session.parent}.")
    if session and (compare or options.get("n", 1) > 1):
        raise click.UsageError(f"--session needs a single text; leave {'--compare' if compare else '--samples'} out.")
    if context and (compare or options.get("n", 1) > 1):
        raise click.UsageError(f"--context can't be combined with {'--compare' if compare else '--samples'}.")
    if compare and options.get("lookahead") == 0:
        raise click.UsageError("--compare needs a --lookahead of at least 1.")

    import ovspec
    from ovspec.cli import output

    lm = ovspec.load(folder, **loading)
    if compare:
        output.compare(lm, prompt, options, as_json)
    elif options.get("n", 1) > 1:
        output.samples(lm, prompt, options, stats, as_json)
    else:
        with lm.session(context) as opened:
            output.show_context(lm, context)
            if session and goes_on:
                opened.load(session)
            if prompt is not None:
                opened.append(prompt)
            options["heal"] = bool(options.get("heal"))  # which sessions do unless told otherwise
            interrupted = output.generate(opened.stream(**options), stats, as_json)
            if session:
                opened.save(session)
        if interrupted:
            raise KeyboardInterrupt


def split_arguments(arguments: tuple[str, ...], prompt_elsewhere: bool) -> tuple[Path | None, str | None]:
    """(DIR, PROMPT) from one or two arguments; a single one that is no folder is the prompt unless there is one."""
    if len(arguments) > 2:
        raise click.UsageError("Too many arguments; put the prompt in quotes.")
    if len(arguments) == 2:
        return Path(arguments[0]), arguments[1]
    if arguments and (prompt_elsewhere or Path(arguments[0]).is_dir() or looks_like_path(arguments[0])):
        return Path(arguments[0]), None
    return None, arguments[0] if arguments else None


def read_prompt(
    text: str | None, option: str | None, file: str | None, ids: str | None, needed: bool
) -> str | list[int] | None:
    """The prompt from the one place that gives it; stdin where none does. None where none is ``needed`` or there."""
    given = [value for value in (text, option, file, ids) if value is not None]
    if len(given) > 1:
        raise click.UsageError("Give one prompt: the argument, --prompt, --file or --token-ids.")
    if ids is not None:
        try:
            return [int(part) for part in ids.replace(",", " ").split()]
        except ValueError:
            raise click.UsageError(f"--token-ids {ids}: not a list of numbers.") from None
    if text is not None or option is not None:
        return text if text is not None else option or ""
    if file is None and not needed and (sys.stdin.isatty() or sys.stdin.closed):
        return None
    if file is None and sys.stdin.isatty():
        raise click.UsageError("No prompt; give it as an argument, with --file, or on stdin.")
    try:
        data = sys.stdin.buffer.read() if file in (None, "-") else Path(file).read_bytes()
    except OSError as error:
        raise click.UsageError(f"--file {file}: {error.strerror}.") from None
    if file is None and not needed and not data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise click.UsageError("The prompt is not UTF-8 text.") from None
