"""The shared options of commands, made from the declarations in ``ovspec.params``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, get_origin

import click
from click.shell_completion import CompletionItem

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.cli import replace_option_names_by_flags
from ovspec.cli.path_type import FILE_TYPE
from ovspec.drafting.choice import EXPORTED_DRAFT, DraftChoice, is_chain_of_known_drafters, parse_draft
from ovspec.params import Params, make_params
from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.limits import ANY_NUMBER
from ovspec.params.loading import LOAD_OPTIONS, RUNTIME_OPTIONS
from ovspec.params.option import Option, OptionValue, is_collection_type, literal_values, union_members
from ovspec.params.sampling import LONG_DEFAULT_TEXT, RECOMMENDED_DEFAULT_TEXTS
from ovspec.params.values import describe_value_problem, parse_number_or_text, single_value_type

CommandFunction: TypeAlias = Callable[..., None]
CommandDecorator: TypeAlias = Callable[[CommandFunction], CommandFunction]

CLICK_NUMBER_TYPES = {int: "integer", float: "float"}
CHAT_MAX_TOKENS = 1024
CHAT_DEFAULT_TEXTS = {"max_tokens": str(CHAT_MAX_TOKENS), **RECOMMENDED_DEFAULT_TEXTS}
# (command, option) -> the command's own default, in words.
COMMAND_DEFAULT_TEXTS = {("chat", option): default_text for option, default_text in CHAT_DEFAULT_TEXTS.items()}
COMMAND_DEFAULT_TEXTS["batch", "max_tokens"] = LONG_DEFAULT_TEXT


class ParsedType(click.ParamType):
    """A parameter with a parser function."""

    def __init__(self, parse: Callable[[str], OptionValue], name: str) -> None:
        self.parse = parse
        self.name = name

    def convert(self, value: OptionValue, param: click.Parameter | None, ctx: click.Context | None) -> OptionValue:
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class OptionType(click.ParamType):
    """A single value of a declared option, checked as in Python."""

    def __init__(self, option: Option) -> None:
        self._option = option
        self._value_type = single_value_type(option.value_type)
        self._parse = option.parse or (lambda text: parse_number_or_text(text, self._value_type))
        member_types = union_members(self._value_type)
        self.name = next(
            (type_name for number, type_name in CLICK_NUMBER_TYPES.items() if number in member_types), "text"
        )

    def convert(self, value: OptionValue, param: click.Parameter | None, ctx: click.Context | None) -> OptionValue:
        if not isinstance(value, str):
            return value
        try:
            value = self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if problem := describe_value_problem(value, self._value_type, self._option.limits):
            flag = max(param.opts, key=len) if param else self._option.name
            raise click.UsageError(f"{flag} {problem}.", ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        return [CompletionItem(choice) for choice in literal_values(self._value_type) if choice.startswith(incomplete)]


def make_click_option(option: Option) -> CommandDecorator:
    """Return the command-line option of a declaration."""
    name = option.name
    value_type = option.value_type
    flags = option.flags or (f"--{name.replace('_', '-')}",)
    help_notes = []
    if option.default_text:
        help_notes.append(f"default: {option.default_text}")
    if option.limits and option.limits != ANY_NUMBER:
        help_notes.append(option.limits.description)
    help_text = "  ".join([option.help, *(f"[{note}]" for note in help_notes)])
    if "/" in flags[0]:  # --yes/--no
        return click.option(*flags, name, default=None, help=help_text)
    if bool in union_members(value_type) and not option.parse:
        is_negated = flags[0].startswith("--no-")
        return click.option(*flags, name, is_flag=True, flag_value=not is_negated, default=None, help=help_text)
    metavar = option.metavar
    if not metavar and (choices := literal_values(value_type)):
        metavar = f"[{'|'.join(choices)}]"
    if not is_collection_type(value_type):
        return click.option(*flags, name, type=OptionType(option), metavar=metavar, help=help_text)
    collect_values = (
        merge_mappings if any(get_origin(member_type) is Mapping for member_type in union_members(value_type)) else list
    )
    return click.option(
        *flags,
        name,
        type=OptionType(option),
        metavar=metavar,
        help=help_text + " May be repeated.",
        multiple=True,
        callback=lambda ctx, param, values: collect_values(values) or None,  # noqa: ARG005
    )


def merge_mappings(mappings: Sequence[Mapping[str, OptionValue]]) -> dict[str, OptionValue]:
    """Merge several mappings; later values win."""
    return {name: value for mapping in mappings for name, value in mapping.items()}


def add_options(options: Mapping[str, Option]) -> CommandDecorator:
    """Return a decorator that adds options to a command."""

    def add_to_command(command: CommandFunction) -> CommandFunction:
        for name, option in reversed([*options.items()]):
            if option.flags != () and (not option.commands or command.__name__ in option.commands):
                default_meaning = COMMAND_DEFAULT_TEXTS.get((command.__name__, name), option.default_meaning)
                command = make_click_option(replace(option, default_meaning=default_meaning))(command)
        return command

    return add_to_command


def parse_draft_or_text(text: str) -> DraftChoice | str:
    """Parse ``--draft``. Text other than drafters is returned unchanged: it is really the next argument."""
    if is_chain_of_known_drafters(text):
        return parse_draft(text) or DraftChoice()
    return text


def check_session_folder(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:  # noqa: ARG001
    if file and not file.parent.is_dir():
        raise click.UsageError(f"--session {file}: there is no folder {file.parent}; create the folder first.")
    return file


runtime_options = add_options(RUNTIME_OPTIONS)
target_options = add_options({name: option for name, option in RUNTIME_OPTIONS.items() if name != "draft_device"})
draft_option = click.option(
    "--draft",
    type=ParsedType(parse_draft_or_text, "draft"),
    is_flag=False,
    flag_value=EXPORTED_DRAFT,
    metavar="[DRAFT]",
    help="Speculative decoding with DRAFT. Without a value: the draft exported with MODEL, or a known draft for it. "
    "DRAFT is a draft model or head (a folder, GGUF file or hub id); draft (the draft exported with MODEL); head, mtp "
    "or self (the same, but only an EAGLE-3 head, an MTP layer, or MODEL's first layers); lookup (prompt lookup: find "
    "the last tokens earlier in prompt and text, and propose the tokens after them); lookup,DRAFT (DRAFT proposes if "
    "lookup finds nothing good); or none.  [default: lookup if its proposals cost no time, as measured at the first "
    "load; otherwise none]",
)
session_option = click.option(
    "--session",
    type=FILE_TYPE,
    callback=check_session_folder,
    metavar="FILE",
    help="Continue the text or chat in FILE, if it exists; at the end, save the session with its KV cache to FILE.",
)
context_option = click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Context length: limit for prompt and text together, in tokens. Also prints the size of its KV cache.  "
    "[default: the model's]",
)
chat_option = click.option(
    "--chat/--raw",
    default=None,
    help="Apply the model's chat template to the prompt, or use the prompt unchanged.  [default: raw]",
)
system_option = click.option("--system", metavar="TEXT", help="System message; needs --chat.")


def add_generate_options(command: CommandFunction) -> CommandFunction:
    """Add the options of a generating command: the draft, the text, and how the model runs."""
    return draft_option(add_options(GENERATE_OPTIONS)(add_options(LOAD_OPTIONS)(command)))


STATS_LEVELS = ("short", "full")


def make_stats_option(help_text: str) -> CommandDecorator:
    """Return the option ``--stats [short|full]``, short without a value; its command must be a ``StatsCommand``."""
    level_type = click.Choice(STATS_LEVELS)
    return click.option("--stats", type=level_type, is_flag=False, flag_value="short", metavar="[full]", help=help_text)


class StatsCommand(click.Command):
    """A command with an optional value after ``--stats``: any other argument there is left alone."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, fill_missing_flag_value(args, "--stats", "short", STATS_LEVELS.__contains__))


def fill_missing_flag_value(
    args: list[str], flag: str, default_value: str, is_value: Callable[[str], bool]
) -> list[str]:
    """Return ``args`` with the value ``default_value`` for ``flag``, unless a value follows it."""
    filled_args = args.copy()
    for arg_index, arg in enumerate(args):
        if arg == "--":
            break
        has_value = any(map(is_value, args[arg_index + 1 : arg_index + 2]))
        if arg == flag and not has_value:
            filled_args[arg_index] = f"{flag}={default_value}"
    return filled_args


def raise_usage_error_if(condition: object, message: str) -> None:
    """Raise click.UsageError if a condition holds."""
    if condition:
        raise click.UsageError(message)


def read_text_or_stdin(file: str | Path) -> str:
    """Return the text in a file, or on stdin for -; raise an error with the name of an empty file."""
    if str(file) != "-":
        return read_text(Path(file))
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise click.UsageError("stdin: not UTF-8 text; convert the text to UTF-8.") from None
    raise_usage_error_if(not text.strip(), "stdin: contains no text; give text.")
    return text


def check_chat_options(chat: bool | None, system: str | None, heal: bool | None) -> None:
    """Raise click.UsageError for options without a use in a chat or with a raw prompt."""
    raise_usage_error_if(system is not None and not chat, "--system needs --chat.")
    raise_usage_error_if(
        chat and heal,
        "--heal can't be combined with a chat: the chat template ends at a token boundary; leave out --heal.",
    )


def take_model_from_draft_option(options: dict[str, OptionValue]) -> str | None:
    """Return what was meant as MODEL where '--draft DIR' took it, and set the draft in it; None otherwise."""
    draft = options["draft"]
    draft_folder = draft.model if isinstance(draft, DraftChoice) and not draft.lookup else None
    if not isinstance(draft_folder, Path) or not (draft_folder / EXPORTED_DRAFT).is_dir():
        return None
    options["draft"] = DraftChoice(model=EXPORTED_DRAFT)
    return str(draft_folder)


def check_draft_option(draft: OptionValue) -> None:
    """Raise click.UsageError if ``--draft`` names no drafters."""
    if isinstance(draft, str):
        raise click.UsageError(
            f"--draft {draft}: no such folder; give the folder of a draft model or head, or lookup, "
            "mtp, head, self or none."
        )


def split_load_and_generate_options(values: Mapping[str, OptionValue]) -> tuple[dict[str, OptionValue], Params]:
    """Return the passed options of ``add_generate_options`` as (keywords for ``load``, params for ``generate``)."""
    passed_options = {option: value for option, value in values.items() if value is not None}
    draft = passed_options.get("draft")
    check_draft_option(draft)
    load_options = {option: value for option, value in passed_options.items() if option not in GENERATE_OPTIONS}
    try:
        params = make_params({option: value for option, value in passed_options.items() if option in GENERATE_OPTIONS})
    except OvspecError as error:
        raise click.UsageError(replace_option_names_by_flags(error)) from None
    greedy_rejection = params.accept == "rejection" and not params.temperature
    raise_usage_error_if(greedy_rejection, "--accept rejection needs a --temperature above 0.")
    may_propose = params.grammar_option or draft or (draft is None and passed_options.get("arithmetic") != "fast")
    useless_lookahead = params.lookahead is not None and not may_propose
    raise_usage_error_if(useless_lookahead, "--lookahead needs a source of proposals; add --draft or a grammar.")
    return load_options, params


def refuse_zero_max_tokens(params: Params, command: str) -> None:
    """Raise click.UsageError for a limit of 0 tokens: reading only the prompt is useless in ``command``."""
    raise_usage_error_if(
        params.max_tokens == 0, f"{command} needs a --max-tokens of at least 1, or -1: 0 only runs prefill."
    )


def check_grammar_option(params: Params) -> None:
    """Raise OvspecError for an invalid grammar, before a model is loaded."""
    if params.grammar_option:
        from ovspec.sampling.grammar_options import convert_requested_grammar

        convert_requested_grammar(params)
