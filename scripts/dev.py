"""Everything a developer runs, from a fresh clone, with the standard library alone.

    python3 scripts/dev.py demo            export the demo pair in f32, generate without and with speculation
    python3 scripts/dev.py test [--slow]   the tests, in two workers (-n 0 for none); further arguments go to pytest
        [--isa AVX2]                       as on a processor with this instruction set and no better one
    python3 scripts/dev.py soak            long series of kills and of draws
    python3 scripts/dev.py test-guidance   the tests of the guidance library, in an environment of their own
    python3 scripts/dev.py lint            ruff, pyright, import-linter; references, lengths and links of the docs
    python3 scripts/dev.py bench           the figures of the demo pair

The first call makes .venv and installs the project with all its extras except guidance, which needs an older
llguidance; that is installed into .venv-guidance.
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
DEMO = ".cache/demo-f32"
# The demo pair is too small to edit a file; it repeats what it has read, which lookup predicts.
DEMO_PROMPTS = {"demos/complete.txt": "draft", "demos/edit.txt": "lookup,draft"}


def python(folder: Path = VENV) -> Path:
    """Return the Python of a virtual environment."""
    return folder / BIN / ("python.exe" if os.name == "nt" else "python")


def run(*command: str | Path) -> None:
    """Run a command in the repository's root; exit with its code if it fails."""
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONUTF8": "1"}
    done = subprocess.run([str(part) for part in command], cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(done.returncode)


def install(folder: Path = VENV, extra: str = "dev") -> None:
    """Make a virtual environment, or bring it up to date with pyproject.toml and the overlays for exports."""
    files = (ROOT / "pyproject.toml", ROOT / "export" / "ovspec_export" / "environments.py")
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    stamp = folder / "installed-from"
    if python(folder).exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    print(f"installing into {folder.name} (about a minute the first time)", file=sys.stderr, flush=True)
    if not python(folder).exists():
        venv.create(folder, with_pip=True)
    pip = (python(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-e", f".[{extra}]")
    if extra == "dev":  # what the tests export with, so that they need no network
        run(python(folder), "-m", "ovspec", "export", "--prepare", "all")
    stamp.write_text(wanted, encoding="utf-8")


def demo() -> None:
    pair = "models/demo-hf"
    ovspec("export", f"{pair}/target", "--draft", f"{pair}/draft", "-o", DEMO, "--overwrite", "--weight-format", "fp32")
    for prompt, drafter in DEMO_PROMPTS.items():
        print(f"\n{prompt}:\n{(ROOT / prompt).read_text(encoding='utf-8')}\n")
        ovspec("generate", DEMO, "-f", prompt, "--draft", drafter, "--compare", "--precision", "f32", "-n", "160")


def ovspec(*arguments: str) -> None:
    """Show a command and run it."""
    print(f"$ ovspec {' '.join(arguments)}", flush=True)
    run(python(), "-m", "ovspec", *arguments)


def test(arguments: list[str], which: str = "not slow and not soak") -> None:
    if "--slow" in arguments:
        which = "not soak"
    rest = [argument for argument in arguments if argument != "--slow"]
    if "--isa" in rest:
        at = rest.index("--isa")
        cap_instruction_set(*rest[at + 1 : at + 2])
        del rest[at : at + 2]
    # Two workers, each with its half of the cores (tests/conftest.py): small models gain nothing from more.
    workers = ("-n", "2", "--dist", "worksteal") if "--update-docs" not in rest else ()
    run(python(), "-m", "pytest", *workers, "-m", which, *rest)


def cap_instruction_set(name: str = "") -> None:
    """Let OpenVINO use no better instruction set than ``name``; exit if this processor lacks it."""
    levels = "from ovspec.ir.instruction_set import processor_levels; print(*processor_levels())"
    done = subprocess.run([python(), "-c", levels], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    if name not in (known := done.stdout.split()):
        sys.exit(f"--isa: this processor has no {name!r}; name one of {', '.join(known) or 'none (not x86)'}.")
    # The first is for OpenVINO's matrix products, the second for its own kernels; without both it contradicts itself.
    os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ["OV_CPU_MAX_ISA"] = name


def test_guidance(arguments: list[str]) -> None:
    install(GUIDANCE_VENV, "test-guidance")
    run(python(GUIDANCE_VENV), "-m", "pytest", "tests/integrations/guidance", *arguments)


def lint() -> None:
    run(python(), "-m", "ruff", "check", ".")
    run(python(), "-m", "ruff", "format", "--check", ".")
    run(python(), "-m", "pyright")
    run(python().with_name("lint-imports"), "--no-cache")
    run(python(), "scripts/reference.py", "--check")
    run(python(), "scripts/check_docs.py")


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
