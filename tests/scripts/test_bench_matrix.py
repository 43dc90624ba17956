"""scripts/bench/matrix.py: that its figures are of what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matrix as script
import pytest
from cells import bytes_a_step, edit_of, read_bandwidth, tasks_of, with_context
from click.testing import CliRunner
from conftest import ROOT

import ovspec

DEMO = ROOT / "models" / "demo"
MATRIX = ROOT / "scripts" / "bench" / "matrix.py"


@pytest.fixture(scope="module")
def process(command_environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the script in a process of its own."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(MATRIX), *arguments]
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", env=command_environment, timeout=120, check=False
        )

    return run


@pytest.fixture(scope="module")
def matrix(cache_dir: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the script's command in this process."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("XDG_CACHE_HOME", str(cache_dir))
            done = CliRunner().invoke(script.matrix, arguments)
        if done.exception and not isinstance(done.exception, (SystemExit, ovspec.OvspecError)):
            raise done.exception
        told = f"{done.stderr}{done.exception or ''}"
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, told)

    return run


def test_workloads() -> None:
    for workload in ("completion", "edit", "prose"):
        tasks = tasks_of(workload, 3)
        assert len(tasks) == 3
        assert all(task.prompt for task in tasks)
        assert all((task.answer is not None) == (workload == "edit") for task in tasks)
    edit = edit_of({"file": "a = 1\nb = a\n", "replace": {"a": "c"}, "task": "t"})
    assert edit.prompt.endswith("# The same file, t:\n\nc = 1\n")
    assert edit.answer == "b = c\n"


def test_context_and_weights() -> None:
    lm = ovspec.load(DEMO, tune=False)
    assert len(with_context(lm, "def f():", 500)) == 500
    assert with_context(lm, "def f():", 0) == lm.encode("def f():").tolist()
    size = (DEMO / "openvino_model.bin").stat().st_size
    assert 0.5 * size < bytes_a_step(DEMO) < size
    assert read_bandwidth(1 << 24) > 1e8


@pytest.fixture(scope="module")
def lines(process: Any, pair: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    plot = tmp_path_factory.mktemp("plot") / "speed.png"
    options = [str(pair), "--workload", "completion,edit", "--temperature", "0", "--lookahead", "2,auto", "-n", "16"]
    done = process("--prompts", "1", *options, "--dictate", "--json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_line_for_each_cell(lines: list[dict[str, Any]]) -> None:
    modes = [("plain", 0)] + [(mode, k) for mode in ("draft", "lookup", "chain") for k in (2, "auto")]
    assert [(line["mode"], line["lookahead"]) for line in lines] == [*modes, ("auto", "auto")] * 2
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(1e3 / line["tpot_ms"], rel=1e-2)
        if line["speedup"]:
            assert line["speedup"] == pytest.approx(line["plain_tpot_ms"] / line["tpot_ms"], rel=1e-2)
        assert line["equal"] == "1 of 1"
        if line["mode"] == "plain":
            assert (line["speedup"], line["tokens_per_round"], line["acceptance"]) == (1.0, 1.0, None)
        if line["lookahead"] == 2:
            assert line["accepted_by_position"][0] > 0
            assert line["predicted"] or line["mode"] == "chain"
        assert 0 < line["weights_gb_s"] < 3 * line["read_gb_s"]  # the demo pair stays in the cache
        assert line["batch"] == 1
    # A dictated edit quotes the file, so lookup predicts most of it.
    edits = [line for line in lines if line["workload"] == "edit" and line["mode"] == "lookup"]
    assert edits[0]["tokens_per_round"] > 1.5


def test_batches(matrix: Any, pair: Path) -> None:
    options = [
        str(pair),
        "--workload",
        "completion",
        "--temperature",
        "0",
        "--mode",
        "plain,draft",
        "--prompts",
        "2",
        "-n",
        "12",
    ]
    done = matrix(*options, "--batch", "1,4", "--precision", "bf16", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["batch"], line["mode"]) for line in lines] == [
        (size, m) for size in (1, 4) for m in ("plain", "draft")
    ]
    for line in lines:
        assert line["equal"].endswith(f"of {2 * line['batch']}")
        assert line["tokens_per_s"] == pytest.approx(line["batch"] * 1e3 / line["tpot_ms"], rel=1e-2), "of all texts"
    assert lines[2]["speedup"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lookahead", "0"], "is the mode plain"),
        (["--lookahead", "x"], "neither auto nor a number"),
        (["--mode", "fast"], "is not one of"),
        (["--plot", "nowhere/x.png"], "its folder isn't there"),
    ],
)
def test_wrong_options(matrix: Any, options: list[str], message: str) -> None:
    done = matrix(*options)
    assert done.returncode == 2
    assert message in done.stderr


def test_without_a_draft(matrix: Any, tmp_path: Path) -> None:
    shutil.copytree(DEMO / "draft", tmp_path / "alone", ignore=shutil.ignore_patterns("ovspec.json"))
    common = [
        str(tmp_path / "alone"),
        "--workload",
        "prose",
        "--prompts",
        "1",
        "-n",
        "8",
        "--temperature",
        "1",
    ]
    done = matrix(*common, "--json")
    assert [json.loads(line)["mode"] for line in done.stdout.splitlines()] == ["plain", "lookup", "auto"]
    refused = matrix(*common, "--mode", "draft")
    assert refused.returncode == 1
    assert "exported without a draft" in refused.stderr
