"""A distillation takes turns between data and training, goes on after any end, and puts its result into its place.

The jobs that take minutes are stand-ins; what the parent does with them is what is tested.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from distilling import Distilling, distilling, made_head, row
from filelock import FileLock
from ovspec_export.distill import result as results
from ovspec_export.distill.card import read_record
from ovspec_export.distill.run import compute_round_ends, estimate_text_seconds
from ovspec_export.distill.work_folder import StageFigures, WorkFolder
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import HeadSource
from ovspec_export.worker import subtract_startup_time

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.setup.manifest import read_manifest

posix = pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
STAGES = ("write_texts", "write_features", "train_head", "convert_eagle_head", "measure_gain")


@pytest.fixture
def distil(
    pair: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Distilling:
    made = distilling(pair, made_head(tmp_path_factory), tmp_path)
    made.stand_in(monkeypatch)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------- a whole run


def test_a_head_for_an_exported_model(distil: Distilling, capsys: pytest.CaptureFixture[str]) -> None:
    assert distil.run() == 0
    told = capsys.readouterr().err
    assert "out: round 1, training: 1,000 tokens, 345 tokens/s, 0.34 accepted tokens a round, about 1.0" in told
    assert "tokens/round" in told, "the table of the benchmark"
    assert "model: out is its draft now" in told
    names = {"config.json", "model.safetensors", "openvino_model.xml", "openvino_model.bin"}
    assert {file.name for file in distil.output.iterdir()} == {*names, "README.md", "distill.json", "ovspec.json"}
    assert read_manifest(distil.output, verify=True)
    assert not distil.work.exists()
    assert {path.name for path in distil.folder.iterdir()} == {"model", "out", "began"}
    source = find_source(str(distil.output))
    assert isinstance(source, HeadSource) and not source.is_ir, "the checkpoint counts, not the export beside it"
    manifest = read_manifest(distil.model, verify=True)
    assert manifest and manifest.draft and manifest.draft.source == "out"
    for draft in ("head", distil.output):
        lm = ovspec.load(distil.model, draft, precision="f32", arithmetic="fast")
        drafted = lm.generate("def f(", max_tokens=12, lookahead=2)
        assert drafted.stats.proposed > 0


def test_what_the_jobs_are_asked(distil: Distilling) -> None:
    notes, topics = distil.folder / "notes.txt", distil.folder / "topics"
    notes.write_text("import os", encoding="utf-8")
    topics.write_text("cats\n\n a dog \n", encoding="utf-8")
    options = {"text": (notes,), "topics": topics, "draft_vocabulary": 256, "size_limit": 0.5}
    assert distil.run(tokens=1500, minutes=6, **options) == 0
    texts, features, training = (distil.began(job) for job in STAGES[:3])
    assert (texts[0]["texts"], texts[0]["topics"]) == ([str(notes)], ["cats", "a dog"])
    assert texts[0]["model"] == str(distil.model)
    after = 20 + 1.2 * 2 * 8 * 96 * 0.01  # seconds to export the result and to measure the gain
    spent = read_record(distil.output).seconds  # type: ignore[union-attr]
    left = (360 - after) / 2 - spent["timing"]
    assert texts[0]["seconds"] == pytest.approx(left / 3, abs=1), "two thirds of half of the first round is for data"
    assert (features[0]["max_bytes"], features[0]["layers"]) == (0.5e9, [0, 1])
    assert [each["tokens"] for each in training] == [1500, 1500], "a second round was needed"
    assert (training[0]["draft_vocabulary"], training[0]["start_checkpoint"], training[0]["layers"]) == (
        256,
        "",
        [0, 1],
    )
    assert training[0]["seconds"] == pytest.approx(left, abs=5), "what the stand-ins left of the first round"
    assert sum(spent.values()) + distil.began("measure_gain")[0]["seconds"] == pytest.approx(360, abs=5), "all of it"
    assert set(spent) == {"timing", "texts", "features", "training", "exporting", "measuring"}


def test_only_training_goes_on_when_the_disk_space_is_used(distil: Distilling) -> None:
    assert distil.run(tokens=2500, minutes=60, size_limit=1500 / 1e9) == 0
    assert len(distil.began("write_texts")) == len(distil.began("write_features")) == 2
    seconds = [call["seconds"] for call in distil.began("train_head")]
    assert len(seconds) == 3
    assert seconds[2] > 3500 > 1000 > seconds[1], "to the end of the time"


def test_rounds_grow_and_end_with_the_time() -> None:
    for minutes in (1, 20, 180, 600):
        ends = compute_round_ends(60 * minutes)
        lengths = [b - a for a, b in zip([0, *ends], ends, strict=False)]
        assert ends[-1] == 60 * minutes
        assert lengths[0] == min(360, 30 * minutes) or len(ends) == 1
        assert all(b >= 0.75 * a for a, b in itertools.pairwise(lengths))
    assert compute_round_ends(200) == [200], "what is loaded twice is time lost"
    assert compute_round_ends(60 * 180)[:3] == pytest.approx([360, 360 * 2.6, 360 * 2.6 + 360 * 1.6**2])


def test_texts_get_the_time_that_leaves_enough_for_their_features() -> None:
    def seconds(texts: tuple[float, int], features: tuple[float, int]) -> float:
        both = {"texts": texts, "features": features}
        told: dict[str, dict[str, Any]] = {name: {"tokens": tokens} for name, (_, tokens) in both.items()}
        spent = StageFigures({name: seconds for name, (seconds, _) in both.items()}, told)
        return estimate_text_seconds(WorkFolder(Path(), "", spent), 90)

    assert estimate_text_seconds(WorkFolder(Path(), "", StageFigures()), 90) == 60
    assert seconds((60, 1000), (30, 1000)) == pytest.approx(60)
    assert seconds((30, 1000), (60, 1000)) == pytest.approx(30)
    assert seconds((60, 1000), (30, 500)) == pytest.approx(30), "500 tokens wait for their features, 30 seconds' worth"
    assert seconds((60, 90000), (30, 1000)) == pytest.approx(18), "of much given text, too, something is written beside"


def test_the_start_of_a_process_counts() -> None:
    """Of a job's seconds; this process has started long ago."""
    age = time.time() - psutil.Process().create_time()
    assert subtract_startup_time({"seconds": 500.0, "work": "x"}) == {
        "seconds": pytest.approx(500 - age, abs=0.5),
        "work": "x",
    }
    assert subtract_startup_time({"model": "x"}) == {"model": "x"}


# ---------------------------------------------------------------- stopping and going on


def interrupt(distil: Distilling, job: str, times: int) -> None:
    """Press Ctrl-C each time that a job has begun, so many times."""

    def press() -> None:
        for time_of_it in range(1, times + 1):
            while len(distil.began(job)) < time_of_it:
                time.sleep(0.02)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


@posix
@pytest.mark.parametrize(  # quick runs stop one of two jobs of each kind of outcome
    "job",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in ("write_texts", "measure_gain"))) for each in STAGES],
)
def test_ctrl_c_keeps_what_there_is(
    distil: Distilling, job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distil.stand_in(monkeypatch, stall=job)
    # Stopped while the result is exported, it exports the result so far, and is stopped again.
    interrupt(distil, job, 1 + (job == "convert_eagle_head"))
    if job == "convert_eagle_head":
        with pytest.raises(KeyboardInterrupt):
            distil.run()
    else:
        assert distil.run() == 130
        told = capsys.readouterr().err.splitlines()[-1]
        assert told.endswith("run the same command to continue")
    trained = job in ("train_head", "measure_gain")
    made = read_record(distil.output)
    assert (made is not None) == trained
    assert not (distil.model / "draft").exists(), "only a finished result goes there"
    assert distil.work.is_dir()
    if made:
        assert not made.complete and not made.rows
        assert "**Not finished**" in (distil.output / "README.md").read_text(encoding="utf-8")
        assert read_manifest(distil.output, verify=True)
    texts = len(distil.began("write_texts"))
    distil.stand_in(monkeypatch, stall=None)
    assert distil.run() == 0, "no --overwrite is needed"
    if trained:
        assert len(distil.began("write_texts")) == texts, "what is done isn't done again"
    made = read_record(distil.output)
    assert made and made.complete and made.tokens == 1000
    assert (distil.model / "draft").is_dir()
    assert {path.name for path in distil.folder.iterdir()} == {"model", "out", "began"}


@posix
@pytest.mark.parametrize(
    "job", [each if each == "train_head" else pytest.param(each, marks=pytest.mark.slow) for each in STAGES]
)
def test_it_goes_on_after_a_kill(distil: Distilling, job: str) -> None:
    process = distil.start(stall=job)
    while not distil.began(job):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.kill()
    process.communicate()
    documents = (distil.work / "documents.jsonl").read_bytes()
    work = distil.folder / "work"
    distil.work.rename(work)
    assert distil.run(work=work) == 0
    assert (work / "documents.jsonl").read_bytes().startswith(documents)
    assert not list(work.glob("scratch/*")), "nothing of the killed run is left"
    shutil.rmtree(work)
    assert {path.name for path in distil.folder.iterdir()} == {"model", "out", "began"}
    assert read_manifest(distil.output, verify=True) and read_manifest(distil.model, verify=True)


@posix
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGTERM, 1, id="SIGTERM"),
        pytest.param(signal.SIGINT, 130, id="SIGINT", marks=pytest.mark.slow),  # as Ctrl-C, above
    ],
)
def test_signals_end_the_command(distil: Distilling, number: int, code: int) -> None:
    process = distil.start(stall="train_head")
    while not distil.began("train_head"):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(number)
    _, told = process.communicate(timeout=30)
    assert process.returncode == code, told
    assert told.strip().endswith("run the same command to continue" + "." * (number == signal.SIGTERM))
    assert "Traceback" not in told
    assert distil.output.is_dir() == (number == signal.SIGINT)


def test_other_settings_need_another_folder(distil: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ovspec_export.distill.run.run_rounds", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert distil.run() == 130
    notes = distil.folder / "notes.txt"
    notes.write_text("import os", encoding="utf-8")
    for options, told in (
        ({"text": (notes,)}, "another `text`"),
        ({"draft_vocabulary": 9}, "another `draft_vocabulary`"),
    ):
        with pytest.raises(
            OvspecError,
            match=rf"\.out\.distill: contains an earlier distillation with {told}; repeat the earlier options to "
            r"resume",
        ):
            distil.run(**options)
    assert distil.run(minutes=9, tokens=7, size_limit=1) == 130, "these may change"


def test_one_distillation_at_a_time(distil: Distilling) -> None:
    distil.work.mkdir()
    with FileLock(distil.work / "lock"), pytest.raises(OvspecError, match="another distillation uses this folder"):
        distil.run()


def test_a_work_folder_that_is_named_is_kept(distil: Distilling) -> None:
    work = distil.folder / "work"
    assert distil.run(work=work) == 0
    assert (work / "documents.jsonl").is_file()
    assert distil.run(work=work, tokens=1500) == 0, "more training replaces its own result"
    made = read_record(distil.output)
    assert made and made.tokens == 1500
    assert len(distil.began("measure_gain")) == 2
    assert distil.run(work=work, tokens=1500) == 0, "there is nothing left to do"
    assert len(distil.began("measure_gain")) == 2
    other = distil.folder / "mine"
    other.mkdir()
    (other / "thesis.txt").touch()
    with pytest.raises(
        OvspecError, match=r"mine: contains files of another origin \(thesis.txt\); choose an empty folder as `work`"
    ):
        distil.run(work=other, overwrite=True)


@posix
def test_ctrl_c_at_the_very_end_leaves_what_is_finished(distil: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("ovspec_export.distill.outcome.add_draft_to_target", press)
        assert distil.run() == 130
    made = read_record(distil.output)
    assert made and made.complete and made.rows
    assert distil.run() == 0
    assert len(distil.began("measure_gain")) == 1
    assert (distil.model / "draft").is_dir() and not distil.work.exists()


def test_a_time_too_short_is_said(distil: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ovspec_export.distill.stages.run_training_job", lambda *_: True)
    with pytest.raises(OvspecError, match="out: the time was too short to train anything; raise `minutes`"):
        distil.run()


# ---------------------------------------------------------------- the result and its places


def test_nothing_gained(
    distil: Distilling, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    distil.stand_in(monkeypatch, rows=[row("plain"), row("head", 0.9)])
    assert distil.run() == 3
    assert "out: nothing was gained (0.90 of plain speed); more minutes" in capsys.readouterr().err
    assert "| head | 11.11 | 100.0 | 0.90 | 30 of 90 | 1.34 |" in (distil.output / "README.md").read_text("utf-8")
    assert not (distil.model / "draft").exists()
    assert not distil.work.exists()


def test_an_old_draft_is_compared_and_stays(
    distil: Distilling, pair: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(distil.model)
    shutil.copytree(pair, distil.model)
    before = contents(distil.model)
    distil.stand_in(monkeypatch, rows=[row("plain"), row("old draft", 1.1), row("head", 1.2)])
    assert distil.run() == 0
    assert distil.began("measure_gain")[0]["old_draft"] == str(distil.model / "draft")
    assert "model: has a draft, which stays there" in capsys.readouterr().err
    distil.stand_in(monkeypatch, rows=[row("plain"), row("old draft", 1.3), row("head", 1.2)])
    assert distil.run(overwrite=True) == 3
    assert "1.20 of plain speed, with the old draft 1.30" in capsys.readouterr().err
    assert contents(distil.model) == before


def test_foreign_files_are_left_alone(distil: Distilling) -> None:
    """In the output, beside an earlier result, and in the model."""
    distil.output.mkdir()
    (distil.output / "thesis.txt").write_text("precious", encoding="utf-8")
    for overwrite in (False, True):
        with pytest.raises(OvspecError, match=r"contains files not exported by ovspec \(thesis.txt\)"):
            distil.run(overwrite=overwrite)
    (distil.output / "thesis.txt").unlink()
    (distil.model / "thesis.txt").write_text("precious", encoding="utf-8")
    before = contents(distil.model)
    assert distil.run() == 0
    assert contents(distil.model) == before
    with pytest.raises(OvspecError, match="already exists; choose another `output`, or add `overwrite=True`"):
        distil.run()
    (distil.output / "thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(OvspecError, match=r"contains files not exported by ovspec \(thesis.txt\)"):
        distil.run(overwrite=True)
    (distil.output / "thesis.txt").unlink()
    assert distil.run(overwrite=True) == 0


@posix
def test_a_kill_leaves_the_model_with_or_without_its_draft(distil: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each rename or deletion while the draft is put into the model's folder."""
    manifest, ir = read_manifest(distil.model), Path(distil.given["ir"])
    assert manifest
    entry, steps = manifest.target, 0
    whole = distil.folder / "whole"
    shutil.copytree(distil.model, whole)
    rename, found = Path.rename, set[bool]()
    for last in range(20):
        shutil.rmtree(distil.model)
        shutil.copytree(whole, distil.model)
        steps = 0

        def counted(path: Path, target: Path, last: int = last) -> Path:
            nonlocal steps
            steps += 1
            if steps > last:
                raise Killed
            return rename(path, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", counted)
            # A killed process cleans nothing up.
            patched.setattr("ovspec_export.folders.remove_export_folder", lambda _: None)
            patched.setattr("ovspec_export.folders.restore_backup", lambda _: None)
            with contextlib.suppress(Killed):
                results.rewrite_target_with_draft(distil.model, read_manifest(distil.model), ir, entry)  # type: ignore[arg-type]
        lm = ovspec.load(distil.model, "none", arithmetic="fast")  # which undoes what was killed half way
        now = read_manifest(distil.model, verify=True)
        assert now and lm
        found.add(now.draft is not None)
        assert (distil.model / "draft").is_dir() == (now.draft is not None)
        if steps <= last:
            break
    assert found == {False, True}


class Killed(BaseException):
    """Stands for SIGKILL."""
