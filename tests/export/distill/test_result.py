"""What a distillation leaves: heads and drafts, of exported models and of checkpoints, with their cards and gains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from compiling import trust_paged
from conftest import DRAFT, PROMPTS, TARGET
from distilling import Distilling, distilling, made_head, row
from ovspec_export import DistillOptions, distill_model
from ovspec_export.distill import gain_benchmark
from ovspec_export.distill.card import DocumentCounts, ResultRecord, format_card, read_record
from ovspec_export.distill.gain_benchmark import (
    PLAIN_PROMPT_TOKENS,
    describe_missing_gain,
    is_new_draft_fastest,
    measure_gain,
    read_held_out_prompts,
)
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import HeadSource

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.setup.manifest import read_manifest
from ovspec.text.tokenizer import Tokenizer


@pytest.fixture
def distil(
    pair: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Distilling:
    trust_paged(monkeypatch)
    made = distilling(pair, made_head(tmp_path_factory), tmp_path)
    made.stand_in(monkeypatch)
    return made


# ---------------------------------------------------------------- kinds


def test_a_draft_is_taught(distil: Distilling, pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft of an exported pair, whose checkpoint is beside it, for a model without one."""
    shutil.copytree(pair, distil.folder / "pair")
    shutil.copytree(DRAFT, distil.folder / "small-hf")
    old = distil.folder / "pair" / "draft"
    rows = [row("plain"), row("old draft", 1.1), row("draft", 1.2)]
    distil.stand_in(monkeypatch, checkpoint=str(DRAFT), exported=str(pair / "draft"), rows=rows)
    assert distil.run(draft=str(old)) == 0
    teaching = distil.began("train_draft")[0]
    assert (teaching["source"], teaching["model_type"]) == (str(distil.folder / "small-hf"), "llama")
    assert distil.began("write_features")[0]["layers"] is None, "a draft model reads no hidden states"
    assert (distil.output / "tokenizer.json").is_file(), "which training doesn't write"
    assert distil.began("measure_gain")[0]["old_draft"] == str(old), "what was exported isn't exported again"
    source = find_source(str(distil.output))
    assert not source.is_ir and not isinstance(source, HeadSource)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (distil.output, DRAFT)]
    assert weights[0] == weights[1]
    made = read_record(distil.output)
    assert made and (made.kind, made.draft) == ("draft", "small-hf")
    manifest = read_manifest(distil.model, verify=True)
    assert manifest and manifest.draft and manifest.draft.source == "out"
    for draft in (True, distil.output):
        lm = ovspec.load(distil.model, draft, arithmetic="fast")
        result = lm.generate("def f(", max_tokens=20, lookahead=3)
        assert result.stats.accepted > 0


@pytest.mark.parametrize("exported", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_vocabulary_is_trimmed(
    distil: Distilling, pair: Path, exported: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts, no features, no training; of an exported draft, its export."""
    rows = [row("plain"), row("old draft", 1.1), row("draft", 1.2)]
    distil.stand_in(monkeypatch, exported=str(pair / "draft"), rows=rows)
    assert distil.run(draft=str(pair / "draft" if exported else DRAFT), trim_vocabulary=500, minutes=None) == 0
    assert distil.began("write_texts")[0]["seconds"] == pytest.approx(420, abs=1), "and the rest for what follows"
    assert not distil.began("write_features") and not distil.began("train_draft")
    assert len(distil.began("export_with_optimum")) == (0 if exported else 2), (
        "the old draft is exported, too, to be compared"
    )
    told = "out: 500 ids, without which are 0.0% of the tokens in the texts that were held out"
    assert told in capsys.readouterr().err
    made = read_record(distil.output)
    assert made and (made.kind, made.tokens, made.complete, made.lost) == ("trimmed draft", 0, True, 0.0)
    assert (distil.output / "model.safetensors").exists() is not exported
    assert read_manifest(distil.model, verify=True)
    lm = ovspec.load(distil.model, True, arithmetic="fast")
    assert lm.draft and lm.draft.ir.logits_width == 500
    assert lm.generate("def f(", max_tokens=20, lookahead=3).stats.proposed > 0
    with pytest.raises(OvspecError, match="this draft's vocabulary is already trimmed"):
        distil.run(draft=str(distil.output), trim_vocabulary=100, work=distil.folder / "w", overwrite=True)


def test_a_head_is_trained_further(distil: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("plain"), row("old draft", 1.1), row("head", 1.2)]
    distil.stand_in(monkeypatch, rows=rows)
    assert distil.run(draft=distil.given["checkpoint"]) == 0
    assert distil.began("train_head")[0]["start_checkpoint"] == distil.given["checkpoint"]
    assert len(distil.began("convert_eagle_head")) == 2, "the old head is exported, too, to be compared"
    again = distil.output.with_name("again")
    options: dict[str, Any] = {"draft": str(distil.output), "output": again, "model": str(distil.model)}
    assert distill_model(DistillOptions(**options, tokens=1000, minutes=1)) == 0
    assert distil.began("measure_gain")[1]["old_draft"] == str(distil.output), (
        "an earlier result has its export beside it"
    )


def test_a_checkpoint_is_exported_first(distil: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(distil.model, distil.folder / "exported", ignore=shutil.ignore_patterns("ovspec.json"))
    shutil.rmtree(distil.model)
    shutil.copytree(TARGET, distil.model)
    before = sorted(path.name for path in distil.model.iterdir())
    distil.stand_in(monkeypatch, exported=str(distil.folder / "exported"))
    assert distil.run(work=distil.folder / "work") == 0
    assert distil.began("write_texts")[0]["model"] == str(distil.folder / "work" / "target")
    assert read_manifest(distil.folder / "work" / "target", verify=True)
    assert sorted(path.name for path in distil.model.iterdir()) == before
    assert distil.run(work=distil.folder / "work", tokens=1500) == 0
    assert len(distil.began("export_with_optimum")) == 1, "it is exported once"
    # What can't have a head is found out in the export at the latest; then nothing is left.
    config = distil.folder / "exported" / "config.json"
    entries = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(entries | {"num_hidden_layers": 3}), encoding="utf-8")
    shutil.rmtree(distil.output)
    with pytest.raises(OvspecError, match="only 2 of its 3 layers have their own keys and values"):
        distil.run()
    assert not distil.work.exists() and not distil.output.exists()


# ---------------------------------------------------------------- the gain


def document(answer: int, held_out: bool, length: int = 200) -> dict[str, Any]:
    return {"ids": list(range(5, 5 + length)), "answer": answer, "source": "own", "greedy": True, "held_out": held_out}


def test_prompts_are_what_was_held_out(tmp_path: Path) -> None:
    file = tmp_path / "documents.jsonl"
    assert read_held_out_prompts(file) == []
    documents = [document(answer=10 + i, held_out=i % 2 == 0) for i in range(40)]
    documents += [document(answer=0, held_out=True), document(answer=0, held_out=True, length=1)]
    file.write_text("".join(json.dumps(each) + "\n" for each in documents) + '{"ids": [1', encoding="utf-8")
    prompts = read_held_out_prompts(file)
    assert len(prompts) == 8
    assert [len(prompt) for prompt in prompts] == [10, 14, 20, 24, 30, 36, 40, 46]
    file.write_text(json.dumps(documents[-2]) + "\n", encoding="utf-8")
    assert [len(prompt) for prompt in read_held_out_prompts(file)] == [PLAIN_PROMPT_TOKENS], (
        "of a plain text, its beginning"
    )


def test_the_gain_is_measured(distil: Distilling, pair: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_dir))
    monkeypatch.setattr(gain_benchmark, "MAX_GENERATED_TOKENS", 16)
    file, output = distil.folder / "documents.jsonl", distil.folder / "rows.json"
    ids = Tokenizer(pair).encode(PROMPTS[0]).tolist()
    given = document(0, True) | {"ids": ids, "answer": len(ids) - 1}
    file.write_text(2 * (json.dumps(given) + "\n"), encoding="utf-8")
    measure_gain(str(distil.model), distil.given["ir"], str(pair / "draft"), str(file), str(output))
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert [row["mode"] for row in rows] == ["plain", "old draft", "head"]
    assert [row["texts"] for row in rows] == [2, 2, 2]
    assert [row["equal"] for row in rows] == [2, 2, 2]
    file.write_text(3 * (json.dumps(given) + "\n"), encoding="utf-8")
    measure_gain(str(distil.model), str(pair / "draft"), "", str(file), str(output), seconds=0.0)
    rows = json.loads(output.read_text(encoding="utf-8"))["rows"]
    assert [(row["mode"], row["texts"]) for row in rows] == [("plain", 2), ("draft", 2)], "at least two, in no time"


def test_what_is_a_gain() -> None:
    plain = row("plain")
    assert is_new_draft_fastest([plain, row("head", 1.1)])
    assert is_new_draft_fastest([plain, row("old draft", 1.1), row("head", 1.2)])
    assert is_new_draft_fastest([plain, row("old draft", None), row("head", 1.2)])
    for new in (1.0, 0.9, None):
        assert not is_new_draft_fastest([plain, row("head", new)])
        assert not is_new_draft_fastest([plain, row("old draft", 0.8), row("head", new)])
    assert not is_new_draft_fastest([plain, row("old draft", 1.3), row("head", 1.2)])
    assert "(no speed-up)" in describe_missing_gain("out", [plain, row("head", None)])
    assert "(0.90 of plain speed, with the old draft 1.30)" in describe_missing_gain(
        "out", [plain, row("old draft", 1.3), row("head", 0.9)]
    )


# ---------------------------------------------------------------- the card


def test_the_card() -> None:
    made = ResultRecord(
        run="1",
        kind="head",
        model="org/model",
        revision="0123456789abcdef",
        draft=None,
        complete=True,
        seconds={"texts": 1800.0, "features": 900.0, "training": 2700.0},
        tokens=1234567,
        data={"own": DocumentCounts(900, 250000), "text": DocumentCounts(12, 30000)},
        held_out=DocumentCounts(48, 14000),
        machine="A processor",
        agreement=[0.468, 0.43, 0.388],
        rows=[row("plain"), row("old draft", None), row("head", 1.25)],
    )
    text = format_card(made, "my-head")
    for part in (
        "# An EAGLE-3 head for org/model",
        "org/model, revision 0123456789ab, so that",
        'ovspec generate MODEL "Once upon a time" --draft my-head --stats',
        "ovspec export CHECKPOINT --draft my-head -o MODEL",
        "**Trained on** 1,234,567 tokens",
        "250,000 tokens written by the model itself (900 documents); 30,000 tokens of given text (12 documents)",
        "; 48 more documents were held out",
        "**Time**: 1.5 hours (texts 0.5, features 0.2, training 0.8)",
        "**Machine**: A processor",
        "0.47 for the first token, 0.43 and 0.39 for the next",
        "| old draft | 10.00 | 100.0 | none | 30 of 90 | 1.34 |",
        "| head | 8.00 | 100.0 | 1.25 | 30 of 90 | 1.34 |",
        "The license of org/model holds",
    ):
        assert part in text
    assert "Not finished" not in text
    bare = ResultRecord("1", "draft", "model", None, "small", False, {}, 0, {}, DocumentCounts(), "A processor")
    text = format_card(bare, "my-draft")
    assert "It was made from small." in text and "**Not finished**" in text
    assert "Agreement" not in text and "What it brings" not in text and "hidden states" not in text
