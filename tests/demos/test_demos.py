"""The demos run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT


def run(name: str, *arguments: str | Path) -> str:
    """What a demo prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1"}
    command = [sys.executable, str(ROOT / "demos" / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, env=environment, cwd=ROOT / "tests", timeout=120, check=False)
    assert not done.returncode, done.stderr.decode()
    return done.stdout.decode()


def test_embed() -> None:
    out = run("embed.py")
    assert re.search(r"colour = '(red|green|blue)$", out.strip())


def test_guided_program_says_how_to_install_guidance(pair: Path) -> None:
    out = run("guided_program.py", pair)
    assert out.count("pip install '.[guidance]'") == 2
    for part in out.split("--- with_sessions")[1:]:
        form, inferences = part.split("\n--- ", 1)
        assert re.search(r'name = "[a-z]{3,12}"\nkind = "(server|client|library)"\nlicense = "', form)
        assert re.search(r'version = "[0-9]\.[0-9]{1,2}"\nmodules = \["', form)
        assert re.match(r"[0-9]+ inferences of the target, [0-9]+ ms", inferences)
