"""The demos run."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

Run = Callable[..., str]


@pytest.fixture
def run(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a demo in this process, in another folder, and returns what it prints."""

    def run(name: str, *arguments: str | Path) -> str:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache_dir))
        monkeypatch.chdir(ROOT / "tests")
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(ROOT / "demos" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_embed(run: Run) -> None:
    out = run("embed.py")
    assert re.search(r"colour = '(red|green|blue)$", out.strip())


def test_guided_program_says_how_to_install_guidance(run: Run, pair: Path) -> None:
    out = run("guided_program.py", pair)
    assert out.count("pip install '.[guidance]'") == 2
    for part in out.split("--- with_sessions")[1:]:
        form, inferences = part.split("\n--- ", 1)
        assert re.search(r'name = "[a-z]{3,12}"\nkind = "(server|client|library)"\nlicense = "', form)
        assert re.search(r'version = "[0-9]\.[0-9]{1,2}"\nmodules = \["', form)
        assert re.match(r"[0-9]+ inferences of the target, [0-9]+ ms", inferences)
