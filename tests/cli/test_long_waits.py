"""What takes long is said on stderr, and what is wrong is refused before it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_runs import LOADED, Outcome, runs

import ovspec


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path) -> Iterator[Callable[..., Outcome]]:
    LOADED.clear()
    yield from runs(monkeypatch, tmp_path, cache_dir, quiet=0.0)


def test_each_command_says_what_it_does(run: Callable[..., Outcome], pair: Path) -> None:
    Path("notes.txt").write_text("import os\n" * 20, encoding="utf-8")
    said = {
        ("inspect", pair): [f"{pair}: compiling and probing …"],
        ("perplexity", pair, "notes.txt"): [f"{pair}: loading …", "notes.txt: reading …"],
        ("generate", pair, "hi", "-n", "2"): [f"{pair}: loading …", "reading the prompt …"],
        ("generate", pair, "hi", "-n", "2", "--json"): [f"{pair}: loading …", "generating …"],
        ("generate", pair, "hi", "-n", "2", "--samples", "2", "-t", "1"): [f"{pair}: loading …", "generating …"],
        ("batch", pair, "notes.txt", "-o", "out.jsonl", "-n", "1"): [f"{pair}: loading …"],
    }
    for command, expected in said.items():
        found = run(*command)
        assert found.code == 0, found.err
        assert [line for line in found.err.splitlines() if line.endswith("…")] == expected
    result = run("generate", pair, "hi", "-n", "2", "--json").out
    Path("result.json").write_text(result, encoding="utf-8")
    told = run("verify", "result.json").err.splitlines()
    assert told == [f"{json.loads(result)['record']['model']['folder']}: loading …", "result.json: checking …"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_wrong_session_file_is_refused_before_anything_is_compiled(
    run: Callable[..., Outcome], pair: Path, load: Callable[..., Any], command: str
) -> None:
    with load().session() as session:
        session.append("def f(")
        session.save("other.session")
    Path("none.session").write_text("not a session", encoding="utf-8")
    for file, message in (("other.session", "saved with another model"), ("none.session", "not a session file")):
        found = run(command, pair / "draft", "--session", file, stdin="hi\n")
        assert (found.code, message in found.err) == (1, True), found.err
        assert not found.compiled
    assert run("generate", pair, "--session", "other.session", "-n", "1").code == 0


def test_a_chat_without_a_template_is_refused_before_anything_is_compiled(
    run: Callable[..., Outcome], pair: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in pair.iterdir():
        if file.is_file() and file.name not in ("chat_template.jinja", "tokenizer_config.json", "ovspec.json"):
            (bare / file.name).symlink_to(file)
    for command in (["chat", bare], ["generate", bare, "hi", "--chat"]):
        found = run(*command)
        assert (found.code, "without a chat template" in found.err) == (1, True), found.err
        assert not found.compiled


def test_load_checks_before_it_measures(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    monkeypatch.setattr("ovspec.setup.pair_loading.load_or_tune_profile", lambda *given: measured.append(given))
    wrong: list[dict[str, Any]] = [{"draft": tmp_path}, {"lookup_corpus": [tmp_path / "nowhere.txt"]}]
    for options in wrong:
        with pytest.raises(ovspec.OvspecError):
            ovspec.load(pair, tune=True, **options)
    assert not measured
