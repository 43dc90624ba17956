"""The target and the draft of a distillation: their requirements, and the checkpoints behind exported models."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Literal

import openvino as ov

from ovspec.base.errors import OvspecError
from ovspec.base.progress import print_note
from ovspec.ir.compile import MODEL_FILE, check_ir_folder, check_weights_file, read_model_graph
from ovspec.ir.heads import check_layers_have_states, find_target_layer_inputs
from ovspec.ir.lm_head import find_lm_head
from ovspec.setup.manifest import DRAFT_FOLDER, ExportedModel, read_manifest
from ovspec_export.distill.trimming import check_trimmable
from ovspec_export.draft_vocabulary import choose_most_used_ids
from ovspec_export.head_fit import check_head_fits
from ovspec_export.head_layout import choose_new_head_tap_layers
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import GgufSource, HeadSource, MtpSource, Source, check_can_be_unpacked
from ovspec_export.tokenizers import check_pair_vocabularies

HeadKind = Literal["head", "mtp"]
ResultKind = Literal["head", "mtp", "draft", "trimmed draft"]


def choose_kind_draft_and_layers(
    target: Source,
    kind: HeadKind | None,
    draft_name: str | None,
    trim_vocabulary: int | None,
    draft_vocabulary: int | None,
) -> tuple[ResultKind, Source | None, list[int] | None]:
    """Return the kind of result, the draft to start from, and the target layers whose inputs the head reads.

    Args:
        draft_name: the option ``draft``. kind, trim_vocabulary, draft_vocabulary: the options of these names.

    Raises:
        OvspecError: the draft doesn't fit the target or can't be used, or the target can't have a head.
    """
    draft = None
    if draft_name:
        draft = find_source(draft_name) if trim_vocabulary else find_draft_checkpoint(draft_name)
    for_head = not trim_vocabulary and (draft is None or isinstance(draft, HeadSource))
    if not for_head and draft_vocabulary:
        raise OvspecError(
            "`draft_vocabulary` works only for heads; leave `draft_vocabulary` out, and set `trim_vocabulary` for a "
            "draft model."
        )
    draft_kind: ResultKind = kind or "head"
    if trim_vocabulary:
        draft_kind = "trimmed draft"
    elif draft:
        draft_kind = "draft"
        if isinstance(draft, HeadSource):
            draft_kind = "mtp" if isinstance(draft, MtpSource) else "head"
    if isinstance(draft, MtpSource) and len(draft.layers) > 1:
        raise OvspecError(
            f"{draft.name}: has {len(draft.layers)} MTP layers, but only a single MTP layer can be trained; choose "
            "another `draft`."
        )
    if kind and kind != draft_kind:
        kind_text = {"head": "an EAGLE-3 head", "mtp": "an MTP layer"}[kind]
        raise OvspecError(
            f"`kind={kind!r}` trains {kind_text}, but `draft` is another kind of model; leave out `kind` or `draft`."
        )
    if target.is_ir:
        check_target_ir(target.path, target.name, draft_kind)
    elif draft_kind == "head":
        check_target_checkpoint(target)
    if for_head and draft:
        assert isinstance(draft, HeadSource)
        return draft_kind, draft, check_head_fits(target, draft)
    if draft_kind == "mtp":
        return draft_kind, None, []
    if draft is None:
        return draft_kind, None, choose_new_head_tap_layers(require_config_number(target, "layers"))
    if trim_vocabulary:
        check_trimmable(draft)
        choose_most_used_ids([], trim_vocabulary, require_config_number(draft, "vocab"))  # refuses an invalid number
    check_pair_vocabularies(target, draft, trust_remote_code=False)
    return draft_kind, draft, None


def require_config_number(source: Source, config_key: str) -> int:
    """Return a number in a config; raises OvspecError if it is missing."""
    number = source.get_config_number(config_key)
    if number is None:
        key = {"layers": "num_hidden_layers", "vocab": "vocab_size"}[config_key]
        raise OvspecError(f"{source.name}: the entry {key} is missing in config.json; add this entry.")
    return number


def check_target_ir(folder: Path, name: str, kind: ResultKind) -> None:
    """Raise OvspecError if the exported model can't run here, or is to get a head and can't have one."""
    check_ir_folder(folder)
    check_weights_file(folder / MODEL_FILE)

    def check_graph(model: ov.Model) -> None:
        if kind == "head":
            find_target_layer_inputs(model, folder, Path(name))
        if kind in ("head", "mtp") and find_lm_head(model) is None:
            raise OvspecError(
                f"{name}: no head can be trained for this model, because ovspec can't find the lm_head in the graph; "
                "set `draft` to train a draft model instead."
            )

    read_model_graph(folder, check_graph)


def check_target_checkpoint(target: Source) -> None:
    """Raise OvspecError if the config of a checkpoint rules out a head.

    The config need not say so: the exported model is checked again.
    """
    config = target.text_config or target.config
    layer_count = target.get_config_number("layers")
    layers_sharing_keys = int(config.get("num_kv_shared_layers") or 0)
    if layer_count:
        check_layers_have_states(layer_count - layers_sharing_keys, layer_count, target.name)


def find_target_origin(target: Source) -> tuple[str, str | None]:
    """Return the name and the revision of a target's checkpoint, as far as they are known."""
    if target.is_ir and (manifest := read_manifest(target.path)):
        return manifest.target.source, manifest.target.revision
    return target.name, target.revision


def find_torch_checkpoint(target: Source) -> Source | None:
    """Return the checkpoint for torch to compute hidden states with; None if there is none."""
    checkpoint = find_checkpoint_of_export(target) if target.is_ir else target
    if checkpoint is None or isinstance(checkpoint, GgufSource) or checkpoint.has_non_text_parts:
        print_note(f"{target.name}: its checkpoint can't be used, so OpenVINO computes the hidden states, on the CPU")
        return None
    return checkpoint


def find_draft_checkpoint(draft_name: str) -> Source:
    """Return the checkpoint of a draft, even if its export is named.

    Raises:
        OvspecError: it is missing here.
    """
    source = find_source(draft_name)
    check_can_be_unpacked(source)
    if not source.is_ir:
        return source
    if isinstance(source, HeadSource):
        raise OvspecError(f"{draft_name}: a head's OpenVINO IR can't be trained; set `draft` to the head's checkpoint.")
    manifest_entry = find_manifest_entry(source.path)
    if manifest_entry is None:
        raise OvspecError(
            f"{draft_name}: an OpenVINO IR can't be trained, and the folder doesn't name the original checkpoint; "
            "set `draft` to this checkpoint."
        )
    if not (checkpoint := find_checkpoint_of_export(source)):
        raise OvspecError(
            f"{draft_name}: the original checkpoint {manifest_entry.source} was not found; set `draft` to the folder "
            "or hub id of this checkpoint."
        )
    print_note(f"{draft_name}: taught from its checkpoint {checkpoint.path}")
    return checkpoint


def find_checkpoint_of_export(source: Source) -> Source | None:
    """Return the checkpoint of an export by its manifest: in its folder, or on the hub; None if it is missing.

    Checkpoints in the hub's cache need no network.
    """
    manifest_entry = find_manifest_entry(source.path)
    if manifest_entry is None:
        return None
    neighbor_folders = [parent / manifest_entry.source for parent in list(source.path.resolve().parents)[:2]]
    checkpoint_names = [str(folder) for folder in neighbor_folders if (folder / "config.json").is_file()]
    if manifest_entry.source.count("/") == 1:
        checkpoint_names.append(f"{manifest_entry.source.partition('@')[0]}@{manifest_entry.revision}")
    for checkpoint_name in checkpoint_names:
        with contextlib.suppress(OvspecError):
            checkpoint = find_source(checkpoint_name)
            if not checkpoint.is_ir and not isinstance(checkpoint, HeadSource):
                return checkpoint
    return None


def find_manifest_entry(folder: Path) -> ExportedModel | None:
    """Return the manifest entry of the model in ``folder``, even for a draft in its target's folder."""
    if manifest := read_manifest(folder):
        return manifest.target
    if folder.resolve().name == DRAFT_FOLDER and (manifest := read_manifest(folder.resolve().parent)):
        return manifest.draft
    return None
