"""ovspec bench: that its figures are of what they say, and that it claims no speed-up that drafting didn't cause."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from commands_here import Command, commands_here
from conftest import PROMPTS, ROOT

import ovspec
from ovspec.api.timing import TABLE_COLUMNS, format_mode_table, summarize_mode, time_modes
from ovspec.base.errors import OvspecError
from ovspec.cli.bench import bench
from ovspec.engine.results import Result, Stats

DEMO = ROOT / "models" / "demo"
MODES = ["plain", "lookup", "draft", "lookup,draft"]


def rows_of(done: Any) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def command(cache_dir: Path) -> Iterator[Command]:
    yield from commands_here(cache_dir)


@pytest.fixture(scope="module")
def rows(command: Command, pair: Path) -> list[dict[str, Any]]:
    done = command("bench", pair, "--lookahead", "2", "-n", "48", "--json")
    found = rows_of(done)
    assert "text 3 of 3" in done.stderr
    return found


def test_a_row_for_each_mode(rows: list[dict[str, Any]]) -> None:
    assert [row["mode"] for row in rows] == MODES
    assert [row["lookahead"] for row in rows] == [0, 2, 2, 2]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["tpot_ms"], rel=1e-2)
        assert row["equal"] == row["texts"] == 3
        if row["mode"] == "plain":
            assert (row["speedup"], row["spread"], row["proposed"], row["note"]) == (1.0, [1.0, 1.0], 0, "")
            assert row["tokens_per_round"] == 1
            continue
        least, most = row["spread"]
        assert row["speedup"] == pytest.approx(row["plain_tpot_ms"] / row["tpot_ms"], rel=1e-2), "a row's own times"
        assert 0 < least <= row["speedup"] <= most
        assert 0 < row["accepted"] <= row["proposed"]
        assert row["tokens_per_round"] > 1
    assert rows[2]["accepted"] > rows[1]["accepted"], "the draft always has something to propose"


def test_prompts_of_your_own(command: Command, pair: Path, tmp_path: Path) -> None:
    """The same prompt as a text and from a file gives the same counts, each repeat counts, and texts are short."""
    (tmp_path / "prompt.txt").write_text(PROMPTS[0], encoding="utf-8")
    common = ["bench", pair, "--lookahead", "1", "-n", "8", "--json"]
    given = rows_of(command(*common, "--prompt", PROMPTS[0]))
    read = rows_of(command(*common, "--prompt-file", tmp_path / "prompt.txt"))
    both = rows_of(command(*common, "--prompt", PROMPTS[1], "--prompt-file", tmp_path / "prompt.txt", "--repeats", "2"))
    counts = [[(row["proposed"], row["accepted"]) for row in found] for found in (given, read)]
    assert counts[0] == counts[1]
    assert {row["texts"] for row in given} == {1}
    assert all(row["accepted"] < 8 for row in given)
    assert {row["texts"] for row in both} == {4}
    missing = command("bench", pair, "--prompt-file", tmp_path / "none.txt")
    assert missing.returncode == 1
    assert "none.txt" in missing.stderr


def test_temperature(command: Command, pair: Path, rows: list[dict[str, Any]]) -> None:
    sampled = rows_of(command("bench", pair, "--lookahead", "2", "--json", "-n", "48", "-t", "1"))
    assert all(row["equal"] == 3 for row in sampled), "plain decoding has the same seeds"
    rate = [row[2]["accepted"] / row[2]["proposed"] for row in (rows, sampled)]
    assert rate[0] > rate[1], "the pair's greedy guesses are better"


@pytest.mark.slow
def test_length(command: Command, pair: Path, rows: list[dict[str, Any]]) -> None:
    short = rows_of(command("bench", pair, "--lookahead", "2", "--json", "-n", "12"))
    assert short[2]["proposed"] < rows[2]["proposed"] / 2


def test_the_table_without_a_draft(command: Command, pair: Path, tmp_path: Path) -> None:
    """A text of two tokens leaves no room for a proposal, so no speed-up is shown."""
    shutil.copytree(pair, tmp_path / "alone", ignore=shutil.ignore_patterns("ovspec.json", "draft"))
    why = "lookup: no speed-up: drafting doesn't pay for this model here (nothing was proposed)"
    for given in ([tmp_path / "alone"], [pair, "--draft", "none"]):
        done = command("bench", *given, "--prompt", "def f():", "-n", "2")
        lines = [re.split(r" {2,}", line) for line in done.stdout.splitlines()]
        assert lines[0] == list(TABLE_COLUMNS)
        assert [line[0] for line in lines[1:3]] == ["plain", "lookup"]
        assert lines[2][-3:] == ["nothing proposed", "1.00", "1 of 1"]
        speedup = lines[2][4]
        assert speedup == "none" or float(speedup) <= 1, "a loss is shown, a gain isn't"
        assert done.stdout.splitlines()[3].startswith(why)


def test_a_draft_that_is_named(command: Command, pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair, tmp_path / "alone", ignore=shutil.ignore_patterns("ovspec.json", "draft"))
    common = ["bench", tmp_path / "alone", "--lookahead", "2", "-n", "16", "--prompt", PROMPTS[0], "--json"]
    found = rows_of(command(*common, "--draft", pair / "draft"))
    assert [row["mode"] for row in found] == MODES
    assert found[2]["accepted"] > 0
    refused = command(*common, "--draft", "draft")
    assert refused.returncode == 1
    assert "exported without a draft" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lookahead", "x"], "neither auto nor a number"),
        (["--draft", "lookup,draft"], "lookup is timed anyway"),
        (["-n", "1"], "is not in the range"),
    ],
)
def test_wrong_options(command: Command, options: list[str], message: str) -> None:
    done = command("bench", *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_where_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load(folder: Path, draft: list[str], **options: Any) -> Any:
        seen.update(options, folder=folder, draft=draft)
        raise OvspecError("seen enough")

    monkeypatch.setattr(ovspec, "load", load)
    done = CliRunner().invoke(bench, ["--precision", "f32", "--threads", "1", "--engine", "stateful", "--no-tune"])
    assert isinstance(done.exception, OvspecError)
    assert (seen["precision"], seen["threads"], seen["engine"], seen["tune"]) == ("f32", 1, "stateful", False)
    assert (seen["folder"], seen["draft"]) == (DEMO, ["lookup", "draft"])


# ---------------------------------------------------------------- turns and rows


def result(tpot_ms: float, accepted: int = 0, proposed: int = 0, tokens: tuple[int, ...] = (1, 2)) -> Result:
    rounds = 100 - accepted
    stats = Stats(tpot_ms=tpot_ms, generated_tokens=100, rounds=rounds, accepted=accepted, proposed=proposed)
    return Result("", list(tokens), "length", stats)


def test_modes_take_turns_and_each_begins_with_another() -> None:
    calls: list[tuple[str, str, int, dict[str, Any]]] = []

    def fake(mode: str) -> Any:
        def generate(prompt: str, seed: int, **options: Any) -> Result:
            calls.append((mode, prompt, seed, options))
            return result(1.0)

        return SimpleNamespace(generate=generate)

    options = {"lookahead": "auto", "max_tokens": 100, "temperature": 0.5}
    found = time_modes({mode: fake(mode) for mode in ("plain", "lookup", "draft")}, ["a", "b"], options, 2)
    turns = [calls[first : first + 3] for first in range(0, len(calls), 3)]
    assert [[call[0] for call in turn] for turn in turns] == [
        ["plain", "lookup", "draft"],
        ["plain", "lookup", "draft"],
        ["lookup", "draft", "plain"],
        ["draft", "plain", "lookup"],
        ["plain", "lookup", "draft"],
    ]
    assert [{call[1] for call in turn} for turn in turns[1:]] == [{"a"}, {"b"}, {"a"}, {"b"}]
    assert all(len({call[2] for call in turn}) == 1 for turn in turns), "the same seed for all modes"
    assert len({turn[0][2] for turn in turns[1:]}) == 4, "another seed for each text"
    assert [call[3]["max_tokens"] for call in calls] == [32] * 3 + [100] * 12, "the warm-up is short"
    assert all(call[3]["lookahead"] == (0 if call[0] == "plain" else "auto") for call in calls)
    assert {call[3]["temperature"] for call in calls} == {0.5}
    assert {mode: len(texts) for mode, texts in found.items()} == {"plain": 4, "lookup": 4, "draft": 4}


def test_a_row_shows_the_median_turn() -> None:
    plain = [result(10.0), result(20.0), result(30.0)]
    row = summarize_mode("draft", 4, [result(5.0, 60, 80), result(19.0, 50, 80), result(10.0, 40, 80, (1, 3))], plain)
    times = {"speedup": 2.0, "plain_tpot_ms": 10.0, "tpot_ms": 5.0, "tokens_per_s": 200.0}
    assert row | times | {"accepted": 150, "proposed": 240, "equal": 2, "texts": 3, "note": ""} == row
    assert row["spread"] == (pytest.approx(20 / 19, abs=1e-3), 3.0)
    cells = re.split(r" {2,}", format_mode_table([row]).splitlines()[1])
    assert cells == ["draft", "10.00", "5.00", "200.0", "2.00", "1.05 to 3.00", "150 of 240", "2.00", "2 of 3"]


@pytest.mark.parametrize(
    ("proposed", "accepted", "ms", "speedup", "note"),
    [
        (0, 0, 5.0, None, "no speed-up: drafting doesn't pay for this model here (nothing was proposed)"),
        (
            8,
            0,
            5.0,
            None,
            "no speed-up: drafting doesn't pay for this model here (0 of 8 proposed tokens accepted in all turns)",
        ),
        (0, 0, 20.0, 0.5, "(nothing was proposed); 0.50 of plain speed (0.50 to 0.50, 1 turn)"),
        (90, 30, 20.0, 0.5, "no speed-up: drafting costs more than it brings here; 0.50 of plain speed"),
    ],
)
def test_gains_need_a_cause_and_losses_are_shown(
    proposed: int, accepted: int, ms: float, speedup: float | None, note: str
) -> None:
    row = summarize_mode("lookup", "auto", [result(ms, accepted, proposed)], [result(10.0)])
    assert row["speedup"] == speedup
    assert note in row["note"]
    lines = format_mode_table([row]).splitlines()
    assert re.split(r" {2,}", lines[1])[4] == (f"{speedup:.2f}" if speedup else "none")
    assert lines[-1] == f"lookup: {row['note']}"
