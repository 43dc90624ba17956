"""Export a target and its draft, completely or not at all."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import shutil
from pathlib import Path

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.progress import in_bytes, note, step
from ovspec.engine.scoring import DEFAULT_CONTEXT
from ovspec.ir.compile import read_ir
from ovspec.ir.heads import give_features, read_head
from ovspec.setup.manifest import DRAFT_FOLDER, MANIFEST_FILE, ExportedFile, ExportedModel, Manifest, sha256
from ovspec.text.given_template import given_source
from ovspec.text.pairing import check_same_vocabulary
from ovspec.text.tokenizer_files import TOKENIZER_FILE
from ovspec.text.vocabulary import differing_ids
from ovspec_export.compression import INT8, Compression
from ovspec_export.convert import (
    check_ir,
    convert,
    convert_head,
    first_layers,
    fitted,
    layers_of,
    needed_space,
    run_job,
)
from ovspec_export.draft_vocabulary import is_trimmed, proposed_ids, trim_ir
from ovspec_export.environments import prepared_variables
from ovspec_export.folders import check_output, check_space, replace_folder, work_folder
from ovspec_export.gguf_checkpoint import checkpoint_of
from ovspec_export.head_fit import check_fits
from ovspec_export.sources import GgufSource, HeadSource, Source, find_source
from ovspec_export.text_part import text_part
from ovspec_export.tokenizers import differing_texts, load_tokenizer, put_template, templates_of

VERSIONED = ("openvino", "openvino-tokenizers", "nncf", "optimum-intel", "transformers", "torch")


def export_pair(
    target: str,
    draft: str | None,
    output: Path,
    compression: Compression = INT8,
    draft_compression: Compression | None = None,
    *,
    overwrite: bool = False,
    draft_layers: int | None = None,
    evaluate: Path | None = None,
    chat_template: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Manifest:
    """Export ``target`` and, if there is one, a draft into ``output``.

    Args:
        target: a folder with a checkpoint or an IR, a GGUF file, or a hub id.
        draft: likewise, or an EAGLE-3 head that was trained for the target, or None.
        output: the folder to write.
        overwrite: replace, at the very end, a pair that ovspec exported there before.
        compression: how the target's weights are stored.
        draft_compression: how the draft's weights are stored; by default like the target's.
        draft_layers: make the draft from this many of the target's own first layers.
        evaluate: a text file on which the exported models are compared with the checkpoints.
        chat_template: what the target gets in place of its own; see ``given_source``.
        trust_remote_code: run the Python code that a checkpoint brings.

    Raises:
        OvspecError: an option is wrong, the vocabularies differ, a model can't be exported, a folder is in the
            way, or the disk has too little space.
    """
    for wanted in filter(None, (compression, draft_compression)):
        wanted.check()
    if draft and draft_layers is not None:
        raise OvspecError("`draft_layers` makes the draft from the target; leave out either it or `draft`.")
    if evaluate:
        read_text(evaluate)
    output = output.expanduser().resolve()
    check_output(output, overwrite)
    # Not in a progress step: a download shows its own progress.
    sources = [find_source(name, trust_remote_code) for name in (target, draft) if name is not None]
    for source in sources:
        what = f"{in_bytes(source.size)}{', an IR, used as it is' if source.is_ir else ''}"
        note(f"{source.name}: {what}, revision {source.revision[:12]}")
        where = source.folder.resolve()
        if output == where or where in output.parents or output in where.parents:
            raise OvspecError(f"{output}: is, contains or is inside the source {source.name}; name another `output`.")
    if isinstance(sources[0], HeadSource):
        raise OvspecError(f"{sources[0].name}: an EAGLE-3 head, which only drafts; name its target, and it as `draft`.")
    if is_trimmed(sources[0]):
        told = "a draft with a trimmed vocabulary; name its target, and it as `draft`"
        raise OvspecError(f"{sources[0].name}: {told}.")
    template = None if chat_template is None else given_source(chat_template, templates_of(sources[0]))
    head = sources[1] if len(sources) == 2 and isinstance(sources[1], HeadSource) else None
    ids = proposed_ids(sources[1], sources[0]) if len(sources) == 2 else None
    if evaluate and any(source.is_ir for source in sources if source is not head):
        raise OvspecError("`evaluate` compares with a checkpoint, but an existing IR has none; leave it out.")
    for source, wanted in zip(sources, (compression, draft_compression), strict=False):
        if source.is_ir and wanted not in (None, INT8):
            raise OvspecError(f"{source.name}: an IR is used as it is; leave out the options for its weights.")
    tapped = check_fits(sources[0], head) if head else None
    for source in sources:
        if not source.is_ir:
            # Prepared before anything is converted, so that a missing version is noticed at once.
            prepared_variables(source.family.environment, source.model_type)
    if head and (draft_compression or compression).calibration:
        note(f"{head.name}: a head is compressed without a text to calibrate on")
        draft_compression = (draft_compression or compression).without_text()
    # A draft of first layers has the target's rows.
    asked = zip([*sources, sources[0]], (compression, draft_compression or compression), strict=False)
    compressions = [fitted(source, wanted) for source, wanted in asked]
    needed = [needed_space(source, wanted) for source, wanted in zip(sources, compressions, strict=False)]
    if draft_layers is not None:
        needed.append(needed[0] * layers_of(sources[0], draft_layers))
    check_space(output, sum(needed))
    if len(sources) == 2 and not head:
        with step(f"{sources[1].name}: comparing its vocabulary with that of {sources[0].name}"):
            check_pair(sources[0], sources[1], trust_remote_code)

    with work_folder(output, overwrite) as work:
        sources = [
            as_checkpoint(source, work / f"checkpoint-{i}", wanted.weight_format)
            for i, (source, wanted) in enumerate(zip(sources, compressions, strict=False))
        ]
        if draft_layers is not None:
            layers = work / "first-layers"
            sources.append(first_layers(sources[0], draft_layers, layers, trust_remote_code))
        folders = [work, work / DRAFT_FOLDER]
        models = []
        states = work / "states.npy"
        for source, folder, wanted in zip(sources, folders, compressions, strict=False):
            if tapped and isinstance(source, HeadSource) and not source.is_ir:
                convert_head(source, folder, wanted, sources[0], tapped, states)
            else:
                convert(source, folder, wanted, trust_remote_code, tapped, states)
            check_ir(source, folder)
            if source.is_ir and folder != work and not head:
                check_same_vocabulary(work, folder)
            models.append(describe(source, folder, wanted, work))
        with step(f"{sources[0].name}: comparing the tokenizers"):
            differing = [] if sources[0].is_ir else differing_texts(load_tokenizer(sources[0], trust_remote_code), work)
        for text in differing:
            note(f"warning: OpenVINO's tokenizer splits {text!r} differently from Hugging Face's")
        quality = evaluated(sources, folders, evaluate, work, trust_remote_code) if evaluate else []
        if ids is not None and not sources[1].is_ir:
            with step(f"{sources[1].name}: keeping {len(ids):,} of its ids", keep=True):
                trim_ir(folders[1], ids, sources[1].name)
        if template is not None:
            put_template(template, work)
        states.unlink(missing_ok=True)
        for folder in (work / "first-layers", work / "checkpoint-0", work / "checkpoint-1"):
            shutil.rmtree(folder, ignore_errors=True)
        manifest = Manifest(models[0], models[1] if len(models) > 1 else None, versions(), {}, differing)
        complete(work, output, manifest)
    for line in quality_table(quality):
        note(line)
    return manifest


def complete(work: Path, output: Path, manifest: Manifest) -> None:
    """Complete what was written into ``work`` by its manifest, with checksums, and move it to ``output``."""
    with step(f"{output.name}: computing checksums", keep=True) as computing:
        files = sorted(path for path in work.rglob("*") if path.is_file() and path != work / MANIFEST_FILE)
        manifest.files = {
            path.relative_to(work).as_posix(): ExportedFile(path.stat().st_size, sha256(path)) for path in files
        }
        size = sum(file.size for file in manifest.files.values())
        computing.result = f"{in_bytes(size)} in {len(files)} files"
    manifest.write(work)
    replace_folder(work, output)


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that an export depends on."""
    return {name: importlib.metadata.version(name) for name in VERSIONED} | {"ovspec": ovspec.__version__}


def as_checkpoint(source: Source, folder: Path, weight_format: str) -> Source:
    """Return a source that optimum can read: the same, or one that is written into ``folder``."""
    if isinstance(source, GgufSource):
        return checkpoint_of(source, folder, weight_format)
    return text_part(source, folder) if source.holds_text_model else source


def check_pair(target: Source, draft: Source, trust_remote_code: bool) -> None:
    """Raise OvspecError if the vocabularies are not the same, id by id."""
    if target.is_ir and draft.is_ir:
        check_same_vocabulary(target.folder, draft.folder)
        return
    if draft.is_ir and not (draft.folder / TOKENIZER_FILE).is_file():
        return  # compared after the target is converted: only then does it have an OpenVINO tokenizer
    ours, theirs = (load_tokenizer(source, trust_remote_code).get_vocab() for source in (target, draft))
    message = differing_ids({i: t for t, i in ours.items()}, {i: t for t, i in theirs.items()})
    if message:
        raise OvspecError(
            f"{draft.name} cannot draft for {target.name}: {message}; choose a draft with the same tokenizer."
        )


def describe(source: Source, folder: Path, compression: Compression, target: Path | None = None) -> ExportedModel:
    """Return the manifest entry of the model in ``folder``, which is read to see that it is supported.

    A head is read with its ``target``, by default the model above it.
    """
    if isinstance(source, HeadSource):
        try:
            target = target or folder.parent
            read_ir(target, lambda model: give_features(model, target, folder))
            states = read_head(folder, target).states
        except OvspecError as error:
            raise OvspecError(str(error).replace(str(folder), source.name)) from None
    else:
        states = read_ir(folder).states
    return ExportedModel(
        source=source.name,
        revision=source.revision,
        weight_format="as it was" if source.is_ir else compression.weight_format,
        options={} if source.is_ir else compression.options(),
        states=[dataclasses.asdict(state) for state in states],
        versions=overlaid_versions(source),
    )


def evaluated(
    sources: list[Source], folders: list[Path], text: Path, work: Path, trust_remote_code: bool
) -> list[tuple[str, dict[str, float]]]:
    """Compare each model with its checkpoint, by name; a draft of first layers is compared with those layers."""
    found = []
    for source, folder in zip(sources, folders, strict=False):
        if isinstance(source, HeadSource):  # says nothing without the target
            continue
        with step(f"{source.name}: comparing with the checkpoint of {in_bytes(source.size)} on {text.name}", keep=True):
            result = work / "evaluation.json"
            where = {"source": str(source.folder), "folder": str(folder), "text": str(text.absolute())}
            runs_code = source.runs_code(trust_remote_code)
            options = {"context": DEFAULT_CONTEXT, "output": str(result), "trust_remote_code": runs_code}
            try:
                run_job("evaluate", source, work, **where, **options)
            except OvspecError as error:
                note(f"warning: {error}")  # no reason to discard a finished export
                continue
            found.append((source.name, json.loads(result.read_text(encoding="utf-8"))))
            result.unlink()
    return found


def quality_table(quality: list[tuple[str, dict[str, float]]]) -> list[str]:
    """Return the table of ``quality`` as lines for a terminal."""
    if not quality:
        return []
    lines = [f"{'':28} {'perplexity':>10} {'checkpoint':>10} {'KL, nats':>10} {'same top-1':>10} {'tokens':>8}"]
    for name, found in quality:
        shown = name if len(name) <= 28 else "…" + name[-27:]
        lines.append(
            f"{shown:28} {found['perplexity']:10.3f} {found['perplexity_of_the_checkpoint']:10.3f} "
            f"{found['kl']:10.2e} {found['top1']:10.2%} {found['tokens']:8}"
        )
    return lines


def overlaid_versions(source: Source) -> dict[str, str]:
    """Return the versions that the family's environment has in place of the installed ones."""
    environment = None if source.is_ir else source.family.environment
    return {name: version for name, version, _ in environment.wheels if name in VERSIONED} if environment else {}
