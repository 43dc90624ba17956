"""All commands for developers, from a fresh clone, with nothing but the standard library.

    python3 scripts/dev.py demo            make a real model, ask it, and compare plain with speculative decoding
    python3 scripts/dev.py model           make only the model: the folder smollm2, SmolLM2-135M-Instruct in int8
    python3 scripts/dev.py test [--slow]   the tests, in two workers (-n 0 for none); further arguments go to pytest
        [--isa AVX2]                       as on a processor with this instruction set at best
        [--gpu [DIR]]                      the GPU tests alone; DIR/env.sh sets up a stand-in, see CONTRIBUTING.md
        [--windows DIR]                    the tests possible under wine; DIR/wpy starts Windows' Python (docs/how-to)
    python3 scripts/dev.py test-capped     the tests of exactness, as on laptops and desktops: AVX2 and AVX2_VNNI
    python3 scripts/dev.py soak            long series of kills and of draws
    python3 scripts/dev.py test-guidance   the tests of the guidance library, in an environment of their own
    python3 scripts/dev.py planted [WORD]  plant bugs, one at a time, and see that the quick tests find each
    python3 scripts/dev.py lint            ruff, pyright, import-linter; references, links, lengths and names
    python3 scripts/dev.py bench           real chats, plain and with drafters, with the options of bench/chats.py

The first call makes .venv and installs the project with all its extras. Only guidance, with its older llguidance, goes
into .venv-guidance. Models and other files for the demo and the tests are fetched into the user's cache by
scripts/fetch.py; offline, the demo shows the embedded pair, and the tests of the real model are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV, GUIDANCE_VENV = ROOT / ".venv", ROOT / ".venv-guidance"
BIN = "Scripts" if os.name == "nt" else "bin"
LESSER = ("AVX2", "AVX2_VNNI")  # instruction sets of most users' processors
EXACTNESS = ("tests/setup/test_exactness.py", "tests/engine/test_exact.py")
UNDER_WINE = [f"tests/{name}" for name in ("windows", "base", "params", "text", "grammars", "protocols", "batch")]
REAL = "smollm2"  # the folder of the real model in int8
REAL_F32 = ".cache/smollm2-f32"  # the same in f32, for tests
HEAD = "models/smollm2-head"  # the head for the real model
PAIR = ".cache/demo-f32"
# The embedded pair is too small to edit a file; it just repeats the prompt, as predicted by lookup.
PAIR_PROMPTS = {"demos/complete.txt": "draft", "demos/edit.txt": "lookup,draft"}
ASKED = (
    ("Why do we have seasons?", "-n", "100"),
    ("Write a Python function that returns the n-th Fibonacci number.", "-n", "200"),
    (
        "Extract name, city and age as JSON: Maria Keller, 34, has lived in Vienna since 2019.",
        *("--json-schema", "demos/person.schema.json"),
    ),
)
COMPARED = {
    "A rewriting task: the answer repeats much of the prompt, which lookup proposes.": ("-f", "demos/correct.txt"),
    "A free answer: it repeats little, so the head proposes.": (
        "What is the difference between a list and a tuple in Python?",
    ),
}


def python(folder: Path = VENV) -> Path:
    """Return the Python of a virtual environment."""
    return folder / BIN / ("python.exe" if os.name == "nt" else "python")


def run(*command: str | Path) -> None:
    """Run a command in the repository's root; exit with its code if it fails."""
    path = f"{Path(command[0]).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONUTF8": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # with it, each of the tests' processes would compile all modules
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
    if extra == "dev":  # packages for the tests' exports, to run without a network
        run(python(folder), "-m", "ovspec", "export", "--prepare", "all")
    stamp.write_text(wanted, encoding="utf-8", newline="\n")


def fetched(name: str) -> Path | None:
    """Fetch ``name`` by ``scripts/fetch.py`` and return its folder; None, with a message, on failure."""
    command = [python(), "-X", "utf8", ROOT / "scripts" / "fetch.py", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8")
    return None if done.returncode else Path(done.stdout.strip())


def real_model(folder: str = REAL, weight_format: str = "int8") -> bool:
    """Export the real model with its head, unless their current versions are exported; return whether it exists."""
    sources = sorted([*(ROOT / "export" / "ovspec_export").glob("*.py"), *(ROOT / HEAD).glob("openvino_model.*")])
    wanted = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()
    stamp = ROOT / ".cache" / f"{Path(folder).name}.exported-by"
    if (ROOT / folder).is_dir() and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return True
    if not (place := fetched("model")):
        return False
    (model,) = place.glob("*.gguf")
    ovspec("export", str(model), "--draft", HEAD, "-o", folder, "--weight-format", weight_format, "--overwrite")
    stamp.parent.mkdir(exist_ok=True)
    stamp.write_text(wanted, encoding="utf-8", newline="\n")
    return True


def demo() -> None:
    if not real_model():
        print("\nThe real model can't be had, so this shows the embedded pair, which babbles.")
        demo_of_pair()
        return
    for prompt, *options in ASKED:
        ovspec("generate", REAL, "--chat", prompt, *options)
        print()
    for told, prompt in COMPARED.items():
        print(f"\n{told}")
        ovspec("generate", REAL, "--chat", *prompt, "--draft", "lookup,head", "--compare", "-n", "100")


def demo_of_pair() -> None:
    pair = "models/demo-hf"
    ovspec("export", f"{pair}/target", "--draft", f"{pair}/draft", "-o", PAIR, "--overwrite", "--weight-format", "fp32")
    for prompt, drafter in PAIR_PROMPTS.items():
        print(f"\n{prompt}:\n{(ROOT / prompt).read_text(encoding='utf-8')}\n")
        ovspec("generate", PAIR, "-f", prompt, "--draft", drafter, "--compare", "--precision", "f32", "-n", "160")


def ovspec(*arguments: str) -> None:
    """Show a command and run it."""
    print(f"$ ovspec {shlex.join(arguments)}", flush=True)
    run(python(), "-m", "ovspec", *arguments)


def test(arguments: list[str], which: str = "not slow and not soak") -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--isa", nargs="?", const="")
    parser.add_argument("--gpu", action="store_true")
    options, rest = parser.parse_known_args(arguments)
    if options.isa is not None:
        cap_instruction_set(options.isa)
    if options.gpu:
        if rest and Path(rest[0]).is_dir():
            take_environment(Path(rest.pop(0)) / "env.sh")
        # A GPU has room for a single run.
        run(python(), "-m", "pytest", "-m", "gpu", "tests/gpu", *rest)
        return
    # Two workers, each with half of the cores (tests/conftest.py): small models gain nothing from more cores. A file
    # stays with a single worker, which makes its models and servers only once.
    workers = ("-n", "2", "--dist", "loadfile") if "--update-docs" not in rest else ()
    run(python(), "-m", "pytest", *workers, "-m", "not soak" if options.slow else which, *rest)


def test_under_wine(folder: Path, arguments: list[str]) -> NoReturn:
    """Run the tests possible under wine, with the Windows Python started by ``folder``/wpy; exit with its code."""
    if not (folder / "wpy").is_file():
        sys.exit(f"--windows: {folder / 'wpy'} is missing; name a folder with a script that starts Windows' Python.")
    places = [] if any(argument.startswith("tests") for argument in arguments) else UNDER_WINE
    options = ("-p", "no:xdist", "-p", "wine", "-m", "not slow and not soak and not gpu")
    command = [str((folder / "wpy").resolve()), "-m", "pytest", *options, *places, *arguments]
    sys.exit(subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL).returncode)


def test_capped() -> None:
    levels = list_instruction_sets()
    for name in [name for name in LESSER if name in levels]:
        test([*EXACTNESS, "--isa", name])


def list_instruction_sets() -> list[str]:
    """Return the names of this processor's instruction sets."""
    program = "from ovspec.ir.instruction_set import list_instruction_sets; print(*list_instruction_sets())"
    command = (python(), "-c", program)
    return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout.split()


def cap_instruction_set(name: str = "") -> None:
    """Cap OpenVINO to the instruction set ``name``; exit if this processor lacks it."""
    if name not in (known := list_instruction_sets()):
        sys.exit(f"--isa: this processor has no {name!r}; name one of {', '.join(known) or 'none (not x86)'}.")
    # The first is for OpenVINO's matrix products, the second for its own kernels; a single cap makes it fail.
    os.environ["ONEDNN_MAX_CPU_ISA"] = os.environ["OV_CPU_MAX_ISA"] = name


def take_environment(script: Path) -> None:
    """Set the environment variables of a shell script; exit if it is missing."""
    if not script.is_file():
        sys.exit(f"--gpu: {script} is missing; name a folder with a script that sets up a stand-in.")
    command = ["bash", "-c", f". {shlex.quote(str(script))} && env -0"]
    variables = os.fsdecode(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    for entry in filter(None, variables.split("\0")):
        name, _, value = entry.partition("=")
        os.environ[name] = value


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
    run(python(), "scripts/house.py", "--check")


def main() -> None:
    commands = ("demo", "model", "test", "test-capped", "soak", "test-guidance", "planted", "lint", "bench")
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    name, arguments = sys.argv[1], sys.argv[2:]
    if name == "test-guidance":
        test_guidance(arguments)
        return
    if name == "test" and "--windows" in arguments:  # uses other packages than .venv
        at = arguments.index("--windows")
        test_under_wine(Path(*arguments[at + 1 : at + 2]), arguments[:at] + arguments[at + 2 :])
    install()
    if name in ("test", "soak"):
        for needed in ("llama.cpp", "tokenizers", "axe"):
            fetched(needed)
        real_model()
        real_model(REAL_F32, "fp32")
    if name == "test":
        test(arguments)
    elif name == "soak":
        test(arguments, "soak")
    elif name == "planted":
        run(python(), "scripts/planted.py", *arguments)
    elif name == "bench":
        if real_model():
            ways = ["--ways", "lookup", "head", "lookup,head", "--draft", f"head={REAL}/draft"]
            run(python(), "scripts/bench/chats.py", REAL, "--out", ".cache/bench/chats.jsonl", *ways, *arguments)
    elif name == "model":
        sys.exit(None if real_model() else 1)
    else:
        {"demo": demo, "lint": lint, "test-capped": test_capped}[name]()


if __name__ == "__main__":
    main()
