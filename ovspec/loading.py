"""``ovspec.load``: from a folder to a LanguageModel."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from ovspec.drafting.choice import Draft, parse_draft
from ovspec.errors import OvspecError
from ovspec.ir.compile import check_ir_folder
from ovspec.ir.device import DeviceOptions
from ovspec.model import LanguageModel
from ovspec.options import check_lookahead
from ovspec.setup.engine import ENGINES, CompiledModel, EngineChoice
from ovspec.setup.manifest import DRAFT_FOLDER, read_manifest, restore_backup
from ovspec.setup.probing import Probe
from ovspec.setup.profile import load_with
from ovspec.setup.tuning import tune_if_new
from ovspec.text.pairing import check_same_vocabulary
from ovspec.workspace import Workspace


def embedded_pair() -> Path:
    """The demo pair of a source checkout."""
    folder = Path(__file__).resolve().parent.parent / "models" / "demo"
    if not folder.is_dir():
        raise OvspecError("This installation has no embedded model; name a folder made by 'ovspec export'.")
    return folder


def load(
    model: str | Path | None = None,
    draft: Draft | Sequence[Draft] | None = None,
    *,
    device: str = "CPU",
    draft_device: str | None = None,
    precision: str | None = None,
    kv_precision: str | None = None,
    threads: int | None = None,
    properties: dict[str, str] | None = None,
    cache_dir: str | Path | None = None,
    engine: EngineChoice = "auto",
    lookahead: int | Literal["auto"] = "auto",
    lookup_corpus: Sequence[str | Path] = (),
    tune: bool | None = None,
    export: bool = False,
    verify: bool = False,
) -> LanguageModel:
    """Load an exported model.

    Args:
        model: a folder made by ``ovspec export`` or plain optimum-cli; the embedded pair by default.
            With ``export=True`` also a Hugging Face checkpoint (folder or hub id).
        draft: what proposes tokens. True for the draft exported beside the target ("self" if it must be made of the
            target's own layers), "lookup" for what followed the same words before, the folder of a draft, or a
            ``Drafter`` or what makes one; or two of them, as "lookup,draft" or in a list, asked in turn.
        device: CPU, GPU, GPU.N, AUTO or AUTO:X,Y.
        draft_device: the draft's own; by default the same.
        precision: arithmetic, f32, bf16 or f16; by default what the device prefers.
        kv_precision: type of the KV cache, f32, bf16, f16 or u8; by default that of the arithmetic on
            the CPU and the device's own choice elsewhere.
        threads: CPU threads; by default what OpenVINO takes.
        properties: OpenVINO properties, which win over all the above.
        cache_dir: where compiled models are kept; by default the user's cache folder.
        engine: what drives the model and its draft; "auto" takes the paged decoder where it agrees with the
            stateful one, which runs everywhere.
        lookahead: tokens proposed each round; "auto" for as many as pay, which may be none.
        lookup_corpus: text files that "lookup" may quote.
        tune: take what is fastest on this machine, as ``ovspec tune`` has measured it, or as a few seconds of
            measuring now show; what you name above wins. By default yes, unless the environment variable
            OVSPEC_TUNE is 0.
        verify: compare the checksums of all files with those of the export, which reads all of them.
        export: export ``model`` (and a ``draft`` given by name) into the cache first, unless done before.

    Raises:
        OvspecError: with one sentence that says what to do.
    """
    check_lookahead(lookahead)
    if engine not in ENGINES:
        raise OvspecError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}.")
    if export:
        if model is None:
            raise OvspecError("export=True needs the model to export: a checkpoint folder or a hub id.")
        if draft is True:
            raise OvspecError("export=True needs the draft's checkpoint by name, not draft=True.")
        from ovspec.setup.exporting import export_to_cache

        if draft and not isinstance(draft, (str, Path)):
            raise OvspecError("export=True needs the draft's checkpoint by name.")
        named = draft if draft not in ("none", "lookup") else None
        folder = export_to_cache(str(model), str(named) if named else None)
        draft = True if named else draft
    else:
        folder = Path(model) if model is not None else embedded_pair()
    restore_backup(folder)
    check_ir_folder(folder)
    options = DeviceOptions(
        device, precision, kv_precision, threads, properties or {}, Path(cache_dir) if cache_dir else None
    )
    manifest = read_manifest(folder, verify)
    if verify and not manifest:
        raise OvspecError(f"{folder}: to verify it needs the manifest of 'ovspec export', which is not there.")
    choice = parse_draft(draft, folder, manifest)
    if draft_device and not (choice and choice.model):
        raise OvspecError("draft_device needs a draft model.")
    if lookup_corpus and not (choice and choice.lookup):
        raise OvspecError("lookup_corpus needs lookup among the drafts.")
    tune = os.environ.get("OVSPEC_TUNE") != "0" if tune is None else tune
    target = _load_ir(folder, options, engine, manifest.target.probe if manifest else None, tune)
    number = None if lookahead == "auto" else lookahead
    corpus = [Path(file) for file in lookup_corpus]
    if not choice or not choice.model:
        return LanguageModel(Workspace(folder, target, None, choice, number, corpus))
    check_ir_folder(choice.model)
    beside = choice.model == folder / DRAFT_FOLDER
    if not (beside and manifest and manifest.draft):
        check_same_vocabulary(folder, choice.model)
    draft_options = replace(options, device=draft_device or device)
    probe = manifest.draft.probe if beside and manifest and manifest.draft else None
    loaded = _load_ir(choice.model, draft_options, engine, probe, tune)
    return LanguageModel(Workspace(folder, target, loaded, choice, number, corpus))


def _load_ir(
    folder: Path, options: DeviceOptions, engine: EngineChoice, probe: Probe | None, tune: bool
) -> CompiledModel:
    profile = tune_if_new(folder, options, lambda text: print(text, file=sys.stderr, flush=True)) if tune else None
    return load_with(profile, folder, options, engine, probe)
