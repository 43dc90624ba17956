"""The options of ``ovspec.load``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from ovspec.params import AT_LEAST_1, GENERATE, LOOKAHEAD, NOT_NEGATIVE, check, check_names
from ovspec.params.option import Option, declared, fields_of, file_or_name, folder, key_value
from ovspec.params.tools import ToolFormatName


class RuntimeOptions(TypedDict, total=False):
    """The options that decide where and how models are compiled."""

    device: Annotated[str, "OpenVINO device: CPU, GPU, GPU.N, AUTO or AUTO:X,Y.", Option("CPU")]
    draft_device: Annotated[str | None, "OpenVINO device of the draft model.", Option(usual="the target's")]
    precision: Annotated[
        Literal["f32", "bf16", "f16"] | None,
        "Number type that the model computes in.",
        Option(usual="the profile's, or the device's own"),
    ]
    kv_precision: Annotated[
        Literal["f32", "bf16", "f16", "u8"] | None,
        "Number type of the KV cache. u8 takes about half the memory of f16, but rolling back changes it, so a "
        "draft may change the text.",
        Option(usual="the profile's, or that of --precision on the CPU and f16 on a GPU"),
    ]
    engine: Annotated[
        Literal["auto", "stateful", "paged"],
        "Who manages the KV cache: OpenVINO (stateful), or ovspec in blocks (paged, on a CPU or a GPU). auto takes "
        "paged if it gives the same logits.",
        Option("auto"),
    ]
    arithmetic: Annotated[
        Literal["exact", "fast"] | None,
        "exact: every token has the same bits with any draft, batch, session or none. fast: less time for plain "
        "decoding over long contexts and, on the stateful engine, for prompts and batches, but a draft or a batch "
        "may change the text at near-ties.",
        Option(usual="exact on the CPU, fast where a GPU may compute"),
    ]
    threads: Annotated[
        int | None,
        "Number of CPU threads to compute with.",
        Option(limits=AT_LEAST_1, usual="the profile's, or OpenVINO's"),
    ]
    properties: Annotated[
        Mapping[str, Any] | None,
        "OpenVINO property for target and draft; takes precedence over the profile and the other options.",
        Option(flags=("--property",), metavar="KEY=VALUE", parse=key_value),
    ]
    tune: Annotated[
        bool | None,
        "Use OpenVINO's own settings: ignore the profile of this machine, and don't measure one at the first load. "
        "OVSPEC_TUNE=0 does the same.",
        Option(more="In Python that is ``tune=False``; True takes precedence over OVSPEC_TUNE.", flags=("--no-tune",)),
    ]
    cache_dir: Annotated[
        str | Path | None,
        "Folder of compiled models, profiles and probe results.",
        Option(usual="the user's cache", metavar="DIRECTORY", parse=folder),
    ]


class LoadOptions(RuntimeOptions, total=False):
    """The options of ``ovspec.load``, besides the model and its draft."""

    lookahead: Annotated[
        int | Literal["auto"],
        GENERATE["lookahead"][1].help,
        replace(LOOKAHEAD, default="auto", usual="", more="", flags=()),
    ]
    lookup_corpus: Annotated[
        Sequence[str | Path], "Text file that lookup may also propose from.", Option(tuple, metavar="FILE")
    ]
    cache_memory: Annotated[
        float | None,
        "Gigabytes that KV caches may take until those of ended texts give way, which are kept for texts that begin "
        "in the same way; 0 keeps none.",
        Option(limits=NOT_NEGATIVE, usual="a quarter of the memory that is free after loading", metavar="GB"),
    ]
    tool_format: Annotated[
        ToolFormatName | None,
        "How the model writes tool calls.",
        Option(usual="found from its chat template", commands=("batch", "serve")),
    ]
    chat_template: Annotated[
        str | Path | None,
        "Chat template to use in place of the model's: a Jinja file, or a name, as the model has several or as "
        "llama.cpp knows them (chatml, llama3, gemma, mistral-v3, …).",
        Option(
            more="Also the template itself.",
            usual="the model's",
            metavar="FILE|NAME",
            parse=file_or_name,
            commands=("generate", "chat", "batch", "serve", "export"),
        ),
    ]
    verify: Annotated[
        bool, "First check the model's files against the checksums of its export by ovspec.", Option(False)
    ]
    export: Annotated[
        bool,
        "Export the checkpoints given as model and draft into the user's cache, unless an export of these names is "
        "there.",
        Option(False, flags=()),
    ]


RUNTIME, LOAD = declared(RuntimeOptions), declared(LoadOptions)
_LoadFields = fields_of(LOAD)


@dataclass(frozen=True)
class LoadParams(_LoadFields):
    """All options of one call of ``load``, checked by ``load_params``."""


def load_params(options: LoadOptions) -> LoadParams:
    """Return the params of ``load``; raises TypeError for an unknown option and OvspecError for an invalid value."""
    check_names(options, LOAD)
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        check(name, value, *LOAD[name])
    return LoadParams(**given)
