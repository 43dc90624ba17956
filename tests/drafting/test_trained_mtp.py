"""A hybrid that was trained with its MTP layer: its proposals are accepted, less so with a bug, and texts stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import PROMPTS
from kept import kept_model
from ovspec_export import export_pair
from torch_heads import FEATURE_BUGS

import ovspec

pytestmark = pytest.mark.slow
OPTIONS: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "compare": {"temperature": 1.0},
    "rejection": {"temperature": 1.0, "accept": "rejection"},
}


def make_folder(place: Path) -> None:
    from trained_hybrid import train_hybrid

    train_hybrid(place / "checkpoint")
    export_pair(str(place / "checkpoint"), None, place / "pair")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kept_model(tmp_path_factory, "trained-hybrid", make_folder) / "pair"


def acceptance(lm: ovspec.LanguageModel, prompts: list[str], **options: Any) -> float:
    """Return the share of the first proposed tokens that are accepted."""
    texts = [lm.generate(prompt, seed=at, lookahead=1, **OPTIONS, **options) for at, prompt in enumerate(prompts)]
    used = [text.stats.drafters["mtp"] for text in texts]
    return sum(each["accepted"] for each in used) / sum(each["proposed"] for each in used)


@pytest.mark.parametrize("way", WAYS)
def test_proposals_are_accepted(folder: Path, tmp_path: Path, way: str) -> None:
    lm = ovspec.load(folder, "mtp", cache_dir=tmp_path)
    assert lm.target.rollback.advances, "a hybrid"
    assert acceptance(lm, PROMPTS[:20], **WAYS[way]) > 0.5
    if way != "rejection":
        options = {**OPTIONS, **WAYS[way], "seed": 5}
        plain, drafted = (lm.generate(PROMPTS[:4], **options, lookahead=count) for count in (0, 3))
        assert [text.token_ids for text in drafted] == [text.token_ids for text in plain]


@pytest.mark.parametrize("bug", FEATURE_BUGS)
def test_a_bug_costs_acceptance(folder: Path, tmp_path: Path, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where texts are diverse."""
    lm = ovspec.load(folder, "mtp", cache_dir=tmp_path)
    sound = acceptance(lm, PROMPTS[:20], **WAYS["compare"])
    FEATURE_BUGS[bug](monkeypatch)
    assert acceptance(lm, PROMPTS[:20], **WAYS["compare"]) < sound - 0.05
