"""Folders with a damaged value or file work or end in a sentence, in bounded time and memory, without a traceback."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import damaged_folders
import pytest
from conftest import ROOT
from damaged_folders import Case, files_of, values_of

import ovspec
from ovspec.setup.manifest import read_manifest

LONGEST = 60.0  # seconds that a case may take on a busy machine
EACH = 100  # cases in a process: OpenVINO 2026.4 keeps a thread and 10 MB of addresses for each model it has compiled


def outcomes(folder: Path, cases: list[Case], tmp_path: Path) -> Iterator[tuple[Case, str]]:
    """Yield each case with its outcome."""
    environment = os.environ | {"CASES_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, damaged_folders.__file__, str(folder), str(tmp_path / "work")]
    for begin in range(0, len(cases), EACH):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        ) as process:
            assert process.stdin
            assert process.stdout
            try:
                for case in cases[begin : begin + EACH]:
                    print(json.dumps(case), file=process.stdin, flush=True)
                    began = time.monotonic()
                    answer = process.stdout.readline()
                    assert answer, f"the process died of {case}"
                    assert time.monotonic() - began < LONGEST, case
                    yield case, json.loads(answer)
                process.stdin.close()
                process.wait(LONGEST)
            finally:
                process.kill()


def drawn(cases: list[Case], most: int | None) -> list[Case]:
    return random.Random(most).sample(cases, min(most or len(cases), len(cases)))


@pytest.mark.parametrize(
    "most", [3, pytest.param(120, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.soak)]
)
def test_damage(pair: Path, most: int | None, tmp_path: Path) -> None:
    cases = [case for kind in (values_of, files_of) for case in drawn(kind(pair), most)]
    found = list(outcomes(pair, cases, tmp_path))
    kinds = Counter(outcome.partition(":")[0] for _, outcome in found)
    print(f"{len(found)} of {len(cases)} cases: {dict(kinds)}")
    assert not [each for each in found if each[1].startswith("failed")]
    assert kinds["refused"]
    assert kinds["used"], "no case shows that a good folder can be used"


@pytest.mark.parametrize("listed", [{}, {"config.json": {"size": 1}}, {"../x": {"size": "1"}}, []])
def test_verifying_needs_every_file(pair: Path, listed: object, tmp_path: Path) -> None:
    folder = shutil.copytree(pair, tmp_path / "pair")
    data = json.loads((folder / "ovspec.json").read_text("utf-8"))
    (folder / "ovspec.json").write_text(json.dumps(data | {"files": listed}), encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match=r"not part of the export|invalid"):
        read_manifest(folder, verify=True)
