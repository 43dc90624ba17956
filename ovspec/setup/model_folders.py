"""The folders of a target and its draft: the demo pair's, the user's, and exports in the cache."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.hub_names import parse_hub_name
from ovspec.drafting.choice import (
    EXPORTED_DRAFT,
    EXPORTED_DRAFTS,
    HEAD_DRAFT,
    MTP_DRAFT,
    SELF_DRAFT,
    DraftChoice,
    parse_draft,
)
from ovspec.ir.compile import MODEL_FILE, check_ir_folder, has_trimmed_vocabulary
from ovspec.ir.heads import is_head_folder, is_mtp_folder
from ovspec.setup.manifest import DRAFT_FOLDER, Manifest, restore_backup
from ovspec.setup.model_names import find_model_named_in_store, find_model_source
from ovspec.setup.model_store import IR_FOLDER, find_stored_model, mark_used
from ovspec.text.pairing import check_same_vocabulary


def find_demo_folder() -> Path:
    """Return the folder of the demo pair in a source checkout; raises OvspecError elsewhere."""
    folder = Path(__file__).resolve().parent.parent.parent / "models" / "demo"
    if not folder.is_dir():
        raise OvspecError("This installation of ovspec has no demo model; give a folder made by 'ovspec export'.")
    return folder


def resolve_model_folder(model: str | Path | None) -> Path:
    """Return the folder of ``model``, or the demo pair's for None; raises OvspecError if it has no exported model.

    A model in the store goes by its original name, or by its name in 'ovspec models'.
    """
    folder = find_demo_folder() if model is None else find_folder_in_store(model) or Path(model)
    restore_backup(folder)
    if folder.name == IR_FOLDER:
        mark_used(folder)
    if not folder.exists() and parse_hub_name(folder.as_posix()):
        raise OvspecError(
            f"{folder}: no such folder, and not exported yet; run 'ovspec export {folder} -o DIR', or in Python pass "
            "`export=True`."
        )
    check_ir_folder(folder)
    if is_head_folder(folder):
        kind = "an MTP layer" if is_mtp_folder(folder) else "an EAGLE-3 head"
        raise OvspecError(f"{folder}: {kind}, not a model; load the target model, with this folder as `draft`.")
    if has_trimmed_vocabulary(folder):
        raise OvspecError(
            f"{folder}: only a draft (its vocabulary is trimmed); load the target model, with this folder as `draft`."
        )
    return folder


def find_folder_in_store(model: str | Path) -> Path | None:
    """Return the export of a model in the store; None if there is none, or ``model`` is an IR."""
    if (Path(model) / MODEL_FILE).is_file():
        return None
    stored_model = find_model_named_in_store(model)
    if not stored_model and (source := find_model_source(model)):
        stored_model = find_stored_model(source.name, source.revision)
    return stored_model.ir_folder if stored_model else None


def resolve_draft(
    draft_choice: DraftChoice | None, folder: Path, manifest: Manifest | None = None
) -> DraftChoice | None:
    """Return ``draft_choice`` with the folder of the draft exported with the target in ``folder``.

    Raises OvspecError if there is no such draft, or if it is of another kind: "self" means a draft made from the
    target's own layers, "head" an EAGLE-3 head, and "mtp" the target's MTP layer.
    """
    if not draft_choice or draft_choice.model not in EXPORTED_DRAFTS:
        return draft_choice
    draft_folder = folder / DRAFT_FOLDER
    if not draft_folder.is_dir():
        if draft_choice.model == MTP_DRAFT:
            raise OvspecError(
                f"{folder}: exported without an MTP layer; choose another `draft`, or export a model with an MTP layer."
            )
        proposer_name = "head" if draft_choice.model == HEAD_DRAFT else "draft"
        raise OvspecError(
            f"{folder}: exported without a {proposer_name}; set `draft` to a {proposer_name}'s folder, or export the "
            "model again with `draft`."
        )
    draft_source = manifest.draft.source if manifest and manifest.draft else ""
    if draft_choice.model == SELF_DRAFT and not re.fullmatch(r".*, first \d+ layers", draft_source):
        raise OvspecError(
            f"{draft_folder}: not made from the target's layers, so `draft='self'` isn't possible; export the model "
            "again with `draft_layers`."
        )
    is_mtp = is_mtp_folder(draft_folder)
    if draft_choice.model == HEAD_DRAFT and (is_mtp or not is_head_folder(draft_folder)):
        kind = "an MTP layer" if is_mtp else "a draft model"
        name = MTP_DRAFT if is_mtp else EXPORTED_DRAFT
        raise OvspecError(
            f"{draft_folder}: {kind}, not an EAGLE-3 head; set `draft='{name}'`, or export the model again with a head."
        )
    if draft_choice.model == MTP_DRAFT and not is_mtp:
        raise OvspecError(
            f"{draft_folder}: not an MTP layer; set `draft='draft'`, or export the model again without `draft`."
        )
    return replace(draft_choice, model=draft_folder)


def check_draft_folder(draft_folder: Path, folder: Path, manifest: Manifest | None) -> None:
    """Raise OvspecError unless ``draft_folder`` has a draft model or head with the target's vocabulary."""
    check_ir_folder(draft_folder)
    if not is_head_folder(draft_folder) and not (manifest and manifest.draft and draft_folder == folder / DRAFT_FOLDER):
        check_same_vocabulary(folder, draft_folder)


def list_model_folders(folder: Path, draft: Any) -> list[Path]:
    """Return the folders of a model and of its draft, if any."""
    draft_choice = resolve_draft(parse_draft(draft), folder)
    folders = [folder]
    if draft_choice and draft_choice.model:
        folders.append(Path(draft_choice.model))
    return folders
