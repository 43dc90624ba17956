"""The bugs that scripts/planted.py plants: each can be planted, and its tests are there and quick."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import planted
import pytest
from conftest import ROOT
from planted import Bug, known_bugs


def test_each_is_one_change_that_python_reads() -> None:
    for bug in known_bugs():
        text = (ROOT / bug.file).read_text(encoding="utf-8")
        changed = bug.planted_in(text)
        assert changed != text, bug.name
        ast.parse(changed, bug.name)


def test_their_tests_are_there_and_quick() -> None:
    for bug in known_bugs():
        assert bug.tests, bug.name
        for test in bug.tests:
            file, _, name = test.partition("::")
            marks = marks_in(ROOT / file).get(name)
            assert marks is not None, f"{bug.name}: there is no {test}"
            assert not {"pytest.mark.slow", "pytest.mark.soak"}.intersection(marks), f"{bug.name}: {test} is slow"


@functools.cache
def marks_in(file: Path) -> dict[str, list[str]]:
    """Return the marks of each test in a file."""
    functions = [each for each in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(each, ast.FunctionDef)]
    return {each.name: [ast.unparse(mark) for mark in each.decorator_list] for each in functions}


def test_code_that_has_moved_is_told() -> None:
    bug = Bug("a-bug", "ovspec/file.py", "old", "new", [])
    assert bug.planted_in("an old line") == "an new line"
    for text in ("another line", "old and old"):
        with pytest.raises(ValueError, match=r"a-bug: `old` is [02] times in ovspec/file\.py"):
            bug.planted_in(text)


def test_a_bug_is_found_missed_broken_or_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, folder = tmp_path / "sound", tmp_path / "bug"
    for place in (sound, folder):
        place.mkdir()
        (place / "code.py").write_text("NUMBER = 1\nWORD = 'one'\nTOLD = True\n", "utf-8")
        (place / "test_code.py").write_text(
            "import code, pytest\n\n\n@pytest.mark.skipif(not code.TOLD, reason='')\n"
            "def test_number():\n    assert code.NUMBER == 1\n",
            "utf-8",
        )
    monkeypatch.setattr(planted, "SOUND", sound)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to load
    for old, new, expected in (
        ("NUMBER = 1", "NUMBER = 2", "found"),
        ("WORD = 'one'", "WORD = 'two'", "MISSED"),
        ("WORD = 'one'", "WORD = one", "BROKEN"),
        ("TOLD = True", "TOLD = False", "skipped"),
    ):
        outcome = planted.tried(Bug("a-bug", "code.py", old, new, ["test_code.py"]), folder, "0 of 1")
        assert outcome.verdict == expected, outcome.told
        assert (folder / "code.py").read_bytes() == (sound / "code.py").read_bytes()
