"""The commands on Windows, with its paths, line ends and processes; under wine by 'dev.py test --windows DIR'."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ovspec.base.sandbox import SandboxPool
from ovspec.text.chat_template import RENDERER

pytestmark = [
    pytest.mark.windows,
    pytest.mark.skipif(sys.platform != "win32", reason="needs Windows; under wine: dev.py test --windows DIR"),
]
DEMO = Path(__file__).resolve().parent.parent.parent / "models" / "demo"
PROMPT = "import os\nimport sys\n\n\ndef main():\n"
ENVIRONMENT = os.environ | {"OVSPEC_TUNE": "0"}


def ovspec(*arguments: str | Path, input: str = "", rc: int = 0) -> tuple[bytes, str]:
    """Run a command; return what it wrote to stdout, and to stderr as text."""
    command = [sys.executable, "-m", "ovspec", *map(str, arguments)]
    done = subprocess.run(command, input=input.encode(), capture_output=True, env=ENVIRONMENT, timeout=200, check=False)
    told = done.stderr.decode("utf-8")
    assert done.returncode == rc, told
    assert "Traceback" not in told
    return done.stdout, told


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo pair, in a folder whose path has what paths may have."""
    return Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("models") / "größer als 🦊" / "pair"))


@pytest.mark.parametrize("draft", ["lookup", "draft", "lookup,draft"])
def test_drafts_change_nothing(pair: Path, draft: str) -> None:
    plain, other = (
        json.loads(ovspec("generate", pair, PROMPT * 2, "-n", "40", "--draft", *each, "--json")[0])
        for each in (("none",), (draft, "--lookahead", "3"))
    )
    assert plain["token_ids"] == other["token_ids"]
    assert other["stats"]["accepted"] > 0


def test_lines_end_as_elsewhere(pair: Path) -> None:
    text, _ = ovspec("generate", pair, PROMPT, "-n", "40", "--draft", "none")
    assert b"\n" in text and b"\r" not in text


def test_files_as_options(pair: Path, tmp_path: Path) -> None:
    (tmp_path / "a schema.json").write_text('{"enum": ["ja", "nein"]}\r\n', encoding="utf-8-sig", newline="")
    (tmp_path / "prompt.txt").write_text("Größe = \r\n", encoding="utf-8-sig", newline="")
    options = ("--json-schema", tmp_path / "a schema.json", "-f", tmp_path / "prompt.txt", "--json")
    text = json.loads(ovspec("generate", pair, *options)[0])
    assert text["text"] in ('"ja"', '"nein"')
    (tmp_path / "text.json").write_text(json.dumps(text), encoding="utf-8")
    assert ovspec("verify", tmp_path / "text.json")[0].startswith(b"exact:")


def test_a_chat_and_its_file(pair: Path, tmp_path: Path) -> None:
    told, _ = ovspec("chat", pair, "-n", "8", "--session", tmp_path / "chat.ov", input="Hello\r\n")
    more, _ = ovspec("chat", pair, "-n", "8", "--session", tmp_path / "chat.ov", input="And you?\r\n")
    assert told.strip() and more.strip()


def test_a_batch(pair: Path, tmp_path: Path) -> None:
    lines = "".join(json.dumps(f"def f{number}(") + "\r\n" for number in range(3))
    (tmp_path / "in.jsonl").write_text(lines, encoding="utf-8", newline="")
    ovspec("batch", pair, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl", "-n", "8", "--draft", "lookup")
    found = (tmp_path / "out.jsonl").read_bytes()
    assert b"\r" not in found and len([json.loads(line) for line in found.splitlines()]) == 3


@pytest.mark.parametrize("name", ["CON", "aux.ov", "what?.ov"])
def test_names_that_windows_keeps(pair: Path, name: str, tmp_path: Path) -> None:
    _, told = ovspec("generate", pair, "a", "-n", "2", "--session", tmp_path / name, rc=1)
    assert "not a valid file name on Windows" in told.splitlines()[-1]


def test_the_process_that_is_measured_does_the_work(tmp_path: Path) -> None:
    """The python.exe of a virtual environment only starts another one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=200)
    code = f"""
from ovspec.base.sandbox import SandboxPool
pool = SandboxPool({RENDERER.module!r}, "renders", 10.0, 10**9)
answer = pool.ask('{{"source": "{{{{ messages[0] }}}}", "variables": {{"messages": ["hi"]}}, "needed": []}}')
process, = pool.idle_processes
print(answer, process.children(), process.memory_info().rss > 10_000_000)
"""
    python = tmp_path / "venv" / "Scripts" / "python.exe"
    done = subprocess.run([str(python), "-c", code], capture_output=True, encoding="utf-8", timeout=200, check=False)
    assert "hi" in done.stdout and done.stdout.rstrip().endswith("[] True"), done.stderr


def test_memory_is_limited() -> None:
    worker = SandboxPool(RENDERER.module, "renders", 60.0, 300_000_000)
    source = "{% set ns = namespace(a='x' * 1000) %}{% for i in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}"
    with pytest.raises(Exception, match="MB of memory"):
        worker.ask(json.dumps({"source": source, "variables": {"messages": []}, "needed": []}))


@pytest.fixture(scope="module")
def server(pair: Path) -> Iterator[str]:
    """Start a server; return its URL."""
    command = [sys.executable, "-m", "ovspec", "serve", str(pair), "--port", "0", "--draft", "lookup"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    )
    assert process.stderr
    told = ""
    while not (ready := re.search(r"on (http://\S+)/v1 ", told)):
        line = process.stderr.readline()
        assert line, told
        told += line.decode("utf-8")
    reading = threading.Thread(target=process.stderr.read, daemon=True)
    reading.start()
    yield ready[1]
    process.kill()
    process.wait()


def test_a_stream_has_the_text_of_an_answer(server: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    whole = httpx.post(f"{server}/v1/completions", json=body, timeout=100).json()
    pieces: list[str] = []
    with httpx.stream("POST", f"{server}/v1/completions", json=body | {"stream": True}, timeout=100) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == whole["choices"][0]["text"] and len(pieces) > 3
