"""The Python of README and docs runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files that are written without a folder's name stay out of the repository."""
    monkeypatch.chdir(tmp_path)


def run(file: str, pair: Path) -> dict[str, Any]:
    """The names that the file's blocks define, one after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL)
    code = "\n".join(blocks).replace('"my-pair"', repr(str(pair)))
    names: dict[str, Any] = {}
    exec("\n".join(line for line in code.splitlines() if "export=True" not in line), names)
    return names


def test_the_readme_runs(pair: Path, capsys) -> None:
    names = run("README.md", pair)
    assert names["result"].text
    assert len(names["results"]) == 2
    assert "]" not in names["colours"]
    assert names["best"] in ("'red'", "'green'")
    assert names["sampled"].stats.seed == 1
    assert len(names["four"]) == 4
    assert names["lm"].generate(names["prompt"], max_tokens=40, lookahead=4).stats.accepted > 0
    assert capsys.readouterr().out


def test_the_page_on_speculation_runs(pair: Path) -> None:
    import ovspec

    text = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
    assert "```python" in text
    lm = ovspec.load(pair, True)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = "import numpy as np\nimport ovspec\n" + "\n".join(blocks).replace('"my-pair"', repr(str(pair)))
    names: dict[str, Any] = {"lm": lm}
    exec(code, names)
    assert names["model"].generate(np_tokens(), 8, 2, among=3).shape == (1, 11)


def np_tokens() -> Any:
    import numpy as np

    return np.array([[5, 6, 7]])


def test_the_page_on_constraints_runs(pair: Path) -> None:
    assert run("docs/constraints.md", pair)["answer"].text in ("yes", "no")


def test_the_page_on_sessions_runs(pair: Path) -> None:
    names = run("docs/sessions.md", pair)
    assert names["kind"] in ("server", "client")
    assert names["likely"] < 0
    assert [message["role"] for message in names["chat"].messages] == ["system", *["user", "assistant"] * 2]
