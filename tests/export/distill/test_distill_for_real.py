"""Distillations of the demo pair's target with all jobs as they are, to the end and with kills on the way."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from ovspec_export.distill.card import ResultRecord, read_record

import ovspec
from ovspec.setup.manifest import Manifest, read_manifest

DEMO = ROOT / "models" / "demo"
KILLS = 10


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a copy of the demo pair's target, exported without its draft."""
    shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("draft"))
    manifest = read_manifest(DEMO)
    assert manifest
    files = {name: file for name, file in manifest.files.items() if not name.startswith("draft/")}
    Manifest(manifest.target, None, manifest.versions, files).write_to_folder(tmp_path / "model")
    return tmp_path / "model"


def start(model: Path, output: Path, minutes: float, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ovspec", "distill", str(model), "-o", str(output), "--minutes", str(minutes)]
    command += options
    return subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", env=os.environ | {"PYTHONUTF8": "1"})


def finished(model: Path, output: Path, minutes: float, *options: str) -> ResultRecord:
    """Distil to the end, check that all is in its place, and return what was made."""
    process, began = start(model, output, minutes, *options), time.monotonic()
    _, told = process.communicate(timeout=500)
    assert time.monotonic() - began < 60 * minutes + 30, "all that it does counts"
    assert process.returncode in (0, 3), told
    assert "Traceback" not in told
    made = read_record(output)
    assert made and made.complete and made.tokens > 0
    assert read_manifest(output, verify=True) and read_manifest(model, verify=True)
    assert {path.name for path in output.parent.iterdir()} <= {"model", "one", "other"}
    return made


@pytest.mark.slow
def test_a_minute_gives_a_head(model: Path, tmp_path: Path) -> None:
    made = finished(model, tmp_path / "one", 1)
    assert made.agreement[0] > 0.2
    assert set(made.data) == {"own"} and made.held_out.documents
    drafted = ovspec.load(model, tmp_path / "one").generate("def fib(", max_tokens=64, lookahead=3)
    assert drafted.stats.accepted > 0


@pytest.mark.slow
def test_a_minute_gives_an_mtp_layer(model: Path, tmp_path: Path) -> None:
    """Which is trained further as a draft. In so short a time it gains too little to become the model's draft."""
    made = finished(model, tmp_path / "one", 1, "--kind", "mtp")
    assert made.kind == "mtp" and made.agreement[0] > 0.15
    lm = ovspec.load(model, tmp_path / "one")
    plain, drafted = (lm.generate("def fib(", max_tokens=64, lookahead=count) for count in (0, 3))
    assert drafted.stats.drafters["mtp"]["accepted"] > 0 and drafted.token_ids == plain.token_ids
    further = finished(model, tmp_path / "other", 1, "--draft", str(tmp_path / "one"))
    assert further.kind == "mtp" and further.agreement[0] > made.agreement[0] - 0.05


@pytest.mark.soak
def test_kills_cost_only_time(model: Path, tmp_path: Path) -> None:
    """Training that was not saved yet is lost, at most two minutes; with as much more time the result is as good."""
    shutil.copytree(DEMO / "draft", model / "draft")
    shutil.copy(DEMO / "ovspec.json", model)
    whole, moments = finished(model, tmp_path / "one", 1.5), random.Random(0)
    for _ in range(KILLS):
        process = start(model, tmp_path / "other", 2.5)
        time.sleep(moments.uniform(1, 15))
        process.kill()
        process.communicate()
    assert finished(model, tmp_path / "other", 3.5).agreement[0] > whole.agreement[0] - 0.1
