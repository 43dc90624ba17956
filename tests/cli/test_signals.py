"""Signals end a command that keeps a session as Ctrl-C does, and what was shown is in the file."""

from __future__ import annotations

import json
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
FAST = ("--arithmetic", "fast")  # which probes nothing
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# As a shell starts it: Ctrl-C is heard even if the tests run in the background.
CODE = "from signal import *; signal(SIGINT, default_int_handler)\nfrom ovspec.__main__ import main; main()"


def start(environment: dict[str, str], *arguments: str, nohup: bool = False) -> subprocess.Popen[bytes]:
    def hang_up() -> None:  # whether the tests run under nohup or not
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-u", "-c", CODE, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment,
        preexec_fn=hang_up, bufsize=0,
    )  # fmt: skip


def chat(environment: dict[str, str], file: Path, nohup: bool = False) -> subprocess.Popen[bytes]:
    running = start(
        environment, "chat", str(DEMO), *FAST, "--session", str(file), "-n", "1500", "--ignore-eos", nohup=nohup
    )
    assert running.stdin
    running.stdin.write(b"Write a loop.\n")
    running.stdin.flush()
    return running


def generate(environment: dict[str, str], file: Path) -> subprocess.Popen[bytes]:
    return start(
        environment, "generate", str(DEMO), "def f(", *FAST, "--session", str(file), "-n", "1500", "--ignore-eos"
    )


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
    return ovspec.load(DEMO, "none", arithmetic="fast", cache_dir=cache_dir)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        (generate, signal.SIGHUP),
        pytest.param(chat, signal.SIGTERM, marks=pytest.mark.slow),  # test_nohup_is_kept ends with it
        pytest.param(chat, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(generate, signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
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


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed != 1)) for seed in range(24)])
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


@pytest.fixture(scope="module")
def whole_batch(command_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Return a batch file and the output of a batch that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("batch")
    bodies = [{"prompt": f"def f{i}(", "max_tokens": 100 + 9 * i, "ignore_eos": True} for i in range(24)]
    fixed = {"method": "POST", "url": "/v1/completions"}
    lines = [{"custom_id": str(number), "body": body} | fixed for number, body in enumerate(bodies)]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = batch(command_environment, folder / "in.jsonl", folder / "out.jsonl")
    done.communicate(timeout=120)
    assert done.returncode == 0
    return folder / "in.jsonl", (folder / "out.jsonl").read_bytes()


def batch(environment: dict[str, str], file: Path, output: Path) -> subprocess.Popen[bytes]:
    return start(environment, "batch", str(DEMO), str(file), "-o", str(output), "--batch-size", "2")


def texts_in(output: bytes) -> dict[str, str]:
    """Return the text of each line by its id; no id comes twice."""
    found = [json.loads(line) for line in output.splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in found}
    assert len(texts) == len(found)
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_pairs_of_signals_during_a_batch(
    seed: int, whole_batch: tuple[Path, bytes], command_environment: dict[str, str], tmp_path: Path
) -> None:
    """Whatever ends a batch, its lines are whole, and started again it continues where it was."""
    numbers, (file, expected) = random.Random(seed), whole_batch
    output, partial, kept = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial", 0
    for _ in range(4):
        running = batch(command_environment, file, output)
        time.sleep(numbers.uniform(0.7, 3.0))
        for _ in range(2):
            running.send_signal(numbers.choice(ENDING))
            time.sleep(numbers.choice((0, 0.001, 0.01, 0.05)))
        _, told = running.communicate(timeout=60)
        assert b"Traceback" not in told, told.decode()
        if output.exists():
            break
        written = partial.read_bytes().count(b"\n") if partial.exists() else 0
        assert written >= kept, "a result was lost"
        kept = written
    if not output.exists():
        batch(command_environment, file, output).communicate(timeout=120)
    assert texts_in(output.read_bytes()) == texts_in(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_ctrl_c_before_anything_is_shown_says_nothing(command_environment: dict[str, str]) -> None:
    """An import that Ctrl-C interrupts fails with an error of its own, which nobody wants to see."""
    code = """
import sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "openvino":
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as error:
                raise ImportError("initialization failed") from error
sys.meta_path.insert(0, Interrupted())
from ovspec.__main__ import main
main()
"""
    command = [sys.executable, "-c", code, "generate", str(DEMO), "def f("]
    done = subprocess.run(command, capture_output=True, env=command_environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.slow
def test_ctrl_c_while_a_command_starts(command_environment: dict[str, str]) -> None:
    for wait in [0.3 + 0.05 * step for step in range(20)]:
        many = ("-n", "1500", "--ignore-eos", "--samples", "32", "-t", "1")  # takes longer than the longest wait
        running = start(command_environment, "generate", str(DEMO), "def f(", *many)
        time.sleep(wait)
        running.send_signal(signal.SIGINT)
        _, told = running.communicate(timeout=60)
        assert b"Traceback" not in told, told.decode()
        assert running.returncode == 130, wait
