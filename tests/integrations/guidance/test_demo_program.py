"""demos/guided_program.py and docs/how-to/guidance.md with the guidance library installed."""

from __future__ import annotations

import re
from pathlib import Path

import test_demos
import test_docs
from conftest import ROOT

run = test_demos.run  # the fixture


def test_both_halves_run_and_a_draft_saves_inferences(run: test_demos.Run, pair: Path) -> None:
    out = run("guided_program.py", pair, "4")  # what auto finds worth its time depends on how busy this machine is
    assert "pip install" not in out
    plain, drafted = re.findall(r"--- with_guidance.*\n([\s\S]*?)\n--- ([0-9]+) inferences", out)
    assert plain[0] == drafted[0]
    assert re.search(r'name = "[a-z]{3,12}"\nkind = "(server|client|library)"\nlicense = "', plain[0])
    assert int(drafted[1]) < 0.6 * int(plain[1])


def test_the_page_runs() -> None:
    names = test_docs.run("docs/how-to/guidance.md", ROOT / "models" / "demo", skipped=True)
    assert names["form"]["kind"] in ("server", "client")
    assert names["lm"].stats.forks >= 1
    assert names["lm"].stats.accepted > 0
