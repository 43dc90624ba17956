"""Files on Windows, by a stand-in that behaves as it is documented."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ovspec.base import files
from ovspec.base.errors import OvspecError
from ovspec.base.files import flush_to_disk, rename_with_retries, write_atomically


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(files, "RENAME_PAUSE_SECONDS", 0.0)


def refuse(monkeypatch: pytest.MonkeyPatch, times: int) -> list[Path]:
    """Let the first renames fail, as where another process has the file open; return a list of what was renamed."""
    replace, renamed = Path.replace, list[Path]()

    def refusing(self: Path, target: Path) -> Any:
        renamed.append(self)
        if len(renamed) <= times:
            raise PermissionError(13, "Access is denied")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refusing)
    return renamed


@pytest.mark.usefixtures("on_windows")
def test_a_file_that_is_open_for_a_moment_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = refuse(monkeypatch, 3)
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "new"
    assert len(renamed) == 4


@pytest.mark.usefixtures("on_windows")
def test_a_file_that_stays_open_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = refuse(monkeypatch, 99)
    (tmp_path / "old").write_text("", encoding="utf-8")
    with pytest.raises(PermissionError):
        rename_with_retries(tmp_path / "old", tmp_path / "new")
    assert len(renamed) == files.RENAME_ATTEMPTS


def test_elsewhere_permission_is_not_asked_for_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "sys", SimpleNamespace(platform="linux"))
    renamed = refuse(monkeypatch, 99)
    with pytest.raises(PermissionError):
        rename_with_retries(tmp_path / "old", tmp_path / "new")
    assert len(renamed) == 1


@pytest.mark.usefixtures("on_windows")
def test_files_are_open_for_writing_where_only_those_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, synced = list[int](), list[int]()
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, how: flags.append(how) or opened(path, how))
    monkeypatch.setattr(os, "fsync", synced.append)
    (tmp_path / "file").write_text("", encoding="utf-8")
    flush_to_disk(tmp_path / "file")
    flush_to_disk(tmp_path)  # a folder can't be opened so, which is no error
    assert flags == [os.O_RDWR] * 2 and len(synced) == 1


@pytest.mark.usefixtures("on_windows")
@pytest.mark.parametrize("name", ["CON", "con.txt", "COM1", "file:stream", "what?", "dot.", "space ", "NUL.json"])
def test_names_that_windows_keeps_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OvspecError, match="not a valid file name on Windows"):
        write_atomically(tmp_path / name, "lost")


@pytest.mark.usefixtures("on_windows")
@pytest.mark.parametrize("name", ["console", "com10", "a b", "Größe", "🦊.json", ".dot"])
def test_other_names_are_taken(name: str, tmp_path: Path) -> None:
    write_atomically(tmp_path / name, "kept\n")
    assert (tmp_path / name).read_bytes() == b"kept\n"
