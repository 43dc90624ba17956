"""The wheel: its contents, and generation with the runtime dependencies alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from conftest import PROMPTS, ROOT


def test_the_runtime_never_imports_what_only_the_export_needs() -> None:
    code = """
import sys, ovspec
from ovspec import cli
from ovspec.api import model
from ovspec.cli import output
print(sorted({"torch", "transformers", "optimum", "nncf", "tokenizers", "ovspec_export"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--no-deps", "-w", str(folder), str(ROOT)], check=True)
    [made] = folder.glob("ovspec-*.whl")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_read_the_wheel(tmp_path: Path, wheel: Path, checker: str) -> None:
    """Installed as users have it, beside the dependencies that are installed here."""
    pytest.importorskip(checker)
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    subprocess.run([*PIP, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n", "utf-8")
    shutil.copy(ROOT / "tests" / "support" / "typed_program.py", tmp_path)
    if checker == "mypy":
        options = ["--strict", "--no-incremental", f"--python-executable={python}"]
    else:
        options = [f"--pythonpath={python}"]
        settings = {"typeCheckingMode": "strict", "reportUnnecessaryTypeIgnoreComment": True}
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), "utf-8")
    command = [sys.executable, "-m", checker, *options, "typed_program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if checker == "pyright":  # mypy writes no defaults
        lines = done.stdout.splitlines()
        for option, functions in (("prompt: ", 1), ("temperature: float = 0", 2), ("device: str =", 1)):
            assert sum(option in line for line in lines) == functions, done.stdout


@pytest.mark.slow
def test_the_wheel_generates_without_torch(tmp_path: Path, pair: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"ovspec", "ovspec_export"}
    assert "ovspec/py.typed" in names
    page = {file.relative_to(ROOT).as_posix() for file in (ROOT / "ovspec/server/page").rglob("*") if file.is_file()}
    assert "ovspec/server/page/vendor/licences/marked.txt" in page <= {*names}
    assert not [name for name in names if name.endswith((".bin", ".xml", ".safetensors", "tokenizer.json"))]

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    installed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    )
    packages = {package["name"] for package in json.loads(installed.stdout)}
    assert not packages & {"torch", "transformers", "optimum", "nncf", "tokenizers"}

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Run outside the checkout, so that nothing in it can be imported or found.
        command = [str(python), "-m", "ovspec", *arguments]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", cwd=tmp_path, env=environment, check=False
        )

    drafted = ("--draft", "--lookahead", "3", "--precision", "f32")
    done = run("generate", str(pair), PROMPTS[0], *drafted, "--json", "-n", "16")
    result = json.loads(done.stdout)
    assert result["stats"]["accepted"] > 0
    refused = run("export", str(pair), "-o", "out")
    assert refused.returncode == 1
    assert "pip install '.[export]'" in refused.stderr
    bare = run("generate", "hi")
    assert bare.returncode == 1
    assert "no demo model" in bare.stderr
