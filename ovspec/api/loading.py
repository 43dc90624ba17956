"""``ovspec.load``: makes a LanguageModel from a folder."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError
from ovspec.base.files import read_text
from ovspec.drafting.choice import DraftChoice, parse_draft
from ovspec.drafting.drafter import Drafter
from ovspec.engine.runtime import Runtime
from ovspec.ir.device import DeviceOptions, check_threads_option, parse_device_option
from ovspec.params.loading import LOAD_OPTIONS, LoadParams, make_load_params
from ovspec.params.option import accepts_options, format_option_documentation, options_dataclass
from ovspec.setup.exporting import find_or_export_model
from ovspec.setup.manifest import read_manifest
from ovspec.setup.model_folders import check_draft_folder, resolve_draft, resolve_model_folder
from ovspec.setup.pair_loading import load_target_and_draft
from ovspec.text.chat_template import read_chat_templates
from ovspec.text.custom_template import resolve_custom_template

DraftArgument = bool | str | Path | DraftChoice | Drafter | Callable[[], Drafter]


@options_dataclass
class LoadArguments(LoadParams):
    """The arguments of ``load``, as editors show them."""

    model: str | Path | None = field(default=None, kw_only=False)
    draft: DraftArgument | Sequence[DraftArgument] | None = field(default=None, kw_only=False)


@accepts_options(LoadArguments)
def load(
    model: str | Path | None = None, draft: DraftArgument | Sequence[DraftArgument] | None = None, **options: Any
) -> LanguageModel:
    """Load an exported model and return it as a ``LanguageModel``.

    model: a folder made by ``ovspec export`` or plain optimum-cli; by default the embedded pair. With ``export=True``
        also a checkpoint folder, a GGUF file or a hub id (``org/model``, ``org/model@REVISION``, ``org/model:Q4_K_M``),
        which is exported into the user's cache the first time, as commands do it.
    draft: what proposes tokens; by default "lookup" where verifying a guess costs next to nothing, which the first load
        measures (exact arithmetic, paged engine), otherwise nothing. "none" proposes nothing, True is the draft in the
        model's folder, "self" the same if it was made of the target's own layers, "head" if it is an EAGLE-3 head,
        "mtp" if it is the MTP layer that the model brings along, and "lookup" proposes what followed the last tokens
        earlier. It may also be the folder of a draft model or head, or a ``Drafter``: a class or function that makes
        one for each session or batch, or an instance, which all share. Two of these, as "lookup,draft" or in a list,
        make a chain: the second proposes if the first finds nothing good.
    """
    params = make_load_params(options)
    for option in ("device", "draft_device"):  # before an export, which takes minutes
        if device := getattr(params, option):
            parse_device_option(device, option)
    device_options = make_device_options(params)
    if params.weight_format and not params.export:
        raise OvspecError("`weight_format` is for a model that is exported; add `export=True`.")
    if params.export:
        if model is None:
            raise OvspecError("`export=True` needs the model to export: a checkpoint folder, a GGUF file or a hub id.")
        model, draft = find_or_export_model(model, draft, params.weight_format)
    model_folder = resolve_model_folder(model)
    manifest = read_manifest(model_folder, params.verify)
    if params.verify and not manifest:
        raise OvspecError(f"{model_folder}: `verify` needs the manifest that 'ovspec export' writes, which is missing.")
    custom_template = None
    if params.chat_template is not None:
        custom_template = resolve_custom_template(params.chat_template, read_chat_templates(model_folder))
    draft_choice = resolve_draft(parse_draft(draft), model_folder, manifest)
    if params.draft_device and not (draft_choice and draft_choice.model):
        raise OvspecError("`draft_device` needs a draft model.")
    if params.lookup_corpus and draft is not None and not (draft_choice and draft_choice.lookup):
        raise OvspecError("`lookup_corpus` needs lookup as a draft; add `draft='lookup'`.")
    corpus_texts = [read_text(Path(file)) for file in params.lookup_corpus]
    draft_folder = Path(draft_choice.model) if draft_choice and draft_choice.model else None
    if draft_folder:
        check_draft_folder(draft_folder, model_folder, manifest)
    tune = params.tune
    if tune is None:
        tune = os.environ.get("OVSPEC_TUNE") != "0"
    target, draft_model = load_target_and_draft(
        model_folder,
        device_options,
        params.engine,
        params.arithmetic,
        draft=draft_folder,
        draft_options=replace(device_options, device=params.draft_device or params.device),
        tune=tune,
    )
    if draft is None and (target.proposals_are_free or params.lookup_corpus):
        draft_choice = DraftChoice(lookup=True)
    lookahead = None if params.lookahead == "auto" else params.lookahead
    cache_bytes = None if params.cache_memory is None else 1e9 * params.cache_memory
    tool_format = params.tool_format
    runtime = Runtime(
        model_folder,
        target,
        draft_model,
        draft_choice,
        lookahead,
        corpus_texts,
        cache_bytes,
        tool_format,
        custom_template,
    )
    return LanguageModel(runtime)


load.__doc__ = f"""{load.__doc__}
{textwrap.indent(format_option_documentation(LOAD_OPTIONS), "    ")}

    Raises:
        OvspecError: a file is missing or damaged, or an option is invalid here; the message says what to do.
        TypeError: an unknown option.
    """


def make_device_options(params: LoadParams) -> DeviceOptions:
    """Return where and how models are compiled; raises OvspecError if threads are set and none is on the CPU."""
    check_threads_option(params.threads, [params.device, params.draft_device or params.device])
    cache_dir = Path(params.cache_dir) if params.cache_dir else None
    properties = dict(params.properties or {})
    precision = properties.get("INFERENCE_PRECISION_HINT", params.precision)
    return DeviceOptions(params.device, precision, params.kv_precision, params.threads, properties, cache_dir)
