"""Heads for tiny random models of many families: trained and used, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, VOCAB
from family_models import export_as_the_worker_does, make
from ovspec_export.compression import INT8
from ovspec_export.convert import convert_head
from ovspec_export.distill import training
from ovspec_export.distill.documents import Document, write_first_documents
from ovspec_export.distill.features import write_features
from ovspec_export.distill.head import train_head
from ovspec_export.distill.plan import DistillOptions, make_plan
from ovspec_export.distill.work_folder import CHECKPOINT_FOLDER, DOCUMENTS_FILE
from ovspec_export.head_fit import check_head_fits
from ovspec_export.sources import HeadSource, Source, make_source

import ovspec
from ovspec.base.errors import OvspecError

pytestmark = pytest.mark.slow
TRAINED = ("llama", "qwen3_moe", "mixtral", "mistral", "gemma2", "gemma3_text", "gpt2", "phi3", "granite", "cohere2")
TRAINED += ("granitemoehybrid", "qwen3_5_text", "lfm2", "mamba")  # with recurrent states
REFUSED = ("gemma3n_text",)
DOCUMENT, TOKENS = 40, 25_000  # tokens of a document, and those to train on


def exported(name: str, folder: Path) -> Path:
    """Return the folder of the family's random model in fp32."""
    make(name, FAMILIES[name], 0, folder / "hf", [[5, 6, 7]], 1)
    assert not export_as_the_worker_does(name, FAMILIES[name], folder / "hf", folder / "ir")
    return folder / "ir"


@pytest.mark.parametrize("name", TRAINED)
def test_a_head_is_trained_and_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ir, work, told = exported(name, tmp_path), tmp_path / "work", list[dict[str, Any]]()
    work.mkdir()
    draws = np.random.default_rng(0)
    texts = [draws.integers(1, VOCAB, DOCUMENT).tolist() for _ in range(20)]
    write_first_documents(
        work / DOCUMENTS_FILE, [Document(ids, 0, "own", True, i % 10 == 0) for i, ids in enumerate(texts)]
    )
    layers = make_plan(DistillOptions(str(ir), tmp_path / "head", size_limit=0.5)).tap_layers
    assert layers
    write_features(str(ir), str(work), layers, 60, 1e9)
    monkeypatch.setattr(training, "report_progress", lambda **figures: told.append(figures))
    monkeypatch.setattr(training, "REPORT_SECONDS", 0)
    train_head(str(ir), str(work), layers, 60, TOKENS, VOCAB)
    losses = [figures["loss"] for figures in told if "loss" in figures]
    assert np.mean(losses[-10:]) < 0.98 * np.mean(losses[:10])
    target, head = Source(name, ir, True, ""), make_source(work / CHECKPOINT_FOLDER, "head", "")
    assert isinstance(head, HeadSource)
    convert_head(head, tmp_path / "head", INT8, target, check_head_fits(target, head), work / "no states")
    plain, drafted = (ovspec.load(ir, draft, precision="f32", tune=False) for draft in ("none", tmp_path / "head"))
    for text in texts[:3]:
        expected, found = (
            plain.generate(text[:9], max_tokens=24),
            drafted.generate(text[:9], max_tokens=24, lookahead=2),
        )
        assert found.token_ids == expected.token_ids and found.stats.proposed


@pytest.mark.parametrize("name", REFUSED)
def test_families_without_heads_are_refused(name: str, tmp_path: Path) -> None:
    ir = exported(name, tmp_path)
    with pytest.raises(OvspecError, match=r"a head can't be used|layers have their own keys"):
        make_plan(DistillOptions(str(ir), tmp_path / "head", size_limit=0.5))
