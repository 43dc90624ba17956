from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ovspec.base.errors import OvspecError
from ovspec.base.interrupts import EndSignal, end_on_signals, exit_if_ended, ignore_signals
from ovspec.base.progress import on_terminal
from ovspec.cli.loading import load_model
from ovspec.cli.options import (
    StatsCommand,
    add_generate_options,
    chat_option,
    check_chat_options,
    check_grammar_option,
    context_option,
    make_stats_option,
    raise_usage_error_if,
    refuse_zero_max_tokens,
    session_option,
    split_load_and_generate_options,
    system_option,
)
from ovspec.drafting.choice import EXPORTED_DRAFT, DraftChoice
from ovspec.params.option import OptionValue

if TYPE_CHECKING:
    from ovspec.api.model import LanguageModel
    from ovspec.params import Params


@click.command(cls=StatsCommand)
@click.argument("arguments", nargs=-1, metavar="[MODEL] [PROMPT]")
@click.option(
    "-p", "--prompt", "prompt_option", metavar="TEXT", help="The prompt, if PROMPT could be mistaken for MODEL."
)
@click.option(
    "-f",
    "--file",
    "prompt_file",
    metavar="FILE",
    help="Read the prompt from FILE, without the final newline; - is stdin.",
)
@click.option(
    "--token-ids", metavar="IDS", help="The prompt as token ids, separated by commas or spaces; no BOS is added."
)
@chat_option
@system_option
@click.option("--prefill", metavar="TEXT", help="Beginning of the answer, to be continued; not printed. Needs --chat.")
@make_stats_option("Print statistics on stderr: tokens, speed and acceptance rate; --stats full prints everything.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
@click.option(
    "--compare",
    is_flag=True,
    help="Generate with and without --draft (by default the draft exported with MODEL), at least five times each. "
    "Prints both texts, whether they are equal (if not, the exit code is 1), and the median speed-up with its range.",
)
@session_option
@context_option
@add_generate_options
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
    **options: OptionValue,
) -> None:
    """Continue PROMPT with MODEL (by default the embedded demo pair).

    The prompt comes from PROMPT, --prompt, --file, --token-ids or stdin. If PROMPT is -, it is read from stdin,
    without its final newline. A single argument is MODEL if it is a folder or looks like a path or a hub id. Text
    goes to stdout, statistics to stderr. --max-tokens 0 only prefills the prompt, for example into a --session file.

    \b
    Examples:
      ovspec generate "def fib("
      ovspec generate my-pair "import os" --draft --stats
      ovspec generate my-pair "Once upon" --draft lookup,draft --temperature 0.8 --top-p 0.95 --seed 1
      ovspec generate my-pair "Tom is 7: " --json-schema schema.json --draft
      git diff | ovspec generate my-pair - --draft --compare
      ovspec generate my-pair "It was" --session story.ov && ovspec generate my-pair --session story.ov
    """
    draft = options["draft"]
    has_prompt_option = bool(prompt_option or prompt_file or token_ids)
    draft_is_prompt = isinstance(draft, str) and not (has_prompt_option or len(arguments) > 1 or looks_like_path(draft))
    if draft_is_prompt:  # '--draft "def f("': the option took the prompt
        arguments = (*arguments, draft)
    if draft_is_prompt or (compare and draft is None):
        draft = options["draft"] = DraftChoice(model=EXPORTED_DRAFT)
    model, prompt_argument = split_model_and_prompt(arguments, has_prompt_option)
    continues_session = session is not None and session.exists()
    check_chat_options(chat, system, options["heal"])
    raise_usage_error_if(
        system is not None and continues_session,
        "--system can't change a saved chat; leave --system out, or choose another --session.",
    )
    raise_usage_error_if(prefill is not None and not chat, "--prefill needs --chat.")
    raise_usage_error_if(
        chat and token_ids is not None, "--chat can't be combined with --token-ids; give the message as text."
    )
    load_options, params = split_load_and_generate_options(options)
    raise_usage_error_if("chat_template" in load_options and not chat, "--chat-template needs --chat.")
    raise_usage_error_if(params.logprobs is not None and not as_json, "--logprobs needs --json.")
    several_texts = params.n > 1 or params.retries
    if compare:
        raise_usage_error_if(not draft, "--compare needs a draft; leave out --draft none.")
        check_comparable(params)
    flag = "--session" if session else "--context"
    raise_usage_error_if((session or context) and compare, f"{flag} can't be combined with --compare; leave one out.")
    raise_usage_error_if(
        (session or context) and several_texts,
        f"{flag} works only for a single text; leave out --samples and --retries.",
    )

    from ovspec.cli import output
    from ovspec.cli.compare import print_comparison
    from ovspec.setup.exporting import find_or_export_model

    check_grammar_option(params)
    weight_format = load_options.pop("weight_format", None)
    # Refuse a folder without a model before reading the prompt.
    folder, load_options["draft"] = find_or_export_model(model, load_options.get("draft"), weight_format)
    prompt = read_prompt(prompt_argument, prompt_option, prompt_file, token_ids, is_needed=not continues_session)
    raise_usage_error_if(
        prefill is not None and prompt is None, "--prefill begins the answer to a prompt; add a prompt."
    )
    template_variables = params.chat_template_kwargs
    raise_usage_error_if(
        template_variables is not None and prompt is None,
        "--chat-template-kwargs needs a prompt to put into the template; add a prompt.",
    )
    if chat and prompt is not None:
        chat_turns = (("system", system), ("user", prompt), ("assistant", prefill))
        prompt = [{"role": role, "content": content} for role, content in chat_turns if content is not None]
    # --chat is suggested for typed questions: not for the demo pair, which continues code, nor with options for raw
    # prompts.
    is_raw_prompt = chat is not None or continues_session or options["heal"] or options["constrain_from"] is not None
    typed_prompt = (prompt_argument or prompt_option) if model and not (is_raw_prompt or as_json) else None
    if compare:
        load_options.setdefault("cache_memory", 0)  # each turn reads its prompt
    lm = load_model(folder, session=session, chat_remedy="leave out --chat" if chat else None, **load_options)
    if compare:
        assert prompt is not None  # only --session allows None
        if not print_comparison(lm, prompt, params, stats, as_json):
            sys.exit(1)
    elif several_texts:
        assert prompt is not None
        output.print_samples(lm, prompt, params, stats, as_json)
        suggest_chat_flag(lm, typed_prompt)
    else:
        with lm.session(context) as lm_session:
            if context:
                output.print_context_memory(lm, context)
            if session and continues_session:
                lm_session.load(session)
            if prompt is not None:
                lm_session.chat_template_kwargs = template_variables or lm_session.chat_template_kwargs
                lm_session.append(prompt)
            # The session has already rendered the chat; it heals by default.
            params = replace(params, heal=bool(params.heal), chat_template_kwargs=None)
            end_signal = end_on_signals() if session else EndSignal()
            session_length_before = len(lm_session)
            has_completed = False
            try:
                interrupted = output.print_stream(lm, lm_session.stream(sampling=params), stats, as_json)
                has_completed = True
            finally:
                if session and (has_completed or len(lm_session) > session_length_before):
                    with ignore_signals():
                        lm_session.save(session)
        suggest_chat_flag(lm, typed_prompt)
        exit_if_ended(end_signal)
        if interrupted:
            raise KeyboardInterrupt


def check_comparable(params: Params) -> None:
    """Raise click.UsageError for options incompatible with ``--compare``."""
    is_rejection = params.accept == "rejection"
    raise_usage_error_if(
        is_rejection,
        "--compare can't be combined with --accept rejection, because rejection sampling changes the "
        "text; leave out --accept.",
    )
    raise_usage_error_if(params.lookahead == 0, "--compare needs a --lookahead of at least 1.")
    raise_usage_error_if(
        params.n > 1 or params.retries, "--compare works only for a single text; leave out --samples and --retries."
    )
    refuse_zero_max_tokens(params, "--compare")


def suggest_chat_flag(lm: LanguageModel, prompt: str | None) -> None:
    """Suggest ``--chat`` on a terminal, if the model has a chat template and ``prompt`` looks like plain text."""
    if prompt and on_terminal() and not lm.tokenizer.contains_special_name(prompt):
        with contextlib.suppress(OvspecError):  # there is no chat template
            _ = lm.runtime.prompt_encoder.chat_format
            chat_hint = (
                "The prompt was continued as plain text; --chat sends it as a chat message, --raw hides this note."
            )
            click.secho(chat_hint, dim=True, err=True)


def split_model_and_prompt(arguments: tuple[str, ...], has_prompt_option: bool) -> tuple[str | None, str | None]:
    """Return (MODEL, PROMPT); a single argument is the prompt unless it looks like a path or an option sets one."""
    raise_usage_error_if(len(arguments) > 2, "Too many arguments; put the prompt in quotes.")
    if not arguments:
        return None, None
    if len(arguments) == 2:
        return arguments[0], arguments[1]
    [argument] = arguments
    if has_prompt_option or Path(argument).is_dir() or looks_like_path(argument):
        return argument, None
    return None, argument


def read_prompt(
    prompt_argument: str | None,
    prompt_option: str | None,
    prompt_file: str | None,
    token_ids_text: str | None,
    is_needed: bool,
) -> str | list[int] | None:
    """Return the prompt from its argument or option, or else from stdin; None if it is missing and not ``is_needed``.

    prompt_argument: the argument PROMPT.
    prompt_option, prompt_file, token_ids_text: the values of ``--prompt``, ``--file`` and ``--token-ids``.
    """
    source_count = sum(source is not None for source in (prompt_argument, prompt_option, prompt_file, token_ids_text))
    raise_usage_error_if(source_count > 1, "Too many prompts; give a single PROMPT, --prompt, --file or --token-ids.")
    if token_ids_text is not None:
        try:
            return [int(number) for number in token_ids_text.replace(",", " ").split()]
        except ValueError:
            raise click.UsageError(f"--token-ids {token_ids_text}: not a list of numbers, such as 1,2,3.") from None
    if prompt_argument == "-":
        prompt_file = "-"
    if source_count and prompt_file is None:
        return prompt_option if prompt_argument is None else prompt_argument
    if not source_count and not is_needed and (sys.stdin.isatty() or sys.stdin.closed):
        return None
    raise_usage_error_if(
        not source_count and sys.stdin.isatty(), "No prompt; give a prompt as an argument, with --file, or on stdin."
    )
    try:
        prompt_bytes = sys.stdin.buffer.read() if prompt_file in (None, "-") else Path(prompt_file).read_bytes()
    except OSError as error:
        raise click.UsageError(f"--file {prompt_file}: {error.strerror}.") from None
    try:
        prompt = prompt_bytes.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise click.UsageError("The prompt is not UTF-8 text; convert the prompt to UTF-8.") from None
    prompt = re.sub(r"\r?\n\Z", "", prompt)  # which editors and programs add
    if prompt_file is None and not is_needed and not prompt:
        return None
    source = "stdin" if prompt_file in (None, "-") else f"--file {prompt_file}"
    raise_usage_error_if(not prompt, f"{source}: empty; give a prompt, or --prompt '' to generate without a prompt.")
    return prompt


def looks_like_path(text: str) -> bool:
    """Return whether ``text`` has a slash and no spaces, or is the name of a GGUF file."""
    has_spaces = any(character.isspace() for character in text)
    return not has_spaces and ("/" in text or "\\" in text or text.lower().endswith(".gguf"))
