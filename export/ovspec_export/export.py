"""Export a target and its draft, atomically."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ovspec.base.progress import print_note, show_step
from ovspec.setup.manifest import DRAFT_FOLDER, Manifest
from ovspec.text.pairing import check_same_vocabulary
from ovspec_export.compression import KEEP, Compression
from ovspec_export.convert import (
    check_converted_files,
    convert_head,
    convert_mtp_layer,
    convert_source,
    make_first_layers_checkpoint,
)
from ovspec_export.draft_vocabulary import trim_ir
from ovspec_export.export_plan import plan_export
from ovspec_export.folders import open_partial_folder
from ovspec_export.manifests import complete_export, make_manifest_entry, read_installed_versions
from ovspec_export.mtp_vocabulary import choose_mtp_vocabulary
from ovspec_export.quality import evaluate_exports, format_quality_table
from ovspec_export.readable_checkpoint import ensure_readable_checkpoint
from ovspec_export.sources import GgufSource, HeadSource, MtpSource
from ovspec_export.tokenizers import find_differing_texts, load_tokenizer, replace_chat_template


def export_pair(
    target: str,
    draft: str | None,
    output: Path,
    compression: Compression | None = None,
    draft_compression: Compression | None = None,
    *,
    overwrite: bool = False,
    draft_layers: int | None = None,
    evaluate: Path | None = None,
    chat_template: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Manifest:
    """Export ``target`` and, if requested, a draft into ``output``.

    Args:
        target: a folder with a checkpoint or an IR, a GGUF file, or a hub id.
        draft: likewise, or an EAGLE-3 head or MTP layer for the target; "mtp" for the MTP layer of the target's
            checkpoint, the default if it has an MTP layer; "none" for no draft.
        output: the folder to write.
        overwrite: replace, at the very end, an earlier export there.
        compression: the format of the target's weights; by default int8, and quantised weights are kept.
        draft_compression: the format of the draft's weights; by default like the target's.
        draft_layers: make the draft from this many of the target's own first layers.
        evaluate: a text file for comparing the exported models with the checkpoints.
        chat_template: the target's template in place of its own; see ``resolve_custom_template``.
        trust_remote_code: run the checkpoint's own Python code.

    Raises:
        OvspecError: an option is invalid, the vocabularies differ, a model can't be exported, a folder is in the way,
            or the disk has too little space.
    """
    output = output.expanduser().resolve()
    plan = plan_export(
        target,
        draft,
        output,
        compression,
        draft_compression,
        overwrite=overwrite,
        draft_layers=draft_layers,
        evaluate=evaluate,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    with open_partial_folder(output, overwrite) as work_folder:
        sources = [
            ensure_readable_checkpoint(source, work_folder / f"checkpoint-{i}", options.weight_format)
            for i, (source, options) in enumerate(zip(plan.sources, plan.compressions, strict=False))
        ]
        if draft_layers is not None:
            sources.append(
                make_first_layers_checkpoint(sources[0], draft_layers, work_folder / "first-layers", trust_remote_code)
            )
        model_folders = [work_folder, work_folder / DRAFT_FOLDER]
        model_entries = []
        states_file = work_folder / "states.npy"
        for source, folder, options in zip(sources, model_folders, plan.compressions, strict=False):
            if isinstance(source, MtpSource):
                layer = source
                if source.path == plan.sources[0].path and plan.compressions[0].weight_format != KEEP:
                    layer = replace(source, path=sources[0].path)
                target_ids = plan.draft_ids
                if target_ids is None:
                    target_ids = choose_mtp_vocabulary(plan.sources[0], work_folder)
                convert_mtp_layer(layer, folder, options, target_ids, states_file)
            elif plan.tap_layers and isinstance(source, HeadSource) and not source.is_ir:
                convert_head(source, folder, options, sources[0], plan.tap_layers, states_file)
            else:
                convert_source(source, folder, options, trust_remote_code, plan.tap_layers, states_file)
            check_converted_files(source, folder)
            if source.is_ir and folder != work_folder and not isinstance(source, HeadSource):
                check_same_vocabulary(work_folder, folder)
            model_entries.append(make_manifest_entry(source, folder, options, work_folder))
        differing_texts: list[str] = []
        with show_step(f"{sources[0].name}: comparing the tokenizers"):
            if not sources[0].is_ir:
                # A GGUF file's tokenizer is built faster than a checkpoint's is loaded.
                tokenizer_source = plan.sources[0] if isinstance(plan.sources[0], GgufSource) else sources[0]
                differing_texts = find_differing_texts(load_tokenizer(tokenizer_source, trust_remote_code), work_folder)
        for differing_text in differing_texts:
            print_note(f"warning: OpenVINO's tokenizer splits {differing_text!r} differently from Hugging Face's")
        quality_figures = (
            evaluate_exports(sources, model_folders, evaluate, work_folder, trust_remote_code) if evaluate else []
        )
        if plan.draft_ids is not None and not sources[1].is_ir and not isinstance(sources[1], MtpSource):
            with show_step(f"{sources[1].name}: keeping {len(plan.draft_ids):,} of its ids", keep_line=True):
                trim_ir(model_folders[1], plan.draft_ids, sources[1].name)
        if plan.chat_template is not None:
            replace_chat_template(plan.chat_template, work_folder)
        states_file.unlink(missing_ok=True)
        for folder in (work_folder / "first-layers", work_folder / "checkpoint-0", work_folder / "checkpoint-1"):
            shutil.rmtree(folder, ignore_errors=True)
        draft_entry = model_entries[1] if len(model_entries) > 1 else None
        manifest = Manifest(model_entries[0], draft_entry, read_installed_versions(), {}, differing_texts)
        complete_export(work_folder, output, manifest)
    for line in format_quality_table(quality_figures):
        print_note(line)
    return manifest
