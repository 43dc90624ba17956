"""However an export is stopped, the old or the new folder is there, whole, and the next export cleans up."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CHECKPOINTS
from ovspec_export import Compression, export_pair, folders
from ovspec_export.folders import check_disk_space, check_output_folder, open_partial_folder, replace_folder

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.setup.manifest import MANIFEST_FILE, UNFINISHED_MANIFEST, backup_path, read_manifest, restore_backup

DRAFT = str(CHECKPOINTS / "draft")
TURNS = 50  # exports that are killed at random moments
posix = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")


MANIFEST = '{"files": {"text": {}}}'


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def marked(folder: Path, text: str, manifest: str = MANIFEST) -> Path:
    """Make a folder that passes for an export."""
    folder.mkdir()
    (folder / MANIFEST_FILE).write_text(manifest, encoding="utf-8")
    (folder / "text").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def open_files(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set for names of folders that can't be renamed, as on Windows where a file in them is open."""
    held, rename = set[str](), Path.rename

    def refusing(self: Path, target: Path) -> Path:
        if self.name in held:
            raise PermissionError(13, "Access is denied", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    monkeypatch.setattr(folders, "sys", SimpleNamespace(platform="win32"))
    return held


def test_a_loaded_export_stays_and_the_error_says_what_to_stop(tmp_path: Path, open_files: set[str]) -> None:
    output = marked(tmp_path / "pair", "old")
    open_files.add("pair")
    with (
        pytest.raises(OvspecError, match="old export was kept; stop the program"),
        open_partial_folder(output, overwrite=True),
    ):
        raise AssertionError("the work has begun")
    assert (output / "text").read_text(encoding="utf-8") == "old"
    open_files.clear()
    with open_partial_folder(output, overwrite=True) as work:
        (work / "text").write_text("new", encoding="utf-8")
        (work / MANIFEST_FILE).write_text(MANIFEST, encoding="utf-8")
        open_files.add("pair")  # loaded meanwhile
        with pytest.raises(OvspecError, match="its files are open"):
            replace_folder(work, output)
        open_files.clear()
        assert (output / "text").read_text(encoding="utf-8") == "old"
        replace_folder(work, output)
    assert (output / "text").read_text(encoding="utf-8") == "new"


def start(*arguments: str, limit: int | None = None) -> subprocess.Popen[str]:
    """Start ``ovspec export --overwrite`` as a shell does; ``limit``: maximum size of a file in bytes."""

    def limited() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (limit or 0, limit or 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    code = "from signal import *; signal(SIGINT, default_int_handler)\nfrom ovspec.__main__ import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "export", "--overwrite", *arguments],
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        preexec_fn=limited if limit else None,
    )


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match="contains files not exported by ovspec"):
        export_pair(DRAFT, None, tmp_path)
    with pytest.raises(ovspec.OvspecError, match="is a file"):
        export_pair(DRAFT, None, tmp_path / "thesis.txt")
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "mine").write_text("mine", encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match="needs this name for a backup"):
        export_pair(DRAFT, None, tmp_path / "out")
    assert contents(tmp_path) == {"thesis.txt": b"precious", ".out.old/mine": b"mine"}
    # Files that somebody has put into an export are left alone, too.
    ours = marked(tmp_path / "ours", "whole")
    check_output_folder(ours, overwrite=True)
    (ours / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match=r"\(notes.txt\)"):
        export_pair(DRAFT, None, ours, overwrite=True)
    # So is a folder that looks like a leftover but has no manifest.
    (tmp_path / ".new.partial-1234").mkdir()
    (tmp_path / ".new.partial-1234" / "mine").write_text("mine", encoding="utf-8")
    with open_partial_folder(tmp_path / "new", overwrite=False):
        pass
    assert (tmp_path / ".new.partial-1234" / "mine").is_file()


def test_a_replacement_killed_half_way_is_undone(tmp_path: Path) -> None:
    output, new = marked(tmp_path / "out", "old"), marked(tmp_path / "new", "new")
    output.rename(backup_path(output))  # killed here
    restore_backup(output)
    assert (output / "text").read_text(encoding="utf-8") == "old"
    output.rename(backup_path(output))
    new.rename(output)  # or here, before the backup was deleted
    check_output_folder(output, overwrite=True)
    replace_folder(marked(tmp_path / "newer", "newer"), output)
    assert contents(tmp_path) == {"out/ovspec.json": MANIFEST.encode(), "out/text": b"newer"}
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "vanished", output)


def test_odd_places(tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, a link, an empty folder and a damaged leftover are all handled."""
    shutil.copytree(CHECKPOINTS.parent / "demo" / "draft", tmp_path / "real")
    monkeypatch.chdir(tmp_path / "real")
    options: dict[str, Any] = {"arithmetic": "fast", "cache_dir": cache_dir}
    assert ovspec.load(".", **options).generate("def f(", max_tokens=2).token_ids
    restore_backup(Path("/"))
    monkeypatch.chdir(tmp_path)
    marked(tmp_path / "there", "old")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    replace_folder(marked(tmp_path / "new", "new"), (tmp_path / "link").resolve())
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "link" / "text").read_text(encoding="utf-8") == "new"
    (tmp_path / "empty").mkdir()
    replace_folder(marked(tmp_path / "new", "new"), tmp_path / "empty")
    assert not backup_path(tmp_path / "empty").exists()
    backup_path(tmp_path / "real").mkdir()
    (backup_path(tmp_path / "real") / MANIFEST_FILE).write_text("", encoding="utf-8")  # as a power cut leaves it
    assert ovspec.load(tmp_path / "real", **options)


def test_a_pair_is_replaced_only_on_request(tmp_path: Path) -> None:
    """A damaged pair too, for its files may be wanted; what an export left unfinished holds nothing."""
    whole, damaged = marked(tmp_path / "whole", "whole"), marked(tmp_path / "damaged", "damaged")
    (damaged / "text").unlink()
    for output in (whole, damaged):
        before = contents(output)
        with pytest.raises(ovspec.OvspecError, match=r"already exists; .* add `overwrite=True`\.$"):
            export_pair(DRAFT, None, output)
        with pytest.raises(ovspec.OvspecError, match="already exists"), open_partial_folder(output, overwrite=False):
            pass  # it came while another export held the lock
        assert contents(output) == before
        check_output_folder(output, overwrite=True)
    whole.rename(backup_path(whole))  # a replacement was killed half way: the old pair is still wanted
    with pytest.raises(ovspec.OvspecError, match="already exists"):
        check_output_folder(whole, overwrite=False)
    (tmp_path / "empty").mkdir()
    marked(tmp_path / "part", "part", UNFINISHED_MANIFEST)
    for name in ("empty", "part", "new"):
        check_output_folder(tmp_path / name, overwrite=False)


def test_an_unfinished_folder_is_not_loaded(tmp_path: Path) -> None:
    marked(tmp_path / "part", "part", UNFINISHED_MANIFEST)
    with pytest.raises(ovspec.OvspecError, match="not finished"):
        read_manifest(tmp_path / "part")


def test_loading_finds_a_replacement_that_was_killed_half_way(tmp_path: Path, cache_dir: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(CHECKPOINTS.parent / "demo", output)
    output.rename(backup_path(output))
    assert ovspec.load(output, arithmetic="fast", cache_dir=cache_dir).generate("def f(", max_tokens=2).token_ids


def test_one_export_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open_partial_folder(out, overwrite=True) as work:
        with (
            pytest.raises(ovspec.OvspecError, match="another export is writing to this folder"),
            open_partial_folder(out, True),
        ):
            pass
        with open_partial_folder(tmp_path / "other", overwrite=False):
            pass
        assert work.is_dir()
    assert not list(tmp_path.iterdir())


def test_free_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_disk_space(tmp_path / "not" / "yet" / "there", 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10e6))  # type: ignore[attr-defined]
    with pytest.raises(ovspec.OvspecError, match=r"needs about \d+\.\d MB there, but only 10\.0 MB is free"):
        export_pair(DRAFT, None, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@posix
@pytest.mark.parametrize("limit", [100_000, 3_000_000])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, limit: int) -> None:
    """A limit on the size of files stops the tokenizer in the first case, and the weights in the second."""
    marked(tmp_path / "out", "old")
    before = contents(tmp_path)
    process = start(DRAFT, "-o", str(tmp_path / "out"), "--weight-format", "fp32", limit=limit)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    last = told.strip().splitlines()[-1]
    assert last.startswith("Error: ") and str(tmp_path) in last
    assert contents(tmp_path) == before


@posix
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        pytest.param(signal.SIGINT, 130, id="SIGINT"),
        pytest.param(signal.SIGTERM, 1, id="SIGTERM", marks=pytest.mark.slow),  # as in distill/test_run.py
    ],
)
def test_an_export_told_to_end_clears_up(tmp_path: Path, number: int, expected: int) -> None:
    marked(tmp_path / "out", "old")
    before = contents(tmp_path)
    process = start(DRAFT, "-o", str(tmp_path / "out"))
    while not list(tmp_path.glob(".out.partial-*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    time.sleep(0.5)  # the worker imports what it exports with
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == expected
    assert contents(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == 1


@posix
@pytest.mark.soak
def test_killed_at_random_moments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After each stopped export, the folder holds the old export or the new one, to the last byte."""
    output = tmp_path / "out"
    export_pair(DRAFT, None, output, Compression("fp16"))
    began = time.monotonic()
    assert start(DRAFT, "-o", str(output), "--weight-format", "int8").wait(timeout=120) == 0
    whole = time.monotonic() - began
    moments, found = random.Random(0), Counter[str]()
    ending = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    for turn in range(TURNS):
        numbers = [signal.SIGKILL] if turn % 3 == 0 else moments.choices(ending, k=2)
        wanted = ("fp16", "int8")[turn % 2]
        before = manifest_format(output)
        process = start(DRAFT, "-o", str(output), "--weight-format", wanted)
        # Spread evenly over the export, but half of them near its end, when folders are renamed.
        moment = (turn + moments.random()) / TURNS
        time.sleep(whole * (0.8 + 0.25 * moment if turn % 2 else moment))
        for number in numbers:
            process.send_signal(number)
            time.sleep(moments.choice((0, 0.001, 0.01, 0.1)))
        process.communicate(timeout=30)
        restore_backup(output)  # as the next load or export does
        assert read_manifest(output, verify=True), "neither the old export nor the new one is whole"
        after = manifest_format(output)
        assert after in (before, wanted)
        finished = process.returncode == 0 or (after == wanted and before != wanted)
        told = "+".join(signal.Signals(number).name for number in numbers)
        found[f"{told}: {'new' if finished else 'old'}"] += 1
    export_pair(DRAFT, None, output, Compression("fp16"), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "leftovers were not removed"
    with capsys.disabled():
        print(f"\nkilled at {TURNS} random moments: {dict(found)}")


def manifest_format(folder: Path) -> str:
    manifest = read_manifest(folder)
    assert manifest
    return manifest.target.weight_format


REPLACE = """
import sys
from pathlib import Path
from ovspec_export.folders import replace_folder
from ovspec.setup.manifest import MANIFEST_FILE
parent = Path(sys.argv[1])
print("ready", flush=True)
for turn in range(100000):
    new = parent / "new"
    if not new.exists():
        (parent / "making").mkdir(exist_ok=True)
        (parent / "making" / MANIFEST_FILE).write_text('{"files": {"text": {}}}')
        (parent / "making" / "text").write_text("whole")
        (parent / "making").rename(new)
    replace_folder(new, parent / "out")
"""


@posix
@pytest.mark.parametrize("times", [1, pytest.param(15, marks=pytest.mark.slow)])
def test_killed_while_folders_are_renamed(tmp_path: Path, times: int) -> None:
    output = marked(tmp_path / "out", "whole")
    moments = random.Random(1)
    for _ in range(times):
        process = subprocess.Popen(
            [sys.executable, "-c", REPLACE, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ | {"PYTHONUTF8": "1"}
        )
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        time.sleep(moments.uniform(0.0, 0.05))
        process.kill()
        process.communicate()
        restore_backup(output)
        assert contents(output) == {"ovspec.json": MANIFEST.encode(), "text": b"whole"}


def test_files_that_come_during_an_export_survive(tmp_path: Path) -> None:
    """A user's file in the old folder, in a subfolder, and under a name that the new export has, too."""
    output = marked(tmp_path / "out", "old")
    with open_partial_folder(output, overwrite=True) as work:
        (work / MANIFEST_FILE).write_text('{"files": {"text": {}, "more": {}}}', encoding="utf-8")
        (work / "text").write_text("new", encoding="utf-8")
        (work / "more").write_text("new", encoding="utf-8")
        (output / "notes").mkdir()
        for name in ("mine", "notes/mine", "more"):
            (output / name).write_text("mine", encoding="utf-8")
        replace_folder(work, output)
    assert contents(output) | {MANIFEST_FILE: b""} == {
        MANIFEST_FILE: b"", "text": b"new", "more": b"new", "mine": b"mine", "notes/mine": b"mine"
    }  # fmt: skip
    kept = backup_path(output)
    assert contents(kept)["more"] == b"mine", "it stays where it doesn't get in the way"
    with pytest.raises(ovspec.OvspecError, match="rename the folder"):
        check_output_folder(tmp_path / "out2" / ".." / "out", overwrite=True)


def test_what_lies_in_a_backup_is_not_deleted(tmp_path: Path) -> None:
    output = marked(tmp_path / "out", "new")
    backup = marked(tmp_path / ".out.old", "old")
    (backup / "mine").write_text("mine", encoding="utf-8")
    with pytest.raises(
        ovspec.OvspecError,
        match=r"\.out\.old: the export needs this name for a backup, but this folder contains files not exported by ",
    ):
        check_output_folder(output, overwrite=True)
    assert (backup / "mine").read_text(encoding="utf-8") == "mine"


def test_a_replacement_that_ends_half_way_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, new, rename = marked(tmp_path / "out", "old"), marked(tmp_path / "new", "new"), Path.rename

    def ended(path: Path, to: Path) -> Path:
        if path == new:
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", ended)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(new, output)
    assert contents(output) == {MANIFEST_FILE: MANIFEST.encode(), "text": b"old"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]
