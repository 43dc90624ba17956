"""``ovspec chat`` as a user runs it: through a pipe and in a terminal; its details in this process."""

from __future__ import annotations

import functools
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands_here import Command, commands_here
from conftest import ROOT

import ovspec
from ovspec.cli.chat import read_user_message

DEMO = ROOT / "models" / "demo"
ENGINE = ("--engine", "stateful", "--precision", "f32", "--arithmetic", "fast")  # which loads fastest
SHORT = ("--max-tokens", "12", *ENGINE)


@pytest.fixture
def command(cache_dir: Path) -> Iterator[Command]:
    yield from commands_here(cache_dir)


@pytest.fixture(scope="module")
def lm(pair: Path, cache_dir: Path) -> ovspec.LanguageModel:
    return ovspec.load(pair, engine="stateful", precision="f32", arithmetic="fast", cache_dir=cache_dir)


def lines_of(*lines: str) -> Callable[[bool], str]:
    rest = iter(lines)

    def line(_: bool) -> str:
        for text in rest:
            return text
        raise EOFError

    return line


def test_messages_of_several_lines() -> None:
    line = lines_of("one", "two\\", "three\\", "four", '"""', "five", "", 'six"""', '"""seven"""', "")
    assert [read_user_message(line) for _ in range(5)] == ["one", "two\nthree\nfour", "five\n\nsix", "seven", ""]
    with pytest.raises(EOFError):
        read_user_message(line)


def test_a_chat_through_a_pipe(command: Command, pair: Path, lm: ovspec.LanguageModel) -> None:
    """Answers go to stdout, everything else to stderr. Each answer is what a session generates for the chat so far."""
    said = ["Write a loop.", "/stats full", "And a class,\\", "please.", "/undo", "/undo", "Write a loop.", "/exit"]
    done = command("chat", pair, "--draft", *SHORT, stdin="\n".join(said))
    assert done.returncode == 0, done.stderr
    with lm.session() as session:
        expected = []
        for turn in ("Write a loop.", "And a class,\nplease."):
            session.append({"role": "user", "content": turn})
            expected.append(session.generate(max_tokens=12).text)
    assert done.stdout == "".join(f"{text}\n" for text in [*expected, expected[0]])
    assert "Taken back: And a class,\nplease." in done.stderr
    assert "Taken back: Write a loop." in done.stderr
    assert re.search(r"prompt: \d+ tokens, \d+ of them cached; first token after", done.stderr)
    assert "Cut off after 12 tokens" in done.stderr


def test_commands_and_mistakes(command: Command, pair: Path, lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    file = tmp_path / "a chat"
    said = [
        "/system",
        "/system Be brief.",
        "hi",
        "",  # continues the answer
        f'/save "{file}"',
        "/reset",
        "/undo",
        "/system",
        f"/load {tmp_path / 'nowhere'}",
        f"/load {file}",
        "/undo",
        "/save",
        "/etc/passwd",
        "/undo now",
        "/help",
        "x " * 3000,
        "still here",
    ]
    done = command("chat", pair, *SHORT, stdin="\n".join(said))
    assert done.returncode == 1, "some commands failed, and nobody may have noticed"
    for text in (
        "There is no system message.",
        f"Saved to {file}.",
        "The chat starts over.",
        "There is nothing to take back.",
        "Be brief.",
        "nowhere: no such file",
        "3 messages, ",
        "Taken back: hi",
        "Name a file.",
        "There is no command /etc/passwd",
        "/undo takes no argument.",
        "/system [TEXT]",
        "The context of 2048 tokens is full",
    ):
        assert text in done.stderr, text
    assert len(done.stdout.splitlines()) >= 3
    with lm.session() as session:
        session.load(file)
        assert [each["role"] for each in session.messages] == ["system", "user", "assistant"]


def test_a_session_file_between_two_calls(
    command: Command, pair: Path, lm: ovspec.LanguageModel, tmp_path: Path
) -> None:
    file = tmp_path / "chat.ov"
    first = command("chat", pair, *SHORT, "--session", file, "--context", "500", stdin="hi\n")
    assert first.returncode == 0, first.stderr
    assert re.search(r"context: 500 tokens, about \d+ MB", first.stderr)
    second = command("chat", pair, *SHORT, "--session", file, "--stats", stdin="more\n/undo\n")
    assert "2 messages" in second.stderr
    assert re.search(r"prompt \d+ tokens \([1-9]\d* cached\) in .* tokens/s", second.stderr)
    assert "Taken back: more" in second.stderr
    with lm.session() as session:
        session.load(file)
        assert [each["content"] for each in session.messages][:1] == ["hi"]
        assert len(session.messages) == 2
    text = command("generate", pair, "import os", *SHORT, "--session", tmp_path / "text.ov")
    assert text.returncode == 0
    wrong = command("chat", pair, *SHORT, "--session", tmp_path / "text.ov", stdin="hi\n")
    assert wrong.returncode == 1
    assert "not a chat" in wrong.stderr


def test_generate_goes_on(command: Command, pair: Path, lm: ovspec.LanguageModel, tmp_path: Path) -> None:
    """Calls with a prompt, another prompt, no prompt and token ids give the same tokens as one session."""
    file = tmp_path / "text.ov"
    calls = [["import os\n"], ["\n\ndef f("], [], ["--token-ids", "1 2 3"]]
    found = []
    for arguments in calls:
        done = command("generate", pair, *arguments, *SHORT, "--json", "--session", file)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    with lm.session() as session:
        for prompt, result in zip(["import os\n", "\n\ndef f(", None, [1, 2, 3]], found, strict=True):
            if prompt is not None:
                session.append(prompt)
            assert session.generate(max_tokens=12, heal=False).token_ids == result["token_ids"]
    assert [result["stats"]["cached_tokens"] > 0 for result in found] == [False, True, True, True]
    for arguments in (["--compare"], ["--samples", "2", "-t", "1"], ["--chat", "--system", "x"]):
        done = command("generate", pair, "x", *arguments, "--session", file)
        assert done.returncode == 2, done.stderr
    done = command("generate", pair, "x", "--session", tmp_path / "nowhere" / "file")
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


def test_an_answer_is_as_long_as_the_context_allows(command: Command, pair: Path) -> None:
    options = ("--context", "60", "--max-tokens", "30", "--ignore-eos", *ENGINE)
    done = command("chat", pair, *options, stdin="hi\nmore\n/stats\n/undo\nmore\nand more\n")
    assert "The chat has 60 tokens of 60." in done.stderr
    assert done.stderr.count("The context of 60 tokens is full; use /undo") == 1
    assert done.returncode == 1


def test_misuse_is_refused(command: Command, pair: Path, tmp_path: Path) -> None:
    for arguments in (["--samples", "2"], ["--heal"], ["--logprobs", "1"], ["--draft", "nothing"], ["--context", "0"]):
        done = command("chat", pair, *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
    done = command("chat", pair, *SHORT, "--context", "10000000")
    assert done.returncode == 1
    assert "context is 10000000" in done.stderr
    done = command("chat", tmp_path / "nowhere")
    assert done.returncode == 1
    assert "no such folder" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_chat_in_a_terminal(command_environment: dict[str, str], tmp_path: Path) -> None:
    """Ctrl-C stops the answer and keeps the chat, Alt+Enter and Ctrl+O start a line, and the input history is saved."""
    import pexpect

    environment = {
        **command_environment,
        "XDG_STATE_HOME": str(tmp_path),
        "TERM": "xterm",
        "NO_COLOR": "1",
        "PROMPT_TOOLKIT_NO_CPR": "1",
    }
    command = ["-m", "ovspec", "chat", str(DEMO), "--draft", *ENGINE, "--session", str(tmp_path / "s")]
    child = pexpect.spawn(sys.executable, command, env=environment, encoding="utf-8", timeout=60)  # type: ignore[arg-type]
    child.setwinsize(40, 200)
    child.expect(">>>")
    child.send("\x03")
    child.expect("Ctrl-D or /exit ends the chat")
    child.expect(">>>")
    child.send("write\x1b\ra\x0floop\r")
    child.expect("def |self|import ")
    child.send("\x03")
    child.expect(">>>")
    child.send("/stats full\r")
    child.expect("ended by cancelled")
    child.expect(">>>")
    child.send("/max\x7f\x7f\x7f\x7f/undo\r")
    child.expect("Taken back: write\r\r?\na\r\r?\nloop")
    child.expect(">>>")
    child.send("\x04")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    (tmp_path / "s").unlink()
    heard = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # even if the tests run under nohup
    options = {"env": environment, "encoding": "utf-8", "timeout": 60, "preexec_fn": heard}
    child = pexpect.spawn(sys.executable, command, **options)
    child.expect(">>>")
    child.kill(signal.SIGHUP)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 128 + signal.SIGHUP, "the terminal was closed"
    assert (tmp_path / "s").is_file()
    history = (tmp_path / "ovspec" / "chat_history").read_text(encoding="utf-8")
    assert "+write\n+a\n+loop\n" in history
