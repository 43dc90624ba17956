"""The manifest of an export, ``ovspec.json``. It is completed last: a complete manifest means a complete export."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_dataclass, read_json, write_atomically
from ovspec.base.json_types import JsonObject
from ovspec.text.chat_template import TEMPLATES_FOLDER

MANIFEST_FILE = "ovspec.json"
DRAFT_FOLDER = "draft"
MANIFEST_FORMAT = 1
# The files with an effect on texts; the draft affects only the speed.
TEXT_DECIDING_FILES = (
    "openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_tokenizer.bin",
    "openvino_detokenizer.xml", "openvino_detokenizer.bin", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "chat_template.jinja",
)  # fmt: skip
UNFINISHED_MANIFEST = '{"format": 1, "unfinished": true}\n'  # the manifest during an export


@dataclass(frozen=True)
class ExportedFile:
    """A file's size in bytes and its checksum in hex."""

    size: int
    sha256: str


@dataclass
class ExportedModel:
    """A model of the pair."""

    source: str
    weight_format: str
    options: JsonObject
    states: list[JsonObject]  # each includes its axes
    revision: str | None = None  # the source's hub commit, or a checksum of its files
    versions: dict[str, str] = field(default_factory=dict)  # package versions, if different from the manifest's


@dataclass
class Manifest:
    """The models and files of an export."""

    target: ExportedModel
    draft: ExportedModel | None
    versions: dict[str, str]  # of the installed packages used by the export
    files: dict[str, ExportedFile]  # by path within the folder
    tokenizer_differs_on: list[str] = field(default_factory=list)  # texts split differently by Hugging Face's tokenizer
    format: int = MANIFEST_FORMAT

    def write_to_folder(self, folder: Path) -> None:
        write_atomically(folder / MANIFEST_FILE, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_manifest(folder: Path) -> bool:
    """Return whether ovspec wrote ``folder``, completely or in part."""
    return (folder / MANIFEST_FILE).is_file()


def backup_path(output: Path) -> Path:
    """Return the path of the old ``output`` during its replacement."""
    output = output.resolve()
    if not output.name:  # the root
        return output / ".old"
    return output.with_name(f".{output.name}.old")


def restore_backup(output: Path) -> None:
    """Undo a replacement killed between its two renames."""
    backup_folder = backup_path(output)
    if not output.exists() and has_manifest(backup_folder):
        with contextlib.suppress(OSError):  # another process may have done it first
            backup_folder.rename(output)


def has_other_line_ends(path: Path, exported_file: ExportedFile) -> bool:
    """Return whether a text file differs from the exported file by line ends alone."""
    if path.suffix == ".bin" or not path.is_file():
        return False
    checksum = hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
    return checksum == exported_file.sha256


def read_manifest(folder: Path, verify: bool = False) -> Manifest | None:
    """Return the manifest in ``folder``, or None if it isn't an export by ovspec.

    Raises OvspecError if the export is unfinished, the manifest is damaged or newer, or a file is missing or has
    another size. ``verify`` also reads all files and compares their checksums.
    """
    if not has_manifest(folder):
        return None
    json_object = read_json(folder / MANIFEST_FILE)
    if json_object.get("unfinished"):
        raise OvspecError(f"{folder}: the export was not finished; export the model again.")
    if json_object.get("format") != MANIFEST_FORMAT:
        manifest_format = json_object.get("format")
        raise OvspecError(f"{folder / MANIFEST_FILE}: unknown format {manifest_format!r:.20}; update ovspec.")
    manifest = read_dataclass(Manifest, folder / MANIFEST_FILE)
    for file_name, exported_file in manifest.files.items():
        path = folder / file_name
        if not path.is_file() or path.stat().st_size != exported_file.size:
            problem = "missing, or of another size than at the export"
            if has_other_line_ends(path, exported_file):
                problem = "its line endings were changed, perhaps by Git"
            raise OvspecError(f"{path}: {problem}; export the model again.")
        if verify and hash_file(path) != exported_file.sha256:
            raise OvspecError(f"{path}: changed since the export; export the model again.")
    if not verify:
        return manifest
    template_paths = [
        f"{TEMPLATES_FOLDER}/{exported_file.name}" for exported_file in (folder / TEMPLATES_FOLDER).glob("*.jinja")
    ]
    draft_files = [f"{DRAFT_FOLDER}/{file_name}" for file_name in TEXT_DECIDING_FILES]
    for file_name in (*TEXT_DECIDING_FILES, *draft_files, *template_paths):
        if file_name not in manifest.files and (folder / file_name).is_file():
            raise OvspecError(
                f"{folder / file_name}: not part of the export; move this file away, or export the model again."
            )
    return manifest
