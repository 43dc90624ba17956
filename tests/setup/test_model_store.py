"""The store of models that were exported by name: what is found in it, and what is deleted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ovspec.base.errors import OvspecError
from ovspec.setup import model_store
from ovspec.setup.model_store import (
    ModelRecord,
    StoredModel,
    find_stored_model,
    list_stored_models,
    lock_source,
    mark_used,
    publish_model,
    remove_model,
)

# Another process, whose cache is its first argument.
ELSEWHERE = """
import sys
from pathlib import Path
from ovspec.setup import model_store
model_store.default_cache_dir = lambda: Path(sys.argv[1])
"""
IN_USE = f"""{ELSEWHERE}
model_store.mark_used(Path(sys.argv[2]))
print("used", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(model_store, "default_cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def put(pair: Path, record: ModelRecord, name: str = "model", outdated: tuple[Path, ...] = ()) -> StoredModel:
    """Put a copy of the small pair into the store."""
    with lock_source(record.source, name) as new_folder:
        shutil.copytree(pair, new_folder / "ir")
        return publish_model(new_folder, record, name, [*outdated])


def test_models_are_found_by_source_revision_and_format(pair: Path, cache: Path) -> None:
    assert cache and not list_stored_models()
    first = put(pair, ModelRecord("org/model", None))
    commit = first.manifest.target.revision
    tagged = put(pair, ModelRecord("org/model", "v1", "org/draft"))
    assert (first.name, tagged.name) == ("model", "model-2")
    assert find_stored_model("org/model", None) == find_stored_model("org/model", None, "fp32") == first
    assert find_stored_model("org/model", "v1", needs_draft=True) == tagged
    assert find_stored_model("org/model", "v1", draft="org/draft") == tagged
    assert find_stored_model("org/other", None) is find_stored_model("org/model", "v2") is None
    assert find_stored_model("org/model", None, "int8") is find_stored_model("org/model", None, draft="a") is None
    os.utime(tagged.folder / "entry.json", (1, 1))
    assert find_stored_model("org/model", commit) == first, "the last used one of those of this commit"
    os.utime(first.folder / "entry.json", (0, 0))
    assert find_stored_model("org/model", commit) == tagged


def test_what_is_not_whole_is_never_found(pair: Path, cache: Path) -> None:
    damaged = put(pair, ModelRecord("org/model", None))
    (damaged.ir_folder / "openvino_model.bin").write_bytes(b"short")
    foreign = damaged.folder.with_name("foreign")
    shutil.copytree(pair, foreign / "ir")
    half_made = damaged.folder.with_name(".new-0123")
    shutil.copytree(damaged.folder, half_made)
    unreadable = damaged.folder.with_name("unreadable")
    unreadable.mkdir()
    (unreadable / "entry.json").write_text("{nonsense", encoding="utf-8")
    assert not list_stored_models()
    assert model_store.list_entry_folders() == [damaged.folder, unreadable]
    assert model_store.is_damaged_entry(damaged.folder) and not model_store.is_damaged_entry(foreign)
    assert put(pair, ModelRecord("org/model", None)).folder == damaged.folder, "it takes the place of the damaged one"
    assert put(pair, ModelRecord("org/foreign", None), "foreign").name == "foreign-2"
    remove_model(unreadable)
    model_store.delete_leftovers()
    assert foreign.is_dir() and not half_made.exists() and not unreadable.exists()
    assert cache.is_dir()


def test_a_model_in_use_stays(pair: Path, cache: Path) -> None:
    """Until the process that uses it ends, or is killed."""
    stored = put(pair, ModelRecord("org/model", None))
    command = [sys.executable, "-c", IN_USE, str(cache), str(stored.ir_folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        with pytest.raises(OvspecError, match=f"^model: in use by process {process.pid}; stop each process first"):
            remove_model(stored.folder)
        newer = put(pair, ModelRecord("org/model", None, "org/draft"), outdated=(stored.folder,))
        assert newer.name == "model-2" and find_stored_model("org/model", None, draft=None)
        process.kill()
    assert list((stored.folder / "uses").iterdir()), "a process that is killed leaves its marker"
    latest = put(pair, ModelRecord("org/model", None, "org/draft"), outdated=(stored.folder, newer.folder))
    assert [model.folder for model in list_stored_models()] == [latest.folder] == [stored.folder]
    remove_model(latest.folder)
    assert [path.name for path in latest.folder.parent.iterdir() if path.suffix != ".lock"] == []


def test_use_is_noted(pair: Path, cache: Path) -> None:
    stored = put(pair, ModelRecord("org/model", None))
    os.utime(stored.folder / "entry.json", (1, 1))
    assert model_store.list_unused_models(30) == [stored.folder]
    mark_used(pair)  # not in the store
    mark_used(stored.ir_folder)
    assert stored.last_used > time.time() - 60
    assert not model_store.list_unused_models(30)
    assert model_store.list_users(stored.folder) == [f"process {os.getpid()}"]
    (stored.folder / "uses" / "0000-1-1").touch()
    assert "process 1 of another machine" in model_store.list_users(stored.folder)
    assert model_store.name_folder(stored.ir_folder / "draft") == "model/draft"
    assert model_store.name_folder(pair) == str(pair)
    assert cache.is_dir()


def test_leftovers_of_a_running_export_stay(cache: Path) -> None:
    with lock_source("org/model", "model") as new_folder:
        new_folder.mkdir()
        code = f"{ELSEWHERE}\nmodel_store.delete_leftovers()"
        subprocess.run([sys.executable, "-c", code, str(cache)], check=True)
        assert new_folder.is_dir()
    assert not new_folder.exists()
