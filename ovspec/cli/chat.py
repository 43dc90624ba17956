from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ovspec.base.errors import OvspecError
from ovspec.base.interrupts import EndSignal, end_on_signals, exit_if_ended, ignore_signals
from ovspec.cli.loading import load_model
from ovspec.cli.options import (
    CHAT_MAX_TOKENS,
    STATS_LEVELS,
    StatsCommand,
    add_generate_options,
    check_draft_option,
    check_grammar_option,
    context_option,
    make_stats_option,
    refuse_zero_max_tokens,
    replace_option_names_by_flags,
    session_option,
    split_load_and_generate_options,
    take_model_from_draft_option,
)
from ovspec.cli.path_type import MODEL_TYPE
from ovspec.cli.serve import chat_in_browser
from ovspec.params.option import OptionValue

if TYPE_CHECKING:
    from ovspec.api.session import Mark, Session
    from ovspec.engine.prompts import TemplateVariables
    from ovspec.engine.results import Result
    from ovspec.params import Params
    from ovspec.text.chat_template import Message

MULTILINE_QUOTES = '"""'  # around a message of several lines


@click.command(cls=StatsCommand)
@click.argument("model", required=False, type=MODEL_TYPE, metavar="[MODEL]")
@click.option("--system", metavar="TEXT", help="System message.")
@make_stats_option(
    "Print statistics on stderr after each answer: tokens, speed and acceptance rate; --stats full prints everything."
)
@click.option("--web", is_flag=True, help="Chat in the browser: serve MODEL on a free port, and open its page.")
@session_option
@context_option
@add_generate_options
def chat(
    model: str | None,
    system: str | None,
    web: bool,
    stats: str | None,
    session: Path | None,
    context: int | None,
    **options: OptionValue,
) -> None:
    """Chat with MODEL (by default the embedded demo pair).

    The chat stays in the KV cache, so each turn prefills only the new message. Enter sends a message. For several
    lines, end each line with a backslash, put three quotes (\"\"\") around the message, or begin new lines with Ctrl+O
    or Alt+Enter (in Windows' own terminal, only Ctrl+O).

    An empty line continues a truncated answer. Ctrl-C stops the answer and keeps the chat. Sampling follows the
    model's generation config; if it recommends nothing, or with --temperature 0, answers are greedy. Commands in the
    chat: /reset, /undo, /system, /save, /load, /stats, /exit; /help explains them.

    \b
    Examples:
      ovspec chat org/model
      ovspec chat my-pair --draft
      ovspec chat my-pair --draft lookup,draft --system "Be brief." --temperature 0.7
      ovspec chat my-pair --session monads.chat --context 2000
      ovspec chat my-pair --web
    """
    model = model or take_model_from_draft_option(options)
    if web:
        chat_in_browser(model, {"system": system, "stats": stats, "session": session, "context": context, **options})
        return
    check_draft_option(options["draft"])
    from ovspec.setup.exporting import find_or_export_model
    from ovspec.text.generation_config import format_sampling, read_recommended_sampling

    folder, options["draft"] = find_or_export_model(model, options["draft"], options.pop("weight_format"))
    passed_options = {name: value for name, value in options.items() if value is not None}
    recommended = read_recommended_sampling(folder, passed_options)
    load_options, params = split_load_and_generate_options(
        {"max_tokens": CHAT_MAX_TOKENS} | passed_options | recommended
    )
    refuse_zero_max_tokens(params, "A chat")

    from ovspec.cli import output

    check_grammar_option(params)
    chat_remedy = "continue a text with 'ovspec generate'"
    lm = load_model(folder, session=session, chat_remedy=chat_remedy, **load_options)
    template_variables = params.chat_template_kwargs
    with lm.session(context, template_variables) as lm_session:
        if context:
            output.print_context_memory(lm, context)
        if recommended:
            sampling_text = format_sampling(recommended)
            print_dim_line(f"Sampling as the model recommends: {sampling_text}; --temperature 0 for greedy.")
        context_length = context or lm.target.ir.context_length
        params = replace(params, chat_template_kwargs=None)
        conversation = Conversation(lm_session, params, stats, context_length, template_variables)
        if session and session.exists():
            load_chat_file(conversation, session)
        if system is not None:
            set_system_message(conversation, system)
        conversation.end_signal = end_on_signals()
        try:
            succeeded = run_conversation(conversation, make_message_reader())
        finally:
            if session:
                with ignore_signals():
                    lm_session.save(session)
    exit_if_ended(conversation.end_signal)
    if not succeeded and not stdin_is_terminal():
        sys.exit(1)


@dataclass
class Conversation:
    """A running chat."""

    session: Session
    params: Params
    stats_level: str | None
    context_length: int | None  # limit for the whole chat, in tokens
    template_variables: TemplateVariables | None  # from the command line, not from a saved chat
    system: str | None = None  # sent with the user's first message, because templates may refuse it alone
    undo_marks: list[Mark] = field(default_factory=list)  # the text before each message, for /undo
    last_result: Result | None = None
    end_signal: EndSignal = field(default_factory=EndSignal)  # whether a signal has ended it


def run_conversation(conversation: Conversation, read_input: Callable[[], str]) -> bool:
    """Read and answer messages until the input ends; return whether all of them succeeded."""
    all_succeeded = True
    while not conversation.end_signal.exit_code:
        try:
            text = read_input()
        except EOFError:
            return all_succeeded
        except KeyboardInterrupt:
            if not conversation.end_signal.exit_code:
                print_dim_line("Ctrl-D or /exit ends the chat.")
            continue
        command_name, _, argument = text.strip().partition(" ")
        try:
            if command_name in ("/exit", "/quit", "/bye"):
                return all_succeeded
            if text.startswith("/"):
                run_chat_command(conversation, command_name, argument.strip())
            elif text.strip():
                answer_message(conversation, text)
            elif conversation.last_result and conversation.last_result.finish_reason in ("length", "cancelled"):
                stream_answer(conversation)
        except OvspecError as error:
            all_succeeded = False
            click.secho(f"Error: {replace_option_names_by_flags(error)}", fg="red", err=True)
        except KeyboardInterrupt:  # while a message was read or a command ran
            all_succeeded = False
    return all_succeeded


def answer_message(conversation: Conversation, text: str) -> None:
    """Send a message and stream the answer; take the message back if there is no answer."""
    mark_before = conversation.session.mark()
    try:
        messages: list[Message] = [{"role": "user", "content": text}]
        if not conversation.session.messages:
            messages = replace_system_message(messages, conversation.system)
        conversation.session.append(messages)
        stream_answer(conversation)
    finally:
        messages = conversation.session.messages
        has_answer = messages and messages[-1]["role"] == "assistant"
        if has_answer:
            conversation.undo_marks.append(mark_before)
        else:
            conversation.session.rewind(mark_before)
    if not has_answer:
        print_dim_line("The message got no answer, so it was taken back.")


@contextlib.contextmanager
def restore_session_on_error(session: Session) -> Iterator[Mark]:
    """Yield a mark of the session's text, and restore the text after an exception."""
    mark_before = session.mark()
    try:
        yield mark_before
    except BaseException:
        session.rewind(mark_before)
        session.chat_template_kwargs = mark_before.chat_template_kwargs
        raise


def stream_answer(conversation: Conversation) -> None:
    """Stream the answer, or more of it."""
    from ovspec.cli import output

    if conversation.context_length and len(conversation.session) >= conversation.context_length:
        raise OvspecError(
            f"The context of {conversation.context_length} tokens is full; use /undo or /reset to make room."
        )
    stream = conversation.session.stream(sampling=conversation.params)
    try:
        conversation.last_result, _ = output.run_stream(stream, print_text=True)
        click.echo()
    except OSError:  # the terminal is gone
        stream.cancel()
        conversation.last_result = stream.result()
        conversation.end_signal.exit_code = conversation.end_signal.exit_code or 1
        return
    if conversation.last_result.finish_reason == "length":
        print_dim_line(
            f"Cut off after {conversation.last_result.stats.generated_tokens} tokens; send an empty line to continue."
        )
    if conversation.stats_level:
        show_chat_stats(conversation, conversation.stats_level)


# ---------------------------------------------------------------- commands


def run_chat_command(conversation: Conversation, command_name: str, argument: str) -> None:
    """Run a command, a line with a leading slash."""
    if command_name not in CHAT_COMMANDS:
        print_dim_line(
            f"There is no command {command_name}; /help lists all commands. Start with a space to send it as a message."
        )
        return
    metavar, _, run_command = CHAT_COMMANDS[command_name]
    if argument and not metavar:
        print_dim_line(f"{command_name} takes no argument.")
    elif metavar == "FILE" and not argument:
        print_dim_line("Name a file.")
    else:
        run_command(conversation, argument)


def reset_chat(conversation: Conversation, _: str = "") -> None:
    conversation.session.reset()
    conversation.undo_marks = []
    conversation.last_result = None
    print_dim_line("The chat starts over.")


def undo_message(conversation: Conversation, _: str = "") -> None:
    messages = conversation.session.messages
    user_indices = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not user_indices:
        print_dim_line("There is nothing to take back.")
        return
    last_index = user_indices[-1]
    if conversation.undo_marks:
        conversation.session.rewind(conversation.undo_marks.pop())
    else:
        replace_chat_messages(conversation, messages[:last_index])
    conversation.last_result = None
    print_dim_line(f"Taken back: {messages[last_index]['content']}")


def set_system_message(conversation: Conversation, text: str) -> None:
    if not text:
        print_dim_line("There is no system message." if conversation.system is None else conversation.system)
        return
    replace_chat_messages(conversation, replace_system_message(conversation.session.messages, text))
    conversation.system = text


def save_chat(conversation: Conversation, path_text: str) -> None:
    path = parse_path(path_text)
    conversation.session.save(path)
    print_dim_line(f"Saved to {path}.")


def parse_path(path_text: str) -> Path:
    """Return the path in a command, where it may be in quotes."""
    return Path(path_text.strip("\"'")).expanduser()


def load_chat(conversation: Conversation, path_text: str) -> None:
    load_chat_file(conversation, parse_path(path_text))


def load_chat_file(conversation: Conversation, path: Path) -> None:
    """Continue the chat in a session file."""
    with restore_session_on_error(conversation.session):
        conversation.session.load(path)
        conversation.session.chat_template_kwargs = (
            conversation.template_variables or conversation.session.chat_template_kwargs
        )
        messages = conversation.session.messages
        if len(conversation.session) and not messages:
            raise OvspecError(f"{path}: a saved text, not a chat; continue the text with 'ovspec generate --session'.")
    conversation.system = None
    if messages and messages[0]["role"] == "system":
        conversation.system = messages[0]["content"]
    conversation.undo_marks = []
    conversation.last_result = None
    print_dim_line(f"{len(messages)} messages, {len(conversation.session)} tokens.")


def show_chat_stats(conversation: Conversation, level: str) -> None:
    from ovspec.cli import output

    if level not in ("", *STATS_LEVELS):
        print_dim_line("Use /stats or /stats full.")
        return
    if conversation.last_result:
        output.print_stats(conversation.last_result, level or "short")
    limit_clause = f" of {conversation.context_length}" if conversation.context_length else ""
    print_dim_line(f"The chat has {len(conversation.session)} tokens{limit_clause}.")


def show_help(_: Conversation, __: str = "") -> None:
    for command_name, (metavar, help_text, _run) in CHAT_COMMANDS.items():
        click.echo(f"{f'{command_name} {metavar}':<16}{help_text}", err=True)
    click.echo(f"{'/exit':<16}End the chat, as Ctrl-D does.", err=True)


# Name -> (its argument, help, function)
CHAT_COMMANDS: dict[str, tuple[str, str, Callable[[Conversation, str], None]]] = {
    "/help": ("", "List the commands.", show_help),
    "/reset": ("", "Forget the chat, except the system message.", reset_chat),
    "/undo": ("", "Take back your last message and its answer.", undo_message),
    "/system": ("[TEXT]", "Set the system message of the whole chat, or show it.", set_system_message),
    "/save": ("FILE", "Save the chat and its KV cache to a file.", save_chat),
    "/load": ("FILE", "Continue a saved chat.", load_chat),
    "/stats": ("[full]", "Show the statistics of the last answer.", show_chat_stats),
}


def replace_system_message(messages: list[Message], system: str | None) -> list[Message]:
    """Return ``messages`` with ``system`` as their system message, or without one if it is None."""
    if messages and messages[0]["role"] == "system":
        messages = messages[1:]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def replace_chat_messages(conversation: Conversation, messages: list[Message]) -> None:
    """Replace the chat with ``messages``; the common prefix stays in the KV cache."""
    from ovspec.api.session import EMPTY_MARK

    with restore_session_on_error(conversation.session):
        conversation.session.rewind(EMPTY_MARK)
        if any(message["role"] != "system" for message in messages):
            conversation.session.append(messages)
    conversation.undo_marks = []
    conversation.last_result = None


def print_dim_line(text: str) -> None:
    click.secho(text, dim=True, err=True)


# ---------------------------------------------------------------- the user's input


def make_message_reader() -> Callable[[], str]:
    """Return a reader of messages; it raises EOFError at the end and KeyboardInterrupt on Ctrl-C."""
    read_line = make_terminal_reader() if stdin_is_terminal() else read_piped_line
    return lambda: read_user_message(read_line)


def stdin_is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def read_user_message(read_line: Callable[[bool], str]) -> str:
    """Return the next message. The argument of ``read_line`` is whether the line continues a message."""
    text = read_line(False)
    if text.lstrip().startswith(MULTILINE_QUOTES):
        text = text.lstrip().removeprefix(MULTILINE_QUOTES)
        while MULTILINE_QUOTES not in text:
            text += "\n" + read_line(True)
        return text.partition(MULTILINE_QUOTES)[0].strip("\n")
    while text.endswith("\\"):
        text = text[:-1] + "\n" + read_line(True)
    return text


def read_piped_line(_: bool) -> str:
    # Not input(), which fails at characters outside of the locale's encoding.
    piped_line = sys.stdin and sys.stdin.buffer.readline()
    if not piped_line:
        raise EOFError
    return piped_line.decode("utf-8-sig", "replace").rstrip("\r\n")


def make_terminal_reader() -> Callable[[bool], str]:
    """Return a reader of lines with editing and a history in the user's state folder."""
    import platformdirs
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    key_bindings = KeyBindings()

    @key_bindings.add("c-o")
    @key_bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            with contextlib.suppress(OSError):  # a full disk doesn't end the chat
                super().store_string(string)

    state_folder = Path(platformdirs.user_state_dir("ovspec", appauthor=False))
    try:
        state_folder.mkdir(parents=True, exist_ok=True)
        (state_folder / "chat_history").touch(mode=0o600)
        history = History(str(state_folder / "chat_history"))
    except OSError:
        history = InMemoryHistory()
    # stdout may be redirected to a file; the prompt goes to the terminal all the same.
    prompt_session: PromptSession[str] = PromptSession(
        history=history, key_bindings=key_bindings, output=create_output(always_prefer_tty=True)
    )
    return lambda continues: prompt_session.prompt("... " if continues else ">>> ")
