"""Access to the export package, the only part that needs torch and transformers."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import ModuleType

from ovspec.base.errors import OvspecError
from ovspec.ir.device import default_cache_dir
from ovspec.setup.identity import compute_files_revision
from ovspec.setup.manifest import ExportedModel, read_manifest


def import_export_package(task: str = "Exporting") -> ModuleType:
    """Import and return ``ovspec_export``; raises OvspecError with the command to install it if a package is missing.

    ``task``: the beginning of the error's sentence.
    """
    try:
        import ovspec_export
    except ModuleNotFoundError as error:
        advice = "which is not installed; run pip install '.[export]' in a clone of ovspec"
        raise OvspecError(f"{task} needs the package {error.name}, {advice}.") from None
    return ovspec_export


def export_to_cache(target: str, draft: str | None) -> Path:
    """Export a checkpoint (folder, GGUF file or hub id) into the user's cache, unless it is there; return its folder.

    A model whose files have changed is exported again. A hub id is looked up only the first time.
    """
    source_paths = [Path(name) if name and Path(name).exists() else None for name in (target, draft)]
    resolved_sources = [
        str(source_path.resolve()) if source_path else name
        for source_path, name in zip(source_paths, (target, draft), strict=True)
    ]
    sources_key = hashlib.sha256(repr(resolved_sources).encode()).hexdigest()[:12]
    folder_name = re.sub(r"[^\w.-]+", "-", target).strip("-.") or "model"
    folder = default_cache_dir() / "exports" / f"{folder_name[-60:]}-{sources_key}"
    try:
        manifest = read_manifest(folder)
    except OvspecError:  # damaged
        manifest = None
    if not manifest or any(map(has_source_changed, source_paths, (manifest.target, manifest.draft))):
        import_export_package().export_pair(target, draft, folder, overwrite=True)
    return folder


def has_source_changed(source: Path | None, exported: ExportedModel | None) -> bool:
    """Return whether the files of ``source`` have changed since it was exported; a hub id has none."""
    return bool(source and exported and compute_files_revision(source) != exported.revision)
