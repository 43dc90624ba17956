"""Draft models with a trimmed vocabulary propose what the whole draft would, among their ids; no text changes.

``test_exact_heads.py`` crosses them with all else that moves a text, in slow runs.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiling import compile_once
from conftest import DRAFT, PROMPTS, Reference, made_once
from moves import moving_texts
from ovspec_export import draft_vocabulary
from ovspec_export.draft_vocabulary import choose_most_used_ids, trim_ir

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.drafting.draft_model import ModelDrafter
from ovspec.drafting.drafter import RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.ir import lm_head
from ovspec.ir.compile import write_target_ids
from ovspec.ir.device import DeviceOptions
from ovspec.setup.inspection import describe_compiled_model
from ovspec.setup.manifest import DRAFT_FOLDER

COUNT = 300
TOKENS = 24
CLEAR = 1e-3  # logits that are nearer than this may come in another order
Load = Callable[..., ovspec.LanguageModel]


@pytest.fixture(scope="module")
def ids(load: Load) -> np.ndarray:
    """Return the ids that the target uses most in a few texts."""
    texts = [load().generate(prompt, max_tokens=TOKENS).token_ids for prompt in PROMPTS[::3]]
    return choose_most_used_ids(texts, COUNT, 4096)


@pytest.fixture(scope="module")
def draft(pair: Path, ids: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the small pair's draft with fewer ids."""

    def make(folder: Path) -> None:
        shutil.copytree(pair / DRAFT_FOLDER, folder)
        trim_ir(folder, ids, "draft")

    return made_once(tmp_path_factory, "trimmed-draft", make)


@pytest.fixture(scope="module")
def load_with(pair: Path, cache_dir: Path) -> Load:
    """Return a function that loads the small pair's target with a draft behind lookup, as ``load`` does without."""

    @functools.cache
    def load_with(draft: Path, engine: Any = "paged") -> ovspec.LanguageModel:
        options: dict[str, Any] = {"precision": "f32", "cache_dir": cache_dir, "engine": engine}
        options["arithmetic"] = "fast" if engine == "stateful" else "exact"
        return ovspec.load(pair, ["lookup", draft], **options)

    return load_with


@dataclass
class Proposed:
    """What the draft proposed after ``text``."""

    text: np.ndarray
    tokens: np.ndarray


@pytest.fixture
def proposals(monkeypatch: pytest.MonkeyPatch) -> list[Proposed]:
    """Return a list to which each proposal of a draft model is added."""
    found: list[Proposed] = []
    propose = ModelDrafter.propose

    def noted(self: ModelDrafter, rows: list[RowToDraft], lookahead: Lookahead) -> Any:
        made = propose(self, rows, lookahead)
        found.extend(
            Proposed(row.sequence.tokens.copy(), proposal.tokens)
            for row, proposal in zip(rows, made, strict=True)
            if len(proposal.tokens)
        )
        return made

    monkeypatch.setattr(ModelDrafter, "propose", noted)
    return found


@pytest.fixture(scope="module")
def whole_draft() -> Reference:
    return Reference(DRAFT)


def agrees(proposed: Proposed, draft: Reference, ids: np.ndarray) -> bool:
    """Return whether each proposed token is the whole draft's most likely one among ``ids``, but for rounding."""
    text = np.concatenate((proposed.text, proposed.tokens))
    logits = draft.logits(text.tolist())[len(proposed.text) - 1 : -1, ids]
    chosen = [np.flatnonzero(ids == token) for token in proposed.tokens]
    return all(len(at) and row[at[0]] > row.max() - CLEAR for at, row in zip(chosen, logits, strict=True))


@pytest.fixture(scope="module")
def plain(load: Load) -> list[list[int]]:
    """Return the texts of plain decoding."""
    return moving_texts(load(), PROMPTS, max_tokens=TOKENS)


BUGS = ["none", *[pytest.param(bug, marks=pytest.mark.slow) for bug in ("other ids", "rows of the next ids")]]


@pytest.mark.parametrize("bug", BUGS)
def test_each_proposal_is_the_whole_drafts(
    bug: str,
    pair: Path,
    ids: np.ndarray,
    plain: list[list[int]],
    load_with: Load,
    whole_draft: Reference,
    proposals: list[Proposed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No bug changes the text: only the proposals show it."""
    if bug == "other ids":
        monkeypatch.setattr(
            draft_vocabulary, "write_target_ids", lambda model, ids: write_target_ids(model, np.roll(ids, 1))
        )
    elif bug == "rows of the next ids":
        entries = lm_head.select_constant_entries
        monkeypatch.setattr(lm_head, "select_constant_entries", lambda rows, axis, ids: entries(rows, axis, ids + 1))
    shutil.copytree(pair / DRAFT_FOLDER, tmp_path / "draft")
    trim_ir(tmp_path / "draft", ids, "draft")
    lm = load_with(tmp_path / "draft")
    assert lm.draft and (lm.draft.engine, lm.draft.proposer_name, lm.draft.ir.logits_width) == ("paged", "draft", COUNT)
    found = moving_texts(lm, PROMPTS, max_tokens=TOKENS, lookahead=3)
    assert len(proposals) > 20
    assert all(agrees(proposed, whole_draft, ids) for proposed in proposals[::5]) == (bug == "none")
    assert found == plain


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T=1": {"temperature": 1.0, "seed": 3},
    "grammar": {"regex": r"([a-z_ ]{1,9}[(),.=\n]{1,3})+"},
    "forced": {"json_schema": {"type": "object", "properties": {"capital": {"maxLength": 9}}, "required": ["capital"]}},
}


@pytest.mark.parametrize("engine", [pytest.param("stateful", marks=pytest.mark.slow), "paged"])
def test_no_text_changes(draft: Path, load: Load, load_with: Load, engine: str) -> None:
    lm = load_with(draft, engine)
    for way, options in WAYS.items():
        asked: dict[str, Any] = {"max_tokens": TOKENS, **options}
        found = [lm.generate(PROMPTS[0], lookahead=3, **asked)]
        plain = [load(engine=engine).generate(PROMPTS[0], **asked)]
        assert [result.token_ids for result in found] == [result.token_ids for result in plain], way
        drafted = [result.stats.drafters["draft"] for result in found]
        assert sum(each["proposed"] for each in drafted) > 0, way
        assert way != "greedy" or sum(each["accepted"] for each in drafted) > 0
    asked = {"temperature": 1.0, "seed": 3, "accept": "rejection", "max_tokens": TOKENS, "lookahead": 3}
    found = [lm.generate(prompt, **asked) for prompt in PROMPTS[:2]]
    assert sum(result.stats.drafters["draft"]["accepted"] for result in found) > 0


def test_a_session_file_keeps_its_cache(draft: Path, load_with: Load, tmp_path: Path) -> None:
    lm = load_with(draft)
    options: dict[str, Any] = {"lookahead": 3, "ignore_eos": True}
    expected = lm.generate(PROMPTS[0], max_tokens=2 * TOKENS, **options).token_ids
    with lm.session() as session:
        session.append(PROMPTS[0])
        begun = session.generate(max_tokens=TOKENS, **options).token_ids
        session.save(tmp_path / "text.ov")
    with lm.session() as session:
        session.load(tmp_path / "text.ov")
        assert session._decoders
        assert len(session._decoders.drafts[0].rows[0]) > TOKENS
        assert begun + session.generate(max_tokens=TOKENS, **options).token_ids == expected


def test_what_cannot_be_is_refused_in_a_sentence(
    pair: Path, draft: Path, ids: np.ndarray, load_with: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_once(monkeypatch)
    with pytest.raises(OvspecError, match="only a draft \\(its vocabulary is trimmed\\); load the target model"):
        ovspec.load(draft)
    cases = {
        "the draft proposes token id 4096, but the target has 4096 tokens; use the draft only with its own target": (
            ids + 4096 - ids[-1]
        ),
        "the draft proposes token id -1, but the target has 4096 tokens": ids - 1,
        "the head's d2t and logits differ in length": ids[1:],
    }
    for number, (told, wrong) in enumerate(cases.items()):
        shutil.copytree(pair / DRAFT_FOLDER, tmp_path / f"{number}")
        monkeypatch.setattr(
            draft_vocabulary, "write_target_ids", lambda model, _, wrong=wrong: write_target_ids(model, wrong)
        )
        trim_ir(tmp_path / f"{number}", ids, "draft")
        with pytest.raises(OvspecError, match=told):
            load_with(tmp_path / f"{number}")


def test_inspection_shows_how_many_ids_are_proposed(draft: Path, load_with: Load, cache_dir: Path) -> None:
    loaded = load_with(draft).draft
    assert loaded
    found = describe_compiled_model(loaded, DeviceOptions(cache_dir=cache_dir), None)
    assert (found["model_type"], found["logits"]) == ("llama", COUNT)
