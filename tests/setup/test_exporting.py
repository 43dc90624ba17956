"""Models by name: what a request makes of names and drafts, and one export that is made and found again."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import DRAFT, TARGET
from family_models import warm_jobs

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.drafting.choice import DraftChoice, parse_draft
from ovspec.setup import exporting, known_drafts, model_store
from ovspec.setup.exporting import find_exported_model, find_or_export_model, make_request
from ovspec.setup.manifest import read_manifest


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for module in (model_store, known_drafts):
        monkeypatch.setattr(module, "default_cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch, pair: Path) -> list[tuple[Any, ...]]:
    """Replace the exporter by one that copies the small pair, without its draft unless one is named."""
    calls: list[tuple[Any, ...]] = []

    def export_named_model(target: str, draft: str | None, output: Path, weight_format: str | None, name: str) -> Any:
        calls.append((target, draft, weight_format, name))
        shutil.copytree(pair, output)
        manifest = read_manifest(output)
        assert manifest
        manifest.target.weight_format = weight_format or "int8"
        if not draft:
            manifest.draft = None
        manifest.write_to_folder(output)
        return manifest

    package = SimpleNamespace(export_named_model=export_named_model)
    monkeypatch.setattr(exporting, "import_export_package", lambda _: package)
    return calls


def test_a_checkpoint_is_exported_once_and_loaded_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], cache_dir: Path
) -> None:
    warm_jobs(monkeypatch)
    checkpoint = shutil.copytree(DRAFT, tmp_path / "small")
    with pytest.raises(OvspecError, match=r"run 'ovspec export .*small -o DIR' first"):
        ovspec.load(checkpoint)
    assert find_exported_model(checkpoint, None, None) is None
    lm = ovspec.load(checkpoint, export=True, weight_format="int4", precision="f32", cache_dir=cache_dir)
    assert lm.generate("def f(", max_tokens=4, ignore_eos=True).stats.generated_tokens == 4
    assert "small: an export in int4 is made once: 2" in capsys.readouterr().err
    monkeypatch.setattr(exporting, "import_export_package", None)  # which is not needed any more
    assert find_or_export_model(checkpoint, "lookup", None) == (lm.folder, "lookup")
    assert find_or_export_model("small-int4", None, None)[0] == lm.folder
    assert ovspec.load("small-int4", precision="f32", cache_dir=cache_dir).folder == lm.folder
    assert ovspec.load(checkpoint, precision="f32", cache_dir=cache_dir).folder == lm.folder
    assert find_exported_model(checkpoint, None, "int8") is None


def test_changed_files_are_exported_again_in_place_of_the_old_ones(
    exports: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(DRAFT, tmp_path / "small")
    first = find_or_export_model(checkpoint, None, None)
    assert find_or_export_model(str(checkpoint), None, None) == first and len(exports) == 1
    (checkpoint / "config.json").write_bytes((checkpoint / "config.json").read_bytes() + b"\n")
    assert find_or_export_model(checkpoint, None, None) == first and len(exports) == 2
    (first[0] / "config.json").unlink()
    assert find_or_export_model(checkpoint, None, None) == first and len(exports) == 3, "it was damaged"
    find_or_export_model(checkpoint, None, "int4")
    assert sorted(model.name for model in model_store.list_stored_models()) == ["small-int4", "small-int8"]


def test_a_draft_joins_an_export_that_is_there(exports: list[tuple[Any, ...]]) -> None:
    """A draft is named, known by the list of pairs, or was distilled; the name of the model stays the same."""
    folder, _ = find_or_export_model("Qwen/Qwen3-8B", None, None)
    again, choice = find_or_export_model("Qwen/Qwen3-8B", "lookup,draft", None)
    assert (again, choice) == (folder, "lookup,draft")
    assert [call[:2] for call in exports] == [("Qwen/Qwen3-8B", None), (str(folder), "Qwen/Qwen3-0.6B")]
    assert find_or_export_model("qwen3-8b", True, None)[0] == folder, "by its short name"
    assert find_or_export_model("Qwen/Qwen3-8B", None, None)[0] == folder and len(exports) == 2
    _, choice = find_or_export_model("Qwen/Qwen3-8B", "lookup,org/small@v1", None)
    assert choice == DraftChoice(lookup=True, model="draft") and exports[-1][1] == "org/small@v1"
    find_or_export_model("qwen3-4b", "head", None)
    assert exports[-1][:2] == ("Qwen/Qwen3-4B", "AngelSlim/Qwen3-4B_eagle3")


def test_a_distilled_draft_comes_before_the_known_pairs(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    known_drafts.remember_distilled_draft("Qwen/Qwen3-8B", head, is_head=True)
    assert known_drafts.find_known_draft("Qwen/Qwen3-8B") == "Qwen/Qwen3-0.6B", "it is empty"
    (head / "config.json").write_text("{}")
    assert known_drafts.find_known_draft("Qwen/Qwen3-8B") == str(head)
    assert make_request("qwen3-8b", "head", None).draft == str(head)
    assert known_drafts.find_known_draft("org/other") is None
    known_drafts.remember_distilled_draft("Qwen/Qwen3-4B", head, is_head=False)
    assert known_drafts.find_known_draft("Qwen/Qwen3-4B") == str(head)
    assert make_request("qwen3-4b", "head", None).draft == "AngelSlim/Qwen3-4B_eagle3", "a draft model is no head"


def test_an_ir_is_used_where_it_is(pair: Path, exports: list[tuple[Any, ...]], tmp_path: Path) -> None:
    for draft in (None, "none", "draft", "lookup", str(pair / "draft"), lambda: None):
        assert find_exported_model(pair, draft, None) == (pair, draft)
    with pytest.raises(OvspecError, match="already exported to an OpenVINO IR; leave `weight_format` out"):
        find_or_export_model(pair, None, "int8")
    folder, choice = find_or_export_model(pair, parse_draft(str(DRAFT)), None)
    assert choice == DraftChoice(model="draft") and folder.parent.parent == tmp_path / "cache" / "models"
    assert exports == [(str(pair), str(DRAFT), None, pair.name)]
    assert find_or_export_model(pair, str(DRAFT), None)[0] == folder and len(exports) == 1


REFUSED = [
    (("nowhere", None), "nowhere: no such folder or file; give a folder, a GGUF file, a hub id"),
    (("nowhere.gguf", None), "no such folder or file"),
    (("org/nowhere.gguf", None), "no such folder or file"),
    (("org/model@", None), "no revision after the @"),
    (("org/model", "head"), "org/model: ovspec knows no head for this model; set `draft` to a head's folder"),
    (("org/model:Q4_K_M", True), "org/model:Q4_K_M: ovspec knows no draft for this model"),
    ((str(DRAFT), "nowhere"), "nowhere: no such folder or file"),
    ((str(Path(__file__).parent), None), "has no openvino_model.xml; give a folder made by"),
    ((__file__, None), "is a file; give a folder"),
]


@pytest.mark.parametrize(("names", "sentence"), REFUSED)
def test_names_that_are_refused_before_anything_is_done(
    names: tuple[str, Any], sentence: str, exports: list[tuple[Any, ...]]
) -> None:
    with pytest.raises(OvspecError, match=sentence.replace("(", r"\(")):
        find_or_export_model(*names, None)
    assert not exports


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ovspec_export", None)
    with pytest.raises(OvspecError, match=r"^org/model isn't exported yet, and exporting needs .*; run pip install"):
        find_or_export_model("org/model", None, None)


def test_load_names_the_command() -> None:
    with pytest.raises(OvspecError, match=r"not exported yet; run 'ovspec export org/model -o DIR', or in Python pass"):
        ovspec.load("org/model")
    with pytest.raises(OvspecError, match="`weight_format` works only with an export; add `export=True`"):
        ovspec.load(TARGET, weight_format="int8")
    with pytest.raises(OvspecError, match="needs the model to export"):
        ovspec.load(export=True)


def test_a_draft_that_has_changed_is_exported_again(exports: list[tuple[Any, ...]], tmp_path: Path) -> None:
    draft = shutil.copytree(DRAFT, tmp_path / "draft")
    folder, _ = find_or_export_model(TARGET, str(draft), "int4")
    [stored] = model_store.list_stored_models()
    assert stored.manifest.draft
    stored.manifest.draft.revision = exporting.compute_files_revision(draft)
    stored.manifest.write_to_folder(stored.ir_folder)
    assert find_or_export_model(TARGET, str(draft), "int4")[0] == folder and len(exports) == 1
    (draft / "config.json").write_bytes((draft / "config.json").read_bytes() + b"\n")
    assert find_or_export_model(TARGET, str(draft), "int4")[0] == folder
    assert [call[:3] for call in exports] == [
        (str(TARGET), str(draft), "int4"),
        (str(folder), str(draft), None),
    ]
