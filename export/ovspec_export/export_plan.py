"""The plan of an export, checked before any conversion: options, models, and room on the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.progress import format_size, print_note, show_step
from ovspec.drafting.choice import MTP_DRAFT, NO_DRAFT
from ovspec.text.custom_template import resolve_custom_template
from ovspec_export.compression import INT8, KEEP, KEPT, Compression
from ovspec_export.convert import choose_group_size, compute_layer_share, estimate_disk_space
from ovspec_export.draft_vocabulary import is_trimmed, read_proposed_ids
from ovspec_export.environments import prepare_environment_variables
from ovspec_export.folders import check_disk_space, check_output_folder
from ovspec_export.head_fit import check_head_fits
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import HeadSource, Source, check_can_be_unpacked, find_own_mtp_layer
from ovspec_export.tokenizers import check_pair_vocabularies, read_source_templates


@dataclass(frozen=True)
class ExportPlan:
    """The models of an export, and its options.

    sources: the target's and, if any, the draft's.
    compressions: for the target and for a draft, even a draft made from the target's first layers.
    chat_template: the target's template in place of its own.
    draft_ids: the ids proposed by the draft, (n,); None for all.
    tap_layers: the target layers whose inputs the head reads; empty for the lm_head's input, None without a head.
    """

    sources: list[Source]
    compressions: list[Compression]
    chat_template: str | None
    draft_ids: np.ndarray | None
    tap_layers: list[int] | None


def plan_export(
    target: str,
    draft: str | None,
    output: Path,
    compression: Compression | None,
    draft_compression: Compression | None,
    *,
    overwrite: bool,
    draft_layers: int | None,
    evaluate: Path | None,
    chat_template: str | Path | None,
    trust_remote_code: bool,
) -> ExportPlan:
    """Return the plan of ``export_pair``; see there for the arguments and errors."""
    for weight_options in filter(None, (compression, draft_compression)):
        weight_options.check_weight_options()
    if draft not in (None, NO_DRAFT) and draft_layers is not None:
        raise OvspecError("`draft_layers` and `draft` can't be combined; leave one out.")
    if evaluate:
        read_text(evaluate)
    check_output_folder(output, overwrite)
    # Not in a progress step: a download shows its own progress.
    sources = [find_source(target, trust_remote_code)]
    if draft_source := find_draft_source(sources[0], draft, draft_layers, trust_remote_code):
        sources.append(draft_source)
    for source in sources:
        ir_note = ", an IR, used as it is" if source.is_ir else ""
        print_note(f"{source.name}: {format_size(source.size_in_bytes)}{ir_note}, revision {source.revision[:12]}")
        folder = source.path.resolve()
        if output == folder or folder in output.parents or output in folder.parents:
            raise OvspecError(
                f"{output}: contains the model {source.name}, or lies in the model's folder; choose another `output`."
            )
    target_source = sources[0]
    if isinstance(target_source, HeadSource):
        raise OvspecError(
            f"{target_source.name}: an EAGLE-3 head, not a model; export the head's target model, with the head as "
            "`draft`."
        )
    if is_trimmed(target_source):
        raise OvspecError(
            f"{target_source.name}: a draft with a trimmed vocabulary can't be a target; export the draft's target "
            "model, with this draft as `draft`."
        )
    resolved_template = (
        None if chat_template is None else resolve_custom_template(chat_template, read_source_templates(sources[0]))
    )
    draft_head = draft_source if isinstance(draft_source, HeadSource) else None
    draft_ids = read_proposed_ids(draft_source, target_source) if draft_source else None
    if evaluate and any(source.is_ir for source in sources if source is not draft_head):
        raise OvspecError(
            "`evaluate` compares with a checkpoint, but a given model is already an OpenVINO IR; leave `evaluate` out."
        )
    for source, weight_options in zip(sources, (compression, draft_compression), strict=False):
        if source.is_ir and weight_options not in (None, INT8, KEPT):
            raise OvspecError(
                f"{source.name}: already an OpenVINO IR, so the weights can't be converted; leave `weight_format` and "
                "the other weight options out."
            )
    tap_layers = check_head_fits(target_source, draft_head) if draft_head else None
    for source in sources:
        if not source.is_ir:
            # Prepared before any conversion, to notice a missing version at once.
            prepare_environment_variables(source.family.environment, source.model_type)
    inherited_compression = None if compression == KEPT else compression
    compression, draft_compression = (
        resolve_compression(source, options)
        for source, options in (
            (target_source, compression),
            (draft_source or target_source, draft_compression or inherited_compression),
        )
    )
    if draft_head and draft_compression.calibration:
        print_note(f"{draft_head.name}: a head is compressed without a text to calibrate on")
        draft_compression = draft_compression.without_calibration()
    # A draft of first layers has the target's rows.
    requested_compressions = zip([*sources, target_source], (compression, draft_compression), strict=False)
    compressions = [choose_group_size(source, options) for source, options in requested_compressions]
    needed_bytes = [
        estimate_disk_space(source, options) for source, options in zip(sources, compressions, strict=False)
    ]
    if draft_layers is not None:
        needed_bytes.append(needed_bytes[0] * compute_layer_share(target_source, draft_layers))
    check_disk_space(output, sum(needed_bytes))
    if draft_source and not draft_head:
        with show_step(f"{draft_source.name}: comparing its vocabulary with that of {target_source.name}"):
            check_pair_vocabularies(target_source, draft_source, trust_remote_code)
    return ExportPlan(sources, compressions, resolved_template, draft_ids, tap_layers)


def resolve_compression(source: Source, compression: Compression | None) -> Compression:
    """Return the format of the weights of ``source``, by default unchanged if they are quantised, else int8.

    Raises:
        OvspecError: they can't be kept as requested.
    """
    if compression is not None and compression.weight_format != KEEP:
        check_can_be_unpacked(source)
        return compression
    if source.is_ir:
        return INT8
    if source.is_quantised:
        return KEPT
    if compression is not None:
        raise OvspecError(
            f"{source.name}: its weights aren't quantised, so `weight_format` can't be '{KEEP}'; choose another "
            "format, such as int8."
        )
    return INT8


def find_draft_source(
    target: Source, draft: str | None, draft_layers: int | None, trust_remote_code: bool
) -> Source | None:
    """Return the draft named ``draft``, or None; by default it is the target's MTP layer, if any.

    Raises:
        OvspecError: like ``find_source``, or a requested MTP layer is missing in the target.
    """
    if draft not in (None, NO_DRAFT, MTP_DRAFT):
        return find_source(draft, trust_remote_code)
    if draft == NO_DRAFT or draft_layers is not None:
        return None
    mtp_layer = find_own_mtp_layer(target)
    if not mtp_layer and draft == MTP_DRAFT:
        raise OvspecError(
            f"{target.name}: has no MTP layer, or only a quantised MTP layer; choose another `draft`, or leave `draft` "
            "out."
        )
    return mtp_layer
