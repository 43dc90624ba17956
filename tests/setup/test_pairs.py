"""The known pairs: what their file must say of each."""

from __future__ import annotations

import datetime
import re
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from ovspec.cli import cli
from ovspec.setup import exporting
from ovspec.setup.known_pairs import read_known_pairs


def test_each_pair_names_hub_ids_and_a_dated_source() -> None:
    pairs = read_known_pairs()
    assert len(pairs) > 20
    for pair in pairs.values():
        assert pair.draft or pair.eagle3, pair
        for model in filter(None, (pair.target, pair.draft, pair.eagle3)):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", model), model
        for source in pair.source.split("; "):
            assert re.match(r"https://\S+$|[\w.-]+/[\w.-]+: \S", source), source
        assert datetime.date(2022, 1, 1) < datetime.date.fromisoformat(pair.date) < datetime.date.today()


def test_a_pair_is_listed_in_a_line() -> None:
    pairs = read_known_pairs()
    assert str(pairs["qwen3-8b"]).startswith("qwen3-8b             Qwen/Qwen3-8B  +  Qwen/Qwen3-0.6B  (EAGLE-3 head ")
    assert "  +  " not in str(pairs["qwen3-14b"])


def test_a_short_name_gives_the_draft_or_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exported can't be had here, so the export is replaced."""
    asked: list[tuple[str, str | None]] = []
    package = SimpleNamespace(
        Compression=lambda *_, **__: None, export_pair=lambda model, draft, *_, **__: asked.append((model, draft))
    )
    monkeypatch.setattr(exporting, "import_export_package", lambda: package)
    for draft in ([], ["--draft", "head"], ["--draft", "none"]):
        assert CliRunner().invoke(cli, ["export", "qwen3-8b", "-o", "x", *draft]).exit_code == 0
    pair = read_known_pairs()["qwen3-8b"]
    assert asked == [(pair.target, pair.draft), (pair.target, pair.eagle3), (pair.target, "none")]
    refused = CliRunner().invoke(cli, ["export", "qwen2.5-7b", "-o", "x", "--draft", "head"])
    assert refused.exit_code and "No public head is known for qwen2.5-7b" in refused.output
    refused = CliRunner().invoke(cli, ["export", "some/model", "-o", "x", "--draft", "head"])
    assert refused.exit_code and "give the head's folder or hub id as --draft" in refused.output
