"""The README's Python runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import ROOT


def test_the_example_runs(pair: Path, capsys) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    code = block.replace('"my-pair"', repr(str(pair)))
    lines = [line for line in code.splitlines() if "export=True" not in line]
    assert len(lines) < len(code.splitlines())
    names: dict = {}
    exec("\n".join(lines), names)
    assert names["result"].text
    assert len(names["results"]) == 2
    assert "]" not in names["colours"]
    assert capsys.readouterr().out
