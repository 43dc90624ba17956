"""Distillations of the small pair's target with quick stand-ins for the jobs that take minutes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TARGET
from kept import kept_model
from ovspec_export import DistillOptions, convert, distill_model

from ovspec.setup.manifest import Manifest, read_manifest

TARGET_CONFIG: dict[str, Any] = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
LAYERS = [0, 0, 0]  # by their outputs, as the target's two layers aren't enough for the usual ones
# As a shell starts it: Ctrl-C is heard even if the tests run in the background.
CODE = """
from signal import *; signal(SIGINT, default_int_handler)
from ovspec_export import convert; convert.WORKER_MODULE = "distill_worker"
from ovspec.__main__ import main; main()
"""


def row(mode: str, speedup: float | None = 1.0) -> dict[str, Any]:
    """Return a row of a benchmark."""
    counts = {"proposed": 90, "accepted": 30, "tokens_per_round": 1.34, "equal": 8, "texts": 8, "note": ""}
    times = {"plain_tpot_ms": 10.0, "tpot_ms": 10 / (speedup or 1), "tokens_per_s": 100.0, "spread": [0.9, 1.5]}
    return {"mode": mode, "lookahead": "auto", "speedup": speedup} | times | counts


def made_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a random head of the small target as "checkpoint" and as "ir", made once."""

    def make(folder: Path) -> None:
        from heads import write_head
        from ovspec_export.worker import convert_eagle_head

        head = write_head(folder / "checkpoint", target=TARGET_CONFIG, layer_ids=LAYERS, embedding=False)
        (folder / "ir").mkdir()
        shutil.copy(head / "config.json", folder / "ir")
        options: dict[str, Any] = {"weight_format": "fp32", "quantization": {}, "target": "", "states_file": ""}
        convert_eagle_head(str(head), "head", str(folder / "ir"), [1, 1, 1], **options)

    return kept_model(tmp_path_factory, "distilled-head", make)


def without_draft(pair: Path, folder: Path) -> Path:
    """Copy the target of an exported pair to ``folder``, as if it had been exported alone."""
    shutil.copytree(pair, folder, ignore=shutil.ignore_patterns("draft"))
    manifest = read_manifest(pair)
    assert manifest
    files = {name: file for name, file in manifest.files.items() if not name.startswith("draft/")}
    Manifest(manifest.target, None, manifest.versions, files).write_to_folder(folder)
    return folder


@dataclass
class Distilling:
    """A folder with "model", an export without a draft, and what is distilled from it."""

    folder: Path
    given: dict[str, Any]

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def output(self) -> Path:
        return self.folder / "out"

    @property
    def work(self) -> Path:
        return self.folder / ".out.distill"

    def began(self, job: str) -> list[dict[str, Any]]:
        """Return the arguments of each call of a job so far."""
        file = self.folder / "began" / job
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def stand_in(self, monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
        """Let the jobs of this process be stand-ins; ``given`` is for them."""
        self.given |= given
        monkeypatch.setattr(convert, "WORKER_MODULE", "distill_worker")
        for name, value in self.environment().items():
            monkeypatch.setenv(name, value)

    def environment(self) -> dict[str, str]:
        paths = (ROOT, ROOT / "export", ROOT / "tests" / "support")
        return {"STAND_IN": json.dumps(self.given), "PYTHONPATH": os.pathsep.join(map(str, paths))}

    def run(self, **options: Any) -> int:
        """Distil in this process."""
        usual: dict[str, Any] = {"tokens": 1000, "minutes": 1.0, "size_limit": 0.5}
        return distill_model(DistillOptions(str(self.model), self.output, **usual | options))

    def start(self, *arguments: str, **given: Any) -> subprocess.Popen[str]:
        """Start the command in a process of its own; ``given`` is for its jobs."""
        environment = {**os.environ, **Distilling(self.folder, self.given | given).environment()}
        command = [sys.executable, "-c", CODE, "distill", str(self.model), "-o", str(self.output)]
        return subprocess.Popen(
            [*command, "--tokens", "1000", "--minutes", "1", "--size-limit", "0.5", *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )


def distilling(pair: Path, head: Path, folder: Path) -> Distilling:
    """Return a distillation in ``folder`` that gains something."""
    without_draft(pair, folder / "model")
    (folder / "began").mkdir()
    given = {"checkpoint": str(head / "checkpoint"), "ir": str(head / "ir"), "began": str(folder / "began")}
    return Distilling(folder, given | {"rows": [row("plain"), row("head", 1.2)]})


Made = Callable[..., Distilling]
