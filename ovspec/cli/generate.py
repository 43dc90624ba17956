from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.base.errors import OvspecError
from ovspec.base.interrupts import EndSignal, end_on_signals, exit_if_ended, ignore_signals
from ovspec.base.progress import on_terminal
from ovspec.cli.loading import load_model
from ovspec.cli.options import (
    StatsCommand,
    chat_option,
    check_chat_options,
    check_grammar_option,
    context_option,
    generate_options,
    refuse_if,
    refuse_no_tokens,
    session_option,
    split_options,
    stats_option,
    system_option,
)
from ovspec.drafting.choice import EXPORTED_DRAFT, DraftChoice

if TYPE_CHECKING:
    from ovspec.api.model import LanguageModel


@click.command(cls=StatsCommand)
@click.argument("arguments", nargs=-1, metavar="[DIR] [PROMPT]")
@click.option("-p", "--prompt", "prompt_option", metavar="TEXT", help="The prompt, if it could be taken for DIR.")
@click.option(
    "-f",
    "--file",
    "prompt_file",
    metavar="FILE",
    help="Read the prompt from FILE, without the newline at its end; - is stdin.",
)
@click.option("--token-ids", metavar="IDS", help="The prompt as token ids, with commas or spaces; no BOS is added.")
@chat_option
@system_option
@click.option("--prefill", metavar="TEXT", help="How the answer begins, which isn't printed; needs --chat.")
@stats_option("Print statistics on stderr: tokens, speed and acceptance, or everything with --stats full.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option(
    "--compare",
    is_flag=True,
    help="Generate without and with --draft (by default the draft in DIR), at least five times each. Prints both "
    "texts, whether they are equal (if not, exit code 1), and the median speed-up with its range.",
)
@session_option
@context_option
@generate_options
def generate(
    arguments: tuple[str, ...],
    prompt_option: str | None,
    prompt_file: str | None,
    token_ids: str | None,
    chat: bool | None,
    system: str | None,
    prefill: str | None,
    stats: str | None,
    as_json: bool,
    compare: bool,
    session: Path | None,
    context: int | None,
    **others: Any,
) -> None:
    """Continue PROMPT with the model in DIR (by default the embedded demo pair).

    The prompt comes from the argument, --prompt, --file, --token-ids or stdin; - as PROMPT is stdin, too, whose last
    newline is left out. An only argument is DIR if it is a folder. Text goes to stdout, statistics to stderr. With
    --max-tokens 0 the prompt is only read, as into the file of --session.

    \b
    Examples:
      ovspec generate "def fib("
      ovspec generate my-pair "import os" --draft --stats
      ovspec generate my-pair "Once upon" --draft lookup,draft --temperature 0.8 --top-p 0.95 --seed 1
      ovspec generate my-pair "Tom is 7: " --json-schema schema.json --draft
      git diff | ovspec generate my-pair - --draft --compare
      ovspec generate my-pair "It was" --session story.ov && ovspec generate my-pair --session story.ov
    """
    draft, elsewhere = others["draft"], bool(prompt_option or prompt_file or token_ids)
    taken = isinstance(draft, str) and not (elsewhere or len(arguments) > 1 or looks_like_path(draft))
    if taken:  # '--draft "def f("': the option took the text that was meant as the prompt
        arguments = (*arguments, draft)
    if taken or (compare and draft is None):
        draft = others["draft"] = DraftChoice(model=EXPORTED_DRAFT)
    folder, text = split_arguments(arguments, elsewhere)
    goes_on = session is not None and session.exists()
    check_chat_options(chat, system, others["heal"])
    refuse_if(system is not None and goes_on, "--system works only when a chat begins; name another --session.")
    refuse_if(prefill is not None and not chat, "--prefill needs --chat.")
    refuse_if(chat and token_ids is not None, "--chat needs a text, not --token-ids.")
    loading, params = split_options(others)
    refuse_if("chat_template" in loading and not chat, "--chat-template needs --chat.")
    refuse_if(params.logprobs is not None and not as_json, "--logprobs needs --json.")
    several = params.n > 1 or params.retries
    if compare:
        refuse_if(not draft, "--compare needs a draft; leave --draft none out.")
        rejection = params.accept == "rejection"
        refuse_if(rejection, "--compare needs the same text with and without a draft; leave --accept rejection out.")
        refuse_if(params.lookahead == 0, "--compare needs a --lookahead of at least 1.")
        refuse_if(several, "--compare needs a single text; leave --samples and --retries out.")
        refuse_no_tokens(params, "--compare")
    lasting = "--session" if session else "--context"
    refuse_if((session or context) and compare, f"{lasting} can't be combined with --compare.")
    refuse_if((session or context) and several, f"{lasting} needs a single text; leave --samples and --retries out.")

    from ovspec.cli import output
    from ovspec.cli.compare import print_comparison
    from ovspec.setup.model_folders import resolve_model_folder

    resolve_model_folder(folder)  # what isn't a model is refused before a prompt is read
    check_grammar_option(params)
    prompt = read_prompt(text, prompt_option, prompt_file, token_ids, needed=not goes_on)
    refuse_if(prefill is not None and prompt is None, "--prefill needs a prompt to answer.")
    variables = params.chat_template_kwargs
    refuse_if(variables is not None and prompt is None, "--chat-template-kwargs needs a prompt to render.")
    if chat and prompt is not None:
        messages = [{"role": "system", "content": system}] if system is not None else []
        prompt = [*messages, {"role": "user", "content": prompt}]
        prompt += [{"role": "assistant", "content": prefill}] if prefill is not None else []
    # For somebody who types a question: the demo pair continues code, and some options only suit a raw prompt.
    raw = chat is not None or goes_on or others["heal"] or others["constrain_from"] is not None
    typed = (text or prompt_option) if folder and not (raw or as_json) else None
    if compare:
        loading.setdefault("cache_memory", 0)  # each turn reads its prompt
    lm = load_model(folder, session=session, chat="leave --chat out" if chat else None, **loading)
    if compare:
        if not print_comparison(lm, prompt, params, stats, as_json):
            sys.exit(1)
    elif several:
        output.samples(lm, prompt, params, stats, as_json)
        suggest_chat(lm, typed)
    else:
        with lm.session(context) as opened:
            if context:
                output.show_context(lm, context)
            if session and goes_on:
                opened.load(session)
            if prompt is not None:
                opened.chat_template_kwargs = variables or opened.chat_template_kwargs
                opened.append(prompt)
            # The session has rendered the chat, and heals by default.
            params = replace(params, heal=bool(params.heal), chat_template_kwargs=None)
            ended, before, whole = end_on_signals() if session else EndSignal(), len(opened), False
            try:
                interrupted = output.generate(lm, opened.stream(sampling=params), stats, as_json)
                whole = True
            finally:
                if session and (whole or len(opened) > before):
                    with ignore_signals():
                        opened.save(session)
        suggest_chat(lm, typed)
        exit_if_ended(ended)
        if interrupted:
            raise KeyboardInterrupt


def suggest_chat(lm: LanguageModel, prompt: str | None) -> None:
    """Name ``--chat`` on a terminal, if the model has a chat template and ``prompt`` doesn't look made with one."""
    if prompt and on_terminal() and not lm.tokenizer.has_special(prompt):
        with contextlib.suppress(OvspecError):  # there is no chat template
            _ = lm.runtime.prompts.chat_format
            told = "The prompt was continued as plain text: --chat asks it as a chat, --raw leaves this line out."
            click.secho(told, dim=True, err=True)


def split_arguments(arguments: tuple[str, ...], prompt_elsewhere: bool) -> tuple[Path | None, str | None]:
    """Return (DIR, PROMPT); a single argument that isn't a folder is the prompt, unless that was given elsewhere."""
    refuse_if(len(arguments) > 2, "Too many arguments; put the prompt in quotes.")
    if len(arguments) == 2:
        return Path(arguments[0]), arguments[1]
    if arguments and (prompt_elsewhere or Path(arguments[0]).is_dir() or looks_like_path(arguments[0])):
        return Path(arguments[0]), None
    return None, arguments[0] if arguments else None


def read_prompt(
    text: str | None, option: str | None, file: str | None, ids: str | None, needed: bool
) -> str | list[int] | None:
    """Return the prompt from where it was given, or else from stdin; None if there is none and none is ``needed``."""
    given = sum(value is not None for value in (text, option, file, ids))
    refuse_if(given > 1, "Give one prompt: the argument, --prompt, --file or --token-ids.")
    if ids is not None:
        try:
            return [int(part) for part in ids.replace(",", " ").split()]
        except ValueError:
            raise click.UsageError(f"--token-ids {ids}: not a list of numbers.") from None
    file = "-" if text == "-" else file
    if given and file is None:
        return option if text is None else text
    if not given and not needed and (sys.stdin.isatty() or sys.stdin.closed):
        return None
    refuse_if(not given and sys.stdin.isatty(), "No prompt; give it as an argument, with --file, or on stdin.")
    try:
        data = sys.stdin.buffer.read() if file in (None, "-") else Path(file).read_bytes()
    except OSError as error:
        raise click.UsageError(f"--file {file}: {error.strerror}.") from None
    try:
        prompt = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise click.UsageError("The prompt is not UTF-8 text.") from None
    prompt = re.sub(r"\r?\n\Z", "", prompt)  # which editors and programs add
    if file is None and not needed and not prompt:
        return None
    where = "stdin" if file in (None, "-") else f"--file {file}"
    refuse_if(not prompt, f"{where}: it is empty; give a prompt, or --prompt '' to start from nothing.")
    return prompt


def looks_like_path(text: str) -> bool:
    return not any(c.isspace() for c in text) and ("/" in text or "\\" in text)
