"""Everything a developer runs, from a fresh clone, with the standard library alone.

    python3 scripts/dev.py demo            export the demo pair in f32, generate without and with the draft
    python3 scripts/dev.py test [--slow]   the tests, in two workers (-n 0 for none); further arguments go to pytest
    python3 scripts/dev.py soak            long series of kills and of draws
    python3 scripts/dev.py test-guidance   those of the guidance library, in an environment of their own
    python3 scripts/dev.py lint            ruff, pyright, import-linter, and whether docs/cli.md is current
    python3 scripts/dev.py bench           the figures of the README

The first call makes .venv and installs the project with all its extras but guidance, which needs an older llguidance;
that is installed into .venv-guidance.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV, GUIDANCE_VENV = ROOT / ".venv", ROOT / ".venv-guidance"
BIN = "Scripts" if os.name == "nt" else "bin"
DEMO = ROOT / ".cache" / "demo-f32"
DEMO_PROMPT = '''import os
import sys

def find_executable(name, path=None):
    """Find'''


def python(folder: Path = VENV) -> Path:
    """That of a virtual environment."""
    return folder / BIN / ("python.exe" if os.name == "nt" else "python")


def run(*command: str | Path) -> None:
    """Run a command in the repository's root; end with its exit code where it fails."""
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONUTF8": "1"}
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.returncode)


def install(folder: Path = VENV, extra: str = "dev") -> None:
    """Make a virtual environment, or bring it up to date with pyproject.toml."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamp = folder / "installed-from"
    if python(folder).exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    print(f"installing into {folder.name} (about a minute the first time)", file=sys.stderr, flush=True)
    if not python(folder).exists():
        venv.create(folder, with_pip=True)
    pip = (python(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-e", f".[{extra}]")
    stamp.write_text(wanted, encoding="utf-8")


def demo() -> None:
    pair = ROOT / "models" / "demo-hf"
    print("$ ovspec export models/demo-hf/target --draft models/demo-hf/draft -o .cache/demo-f32 --weight-format fp32")
    export = ["export", pair / "target", "--draft", pair / "draft", "-o", DEMO, "--weight-format", "fp32"]
    run(python(), "-m", "ovspec", *export)
    print("\n$ ovspec generate .cache/demo-f32 PROMPT --draft --compare --precision f32 --max-tokens 160\n", flush=True)
    print(f"PROMPT:\n{DEMO_PROMPT}\n", flush=True)
    generate = ["generate", DEMO, DEMO_PROMPT, "--draft", "--compare", "--precision", "f32", "--max-tokens", "160"]
    run(python(), "-m", "ovspec", *generate)


def test(arguments: list[str], which: str = "not slow and not soak") -> None:
    if "--slow" in arguments:
        which = "not soak"
    rest = [argument for argument in arguments if argument != "--slow"]
    # Two workers, each with its half of the cores (tests/conftest.py): small models gain nothing from more.
    workers = ("-n", "2", "--dist", "worksteal") if "--update-docs" not in rest else ()
    run(python(), "-m", "pytest", *workers, "-m", which, *rest)


def test_guidance(arguments: list[str]) -> None:
    install(GUIDANCE_VENV, "test-guidance")
    run(python(GUIDANCE_VENV), "-m", "pytest", "tests/integrations/guidance", *arguments)


def lint() -> None:
    run(python(), "-m", "ruff", "check", ".")
    run(python(), "-m", "ruff", "format", "--check", ".")
    run(python(), "-m", "pyright")
    run(python().with_name("lint-imports"), "--no-cache")
    run(python(), "scripts/cli_reference.py", "--check")


def main() -> None:
    commands = ("demo", "test", "soak", "test-guidance", "lint", "bench")
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    name, arguments = sys.argv[1], sys.argv[2:]
    if name == "test-guidance":
        test_guidance(arguments)
        return
    install()
    if name == "test":
        test(arguments)
    elif name == "soak":
        test(arguments, "soak")
    elif name == "bench":
        run(python(), "scripts/bench/readme.py", *arguments)
    else:
        {"demo": demo, "lint": lint}[name]()


if __name__ == "__main__":
    main()
