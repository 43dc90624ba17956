"""Everything a developer runs, from a fresh clone, with the standard library alone.

    python3 scripts/dev.py demo            export the demo pair in f32, generate without and with the draft
    python3 scripts/dev.py test [--slow]   the tests; further arguments go to pytest
    python3 scripts/dev.py lint            ruff, pyright, and whether the CLI reference is current
    python3 scripts/dev.py bench           the figures of the README

The first call makes .venv and installs the project with all its extras.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
DEMO = ROOT / ".cache" / "demo-f32"
DEMO_PROMPT = '''import os
import sys

def find_executable(name, path=None):
    """Find'''


def run(*command: str | Path) -> None:
    """Run a command in the repository's root; end with its exit code where it fails."""
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONUTF8": "1"}
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.returncode)


def install() -> None:
    """Make the virtual environment, or bring it up to date with pyproject.toml."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = VENV / "installed-from"
    if PYTHON.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    print("installing into .venv (about a minute the first time)", file=sys.stderr, flush=True)
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-e", ".[dev]")
    stamp.write_text(wanted, encoding="utf-8")


def demo() -> None:
    pair = ROOT / "models" / "demo-hf"
    print("$ ovspec export models/demo-hf/target --draft models/demo-hf/draft -o .cache/demo-f32 --weight-format fp32")
    export = ["export", pair / "target", "--draft", pair / "draft", "-o", DEMO, "--weight-format", "fp32"]
    run(PYTHON, "-m", "ovspec", *export)
    print("\n$ ovspec generate .cache/demo-f32 PROMPT --draft --compare --precision f32 --max-tokens 160\n", flush=True)
    print(f"PROMPT:\n{DEMO_PROMPT}\n", flush=True)
    generate = ["generate", DEMO, DEMO_PROMPT, "--draft", "--compare", "--precision", "f32", "--max-tokens", "160"]
    run(PYTHON, "-m", "ovspec", *generate)


def test(arguments: list[str]) -> None:
    slow = "--slow" in arguments
    rest = [argument for argument in arguments if argument != "--slow"]
    run(PYTHON, "-m", "pytest", *([] if slow else ["-m", "not slow"]), *rest)


def lint() -> None:
    run(PYTHON, "-m", "ruff", "check", ".")
    run(PYTHON, "-m", "ruff", "format", "--check", ".")
    run(PYTHON, "-m", "pyright")
    run(PYTHON, "scripts/cli_reference.py", "--check")


def main() -> None:
    commands = ("demo", "test", "lint", "bench")
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    name, arguments = sys.argv[1], sys.argv[2:]
    install()
    if name == "test":
        test(arguments)
    elif name == "bench":
        run(PYTHON, "scripts/benchmark.py", *arguments)
    else:
        {"demo": demo, "lint": lint}[name]()


if __name__ == "__main__":
    main()
