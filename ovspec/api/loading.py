"""``ovspec.load``: makes a LanguageModel from a folder."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.base.progress import note
from ovspec.drafting.choice import EXPORTED, HEAD, SELF, DraftChoice, parse_draft
from ovspec.drafting.drafter import Draft
from ovspec.engine.runtime import Runtime
from ovspec.ir.compile import check_ir_folder, proposes_only
from ovspec.ir.device import DeviceOptions, check_device, check_threads
from ovspec.ir.heads import is_head
from ovspec.params.loading import LOAD, LoadParams, load_params
from ovspec.params.option import documentation, options_class, takes
from ovspec.setup.manifest import DRAFT_FOLDER, Manifest, read_manifest, restore_backup
from ovspec.setup.profile import load_with
from ovspec.setup.proposers import load_draft, load_head
from ovspec.setup.tuning import tune_if_new
from ovspec.text.chat_template import templates_in
from ovspec.text.given_template import given_source
from ovspec.text.pairing import check_same_vocabulary


def embedded_pair() -> Path:
    """Return the folder of the demo pair in a source checkout; raises OvspecError elsewhere."""
    folder = Path(__file__).resolve().parent.parent.parent / "models" / "demo"
    if not folder.is_dir():
        raise OvspecError("This installation has no embedded model; name a folder made by 'ovspec export'.")
    return folder


def model_folder(model: str | Path | None) -> Path:
    """Return ``model``, or the embedded pair's folder for None; raises OvspecError if it has no exported model."""
    folder = embedded_pair() if model is None else Path(model)
    restore_backup(folder)
    check_ir_folder(folder)
    if is_head(folder):
        raise OvspecError(f"{folder}: an EAGLE-3 head, not a model; name its target, and the head as the draft.")
    if proposes_only(folder):
        raise OvspecError(f"{folder}: a draft with a trimmed vocabulary; name its target, and this as the draft.")
    return folder


@options_class
class Arguments(LoadParams):
    """The arguments of ``load``, as editors show them."""

    model: str | Path | None = field(default=None, kw_only=False)
    draft: Draft | Sequence[Draft] | None = field(default=None, kw_only=False)


@takes(Arguments)
def load(
    model: str | Path | None = None, draft: Draft | Sequence[Draft] | None = None, **options: Any
) -> LanguageModel:
    """Load an exported model and return it as a ``LanguageModel``.

    model: a folder made by ``ovspec export`` or plain optimum-cli; by default the embedded pair. With ``export=True``
        also a Hugging Face checkpoint (folder or hub id).
    draft: what proposes tokens; by default "lookup" where verifying a guess costs next to nothing, which the first load
        measures (exact arithmetic, paged engine), otherwise nothing. "none" proposes nothing, True is the draft in the
        model's folder, "self" the same if it was made of the target's own layers, "head" if it is an EAGLE-3 head, and
        "lookup" proposes what followed the last tokens earlier. It may also be the folder of a draft model or head, or
        a ``Drafter``: a class or function that makes one for each session or batch, or an instance, which all share.
        Two of these, as "lookup,draft" or in a list, make a chain: the second proposes if the first finds nothing good.
    """
    given = load_params(options)
    for name in ("device", "draft_device"):  # before an export, which takes minutes
        if asked := getattr(given, name):
            check_device(asked, name)
    device = device_options(given)
    if given.export:
        model, draft = exported(model, draft)
    folder = model_folder(model)
    manifest = read_manifest(folder, given.verify)
    if given.verify and not manifest:
        raise OvspecError(f"{folder}: `verify` needs the manifest that 'ovspec export' writes, which is missing.")
    template = None if given.chat_template is None else given_source(given.chat_template, templates_in(folder))
    choice = resolve_draft(parse_draft(draft), folder, manifest)
    if given.draft_device and not (choice and choice.model):
        raise OvspecError("`draft_device` needs a draft model.")
    if given.lookup_corpus and draft is not None and not (choice and choice.lookup):
        raise OvspecError("`lookup_corpus` needs lookup as a draft; add `draft='lookup'`.")
    corpus = [read_text(Path(file)) for file in given.lookup_corpus]
    draft_folder = Path(choice.model) if choice and choice.model else None
    head = draft_folder if draft_folder and is_head(draft_folder) else None
    if draft_folder:
        check_ir_folder(draft_folder)
        if not head and not (manifest and manifest.draft and draft_folder == folder / DRAFT_FOLDER):
            check_same_vocabulary(folder, draft_folder)
    # Measuring takes memory, so all profiles are known before a model is loaded.
    tune = os.environ.get("OVSPEC_TUNE") != "0" if given.tune is None else given.tune
    profile = tune_if_new(folder, device) if tune else None
    draft_device = replace(device, device=given.draft_device or given.device)
    draft_profile = tune_if_new(draft_folder, draft_device) if tune and draft_folder and not head else None
    target = load_with(profile, folder, device, given.engine, given.arithmetic, head)
    if target.is_inexact:
        note(f"{folder}: {target.promise}; a draft, a batch or a cached prompt may change a text at near-ties.")
    proposer = None
    if head:
        proposer = load_head(head, target, draft_device)
    elif draft_folder:
        proposer = load_draft(draft_folder, target, draft_device, given.engine, draft_profile)
    if draft is None and (target.guess_is_free or given.lookup_corpus):
        choice = DraftChoice(lookup=True)
    number = None if given.lookahead == "auto" else given.lookahead
    most = None if given.cache_memory is None else 1e9 * given.cache_memory
    format = given.tool_format
    return LanguageModel(Runtime(folder, target, proposer, choice, number, corpus, most, format, template))


load.__doc__ = f"""{load.__doc__}
{textwrap.indent(documentation(LOAD), "    ")}

    Raises:
        OvspecError: a file is missing or damaged, or an option is invalid here; the message says what to do.
        TypeError: an unknown option.
    """


def exported(model: str | Path | None, draft: Any) -> tuple[Path, Any]:
    """Export ``model`` and ``draft`` to the cache unless they are there; return (that folder, the draft to load)."""
    if model is None:
        raise OvspecError("`export=True` needs the model to export: a checkpoint folder, a GGUF file or a hub id.")
    if draft and not isinstance(draft, (str, Path)):
        raise OvspecError("`export=True` needs the draft's checkpoint by name, not `draft=True` or a Drafter.")
    from ovspec.setup.exporting import export_to_cache

    named = draft if draft not in ("none", "lookup") else None
    return export_to_cache(str(model), str(named) if named else None), True if named else draft


def resolve_draft(choice: DraftChoice | None, folder: Path, manifest: Manifest | None = None) -> DraftChoice | None:
    """Return ``choice`` with the folder of the draft that was exported beside the target in ``folder``.

    Raises OvspecError if there is no such draft, or if it isn't made of the target's own layers, as "self" says, or not
    a head, as "head" does.
    """
    if not choice or choice.model not in (EXPORTED, SELF, HEAD):
        return choice
    beside = folder / DRAFT_FOLDER
    if not beside.is_dir():
        what = "head" if choice.model == HEAD else "draft"
        raise OvspecError(f"{folder}: it was exported without a {what}; name one, or export it again with one.")
    source = manifest.draft.source if manifest and manifest.draft else ""
    if choice.model == SELF and not re.fullmatch(r".*, first \d+ layers", source):
        raise OvspecError(
            f"{beside}: not made of the target's own layers; run 'ovspec export --draft-layers N' for 'self'."
        )
    if choice.model == HEAD and not is_head(beside):
        raise OvspecError(f"{beside}: a draft model, not an EAGLE-3 head; name it 'draft', or export a head.")
    return replace(choice, model=beside)


def folders_of(folder: Path, draft: Any) -> list[Path]:
    """Return the folder of a model, and that of its draft if it has one."""
    choice = resolve_draft(parse_draft(draft), folder)
    return [folder, *([Path(choice.model)] if choice and choice.model else [])]


def device_options(given: LoadParams) -> DeviceOptions:
    """Return where and how models are compiled; raises OvspecError if threads are set and none is on the CPU."""
    check_threads(given.threads, [given.device, given.draft_device or given.device])
    cache_dir = Path(given.cache_dir) if given.cache_dir else None
    properties = dict(given.properties or {})
    precision = properties.get("INFERENCE_PRECISION_HINT", given.precision)
    return DeviceOptions(given.device, precision, given.kv_precision, given.threads, properties, cache_dir)
