"""The manifest of an export: any change of what it lists is found, of sizes always and of contents on request."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from ovspec.base.errors import OvspecError
from ovspec.setup.manifest import (
    MANIFEST_FILE,
    UNFINISHED_MANIFEST,
    ExportedFile,
    ExportedModel,
    Manifest,
    hash_file,
    read_manifest,
)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Return a folder that passes for an export."""
    weights = tmp_path / "openvino_model.bin"
    weights.write_bytes(b"weights")
    model = ExportedModel("source", "fp16", {}, [])
    Manifest(model, None, {}, {weights.name: ExportedFile(7, hash_file(weights))}).write_to_folder(tmp_path)
    return tmp_path


def refused(folder: Path, message: str, verify: bool = False) -> None:
    with pytest.raises(OvspecError, match=re.escape(message)):
        read_manifest(folder, verify)


def test_what_is_as_it_was_exported(exported: Path) -> None:
    manifest = read_manifest(exported)
    assert manifest and manifest == read_manifest(exported, verify=True)


def test_files_that_have_changed(exported: Path) -> None:
    weights = exported / "openvino_model.bin"
    weights.write_bytes(b"Weights")
    assert read_manifest(exported), "only `verify` reads the files"
    refused(exported, f"{weights}: changed since the export", verify=True)
    weights.write_bytes(b"weight")
    refused(exported, f"{weights}: missing, or of another size than at the export")
    weights.unlink()
    refused(exported, f"{weights}: missing")


def test_line_ends_that_have_changed(exported: Path) -> None:
    """As Git for Windows does it, unless a repository says otherwise."""
    template = exported / "chat_template.jinja"
    template.write_bytes(b"{{ a }}\n{{ b }}\n")
    manifest = json.loads((exported / MANIFEST_FILE).read_text(encoding="utf-8"))
    manifest["files"][template.name] = {"size": 16, "sha256": hashlib.sha256(template.read_bytes()).hexdigest()}
    (exported / MANIFEST_FILE).write_text(json.dumps(manifest), encoding="utf-8")
    assert read_manifest(exported)
    template.write_bytes(b"{{ a }}\r\n{{ b }}\r\n")
    refused(exported, f"{template}: its line endings were changed, perhaps by Git")


def test_files_that_have_come(exported: Path) -> None:
    """They would decide which text is generated."""
    added = exported / "generation_config.json"
    added.write_text("{}", encoding="utf-8")
    assert read_manifest(exported)
    refused(exported, f"{added}: not part of the export", verify=True)


def test_what_is_no_whole_export_of_this_format(exported: Path) -> None:
    manifest = exported / MANIFEST_FILE
    manifest.write_text(json.dumps(json.loads(manifest.read_bytes()) | {"format": 2}), encoding="utf-8")
    refused(exported, "unknown format 2; update ovspec")
    manifest.write_text(UNFINISHED_MANIFEST, encoding="utf-8")
    refused(exported, "the export was not finished")
    manifest.unlink()
    assert read_manifest(exported) is None, "ovspec did not export it"
