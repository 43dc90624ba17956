"""The options of ``ovspec.load``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ovspec.params.generation import GENERATE_OPTIONS
from ovspec.params.limits import AT_LEAST_1, LOOKAHEAD, NOT_NEGATIVE, POSITIVE
from ovspec.params.option import OptionValue, collect_options, option, options_dataclass
from ovspec.params.tool_formats import TOOL_FORMATS_BY_NAME
from ovspec.params.values import check_option_names, check_value, parse_file_or_name, parse_folder, parse_key_value


@options_dataclass
class RuntimeParams:
    """The options for compiling models: device, precision, engine."""

    device: str = option("OpenVINO device: CPU, GPU, GPU.N, AUTO or AUTO:X,Y.", default="CPU")
    draft_device: str | None = option(
        "OpenVINO device of the draft model.", default=None, default_meaning="the target's"
    )
    precision: Literal["f32", "bf16", "f16"] | None = option(
        "Inference precision of the model.",
        default=None,
        default_meaning="from the profile (see 'ovspec tune'), or the device's own",
    )
    kv_precision: Literal["f32", "bf16", "f16", "u8"] | None = option(
        "KV cache precision. u8 takes about half the memory of f16, but removing rejected tokens changes its values, "
        "so a draft may change the text.",
        default=None,
        default_meaning="from the profile; otherwise as --precision on a CPU, f16 on a GPU",
    )
    engine: Literal["auto", "stateful", "paged"] = option(
        "stateful: OpenVINO's own KV cache. paged: a paged KV cache managed by ovspec, on a CPU or a GPU. auto: paged "
        "if its logits equal the stateful engine's.",
        default="auto",
    )
    arithmetic: Literal["exact", "fast"] | None = option(
        "exact: bit-identical logits with or without drafts, batches and sessions. fast: faster plain decoding over "
        "long contexts and, on the stateful engine, faster prefill and batches; but where two tokens are almost "
        "equally likely, a draft or a batch may change the text.",
        default=None,
        default_meaning="exact on the CPU, fast if a GPU may be used",
    )
    threads: int | None = option(
        "Number of CPU threads.",
        default=None,
        limits=AT_LEAST_1,
        default_meaning="from the profile, or OpenVINO's",
    )
    properties: Mapping[str, Any] | None = option(
        "OpenVINO property for target and draft; overrides the profile and the other options.",
        default=None,
        flags=("--property",),
        metavar="KEY=VALUE",
        parse=parse_key_value,
    )
    tune: bool | None = option(
        "Use OpenVINO's own settings: ignore this machine's profile, and skip the measurement at the first load. "
        "Same as OVSPEC_TUNE=0.",
        default=None,
        python_extra_help="In Python this is ``tune=False``; True overrides OVSPEC_TUNE.",
        flags=("--no-tune",),
    )
    cache_dir: str | Path | None = option(
        "Folder for compiled models, profiles and probe results.",
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
        "Additional text file to search, for prompt lookup.", default_factory=tuple, metavar="FILE"
    )
    cache_size: float | None = option(
        "Memory limit (GB) for all KV caches together: running texts, drafts and the prefix cache. If memory runs out, "
        "the youngest text is preempted and prefilled again later. Without exact arithmetic there is no preemption: "
        "each text reserves memory for its maximum length.",
        default=None,
        limits=POSITIVE,
        default_meaning="the free memory; 80 % of it for ovspec serve",
        metavar="GB",
    )
    cache_memory: float | None = option(
        "Size limit (GB) of the KV caches: above it, idle prefix-cache entries are evicted; 0 turns the prefix cache "
        "off.",
        default=None,
        limits=NOT_NEGATIVE,
        default_meaning="a quarter of the free memory; all of --cache-size for ovspec serve",
        metavar="GB",
    )
    tool_format: str | None = option(
        "Format of the model's tool calls.",
        default=None,
        choices=sorted(TOOL_FORMATS_BY_NAME),
        default_meaning="detected from its chat template",
        commands=("batch", "serve"),
    )
    chat_template: str | Path | None = option(
        "Chat template instead of the model's default: a Jinja file, the name of another template in the model, or a "
        "name known to llama.cpp (chatml, llama3, gemma, mistral-v3, …).",
        default=None,
        python_extra_help="The template itself works, too.",
        default_meaning="the model's",
        metavar="FILE|NAME",
        parse=parse_file_or_name,
        commands=("generate", "chat", "batch", "serve", "export"),
    )
    verify: bool = option(
        "Before loading, check the model's files against the checksums from its export.", default=False
    )
    export: bool = option(
        "Export the checkpoints given as model and draft into the user's cache, unless they are already there.",
        default=False,
        flags=(),
    )
    weight_format: Literal["fp32", "fp16", "bf16", "int8", "int4", "keep"] | None = option(
        "Weight format, if MODEL must be exported first; keep leaves quantised weights as they are.",
        default=None,
        default_meaning="as in an existing export; otherwise keep if MODEL is quantised, int4 if int8 would take "
        "over a third of the memory, else int8",
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
