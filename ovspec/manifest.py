"""What an export says about itself: ``ovspec.json``, written last, so its presence means a whole export."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ovspec.errors import OvspecError
from ovspec.ir import read_json
from ovspec.kv import Rollback
from ovspec.probing import Probe

MANIFEST_FILE = "ovspec.json"
DRAFT_FOLDER = "draft"
FORMAT = 1


@dataclass
class ExportedModel:
    """One model of the pair. ``states`` lists each state with its axes, ``probe`` is how it rolls back."""

    source: str
    weight_format: str
    options: dict[str, Any]
    probe: Probe
    states: list[dict[str, Any]]


@dataclass
class Manifest:
    """``files`` maps relative paths to {"size": bytes, "sha256": hex}; ``tokenizer_differs_on`` lists the
    test texts that OpenVINO's tokenizer splits differently from Hugging Face's."""

    target: ExportedModel
    draft: ExportedModel | None
    versions: dict[str, str]
    files: dict[str, dict[str, Any]]
    tokenizer_differs_on: list[str] = field(default_factory=list)
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def exported_model(data: dict[str, Any]) -> ExportedModel:
    probe = data["probe"]
    found = Probe(Rollback(**probe["rollback"]), probe["setting"], probe["seconds"])
    return ExportedModel(**{**data, "probe": found})


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in ``folder``, None for a folder that ovspec did not export.

    Raises:
        OvspecError: it is damaged or of a newer format, or a file it lists is missing or of another size.
    """
    data = read_json(folder / MANIFEST_FILE)
    if not data:
        return None
    if data.get("format") != FORMAT:
        raise OvspecError(f"{folder / MANIFEST_FILE}: format {data.get('format')} is not known; update ovspec.")
    try:
        draft = data["draft"]
        manifest = Manifest(
            target=exported_model(data["target"]),
            draft=exported_model(draft) if draft else None,
            versions=data["versions"],
            files=data["files"],
            tokenizer_differs_on=data["tokenizer_differs_on"],
        )
    except (KeyError, TypeError):
        raise OvspecError(f"{folder / MANIFEST_FILE}: damaged; export the model again.") from None
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != file["size"]:
            raise OvspecError(f"{path}: missing or not of the exported size; export the model again.")
    return manifest
