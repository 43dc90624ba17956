"""What a user types: lines with a history on a terminal, plain lines from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

QUOTES = '"""'


def reader() -> Callable[[], str]:
    """Reads a message each time it is called; raises EOFError where there is none, and KeyboardInterrupt."""
    line = terminal() if at_terminal() else from_pipe
    return lambda: message(line)


def at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def message(line: Callable[[bool], str]) -> str:
    """The next message, of one line or several. ``line`` gives the next line; whether it goes on from another."""
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
    # Not input(), which would give up on the first character that the locale doesn't have.
    text = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not text:
        raise EOFError
    return text.decode("utf-8-sig", "replace").rstrip("\r\n")


def terminal() -> Callable[[bool], str]:
    """With line editing, and a history that is kept in the user's state folder."""
    import platformdirs
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    folder = Path(platformdirs.user_state_dir("ovspec", appauthor=False))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chat_history").touch()
        history = FileHistory(str(folder / "chat_history"))
    except OSError:
        history = InMemoryHistory()
    # stdout may be a file that the answers go to.
    session: PromptSession[str] = PromptSession(
        history=history, key_bindings=keys, output=create_output(always_prefer_tty=True)
    )
    return lambda goes_on: session.prompt("... " if goes_on else ">>> ")
