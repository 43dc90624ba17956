"""Models by name: a missing export is made once, into the store. Only this file imports the exporter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.interrupts import exit_on_sigterm
from ovspec.drafting.choice import EXPORTED_DRAFT, EXPORTED_DRAFTS, HEAD_DRAFT, DraftChoice, parse_draft
from ovspec.ir.compile import MODEL_FILE
from ovspec.setup.identity import compute_files_revision
from ovspec.setup.known_drafts import find_known_draft
from ovspec.setup.manifest import Manifest
from ovspec.setup.model_folders import find_demo_folder, resolve_model_folder
from ovspec.setup.model_names import ModelSource, find_model_named_in_store, is_ir, require_model_source
from ovspec.setup.model_store import (
    IR_FOLDER,
    ModelRecord,
    StoredModel,
    find_stored_model,
    list_stored_models,
    lock_source,
    publish_model,
)


@dataclass(frozen=True)
class ModelRequest:
    """A named model, and the requirements for its export.

    source: None for an IR, used in place.
    shown_name: the name for messages.
    weight_format: the format of its weights; None for any.
    draft: the source of the draft to export with it; None for none, or for the draft of an existing export.
    needs_draft: whether it must have a draft, any draft.
    draft_choice: the drafters to load it with, as in ``load``.
    """

    source: ModelSource | None
    shown_name: str
    weight_format: str | None
    draft: str | None
    needs_draft: bool
    draft_choice: Any

    def find_in_store(self) -> StoredModel | None:
        """Return the export that fulfils the request; None if it must be made first."""
        assert self.source
        stored_model = find_stored_model(
            self.source.name, self.source.revision, self.weight_format, self.draft, self.needs_draft
        )
        return None if stored_model and has_draft_changed(self.draft, stored_model) else stored_model


def has_draft_changed(draft: str | None, stored_model: StoredModel) -> bool:
    """Return whether the files of a draft have changed since it was exported; a hub id has none."""
    draft_entry = stored_model.manifest.draft
    return bool(
        draft and draft_entry and Path(draft).exists() and compute_files_revision(Path(draft)) != draft_entry.revision
    )


def import_export_package(task: str = "Exporting") -> ModuleType:
    """Import and return ``ovspec_export``; raises OvspecError with the command to install it if a package is missing.

    ``task``: the beginning of the error's sentence.
    """
    try:
        import ovspec_export
    except ModuleNotFoundError as error:
        advice = "but it is not installed; run pip install '.[export]' in a clone of ovspec"
        raise OvspecError(f"{task} needs the package {error.name}, {advice}.") from None
    return ovspec_export


def find_exported_model(model: str | Path | None, draft: Any, weight_format: str | None) -> tuple[Path, Any] | None:
    """Return the folder of a named model and the draft to load it with; None if it must be exported first.

    Args:
        model: the folder of an IR or a checkpoint, a GGUF file, a hub id, or a name of ``ovspec models``; None for the
            demo pair.
        draft: as in ``load``; the draft model or head may also be named like a model.
        weight_format: the format of the weights; None for any.

    Raises:
        OvspecError: there is no such model, or no draft is known for it.
    """
    request = make_request(model, draft, weight_format)
    if not request.source:
        return resolve_model_folder(model), request.draft_choice
    stored_model = request.find_in_store()
    return (stored_model.ir_folder, request.draft_choice) if stored_model else None


def find_or_export_model(model: str | Path | None, draft: Any, weight_format: str | None) -> tuple[Path, Any]:
    """Do the work of ``find_exported_model``, and export a missing model into the store.

    A line reports the cost. Of several processes in need of the same model, one exports it, and the others wait.

    Raises:
        OvspecError: like ``find_exported_model``, or the model can't be exported.
    """
    if exported_model := find_exported_model(model, draft, weight_format):
        return exported_model
    request = make_request(model, draft, weight_format)
    assert request.source
    package = import_export_package(f"{request.shown_name} isn't exported yet, and exporting")
    message = "Error: the export was stopped by SIGTERM; run the same command to continue."
    with exit_on_sigterm(message), lock_source(request.source.name, request.shown_name) as new_folder:
        stored_model = request.find_in_store() or export_into_store(request, new_folder, package)
    return stored_model.ir_folder, request.draft_choice


def make_request(model: str | Path | None, draft: Any, weight_format: str | None) -> ModelRequest:
    """Return the request for a model; raises OvspecError like ``find_exported_model``."""
    draft_choice = None if draft is None else parse_draft(draft)
    named_draft = find_named_draft(draft_choice) if draft_choice else None
    is_exported = model is None or (Path(model) / MODEL_FILE).is_file()
    if is_exported and weight_format:
        raise OvspecError(f"{model or 'the demo pair'}: already exported to an OpenVINO IR; leave `weight_format` out.")
    if is_exported and not named_draft:
        return ModelRequest(None, str(model), None, None, False, draft)
    model = model or find_demo_folder()
    if stored_model := find_model_named_in_store(model):
        source = ModelSource(stored_model.record.source, stored_model.record.revision)
        weight_format = weight_format or stored_model.manifest.target.weight_format
    else:
        source = require_model_source(model)
    shown_name = source.short_name if source.is_local else source.full_name
    request = ModelRequest(source, shown_name, weight_format, None, False, draft)
    if draft_choice and named_draft:
        return replace(request, draft=named_draft, draft_choice=replace(draft_choice, model=EXPORTED_DRAFT))
    if draft_choice and draft_choice.model in (EXPORTED_DRAFT, HEAD_DRAFT):
        return add_known_draft(replace(request, needs_draft=True), str(draft_choice.model))
    return request


def find_named_draft(draft_choice: DraftChoice) -> str | None:
    """Return the source of a draft still to be exported: an absolute path or a hub id; None if there is none."""
    if draft_choice.model is None or draft_choice.model in EXPORTED_DRAFTS or is_ir(draft_choice.model):
        return None
    return require_model_source(draft_choice.model).full_name


def add_known_draft(request: ModelRequest, draft_name: str) -> ModelRequest:
    """Return a request with the known draft for its model, unless its export has a draft.

    Raises:
        OvspecError: no draft is known, and the model has none of its own.
    """
    assert request.source
    known_draft = find_known_draft(request.source.name, only_head=draft_name == HEAD_DRAFT)
    needs_known_head = draft_name == HEAD_DRAFT and known_draft is not None
    if not needs_known_head and request.find_in_store():
        return request
    may_bring_layer = draft_name == EXPORTED_DRAFT and not request.source.is_gguf
    if not known_draft and not may_bring_layer:
        kind = "head" if draft_name == HEAD_DRAFT else "draft"
        raise OvspecError(
            f"{request.shown_name}: ovspec knows no {kind} for this model; set `draft` to a {kind}'s folder, train a "
            "draft with 'ovspec distill', or leave `draft` out."
        )
    return replace(request, draft=known_draft, needs_draft=known_draft is not None)


def export_into_store(request: ModelRequest, new_folder: Path, package: ModuleType) -> StoredModel:
    """Export a model into ``new_folder``, and move it into the store.

    An existing export that lacks only the draft is reused as it is; the new export replaces it.
    """
    source = request.source
    assert source
    base_model = find_stored_model(source.name, source.revision, request.weight_format) if request.draft else None
    target_name = str(base_model.ir_folder) if base_model else source.full_name
    new_folder.mkdir(parents=True)
    ir_folder = new_folder / IR_FOLDER
    weight_format = None if base_model else request.weight_format
    manifest = package.export_named_model(target_name, request.draft, ir_folder, weight_format, request.shown_name)
    if base_model:
        manifest.target = base_model.manifest.target
        manifest.write_to_folder(ir_folder)
    record = ModelRecord(source.name, source.revision, request.draft)
    format_suffix = "" if is_ir(source.name) else f"-{manifest.target.weight_format}"
    outdated_folders = [old.folder for old in list_stored_models() if is_outdated(old, record, manifest)]
    return publish_model(new_folder, record, source.short_name + format_suffix, outdated_folders)


def is_outdated(old_model: StoredModel, new_record: ModelRecord, new_manifest: Manifest) -> bool:
    """Return whether a new export replaces an old one: it lacks the draft, or was made from files changed since."""
    if old_model.record.source != new_record.source:
        return False
    if old_model.manifest.target.weight_format != new_manifest.target.weight_format:
        return False
    if old_model.record.revision == new_record.revision:
        return not old_model.manifest.draft or old_model.record.draft == new_record.draft
    return Path(new_record.source).is_absolute()
