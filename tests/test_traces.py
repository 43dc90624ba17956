"""No command opens a connection, writes outside its cache and its outputs, or leaves a process behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
from conftest import CHECKPOINTS, ROOT
from servers import READY

from ovspec.cli import COMMANDS

# Python runs this in every process; what it reports is a failure.
SITE = """
import os, socket

def report(what):
    with open(os.environ["REPORTS"], "a") as file:
        file.write(what + "\\n")

for name in ("connect", "connect_ex", "sendto"):
    def forbidden(self, *arguments, _real=getattr(socket.socket, name), _name=name):
        if self.family != socket.AF_UNIX:
            report(f"{_name} {arguments}")
            raise OSError("no network in this test")
        return _real(self, *arguments)
    setattr(socket.socket, name, forbidden)

def resolved(*arguments, **_):
    report(f"getaddrinfo {arguments}")
    raise OSError("no network in this test")

socket.getaddrinfo = resolved
"""
DEMO, SMALL = str(ROOT / "models" / "demo"), str(ROOT / "models" / "demo" / "draft")
ARGUMENTS: dict[str, list[str]] = {
    "batch": ["batch", SMALL, "in.txt", "-o", "out.jsonl", "-n", "3"],
    "bench": ["bench", DEMO, "-n", "4", "--repeats", "1"],
    "chat": ["chat", DEMO, "-n", "3"],
    "devices": ["devices"],
    "distill": ["distill", SMALL, "-o", "out", "--minutes", "1", "--tokens", "1"],
    "export": ["export", str(CHECKPOINTS / "draft"), "-o", "out", "--weight-format", "int8"],
    "generate": ["generate", DEMO, "def f(", "-n", "3", "--draft", "--json"],
    "inspect": ["inspect", SMALL],
    "models": ["models"],
    "perplexity": ["perplexity", SMALL, "in.txt"],
    "serve": ["serve", SMALL, "--port", "0"],
    "tune": ["tune", DEMO, "--for", "decode"],
    "verify": ["verify", "result.json"],
}
SLOW = ("tune", "bench", "distill", "export")
# In quick runs, one process runs these with the smaller model; each leaves what it prints in a file.
TOGETHER = ("generate", *(name for name in COMMANDS if name not in (*SLOW, "generate", "serve")))
GENERATING = ("batch", "chat", "generate", "perplexity")
TOGETHER_CODE = """
import contextlib, json, sys
from ovspec.cli import main

for command, arguments in json.loads(sys.argv[1]).items():
    sys.argv[1:] = arguments
    with open("result.json" if command == "generate" else command, "w") as file, contextlib.redirect_stdout(file):
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                sys.exit(f"{command}: {ended.code}")
"""
NOTHING_GAINED = 3


@pytest.mark.parametrize(
    "commands",
    [TOGETHER, ("serve",), *(pytest.param((name,), marks=pytest.mark.slow) for name in COMMANDS if name != "serve")],
    ids="+".join,
)
def test_no_connection_no_file_and_no_process_is_left(commands: tuple[str, ...], tmp_path: Path) -> None:
    home, work, site = (tmp_path / name for name in ("home", "work", "site"))
    for folder in (home, work, site):
        folder.mkdir()
    (site / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    (work / "in.txt").write_text("A line of text with some words in it.\n" * 9, encoding="utf-8")
    reports = tmp_path / "reports"
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    environment = kept | {"HOME": str(home), "USERPROFILE": str(home), "TMPDIR": str(tmp_path), "REPORTS": str(reports)}
    environment |= {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT), str(ROOT / "export")]), "OVSPEC_TUNE": "0"}

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=work, env=environment, input=b"Hello.\n", capture_output=True, timeout=280, check=False,
        )  # fmt: skip

    if commands == ("verify",):
        made = run("-m", "ovspec", *ARGUMENTS["generate"])
        assert made.returncode == 0, made.stderr.decode()
        (work / "result.json").write_bytes(made.stdout)
    if commands == ("serve",):
        done = served(ARGUMENTS["serve"], work, environment)
    elif commands == TOGETHER:
        done = run("-c", TOGETHER_CODE, json.dumps({name: quick(name) for name in TOGETHER}))
    else:
        done = run("-m", "ovspec", *ARGUMENTS[commands[0]])
    assert done.returncode in (0, NOTHING_GAINED if commands == ("distill",) else 0), done.stderr.decode()
    assert not reports.exists(), reports.read_text(encoding="utf-8")
    written = {path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()}
    assert all("ovspec" in Path(name).parts for name in written), written
    time.sleep(0.1)
    left = [
        each for each in psutil.process_iter(["environ"]) if (each.info["environ"] or {}).get("REPORTS") == str(reports)
    ]
    assert not left


def quick(command: str) -> list[str]:
    """Return the arguments of a command with the smaller model, also as its own draft, without long probing."""
    arguments = [SMALL if each == DEMO else each for each in ARGUMENTS[command]]
    drafted = [more for each in arguments for more in ([each, SMALL] if each == "--draft" else [each])]
    return drafted + ["--arithmetic", "fast"] * (command in GENERATING)


def served(arguments: list[str], work: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Ask a server for a text, and end it."""
    log = work.parent / "stderr"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "ovspec", *arguments], cwd=work, env=environment, stderr=stderr, stdout=stderr
        )
    ends = time.monotonic() + 120
    while not (found := READY.search(log.read_text(encoding="utf-8"))) and time.monotonic() < ends:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.05)
    assert found
    answer = httpx.post(f"{found[1]}/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=60)
    assert answer.status_code == 200
    process.terminate()
    return subprocess.CompletedProcess(arguments, process.wait(30) if os.name != "nt" else 0, b"", log.read_bytes())


@pytest.mark.parametrize(
    "package", ["ovspec", "ovspec_export", pytest.param("ovspec_export.distill.features", marks=pytest.mark.slow)]
)
def test_importing_openvino_after_our_packages_reports_nothing(package: str) -> None:
    code = f"import {package}, openvino, sys; assert sys.modules['openvino_telemetry'] is None; print('fine')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"fine"
