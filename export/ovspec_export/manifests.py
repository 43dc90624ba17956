"""The entries of an exported folder's manifest, and the completion of the folder."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.base.progress import format_size, show_step
from ovspec.ir.compile import read_model_graph
from ovspec.ir.heads import add_features_output, list_head_layers, read_head_graph
from ovspec.setup.manifest import MANIFEST_FILE, ExportedFile, ExportedModel, Manifest, hash_file
from ovspec_export.compression import Compression
from ovspec_export.folders import replace_folder
from ovspec_export.sources import HeadSource, Source

VERSIONED_PACKAGES = ("openvino", "openvino-tokenizers", "nncf", "optimum-intel", "transformers", "torch")


def complete_export(work_folder: Path, output: Path, manifest: Manifest) -> None:
    """Complete the export in ``work_folder`` with its manifest and checksums, and move it to ``output``."""
    with show_step(f"{output.name}: computing checksums", keep_line=True) as computing:
        files = sorted(
            path for path in work_folder.rglob("*") if path.is_file() and path != work_folder / MANIFEST_FILE
        )
        manifest.files = {
            path.relative_to(work_folder).as_posix(): ExportedFile(path.stat().st_size, hash_file(path))
            for path in files
        }
        total_bytes = sum(file.size for file in manifest.files.values())
        computing.result = f"{format_size(total_bytes)} in {len(files)} files"
    manifest.write_to_folder(work_folder)
    replace_folder(work_folder, output)


def read_installed_versions() -> dict[str, str]:
    """Return the versions of the installed packages used by an export."""
    return {name: importlib.metadata.version(name) for name in VERSIONED_PACKAGES} | {"ovspec": ovspec.__version__}


def make_manifest_entry(
    source: Source, folder: Path, compression: Compression, target: Path | None = None
) -> ExportedModel:
    """Return the manifest entry of the model in ``folder``, after checking that the model is supported.

    A head is checked with its ``target``, by default the model in the folder above it.
    """
    if isinstance(source, HeadSource):
        try:
            target = target or folder.parent
            read_model_graph(target, lambda model: add_features_output(model, target, folder))
            states = [state for layer in list_head_layers(folder) for state in read_head_graph(layer, target).states]
        except OvspecError as error:
            raise OvspecError(str(error).replace(str(folder), source.name)) from None
    else:
        states = read_model_graph(folder).states
    return ExportedModel(
        source=source.name,
        revision=source.revision,
        weight_format="as it was" if source.is_ir else compression.weight_format,
        options={} if source.is_ir else compression.requested_options(),
        states=[dataclasses.asdict(state) for state in states],
        versions=read_environment_versions(source),
    )


def read_environment_versions(source: Source) -> dict[str, str]:
    """Return the versions of packages replaced by the family's environment."""
    if source.is_ir or not source.family.environment:
        return {}
    return {name: version for name, version, _ in source.family.environment.wheels if name in VERSIONED_PACKAGES}
