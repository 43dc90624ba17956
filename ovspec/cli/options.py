"""The options that commands share, made of the declarations in ``ovspec.params``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_origin

import click
from click.shell_completion import CompletionItem

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.cli import options_to_flags
from ovspec.cli.path_type import FILE
from ovspec.drafting.choice import EXPORTED_DRAFT, DraftChoice, names_known_drafters, parse_draft
from ovspec.params import Params, make_params
from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.limits import ANY_NUMBER
from ovspec.params.loading import LOAD_OPTIONS, RUNTIME_OPTIONS
from ovspec.params.option import Option, is_collection_type, literal_values, union_members
from ovspec.params.sampling import RECOMMENDED_DEFAULT_TEXTS
from ovspec.params.values import describe_problem, element_type, parse_number_or_text

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

NUMBERS = {int: "integer", float: "float"}  # click's names
# (command, option) -> the default that a command sets itself, in words.
CHAT_MAX_TOKENS = 1024
DEFAULTS = {
    ("chat", name): usual for name, usual in {"max_tokens": str(CHAT_MAX_TOKENS), **RECOMMENDED_DEFAULT_TEXTS}.items()
}


class Parsed(click.ParamType):
    """A parameter whose text a function parses."""

    def __init__(self, parse: Callable[[str], Any], name: str) -> None:
        self.parse, self.name = parse, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class OptionValue(click.ParamType):
    """One value of a declared option, which is checked as in Python."""

    def __init__(self, option: Option) -> None:
        self._option, self._kind = option, element_type(option.kind)
        self.name = next((name for number, name in NUMBERS.items() if number in union_members(self._kind)), "text")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            value = self._option.parse(value) if self._option.parse else parse_number_or_text(value, self._kind)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if wrong := describe_problem(value, self._kind, self._option.limits):
            flag = max(param.opts, key=len) if param else self._option.name
            raise click.UsageError(f"{flag} {wrong}.", ctx)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        return [CompletionItem(choice) for choice in literal_values(self._kind) if choice.startswith(incomplete)]


def click_option(option: Option) -> Decorator:
    """Return the command-line option of a declaration."""
    name, kind = option.name, option.kind
    flags = option.flags or (f"--{name.replace('_', '-')}",)
    notes = [f"default: {option.default_in_words}"] if option.default_in_words else []
    notes += [option.limits.words] if option.limits and option.limits != ANY_NUMBER else []
    help = "  ".join([option.help, *(f"[{note}]" for note in notes)])
    if "/" in flags[0]:  # --yes/--no
        return click.option(*flags, name, default=None, help=help)
    if bool in union_members(kind) and not option.parse:
        negated = flags[0].startswith("--no-")
        return click.option(*flags, name, is_flag=True, flag_value=not negated, default=None, help=help)
    more: dict[str, Any] = {}
    if is_collection_type(kind):
        collect = merged if any(get_origin(member) is Mapping for member in union_members(kind)) else list
        more = {"multiple": True, "callback": lambda ctx, param, values: collect(values) or None}  # noqa: ARG005
        help += " May be repeated."
    choices = literal_values(kind)
    metavar = option.metavar or (f"[{'|'.join(choices)}]" if choices else None)
    return click.option(*flags, name, type=OptionValue(option), metavar=metavar, help=help, **more)


def merged(values: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return one mapping of several; later values win."""
    return {name: value for each in values for name, value in each.items()}


def add_options(table: Mapping[str, Option]) -> Decorator:
    """Return a decorator that adds the options of a table to a command."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, option in reversed([*table.items()]):
            if option.flags != () and (not option.commands or command.__name__ in option.commands):
                usual = DEFAULTS.get((command.__name__, name), option.usual)
                command = click_option(replace(option, usual=usual))(command)
        return command

    return decorate


def draft_or_text(text: str) -> DraftChoice | str:
    """Parse ``--draft``. A text that names no drafters is returned as it is: it was meant as the next argument."""
    return parse_draft(text) or DraftChoice() if names_known_drafters(text) else text


def in_a_folder(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:  # noqa: ARG001
    if file and not file.parent.is_dir():
        raise click.UsageError(f"--session {file}: there is no folder {file.parent}.")
    return file


runtime_options = add_options(RUNTIME_OPTIONS)
target_options = add_options({name: entry for name, entry in RUNTIME_OPTIONS.items() if name != "draft_device"})
draft_option = click.option(
    "--draft",
    type=Parsed(draft_or_text, "draft"),
    is_flag=False,
    flag_value=EXPORTED_DRAFT,
    metavar="[DRAFT]",
    help="Speculate with the draft in DIR, or with DRAFT: the folder of a draft model or of an EAGLE-3 head; head (a "
    "head in DIR); self (a draft in DIR that --draft-layers made); lookup (what followed the last tokens earlier in "
    "the text); lookup,draft or lookup,FOLDER (the model where lookup finds nothing good); or none.  [default: lookup "
    "where a guess costs nothing, which the first load measures (exact arithmetic, paged engine); otherwise none]",
)
session_option = click.option(
    "--session",
    type=FILE,
    callback=in_a_folder,
    metavar="FILE",
    help="Continue the text or chat in FILE, if that exists; at the end, write it to FILE with its KV cache.",
)
context_option = click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Limit for prompt and text together, in tokens; prints the memory that its KV cache takes.  "
    "[default: the model's]",
)
chat_option = click.option(
    "--chat/--raw",
    default=None,
    help="Put the prompt into the model's chat template, or take it as it is.  [default: raw]",
)
system_option = click.option("--system", metavar="TEXT", help="System message; needs --chat.")


def generate_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a generating command: the draft, the text, and how the model runs."""
    return draft_option(add_options(GENERATE_OPTIONS)(add_options(LOAD_OPTIONS)(command)))


STATS = ("short", "full")


def stats_option(help: str) -> Decorator:
    """Return the option ``--stats [short|full]``, short without a value; its command must be a ``StatsCommand``."""
    kind = click.Choice(STATS)
    return click.option("--stats", type=kind, is_flag=False, flag_value=STATS[0], metavar="[full]", help=help)


class StatsCommand(click.Command):
    """A command whose ``--stats`` takes only its own values, not the argument that follows it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_value(args, "--stats", STATS[0], STATS.__contains__))


def with_value(args: list[str], flag: str, usual: str, takes: Callable[[str], bool]) -> list[str]:
    """Return ``args`` in which ``flag`` has the value ``usual`` unless it ``takes`` the argument that follows it."""
    options = args[: args.index("--")] if "--" in args else args
    whole = [
        f"{flag}={usual}" if arg == flag and not takes(after) else arg
        for arg, after in zip(options, [*options[1:], ""], strict=True)
    ]
    return [*whole, *args[len(options) :]]


def refuse_if(wrong: Any, sentence: str) -> None:
    """Raise click.UsageError if something is ``wrong``."""
    if wrong:
        raise click.UsageError(sentence)


def read_text_or_stdin(file: str | Path) -> str:
    """Return the text in a file, or on stdin for -; raise an error that names it for no text."""
    if str(file) != "-":
        return read_text(Path(file))
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise click.UsageError("stdin: not UTF-8 text.") from None
    refuse_if(not text.strip(), "stdin: contains no text.")
    return text


def check_chat_options(chat: bool | None, system: str | None, heal: bool | None) -> None:
    """Raise click.UsageError for options that a chat or a raw prompt can't have."""
    refuse_if(system is not None and not chat, "--system needs --chat.")
    refuse_if(chat and heal, "--heal can't be combined with a chat: after a chat template there is nothing to heal.")


def split_options(values: Mapping[str, Any]) -> tuple[dict[str, Any], Params]:
    """Return the given ``generate_options`` as (keywords for ``load``, params for ``generate``)."""
    given = {name: value for name, value in values.items() if value is not None}
    if isinstance(draft := given.get("draft"), str):
        raise click.UsageError(
            f"--draft {draft}: no such folder; name the folder of a draft, lookup, head, self or none."
        )
    loading = {name: value for name, value in given.items() if name not in GENERATE_OPTIONS}
    try:
        params = make_params({name: value for name, value in given.items() if name in GENERATE_OPTIONS})
    except OvspecError as error:
        raise click.UsageError(options_to_flags(error)) from None
    refuse_if(
        params.accept == "rejection" and not params.temperature, "--accept rejection needs a --temperature above 0."
    )
    proposes = params.grammar_option or draft or (draft is None and given.get("arithmetic") != "fast")
    alone = params.lookahead is not None and not proposes
    refuse_if(alone, "--lookahead needs --draft, or a grammar, whose forced tokens are proposed.")
    return loading, params


def refuse_no_tokens(params: Params, command: str) -> None:
    """Raise click.UsageError if only the prompt would be read, where that is of no use."""
    refuse_if(params.max_tokens == 0, f"{command} needs a --max-tokens of at least 1, or -1: 0 only reads a prompt.")


def check_grammar_option(params: Params) -> None:
    """Raise OvspecError for a grammar that no model could use."""
    if params.grammar_option:
        from ovspec.sampling.grammar_options import convert_requested_grammar

        convert_requested_grammar(params)
