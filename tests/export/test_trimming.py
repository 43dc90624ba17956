"""A draft is trimmed to the ids that texts use most, exported, and drafts for the embedded pair's target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHECKPOINTS, PROMPTS, ROOT
from family_models import warm_jobs
from ovspec_export import Compression, export_pair
from ovspec_export.distill import trimming
from ovspec_export.distill.trimming import compute_missing_share, trim_draft_model
from ovspec_export.draft_vocabulary import DRAFT_VOCABULARY_FILE, choose_most_used_ids
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import GgufSource, HeadSource

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.setup.manifest import DRAFT_FOLDER, read_manifest

DEMO = ROOT / "models" / "demo"
COUNT, VOCAB = 400, 4096
TOKENS = 24


def test_the_most_used_ids() -> None:
    texts = [[500, 500, 7, 900], [500, 7, 300], [800], [5000]]  # the last is an id that the draft lacks
    ids = choose_most_used_ids(texts, 64, 1000)
    assert ids.dtype == np.int64 and ids.tolist() == [*range(60), 300, 500, 800, 900]
    many = [[*range(200)] * 2, [999, 300]]
    assert choose_most_used_ids(many, 64, 1000).tolist() == [*range(64)]
    assert choose_most_used_ids(many, 64, 1000, special_ids=[999, 998, 2000]).tolist() == [*range(63), 999], (
        "998 is in no text"
    )
    assert choose_most_used_ids([], 64, 64).tolist() == [*range(64)]
    for count in (63, 1001):
        with pytest.raises(OvspecError, match=f"`trim_vocabulary` is {count}; it must be from 64 to 1000"):
            choose_most_used_ids(texts, count, 1000)


def test_the_share_that_is_lost() -> None:
    assert compute_missing_share([[1, 2], [], [3, 4, 9]], np.array([1, 2, 3])) == 0.4
    assert compute_missing_share([], np.array([1])) == 0


def texts(lm: ovspec.LanguageModel) -> list[ovspec.Result]:
    return [lm.generate(prompt, max_tokens=TOKENS, lookahead=3) for prompt in PROMPTS[:3]]


class Trimmed:
    """The embedded draft with fewer ids, as an IR and as a checkpoint, and texts of its target with the whole draft."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.expected = texts(ovspec.load(DEMO, True, cache_dir=cache))
        self.ids = choose_most_used_ids([result.token_ids for result in self.expected], COUNT, VOCAB)
        self.ir, self.checkpoint = folder / "ir", folder / "checkpoint"
        trim_draft_model(find_source(str(DEMO / DRAFT_FOLDER)), self.ids, self.ir)
        trim_draft_model(find_source(str(CHECKPOINTS / "draft")), self.ids, self.checkpoint)


@pytest.fixture(scope="module")
def trimmed(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Trimmed:
    return Trimmed(tmp_path_factory.mktemp("trimmed"), cache_dir)


def test_what_is_written(trimmed: Trimmed) -> None:
    for folder, before in ((trimmed.ir, DEMO / DRAFT_FOLDER), (trimmed.checkpoint, CHECKPOINTS / "draft")):
        manifest = read_manifest(folder, verify=True)
        assert manifest and manifest.target.source == "draft"
        more = {"ovspec.json", DRAFT_VOCABULARY_FILE} if folder == trimmed.checkpoint else {"ovspec.json"}
        assert {file.name for file in folder.iterdir()} == {file.name for file in before.iterdir()} | more
        assert [file.name for file in folder.parent.glob(".*")] == []
    assert json.loads((trimmed.checkpoint / DRAFT_VOCABULARY_FILE).read_text("utf-8"))["ids"] == trimmed.ids.tolist()


@pytest.mark.slow  # distill/test_result.py loads an export of a trimmed draft in quick runs
@pytest.mark.parametrize("form", ["ir", "checkpoint"])
def test_exported_it_drafts(
    trimmed: Trimmed, form: str, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_jobs(monkeypatch)
    export_pair(str(DEMO), str(getattr(trimmed, form)), tmp_path / "pair", draft_compression=Compression("int8"))
    manifest = read_manifest(tmp_path / "pair", verify=True)
    assert manifest and manifest.draft and f"draft/{DRAFT_VOCABULARY_FILE}" not in manifest.files
    lm = ovspec.load(DEMO, tmp_path / "pair" / DRAFT_FOLDER, cache_dir=cache_dir)
    assert lm.draft and lm.draft.ir.logits_width == COUNT
    assert np.array_equal(np.asarray(lm.draft.ir.target_ids), trimmed.ids)
    found = texts(lm)
    assert [result.token_ids for result in found] == [result.token_ids for result in trimmed.expected]
    # The texts' ids are kept, so the draft is right about as often as the whole one.
    accepted, before = (sum(result.stats.accepted for result in each) for each in (found, trimmed.expected))
    assert accepted > 0.9 * before > 0


def test_what_cannot_be_trimmed_is_refused(trimmed: Trimmed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids: Any = trimmed.ids
    for form in (trimmed.ir, trimmed.checkpoint):
        with pytest.raises(OvspecError, match="this draft's vocabulary is already trimmed"):
            trim_draft_model(find_source(str(form)), ids, tmp_path / "out")
        with pytest.raises(OvspecError, match=f"{form.name}: a draft with a trimmed vocabulary can't be a target"):
            export_pair(str(form), None, tmp_path / "out")
    with pytest.raises(OvspecError, match="the vocabulary of an EAGLE-3 head can't be trimmed"):
        trim_draft_model(HeadSource("head", tmp_path, True, ""), ids, tmp_path / "out")
    with pytest.raises(OvspecError, match="the vocabulary of a GGUF file can't be trimmed"):
        trim_draft_model(GgufSource("x", tmp_path, False, "", None), ids, tmp_path / "out")  # type: ignore[arg-type]
    draft = find_source(str(DEMO / DRAFT_FOLDER))
    with pytest.raises(OvspecError, match="already exists"):
        trim_draft_model(draft, ids, trimmed.ir)
    monkeypatch.setattr(trimming, "trim_ir", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        trim_draft_model(draft, ids, tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_it_replaces_what_it_made(trimmed: Trimmed, tmp_path: Path) -> None:
    shutil.copytree(trimmed.checkpoint, tmp_path / "out")
    draft = find_source(str(CHECKPOINTS / "draft"))
    trim_draft_model(draft, np.arange(64), tmp_path / "out", overwrite=True)
    assert json.loads((tmp_path / "out" / DRAFT_VOCABULARY_FILE).read_text("utf-8"))["ids"] == [*range(64)]
