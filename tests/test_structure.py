"""Sizes of files and functions, and the files that a prompt passes through, as ARCHITECTURE.md lists them."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

import ovspec

FILES = sorted((ROOT / "ovspec").rglob("*.py"))
MOST_FILES_ON_THE_ROAD = 14


def test_the_road_of_a_prompt_is_the_one_in_the_docs() -> None:
    lm, home = ovspec.load(ROOT / "models" / "demo", "none", engine="paged"), str(ROOT / "ovspec")
    passed: dict[str, None] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            passed[str(Path(frame.f_code.co_filename).relative_to(home))] = None

    for _ in range(2):
        lm.generate("def fib(", max_tokens=8)
    sys.setprofile(note)
    try:
        lm.generate("def fib(", max_tokens=8)
    finally:
        sys.setprofile(None)
    road = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("### The road of a prompt")[2]
    listed = set(re.findall(r"\d+\. `([\w/]+\.py)`", road.partition("\n#")[0]))
    assert set(passed) == listed
    assert len(passed) <= MOST_FILES_ON_THE_ROAD


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_and_functions_stay_small(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 350
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not any("command" in ast.dump(each) for each in node.decorator_list):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
            assert len(names) <= 6, f"{node.name} has {len(names)} parameters; group them in a dataclass"
