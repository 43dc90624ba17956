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
    """The arguments of ``load``, for editors."""

    model: str | Path | None = field(default=None, kw_only=False)
    draft: DraftArgument | Sequence[DraftArgument] | None = field(default=None, kw_only=False)


@accepts_options(LoadArguments)
def load(
    model: str | Path | None = None, draft: DraftArgument | Sequence[DraftArgument] | None = None, **options: Any
) -> LanguageModel:
    """Load an exported model and return it as a ``LanguageModel``.

    model: a folder made by ``ovspec export`` or by optimum-cli; by default the demo pair (only in a source checkout).
        With ``export=True`` also a checkpoint folder, a GGUF file or a hub id (``org/model``, ``org/model@REVISION``,
        ``org/model:Q4_K_M``): it is exported into the user's cache at its first use, as on the command line.
    draft: the drafter for speculative decoding; "none" for none. True or "draft" is the draft in the model's folder;
        "self", "head" and "mtp" are the same draft, but require a kind: made from the target's own layers, an EAGLE-3
        head, or the model's MTP layer. "lookup" is prompt lookup: it proposes the continuation of an earlier occurrence
        of the last tokens. Other drafters: the folder of a draft model or head, a shared ``Drafter`` instance, or a
        class or function for making a ``Drafter`` per session or batch. Two drafters, as in "lookup,draft" or
        ["lookup", MyDrafter], form a chain: the second proposes if the first has no good proposal. The default is
        "lookup" if verifying a proposed token takes almost no extra time, as measured at the first load (exact
        arithmetic, paged engine), otherwise none.
    """
    params = make_load_params(options)
    for option in ("device", "draft_device"):  # checked before an export of minutes
        if device := getattr(params, option):
            parse_device_option(device, option)
    device_options = make_device_options(params)
    if params.weight_format and not params.export:
        raise OvspecError("`weight_format` works only with an export; add `export=True`.")
    if params.export:
        if model is None:
            raise OvspecError("`export=True` needs the model to export: a checkpoint folder, a GGUF file or a hub id.")
        model, draft = find_or_export_model(model, draft, params.weight_format)
    model_folder = resolve_model_folder(model)
    manifest = read_manifest(model_folder, params.verify)
    if params.verify and not manifest:
        raise OvspecError(
            f"{model_folder} has no manifest, so `verify` can't check it; export the model with 'ovspec export'."
        )
    custom_template = None
    if params.chat_template is not None:
        custom_template = resolve_custom_template(params.chat_template, read_chat_templates(model_folder))
    draft_choice = resolve_draft(parse_draft(draft), model_folder, manifest)
    if params.draft_device and not (draft_choice and draft_choice.model):
        raise OvspecError("`draft_device` needs a draft model; set `draft`.")
    if params.lookup_corpus and draft is not None and not (draft_choice and draft_choice.lookup):
        raise OvspecError("`lookup_corpus` needs prompt lookup; add `draft='lookup'`.")
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
        None if params.cache_size is None else 1e9 * params.cache_size,
        tool_format,
        custom_template,
    )
    return LanguageModel(runtime)


load.__doc__ = f"""{load.__doc__}
{textwrap.indent(format_option_documentation(LOAD_OPTIONS), "    ")}

    Raises:
        OvspecError: a file is missing or damaged, or an option is invalid; the message says how to fix it.
        TypeError: an unknown option.
    """


def make_device_options(params: LoadParams) -> DeviceOptions:
    """Return the options for compiling models; raises OvspecError for ``threads`` without a model on the CPU."""
    check_threads_option(params.threads, [params.device, params.draft_device or params.device])
    cache_dir = Path(params.cache_dir) if params.cache_dir else None
    properties = dict(params.properties or {})
    precision = properties.get("INFERENCE_PRECISION_HINT", params.precision)
    return DeviceOptions(params.device, precision, params.kv_precision, params.threads, properties, cache_dir)
