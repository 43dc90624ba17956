"""ovspec models, and how commands take the models that it lists."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_runs import LOADED, Outcome, runs
from conftest import DRAFT

from ovspec.setup import exporting, known_drafts, model_store
from ovspec.setup.manifest import read_manifest
from ovspec.setup.model_store import ModelRecord, lock_source, publish_model

LOADING = ("--engine", "stateful", "--arithmetic", "fast")


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path, pair: Path
) -> Iterator[Callable[..., Outcome]]:
    """Return a function that runs commands on a store of its own, whose exporter copies the small pair."""

    def export_named_model(target: str, draft: str | None, output: Path, weight_format: str | None, name: str) -> Any:
        shutil.copytree(pair, output)
        manifest = read_manifest(output)
        assert manifest and target and name
        manifest.target.weight_format = weight_format or "int8"
        manifest.draft = manifest.draft if draft else None
        manifest.write_to_folder(output)
        return manifest

    package = SimpleNamespace(export_named_model=export_named_model)
    monkeypatch.setattr(exporting, "import_export_package", lambda _: package)
    for module in (model_store, known_drafts):
        monkeypatch.setattr(module, "default_cache_dir", lambda: tmp_path / "cache")
    yield from runs(monkeypatch, tmp_path, cache_dir)
    LOADED.clear()


def put(pair: Path, name: str, source: str) -> None:
    with lock_source(source, name) as new_folder:
        shutil.copytree(pair, new_folder / "ir")
        publish_model(new_folder, ModelRecord(source, "v1"), name, [])


def test_a_table_of_models(run: Callable[..., Outcome], pair: Path, tmp_path: Path) -> None:
    assert "'ovspec chat MODEL' exports and keeps MODEL" in run("models").err
    put(pair, "model-fp32", "org/model")
    put(pair, "other", "org/other")
    os.utime(tmp_path / "cache" / "models" / "model-fp32" / "entry.json", (0, 0))
    (tmp_path / "cache" / "models" / "other" / "ir" / "config.json").unlink()
    listed = run("models")
    head, line = listed.out.splitlines()
    assert head.split("  ")[0] == "NAME" and head.endswith("DRAFT")
    assert line.split()[:3] == ["model-fp32", "org/model@v1", "fp32"] and line.endswith("days ago  draft")
    assert "other: damaged, so it is never used; 'ovspec models rm other' deletes it" in listed.err


def test_models_are_deleted(run: Callable[..., Outcome], pair: Path, tmp_path: Path) -> None:
    store = tmp_path / "cache" / "models"
    for name in ("a", "b", "c", "d"):
        put(pair, name, f"org/{name}")
    (store / "a" / "ir" / "config.json").unlink()
    os.utime(store / "c" / "entry.json", (0, 0))
    deleted = run("models", "rm", "a", "org/b@v1")
    assert (deleted.code, deleted.out.split()) == (0, ["a:", "deleted", "b:", "deleted"])
    assert run("models", "--prune", "30").out == "c: deleted\n"
    assert run("models", "--prune", "30").out == ""
    assert [path.name for path in store.iterdir() if not path.name.startswith(".")] == ["d"]
    assert run("models", "rm", "org/d").code == 0, "all revisions"


def test_every_command_takes_a_name(run: Callable[..., Outcome], tmp_path: Path, pair: Path) -> None:
    """The first one exports the model, and the others find it; inspect and tune only find it."""
    checkpoint = shutil.copytree(DRAFT, tmp_path / "small")
    assert "run 'ovspec export org/model -o DIR'" in run("inspect", "org/model").err
    Path("in.txt").write_text("import\n", encoding="utf-8")
    options = ("--weight-format", "int4", *LOADING)
    commands: list[tuple[Any, ...]] = [
        ("generate", checkpoint, "import", "-n", "2", "--json", *options),
        ("chat", checkpoint, "-n", "2", *options),
        ("batch", checkpoint, "in.txt", "-o", "out.jsonl", "-n", "2", *options),
        ("bench", checkpoint, "--prompt", "import", "-n", "2", *options, "--draft", "none"),
        ("generate", "small-int4", "import", "-n", "2", *LOADING),
        ("inspect", checkpoint, "--json", *LOADING),
    ]
    outcomes = [run(*command, stdin="hi\n") for command in commands]
    assert [outcome.code for outcome in outcomes] == [0] * len(commands), outcomes
    assert json.loads(outcomes[-1].out)["target"]
    assert [model.name for model in model_store.list_stored_models()] == ["small-int4"]
    drafted = run("generate", checkpoint, "import", "-n", "2", "--draft", DRAFT, "--json", *LOADING)
    assert drafted.code == 0 and drafted.lm.draft, drafted.err
    in_use = run("models", "rm", "small-int4")
    assert (in_use.code, f"small-int4: in use by process {os.getpid()}; stop each process first." in in_use.err) == (
        1,
        True,
    )
    assert pair.is_dir()


def test_a_missing_draft_is_said_before_an_export(run: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refused = run("chat", "model.gguf", "--draft")
    assert "model: ovspec knows no draft for this model; set --draft to a draft's folder" in refused.err
    assert not model_store.list_entry_folders()
