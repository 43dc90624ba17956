"""ovspec bench: that its figures are of what they say, and that it claims no speed-up that drafting didn't cause."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import PROMPTS, ROOT

import ovspec
from ovspec.cli.bench import Measured, bench, check_plot, measure, row_of, table
from ovspec.errors import OvspecError
from ovspec.loop.results import Result, Stats

DEMO = ROOT / "models" / "demo"
MODES = ["plain", "lookup", "draft", "lookup,draft"]


def rows_of(done: Any) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def rows(ovspec_command: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    plot = tmp_path_factory.mktemp("plot") / "speed.png"
    done = ovspec_command("bench", DEMO, "--lookahead", "2", "-n", "48", "--json", "--plot", plot)
    found = rows_of(done)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f"{plot}: written" in done.stderr
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
        else:
            least, most = row["spread"]
            assert 0 < least <= row["speedup"] <= most
            assert 0 < row["accepted"] <= row["proposed"]
    assert rows[2]["accepted"] > rows[1]["accepted"], "the draft always has something to propose"


def test_prompts_of_your_own(ovspec_command: Any, tmp_path: Path) -> None:
    """The same prompt as a text and from a file gives the same counts, and each repeat counts."""
    (tmp_path / "prompt.txt").write_text(PROMPTS[0], encoding="utf-8")
    common = ["bench", DEMO, "--lookahead", "1", "-n", "16", "--json"]
    given = rows_of(ovspec_command(*common, "--prompt", PROMPTS[0]))
    read = rows_of(ovspec_command(*common, "--prompt-file", tmp_path / "prompt.txt"))
    both = rows_of(
        ovspec_command(*common, "--prompt", PROMPTS[1], "--prompt-file", tmp_path / "prompt.txt", "--repeats", "2")
    )
    counts = [[(row["proposed"], row["accepted"]) for row in found] for found in (given, read)]
    assert counts[0] == counts[1]
    assert {row["texts"] for row in given} == {1}
    assert {row["texts"] for row in both} == {4}
    missing = ovspec_command("bench", DEMO, "--prompt-file", tmp_path / "none.txt")
    assert missing.returncode == 1
    assert "none.txt" in missing.stderr


def test_temperature_and_length(ovspec_command: Any, rows: list[dict[str, Any]]) -> None:
    common = ["bench", DEMO, "--lookahead", "2", "--json"]
    sampled = rows_of(ovspec_command(*common, "-n", "48", "-t", "1"))
    assert all(row["equal"] == 3 for row in sampled), "plain decoding has the same seeds"
    rate = [row[2]["accepted"] / row[2]["proposed"] for row in (rows, sampled)]
    assert rate[0] > rate[1], "the demo pair's greedy guesses are better"
    short = rows_of(ovspec_command(*common, "-n", "12"))
    assert short[2]["proposed"] < rows[2]["proposed"] / 2


def test_the_table_without_a_draft(ovspec_command: Any, tmp_path: Path) -> None:
    """A text of two tokens leaves no room for a proposal, so no speed-up is shown."""
    shutil.copytree(DEMO, tmp_path / "alone", ignore=shutil.ignore_patterns("draft", "ovspec.json"))
    why = "lookup: nothing was proposed: drafting doesn't pay for this model here"
    for given in ([tmp_path / "alone"], [DEMO, "--draft", "none"]):
        done = ovspec_command("bench", *given, "--prompt", "def f():", "-n", "2")
        lines = done.stdout.splitlines()
        assert lines[0].split() == ["mode", "tokens/s", "ms/token", "speed-up", "accepted", "same", "text"]
        assert [line.split()[0] for line in lines[1:3]] == ["plain", "lookup"]
        assert lines[1].split()[3:] == ["1.00", "-", "1", "of", "1"]
        assert lines[2].split()[3:] == ["-", "-", "1", "of", "1"]
        assert lines[3:] == [why]


def test_a_draft_that_is_named(ovspec_command: Any, tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "alone", ignore=shutil.ignore_patterns("draft", "ovspec.json"))
    common = ["bench", tmp_path / "alone", "--lookahead", "2", "-n", "16", "--prompt", PROMPTS[0], "--json"]
    found = rows_of(ovspec_command(*common, "--draft", DEMO / "draft"))
    assert [row["mode"] for row in found] == MODES
    assert found[2]["accepted"] > 0
    refused = ovspec_command(*common, "--draft", "draft")
    assert refused.returncode == 1
    assert "exported without a draft" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lookahead", "0"], "is plain decoding"),
        (["--lookahead", "x"], "neither auto nor a number"),
        (["--draft", "lookup,draft"], "lookup is timed in any case"),
        (["--draft", "none", "--draft-device", "CPU"], "--draft-device needs a draft"),
        (["--plot", "nowhere/x.png"], "its folder isn't there"),
        (["-n", "1"], "is not in the range"),
    ],
)
def test_wrong_options(ovspec_command: Any, options: list[str], message: str) -> None:
    done = ovspec_command("bench", *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_plots_need_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ovspec.cli.bench"], "find_spec", lambda _: None)
    with pytest.raises(Exception, match="pip install matplotlib"):
        check_plot("x.png")


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


# ---------------------------------------------------------------- turns and speed-ups


def result(tpot_ms: float, accepted: int = 0, proposed: int = 0, tokens: tuple[int, ...] = (1, 2)) -> Result:
    return Result("", list(tokens), "length", Stats(tpot_ms=tpot_ms, accepted=accepted, proposed=proposed))


def test_modes_take_turns() -> None:
    calls: list[tuple[str, str, int, dict[str, Any]]] = []

    def fake(mode: str) -> Any:
        def generate(prompt: str, seed: int, **options: Any) -> Result:
            calls.append((mode, prompt, seed, options))
            return result(1.0)

        return SimpleNamespace(generate=generate)

    options = {"lookahead": "auto", "max_tokens": 100, "temperature": 0.5}
    found = measure({"plain": fake("plain"), "draft": fake("draft")}, ["a", "b"], options, 2)
    assert [call[0] for call in calls] == ["plain", "draft"] * 5
    assert [call[1] for call in calls[2::2]] == ["a", "b", "a", "b"]
    assert [call[2] for call in calls[::2]] == [call[2] for call in calls[1::2]], "the same seed for all modes"
    assert len({call[2] for call in calls[2::2]}) == 4, "another for each text"
    assert [call[3]["max_tokens"] for call in calls] == [32] * 2 + [100] * 8, "the warm-up is short"
    assert [call[3]["lookahead"] for call in calls] == [0, "auto"] * 5
    assert {call[3]["temperature"] for call in calls} == {0.5}
    assert {mode: len(texts) for mode, texts in found.items()} == {"plain": 4, "draft": 4}


def test_speedups_are_of_pairs() -> None:
    plain = [result(10.0), result(20.0), result(30.0)]
    row = row_of("draft", 4, [result(5.0, 3, 4), result(20.0, 1, 4), result(10.0, 2, 4, (1, 3))], plain)
    assert (row.speedup, row.spread, row.tpot_ms, row.tokens_per_s) == (2.0, (1.0, 3.0), 10.0, 100.0)
    assert (row.accepted, row.proposed, row.equal, row.texts, row.note) == (6, 12, 2, 3, "")
    assert "2.00 (1.00-3.00)  6 of 12   2 of 3" in table([row])


@pytest.mark.parametrize(
    ("lookahead", "proposed", "note"),
    [
        ("auto", 0, "nothing was proposed: drafting doesn't pay for this model here"),
        (2, 0, "nothing was proposed: lookup found nothing to quote"),
        (2, 8, "nothing that was proposed was accepted"),
    ],
)
def test_no_speedup_is_claimed_where_nothing_was_accepted(lookahead: int | str, proposed: int, note: str) -> None:
    row = row_of("lookup", lookahead, [result(5.0, 0, proposed)], [result(10.0)])
    assert (row.speedup, row.spread, row.note) == (None, None, note)
    lines = table([Measured("plain", 0, 100.0, 10.0, 1.0, (1.0, 1.0), 0, 0, 1, 1, ""), row]).splitlines()
    assert lines[2].split()[:4] == ["lookup", "200.0", "5.00", "-"]
    assert lines[-1] == f"lookup: {note}"
