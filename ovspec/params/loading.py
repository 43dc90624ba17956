"""The options of ``ovspec.load``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.limits import AT_LEAST_1, LOOKAHEAD, NOT_NEGATIVE
from ovspec.params.option import OptionValue, collect_options, option, options_dataclass
from ovspec.params.tool_formats import TOOL_FORMATS_BY_NAME
from ovspec.params.values import check_option_names, check_value, parse_file_or_name, parse_folder, parse_key_value


@options_dataclass
class RuntimeParams:
    """The options that decide where and how models are compiled."""

    device: str = option("OpenVINO device: CPU, GPU, GPU.N, AUTO or AUTO:X,Y.", default="CPU")
    draft_device: str | None = option(
        "OpenVINO device of the draft model.", default=None, default_meaning="the target's"
    )
    precision: Literal["f32", "bf16", "f16"] | None = option(
        "Number type that the model computes in.", default=None, default_meaning="the profile's, or the device's own"
    )
    kv_precision: Literal["f32", "bf16", "f16", "u8"] | None = option(
        "Number type of the KV cache. u8 takes about half the memory of f16, but rolling back changes it, so a "
        "draft may change the text.",
        default=None,
        default_meaning="the profile's, or that of --precision on the CPU and f16 on a GPU",
    )
    engine: Literal["auto", "stateful", "paged"] = option(
        "Who manages the KV cache: OpenVINO (stateful), or ovspec in blocks (paged, on a CPU or a GPU). auto takes "
        "paged if it gives the same logits.",
        default="auto",
    )
    arithmetic: Literal["exact", "fast"] | None = option(
        "exact: every token has the same bits with any draft, batch, session or none. fast: less time for plain "
        "decoding over long contexts and, on the stateful engine, for prompts and batches, but a draft or a batch "
        "may change the text at near-ties.",
        default=None,
        default_meaning="exact on the CPU, fast where a GPU may compute",
    )
    threads: int | None = option(
        "Number of CPU threads to compute with.",
        default=None,
        limits=AT_LEAST_1,
        default_meaning="the profile's, or OpenVINO's",
    )
    properties: Mapping[str, Any] | None = option(
        "OpenVINO property for target and draft; takes precedence over the profile and the other options.",
        default=None,
        flags=("--property",),
        metavar="KEY=VALUE",
        parse=parse_key_value,
    )
    tune: bool | None = option(
        "Use OpenVINO's own settings: ignore the profile of this machine, and don't measure one at the first load. "
        "OVSPEC_TUNE=0 does the same.",
        default=None,
        python_extra_help="In Python that is ``tune=False``; True takes precedence over OVSPEC_TUNE.",
        flags=("--no-tune",),
    )
    cache_dir: str | Path | None = option(
        "Folder of compiled models, profiles and probe results.",
        default=None,
        default_meaning="the user's cache",
        metavar="DIRECTORY",
        parse=parse_folder,
    )


@options_dataclass
class LoadParams(RuntimeParams):
    """The options of ``ovspec.load``, besides the model and its draft; checked by ``make_load_params``."""

    lookahead: int | Literal["auto"] = option(
        GENERATE_OPTIONS["lookahead"].help, default="auto", limits=LOOKAHEAD, flags=()
    )
    lookup_corpus: Sequence[str | Path] = option(
        "Text file that lookup may also propose from.", default_factory=tuple, metavar="FILE"
    )
    cache_memory: float | None = option(
        "Gigabytes that KV caches may take until those of ended texts give way, which are kept for texts that begin "
        "in the same way; 0 keeps none.",
        default=None,
        limits=NOT_NEGATIVE,
        default_meaning="a quarter of the memory that is free after loading",
        metavar="GB",
    )
    tool_format: str | None = option(
        "How the model writes tool calls.",
        default=None,
        choices=sorted(TOOL_FORMATS_BY_NAME),
        default_meaning="found from its chat template",
        commands=("batch", "serve"),
    )
    chat_template: str | Path | None = option(
        "Chat template to use in place of the model's: a Jinja file, or a name, as the model has several or as "
        "llama.cpp knows them (chatml, llama3, gemma, mistral-v3, …).",
        default=None,
        python_extra_help="Also the template itself.",
        default_meaning="the model's",
        metavar="FILE|NAME",
        parse=parse_file_or_name,
        commands=("generate", "chat", "batch", "serve", "export"),
    )
    verify: bool = option("First check the model's files against the checksums of its export by ovspec.", default=False)
    export: bool = option(
        "Export the checkpoints given as model and draft into the user's cache, unless an export of these names is "
        "there.",
        default=False,
        flags=(),
    )
    weight_format: Literal["fp32", "fp16", "bf16", "int8", "int4", "keep"] | None = option(
        "Format of the weights of a MODEL that is exported first; keep takes quantised weights as they are.",
        default=None,
        default_meaning="any that is there; else keep if MODEL is quantised, int4 if it would take more than a third "
        "of the memory in int8, or int8",
        commands=("batch", "bench", "chat", "generate", "serve"),
    )


RUNTIME_OPTIONS = collect_options(RuntimeParams)
LOAD_OPTIONS = collect_options(LoadParams)


def make_load_params(options: Mapping[str, OptionValue]) -> LoadParams:
    """Return the params of ``load``; raises TypeError for an unknown option and OvspecError for an invalid value."""
    check_option_names(options, LOAD_OPTIONS)
    values = {name: value for name, value in options.items() if value is not None}
    for name, value in values.items():
        check_value(value, LOAD_OPTIONS[name])
    return LoadParams(**values)
