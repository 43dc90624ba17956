"""Test models are kept between runs, but for no longer than what they are made of stays the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT
from kept import PLUGINS, UNUSED, copy_kept, digest


class Maker:
    """Makes a folder with a file, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, folder: Path) -> None:
        folder.mkdir()
        self.times += 1
        (folder / "file").write_text(str(self.times), encoding="utf-8")


def test_it_is_made_once_for_each_key(tmp_path: Path) -> None:
    make, place = Maker(), tmp_path / "kept"
    found = []
    for number, key in enumerate(("one", "one", "two", "one")):
        copy_kept(place, "name", key, make, folder := tmp_path / str(number))
        found.append((folder / "file").read_text("utf-8"))
        (folder / "file").write_text("spoiled", encoding="utf-8")
    assert found == ["1", "1", "2", "3"], "a copy's change is not kept, and neither is an older version"
    copy_kept(place, "name-2", "one", make, tmp_path / "other")
    copy_kept(place, "name", "one", make, tmp_path / "again")
    assert make.times == 4, "another name keeps its own"


def test_nothing_is_kept_of_a_failure(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_kept(tmp_path / "kept", "name", "key", fail, tmp_path / "copy")
    make = Maker()
    copy_kept(tmp_path / "kept", "name", "key", make, tmp_path / "copy")
    assert make.times == 1


def test_a_change_of_what_it_is_made_of_changes_its_key(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a", encoding="utf-8")
    two.write_text("b", encoding="utf-8")
    before = digest([one, two], "torch 2.13")
    assert digest([two, one], "torch 2.13") == before
    assert len({before, digest([one, two], "torch 2.14"), digest([one], "torch 2.13")}) == 3
    two.write_text("c", encoding="utf-8")
    assert digest([one, two], "torch 2.13") != before


def test_exports_import_nothing_of_what_the_key_leaves_out() -> None:
    """The layers below import nothing of it either, as lint checks."""
    for file in (ROOT / "export").rglob("*.py"):
        imported = re.findall(r"(?:from|import) ovspec\.(\w+)", file.read_text(encoding="utf-8"))
        assert not set(imported) & set(UNUSED), file


def test_what_makes_models_imports_no_plugin() -> None:
    """The other way round, a plugin's change would leave models that it has part in."""
    for file in (ROOT / "tests" / "support").glob("*.py"):
        imported = re.findall(r"(?m)^\s*(?:from|import) (\w+)", file.read_text(encoding="utf-8"))
        assert file.stem in PLUGINS or not set(imported) & set(PLUGINS), file
