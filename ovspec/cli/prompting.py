"""Read what the user types: with editing and a history on a terminal, plain lines from a pipe."""

import sys
from collections.abc import Callable
from pathlib import Path

QUOTES = '"""'


def reader() -> Callable[[], str]:
    """Return a function that reads the next message; it raises EOFError at the end and KeyboardInterrupt on Ctrl-C."""
    line = terminal() if at_terminal() else from_pipe
    return lambda: message(line)


def at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def message(line: Callable[[bool], str]) -> str:
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

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    folder = Path(platformdirs.user_state_dir("ovspec", appauthor=False))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chat_history").touch(mode=0o600)
        history = FileHistory(str(folder / "chat_history"))
    except OSError:
        history = InMemoryHistory()
    # stdout may be redirected to a file; the prompt goes to the terminal all the same.
    session: PromptSession[str] = PromptSession(
        history=history, key_bindings=keys, output=create_output(always_prefer_tty=True)
    )
    return lambda goes_on: session.prompt("... " if goes_on else ">>> ")
