"""The wheel: its contents, and generation with the runtime dependencies alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


@pytest.mark.slow
def test_the_wheel_generates_without_torch(tmp_path: Path, pair: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)], check=True)
    [wheel] = tmp_path.glob("ovspec-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"ovspec", "ovspec_export"}
    assert not [name for name in names if name.endswith((".bin", ".xml", ".safetensors", "tokenizer.json"))]

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    installed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True
    )
    packages = {package["name"] for package in json.loads(installed.stdout)}
    assert not packages & {"torch", "transformers", "optimum", "nncf", "tokenizers"}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        # Run outside the checkout, so that nothing in it can be imported or found.
        command = [str(python), "-m", "ovspec", *arguments]
        return subprocess.run(command, capture_output=True, encoding="utf-8", cwd=tmp_path, check=False)

    drafted = ("--draft", "--lookahead", "3", "--precision", "f32")
    done = run("generate", str(pair), PROMPTS[0], *drafted, "--json", "-n", "16")
    result = json.loads(done.stdout)
    assert result["stats"]["accepted"] > 0
    refused = run("export", str(pair), "-o", "out")
    assert refused.returncode == 1
    assert "pip install '.[export]'" in refused.stderr
    bare = run("generate", "hi")
    assert bare.returncode == 1
    assert "no embedded model" in bare.stderr
