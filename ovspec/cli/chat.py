from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ovspec.base.errors import OvspecError
from ovspec.base.interrupts import EndSignal, end_on_signals, exit_if_ended, ignore_signals
from ovspec.cli.loading import load_model
from ovspec.cli.options import (
    CHAT_MAX_TOKENS,
    STATS,
    StatsCommand,
    check_grammar_option,
    context_option,
    generate_options,
    options_to_flags,
    refuse_no_tokens,
    session_option,
    split_options,
    stats_option,
)
from ovspec.cli.path_type import PATH
from ovspec.drafting.choice import EXPORTED_DRAFT, DraftChoice

if TYPE_CHECKING:
    from ovspec.api.session import Mark, Session
    from ovspec.engine.results import Result
    from ovspec.params import Params

QUOTES = '"""'  # around a message of several lines


@click.command(cls=StatsCommand)
@click.argument("folder", required=False, type=PATH, metavar="[DIR]")
@click.option("--system", metavar="TEXT", help="System message.")
@stats_option(
    "Print statistics on stderr after each answer: tokens, speed and acceptance, or everything with --stats full."
)
@session_option
@context_option
@generate_options
def chat(
    folder: Path | None, system: str | None, stats: str | None, session: Path | None, context: int | None, **others: Any
) -> None:
    """Chat with the model in DIR (by default the embedded demo pair).

    The chat stays in the KV cache, so each turn reads only what is new. A line is a message. For several lines,
    end each with a backslash or put three quotes (\"\"\") around them (on a terminal, Ctrl+O or Alt+Enter begins a new
    line; Windows' own takes Alt+Enter for itself).
    An empty line continues an answer that was cut off. Ctrl-C stops the answer and keeps the chat. An answer has up
    to 1024 tokens unless --max-tokens sets another limit, and is sampled as the model's generation config recommends;
    if that recommends nothing, or with --temperature 0, it is greedy. /help lists the commands: /reset, /undo,
    /system, /save, /load, /stats, /exit.

    \b
    Examples:
      ovspec chat my-pair --draft
      ovspec chat my-pair --draft lookup,draft --system "Be brief." --temperature 0.7
      ovspec chat my-pair --session monads.chat --context 2000
    """
    draft = others["draft"]
    named = draft.model if isinstance(draft, DraftChoice) and not draft.lookup else None
    if folder is None and isinstance(named, Path) and (named / EXPORTED_DRAFT).is_dir():
        # '--draft DIR': the option took what was meant as DIR.
        folder, others["draft"] = named, DraftChoice(model=EXPORTED_DRAFT)
    from ovspec.setup.model_folders import resolve_model_folder
    from ovspec.text.generation_config import format_sampling, read_recommended_sampling

    given = {name: value for name, value in others.items() if value is not None}
    recommended = read_recommended_sampling(resolve_model_folder(folder), given)
    loading, params = split_options({"max_tokens": CHAT_MAX_TOKENS} | given | recommended)
    refuse_no_tokens(params, "A chat")

    from ovspec.cli import output

    check_grammar_option(params)
    lm = load_model(folder, session=session, chat="continue a text with 'ovspec generate'", **loading)
    variables = params.chat_template_kwargs
    with lm.session(context, variables) as opened:
        if context:
            output.show_context(lm, context)
        if recommended:
            words = format_sampling(recommended)
            note(f"Sampling as the model recommends: {words}; --temperature 0 for greedy.")
        most = context or lm.target.ir.context_length
        talk = Conversation(opened, replace(params, chat_template_kwargs=None), stats, most, variables)
        if session and session.exists():
            load(talk, session)
        if system is not None:
            set_system(talk, system)
        talk.ended = end_on_signals()
        try:
            whole = run(talk, reader())
        finally:
            if session:
                with ignore_signals():
                    opened.save(session)
    exit_if_ended(talk.ended)
    if not whole and not at_terminal():
        sys.exit(1)


@dataclass
class Conversation:
    """A running chat."""

    session: Session
    params: Params
    stats: str | None
    context: int | None  # tokens that it may grow to
    variables: Mapping[str, Any] | None  # those of the chat template that were given, not loaded with a chat
    system: str | None = None  # sent with the user's first message, because templates may refuse it alone
    marks: list[Mark] = field(default_factory=list)  # the text before each of the messages that can be taken back
    last: Result | None = None
    ended: EndSignal = field(default_factory=EndSignal)  # whether a signal has ended it


def run(talk: Conversation, read: Callable[[], str]) -> bool:
    """Read and answer messages until the input ends; return whether all of them succeeded."""
    whole = True
    while not talk.ended.code:
        try:
            text = read()
        except EOFError:
            return whole
        except KeyboardInterrupt:
            if not talk.ended.code:
                note("Ctrl-D or /exit ends the chat.")
            continue
        name, _, argument = text.strip().partition(" ")
        try:
            if name in ("/exit", "/quit", "/bye"):
                return whole
            if text.startswith("/"):
                command(talk, name, argument.strip())
            elif text.strip():
                answer(talk, text)
            elif talk.last and talk.last.finish_reason in ("length", "cancelled"):
                say(talk)
        except OvspecError as error:
            whole = False
            click.secho(f"Error: {options_to_flags(error)}", fg="red", err=True)
        except KeyboardInterrupt:  # while a message was read or a command ran
            whole = False
    return whole


def answer(talk: Conversation, text: str) -> None:
    """Send a message and stream the answer; take the message back if there is no answer."""
    before = talk.session.mark()
    try:
        system = [] if talk.session.messages else with_system(talk.system, [])
        talk.session.append([*system, {"role": "user", "content": text}])
        say(talk)
    finally:
        answered = talk.session.messages[-1:] and talk.session.messages[-1]["role"] == "assistant"
        if answered:
            talk.marks.append(before)
        else:
            talk.session.rewind(before)
    if not answered:
        note("There is no answer yet; your message was taken back.")


@contextlib.contextmanager
def unchanged_on_error(session: Session) -> Iterator[Mark]:
    """Yield a mark of the session's text, and restore that text if an exception is raised."""
    before = session.mark()
    try:
        yield before
    except BaseException:
        session.rewind(before)
        session.chat_template_kwargs = before.chat_template_kwargs
        raise


def say(talk: Conversation) -> None:
    """Stream the answer, or more of it."""
    from ovspec.cli import output

    if talk.context and len(talk.session) >= talk.context:
        raise OvspecError(f"The context of {talk.context} tokens is full; use /undo or /reset to make room.")
    stream = talk.session.stream(sampling=talk.params)
    try:
        talk.last, _ = output.run(stream, show=True)
        click.echo()
    except OSError:  # the terminal is gone
        stream.cancel()
        talk.last, talk.ended.code = stream.result(), talk.ended.code or 1
        return
    if talk.last.finish_reason == "length":
        note(f"Cut off after {talk.last.stats.generated_tokens} tokens; send an empty line to continue.")
    if talk.stats:
        show_stats(talk, talk.stats)


# ---------------------------------------------------------------- commands


def command(talk: Conversation, name: str, argument: str) -> None:
    """Run the command of a line that begins with a slash."""
    if name not in COMMANDS:
        note(f"There is no command {name}; /help lists them. Put a space in front to send it as a message.")
        return
    wanted, _, does = COMMANDS[name]
    if argument and not wanted:
        note(f"{name} takes no argument.")
    elif wanted != "FILE":
        does(talk, argument)
    elif argument:
        does(talk, Path(argument.strip("\"'")).expanduser())  # the name may be in quotes
    else:
        note("Name a file.")


def reset(talk: Conversation, _: str = "") -> None:
    talk.session.reset()
    talk.marks, talk.last = [], None
    note("The chat starts over.")


def undo(talk: Conversation, _: str = "") -> None:
    messages = talk.session.messages
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not asked:
        note("There is nothing to take back.")
        return
    if talk.marks:
        talk.session.rewind(talk.marks.pop())
    else:
        begin_anew(talk, messages[: asked[-1]])
    talk.last = None
    note(f"Taken back: {messages[asked[-1]]['content']}")


def set_system(talk: Conversation, text: str) -> None:
    if not text:
        note(talk.system if talk.system is not None else "There is no system message.")
        return
    begin_anew(talk, with_system(text, talk.session.messages))
    talk.system = text


def save(talk: Conversation, path: Path) -> None:
    talk.session.save(path)
    note(f"Saved to {path}.")


def load(talk: Conversation, path: Path) -> None:
    with unchanged_on_error(talk.session):
        talk.session.load(path)
        talk.session.chat_template_kwargs = talk.variables or talk.session.chat_template_kwargs
        messages = talk.session.messages
        if len(talk.session) and not messages:
            raise OvspecError(f"{path}: not a chat; continue this text with 'ovspec generate --session'.")
    first = messages[0] if messages else {"role": "user"}
    talk.system = first["content"] if first["role"] == "system" else None
    talk.marks, talk.last = [], None
    note(f"{len(messages)} messages, {len(talk.session)} tokens.")


def show_stats(talk: Conversation, level: str) -> None:
    from ovspec.cli import output

    if level not in ("", *STATS):
        note("Use /stats or /stats full.")
        return
    if talk.last:
        output.show_stats(talk.last, level or "short")
    note(f"The chat has {len(talk.session)} tokens{f' of {talk.context}' if talk.context else ''}.")


def show_help(_: Conversation, __: str = "") -> None:
    for name, (wanted, help, _does) in COMMANDS.items():
        click.echo(f"{f'{name} {wanted}':<16}{help}", err=True)
    click.echo(f"{'/exit':<16}End the chat, as Ctrl-D does.", err=True)


# Name -> (its argument, help, function)
COMMANDS: dict[str, tuple[str, str, Callable[[Conversation, Any], None]]] = {
    "/help": ("", "List the commands.", show_help),
    "/reset": ("", "Forget the chat, except the system message.", reset),
    "/undo": ("", "Take your last message and its answer back.", undo),
    "/system": ("[TEXT]", "Set the system message of the whole chat, or show it.", set_system),
    "/save": ("FILE", "Save the chat and its KV cache to a file.", save),
    "/load": ("FILE", "Continue a chat that was saved.", load),
    "/stats": ("[full]", "Show the statistics of the last answer.", show_stats),
}


def with_system(system: str | None, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with ``system`` as their system message, or without one if it is None."""
    rest = messages[1:] if messages and messages[0]["role"] == "system" else messages
    return rest if system is None else [{"role": "system", "content": system}, *rest]


def begin_anew(talk: Conversation, messages: list[dict[str, Any]]) -> None:
    """Replace the chat with ``messages``; the beginning that both share stays in the KV cache."""
    from ovspec.api.session import EMPTY_TEXT

    with unchanged_on_error(talk.session):
        talk.session.rewind(EMPTY_TEXT)
        if any(message["role"] != "system" for message in messages):
            talk.session.append(messages)
    talk.marks, talk.last = [], None


def note(text: str) -> None:
    click.secho(text, dim=True, err=True)


# ---------------------------------------------------------------- what the user types


def reader() -> Callable[[], str]:
    """Return a function that reads the next message; it raises EOFError at the end and KeyboardInterrupt on Ctrl-C."""
    line = terminal() if at_terminal() else from_pipe
    return lambda: read_message(line)


def at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def read_message(line: Callable[[bool], str]) -> str:
    """Return the next message. ``line`` reads a line; its argument is whether that continues a message."""
    text = line(False)
    if text.lstrip().startswith(QUOTES):
        text = text.lstrip().removeprefix(QUOTES)
        while QUOTES not in text:
            text += "\n" + line(True)
        return text.partition(QUOTES)[0].strip("\n")
    while text.endswith("\\"):
        text = text[:-1] + "\n" + line(True)
    return text


def from_pipe(_: bool) -> str:
    # Not input(), which fails at the first character that the locale's encoding lacks.
    text = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not text:
        raise EOFError
    return text.decode("utf-8-sig", "replace").rstrip("\r\n")


def terminal() -> Callable[[bool], str]:
    """Return a function that reads a line with editing, and a history kept in the user's state folder."""
    import platformdirs
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("c-o")
    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk doesn't end the chat
                super().store_string(string)

    folder = Path(platformdirs.user_state_dir("ovspec", appauthor=False))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chat_history").touch(mode=0o600)
        history = History(str(folder / "chat_history"))
    except OSError:
        history = InMemoryHistory()
    # stdout may be redirected to a file; the prompt goes to the terminal all the same.
    session: PromptSession[str] = PromptSession(
        history=history, key_bindings=keys, output=create_output(always_prefer_tty=True)
    )
    return lambda goes_on: session.prompt("... " if goes_on else ">>> ")
