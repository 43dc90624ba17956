"""What commands share: options made from the declarations in ``ovspec.params``, and how they load a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

import click

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.progress import step
from ovspec.cli import in_flags
from ovspec.cli.path_type import FILE
from ovspec.drafting.choice import EXPORTED, DraftChoice, names_drafters, parse_draft
from ovspec.params import GENERATE, GRAMMARS, RECOMMENDED, make_params
from ovspec.params.loading import LOAD, RUNTIME
from ovspec.params.option import LARGEST, Option, alternatives, choices_of, is_repeatable

if TYPE_CHECKING:
    from ovspec.api.model import LanguageModel

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

# (command, option) -> the default that a command sets itself, in words.
CHAT_MAX_TOKENS = 1024
DEFAULTS = {("chat", name): usual for name, usual in {"max_tokens": str(CHAT_MAX_TOKENS), **RECOMMENDED}.items()}


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


def click_type(kind: Any, option: Option) -> click.ParamType:
    """Return the click type of one value."""
    if option.parse:
        return Parsed(option.parse, option.metavar or "TEXT")
    if choices := choices_of(kind):
        return click.Choice(choices)
    each = alternatives(kind)
    inner = [one.__args__[0] for one in each if get_origin(one)] or each
    if (limits := option.limits) and limits.least > -LARGEST and limits.special is None:
        most = limits.most if limits.most < LARGEST else None
        if float in inner:
            return click.FloatRange(limits.least, most, min_open=limits.above)
        return click.IntRange(int(limits.least), None if most is None else int(most))
    return click.INT if int in inner else click.FLOAT if float in inner else click.STRING


def click_option(name: str, kind: Any, option: Option) -> Decorator:
    """Return the command-line option of a declaration."""
    flags = option.flags or (f"--{name.replace('_', '-')}",)
    help = option.help + f"  [default: {option.initially}]" * bool(option.initially)
    if "/" in flags[0]:  # --yes/--no
        return click.option(*flags, name, default=None, help=help)
    if bool in alternatives(kind) and not option.parse:
        negated = flags[0].startswith("--no-")
        return click.option(*flags, name, is_flag=True, flag_value=not negated, default=None, help=help)
    more: dict[str, Any] = {}
    if is_repeatable(kind):
        made = merged if any(get_origin(each) is Mapping for each in alternatives(kind)) else list
        more = {"multiple": True, "callback": lambda ctx, param, values: made(values) or None}  # noqa: ARG005
        help += " May be repeated."
    return click.option(*flags, name, type=click_type(kind, option), metavar=option.metavar, help=help, **more)


def merged(values: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
    """Return one mapping of several; later values win."""
    return {name: value for each in values for name, value in each.items()}


def options_of(table: dict[str, tuple[Any, Option]]) -> Decorator:
    """Return a decorator that adds the options of a table to a command."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name, (kind, option) in reversed(table.items()):
            here = not option.commands or command.__name__ in option.commands
            option = replace(option, usual=DEFAULTS.get((command.__name__, name), option.usual))
            if option.flags != () and here:
                command = click_option(name, kind, option)(command)
        return command

    return decorate


def draft_or_text(text: str) -> DraftChoice | str:
    """Parse ``--draft``. A text that names no drafters is returned as it is: it was meant as the next argument."""
    return parse_draft(text) or DraftChoice() if names_drafters(text) else text


def in_a_folder(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:  # noqa: ARG001
    if file and not file.parent.is_dir():
        raise click.UsageError(f"--session {file}: there is no folder {file.parent}.")
    return file


runtime_options = options_of(RUNTIME)
target_options = options_of({name: entry for name, entry in RUNTIME.items() if name != "draft_device"})
draft_option = click.option(
    "--draft",
    type=Parsed(draft_or_text, "draft"),
    is_flag=False,
    flag_value=EXPORTED,
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
    return draft_option(options_of(GENERATE)(options_of(LOAD)(command)))


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


def refuse(wrong: Any, sentence: str) -> None:
    """Raise click.UsageError if something is ``wrong``."""
    if wrong:
        raise click.UsageError(sentence)


def text_in(file: str | Path) -> str:
    """Return the text in a file, or on stdin for -; raise an error that names it for no text."""
    if str(file) != "-":
        return read_text(Path(file))
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise click.UsageError("stdin: not UTF-8 text.") from None
    refuse(not text.strip(), "stdin: contains no text.")
    return text


def check_chat(chat: bool | None, system: str | None, heal: bool | None) -> None:
    """Raise click.UsageError for options that a chat or a raw prompt can't have."""
    refuse(system is not None and not chat, "--system needs --chat.")
    refuse(chat and heal, "--heal can't be combined with a chat: after a chat template there is nothing to heal.")


def split_options(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the given ``generate_options`` as keywords (for ``load``, for ``generate``)."""
    given = {name: value for name, value in values.items() if value is not None}
    if isinstance(draft := given.get("draft"), str):
        raise click.UsageError(
            f"--draft {draft}: no such folder; name the folder of a draft, lookup, head, self or none."
        )
    options = {name: value for name, value in given.items() if name in GENERATE}
    loading = {name: value for name, value in given.items() if name not in GENERATE}
    try:
        params = make_params(options)  # type: ignore[arg-type]
    except OvspecError as error:
        raise click.UsageError(in_flags(error)) from None
    refuse(params.accept == "rejection" and not params.temperature, "--accept rejection needs a --temperature above 0.")
    proposes = params.grammar_option or draft or (draft is None and given.get("arithmetic") != "fast")
    alone = params.lookahead is not None and not proposes
    refuse(alone, "--lookahead needs --draft, or a grammar, whose forced tokens are proposed.")
    return loading, options


def refuse_no_tokens(options: Mapping[str, Any], what: str) -> None:
    """Raise click.UsageError if only the prompt would be read, where that is of no use."""
    refuse(options.get("max_tokens") == 0, f"{what} needs a --max-tokens of at least 1, or -1: 0 only reads a prompt.")


def check_grammar(options: Mapping[str, Any]) -> None:
    """Raise OvspecError for a grammar that no model could use."""
    if options.keys() & {*GRAMMARS}:
        from ovspec.sampling.constraint_maker import grammar_of

        grammar_of(make_params(options))  # type: ignore[arg-type]


def load(
    folder: Path | None, *draft: Any, session: Path | None = None, chat: str | None = None, **options: Any
) -> LanguageModel:
    """Return ``ovspec.load(folder, *draft, **options)``; refuse a wrong session or a missing chat template first.

    chat: what to do for a model without a template, if there is to be a chat.
    """
    with step(f"{folder or 'demo pair'}: loading"):
        import ovspec
        from ovspec.api.session_file import check_session
        from ovspec.setup.folders import model_folder
        from ovspec.text.chat_template import chat_template, templates_in

        if session and session.exists():
            check_session(session, model_folder(folder))
        if chat and "chat_template" not in options:
            if not templates_in(model_folder(folder)):
                told = f"{folder}: a base model, which has no chat template; {chat}, or name a `chat_template`."
                raise OvspecError(told)
            chat_template(model_folder(folder))
        return ovspec.load(folder, *draft, **options)
