"""Access to the export package, the only part that needs torch and transformers."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from types import ModuleType

from ovspec.base.errors import OvspecError
from ovspec.ir.device import default_cache_dir
from ovspec.setup.identity import compute_files_revision
from ovspec.setup.manifest import read_manifest


def import_export_package(what: str = "Exporting") -> ModuleType:
    """Import and return ``ovspec_export``; raises OvspecError, naming what to install, if ``what`` lacks a package."""
    try:
        import ovspec_export
    except ModuleNotFoundError as error:
        how = "which is not installed; run pip install '.[export]' in a clone of ovspec"
        raise OvspecError(f"{what} needs the package {error.name}, {how}.") from None
    return ovspec_export


def export_to_cache(target: str, draft: str | None) -> Path:
    """Export a checkpoint (folder, GGUF file or hub id) into the user's cache, unless it is there; return its folder.

    A model whose files have changed is exported again. A hub id is looked up only the first time.
    """
    sources = [str(Path(name).resolve()) if name and Path(name).exists() else name for name in (target, draft)]
    key = hashlib.sha256(repr(sources).encode()).hexdigest()[:12]
    name = re.sub(r"[^\w.-]+", "-", target).strip("-.") or "model"
    folder = default_cache_dir() / "exports" / f"{name[-60:]}-{key}"
    try:
        manifest = read_manifest(folder)
    except OvspecError:  # damaged
        manifest = None
    models = (manifest.target, manifest.draft) if manifest else ()
    revisions = [
        compute_files_revision(Path(name)) if name and Path(name).exists() else None for name in (target, draft)
    ]
    changed = [now for now, model in zip(revisions, models, strict=False) if now and model and now != model.revision]
    if not manifest or changed:
        import_export_package().export_pair(target, draft, folder, overwrite=True)
    return folder
