"""Signals end a command that keeps a session as Ctrl-C does, and what was shown is in the file."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

import ovspec

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
DEMO = ROOT / "models" / "demo"
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# As a shell starts it: Ctrl-C is heard even if the tests run in the background.
CODE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\nfrom ovspec.cli import main; main()"


def start(environment: dict[str, str], *arguments: str, nohup: bool = False) -> subprocess.Popen[bytes]:
    def ignoring() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    return subprocess.Popen(
        [sys.executable, "-u", "-c", CODE, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        preexec_fn=ignoring if nohup else None, bufsize=0,
    )  # fmt: skip


def chat(environment: dict[str, str], file: Path, nohup: bool = False) -> subprocess.Popen[bytes]:
    running = start(environment, "chat", str(DEMO), "--session", str(file), "-n", "1500", "--ignore-eos", nohup=nohup)
    assert running.stdin
    running.stdin.write(b"Write a loop.\n")
    running.stdin.flush()
    return running


def generate(environment: dict[str, str], file: Path) -> subprocess.Popen[bytes]:
    return start(environment, "generate", str(DEMO), "def f(", "--session", str(file), "-n", "1500", "--ignore-eos")


def shown(running: subprocess.Popen[bytes], count: int) -> bytes:
    """Wait until ``count`` bytes of the text are on the screen, and return them."""
    assert running.stdout
    seen = b""
    while len(seen) < count and (more := running.stdout.read(count - len(seen))):
        seen += more
    return seen


def text_in(lm: ovspec.LanguageModel, file: Path) -> str:
    with lm.session() as session:
        session.load(file)
        return session.text


def check_end(lm: ovspec.LanguageModel, running: subprocess.Popen[bytes], file: Path, seen: bytes, code: int) -> None:
    rest, told = running.communicate(timeout=60)
    assert b"Traceback" not in told, told.decode()
    assert running.returncode == code, told.decode()
    assert (seen + rest).decode("utf-8", "ignore").strip() in text_in(lm, file)


@pytest.fixture(scope="module")
def lm(cache_dir: Path) -> ovspec.LanguageModel:
    return ovspec.load(DEMO, "none", cache_dir=cache_dir)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", [chat, generate])
def test_in_the_middle_of_a_text(command, number, lm, command_environment, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    running = command(command_environment, tmp_path / "s.ov")
    seen = shown(running, 40)
    running.send_signal(number)
    check_end(lm, running, tmp_path / "s.ov", seen, 128 + number)


def test_nohup_is_kept(lm: ovspec.LanguageModel, command_environment: dict[str, str], tmp_path: Path) -> None:
    running = chat(command_environment, tmp_path / "s.ov", nohup=True)
    seen = shown(running, 20)
    running.send_signal(signal.SIGHUP)
    seen += shown(running, 200)
    running.send_signal(signal.SIGTERM)
    check_end(lm, running, tmp_path / "s.ov", seen, 128 + signal.SIGTERM)


@pytest.mark.parametrize("seed", [0, 1, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 24)]])
def test_pairs_of_signals(
    seed: int, lm: ovspec.LanguageModel, command_environment: dict[str, str], tmp_path: Path
) -> None:
    numbers = random.Random(seed)
    command = (chat, generate)[seed % 2]
    running = command(command_environment, tmp_path / "s.ov")
    seen = shown(running, numbers.randrange(1, 400))
    running.send_signal(numbers.choice(ENDING[:2]))
    time.sleep(numbers.choice((0, 0.001, 0.01, 0.05, 0.2)))
    running.send_signal(numbers.choice(ENDING))
    rest, told = running.communicate(timeout=60)
    assert b"Traceback" not in told, told.decode()
    assert (seen + rest).decode("utf-8", "ignore").strip() in text_in(lm, tmp_path / "s.ov")
