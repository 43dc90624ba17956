"""A disk that is full: the error names the file, and what was there before stays."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import ovspec
from ovspec.base.errors import DISK_FULL_ERRNOS, OvspecError, WriteError
from ovspec.base.files import write_atomically
from ovspec.base.progress import print_note
from ovspec.batch.requests import make_prompt_request
from ovspec.batch.resumable_run import BatchProgress, run_file
from ovspec.cli import main
from ovspec.cli.batch import BatchProgressPrinter
from ovspec.params import make_params

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="limits files as POSIX systems do")
full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is full")


def ship_folder(folder: Path) -> None:
    shipment = pytest.importorskip("ovspec.batch.ray.shipment")  # which needs Ray
    shipment.create_folder_once(folder, [("file", b"x" * 1000)])


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Let files grow to ``size`` bytes at most, so that this process writes as to a disk that is full."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_session(lm: ovspec.LanguageModel, file: Path) -> None:
    with lm.session() as session:
        session.append("a text that is long enough")
        session.save(file)


@pytest.mark.parametrize(
    "write",
    [
        lambda _, file: write_atomically(file, "x" * 1000),
        save_session,
        lambda _, file: ship_folder(file.parent / "folder"),
    ],
    ids=["file", "session", "folder"],
)
def test_the_file_is_named_and_keeps_what_it_had(
    load: Callable[..., ovspec.LanguageModel], tmp_path: Path, write: Callable[[Any, Path], None]
) -> None:
    lm, file = load(), tmp_path / "file"
    file.write_text("before", encoding="utf-8")
    told = rf"^{re.escape(str(tmp_path))}(/folder)?/file: can't be written \(File too large\); free some space"
    with small_files(100), pytest.raises(WriteError, match=told) as found:
        write(lm, file)
    assert isinstance(found.value, OvspecError) and isinstance(found.value, OSError)
    assert file.read_text(encoding="utf-8") == "before"
    assert not (tmp_path / "folder").exists()


def test_a_batch_goes_on_from_what_was_written(load: Callable[..., ovspec.LanguageModel], tmp_path: Path) -> None:
    requests = [make_prompt_request(str(i), f"{i}", f"a{i}") for i in range(6)]
    options: Any = {"max_tokens": 2, "batch_size": 2}
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    with small_files(2500), pytest.raises(WriteError, match=re.escape(f"{partial}: can't be written")):
        run_file(load(), requests, output, make_params(options))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.partial"]
    whole = partial.read_text(encoding="utf-8").count("}}\n")
    progress = run_file(load(), requests, output, make_params(options))
    assert progress.done_before == whole > 0
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == [request.id for request in requests]


@full_device
def test_a_full_device_for_stdout_or_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of progress stop nothing; without room for its output a command fails."""
    with Path("/dev/full").open("w", encoding="utf-8", buffering=1) as full, monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["ovspec", "--version"])
        patched.setattr(sys, "stdout", full)
        with pytest.raises(SystemExit) as ended:
            main()
        patched.undo()
        assert ended.value.code == 1
        assert capsys.readouterr().err.startswith("Error: stdout: can't be written (No space left on device); free")
        patched.setattr(sys, "stderr", full)
        print_note("a line")
        patched.setattr(sys.modules["ovspec.cli.batch"], "PROGRESS_INTERVAL", -1.0)
        BatchProgressPrinter().update(BatchProgress(2, 0, done=1))
        try:
            full.close()
        except OSError as error:
            assert error.errno in DISK_FULL_ERRNOS
