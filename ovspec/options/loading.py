"""The options of ``ovspec.load``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypedDict

from ovspec.options import AT_LEAST_1, LOOKAHEAD
from ovspec.options.option import Option, check, check_names, declared
from ovspec.options.reading import folder, key_value


class RuntimeOptions(TypedDict, total=False):
    """Where and how models are compiled."""

    device: Annotated[str, Option("CPU, GPU, GPU.N, AUTO or AUTO:X,Y.", "CPU")]
    draft_device: Annotated[str | None, Option("Device of the draft model.", usual="the target's")]
    precision: Annotated[Literal["f32", "bf16", "f16"] | None, Option("Arithmetic.", usual="the device's own")]
    kv_precision: Annotated[
        Literal["f32", "bf16", "f16", "u8"] | None,
        Option("Type of the KV cache.", usual="as the arithmetic on the CPU, the device's own elsewhere"),
    ]
    engine: Annotated[
        Literal["auto", "stateful", "paged"],
        Option(
            "OpenVINO's own KV cache (stateful), or ours in blocks (paged), which auto takes where it gives the same "
            "logits.",
            "auto",
        ),
    ]
    threads: Annotated[int | None, Option("CPU threads.", limits=AT_LEAST_1, usual="OpenVINO's choice")]
    properties: Annotated[
        Mapping[str, Any] | None,
        Option(
            "OpenVINO property for target and draft; wins over the options above.",
            flags=("--property",),
            metavar="KEY=VALUE",
            parse=key_value,
        ),
    ]
    tune: Annotated[
        bool | None,
        Option(
            "Take OpenVINO's own settings, not those that 'ovspec tune' or the first load found fastest here.",
            more="That is ``tune=False``, or the environment variable OVSPEC_TUNE=0.",
            flags=("--no-tune",),
        ),
    ]
    cache_dir: Annotated[
        str | Path | None,
        Option("Folder of compiled models.", usual="the user's cache", metavar="DIRECTORY", parse=folder),
    ]


class LoadOptions(RuntimeOptions, total=False):
    """What ``ovspec.load`` takes besides the model and its draft."""

    lookahead: Annotated[
        int | Literal["auto"],
        Option("Tokens to propose each round; auto for as many as pay.", "auto", LOOKAHEAD, flags=()),
    ]
    lookup_corpus: Annotated[Sequence[str | Path], Option("Text file that lookup may quote.", tuple, metavar="FILE")]
    verify: Annotated[bool, Option("Compare the checksums of all files with those of the export first.", False)]
    export: Annotated[bool, Option("Export model and draft, given by name, into the cache once.", False, flags=())]


RUNTIME, LOAD = declared(RuntimeOptions), declared(LoadOptions)


def load_options(options: LoadOptions) -> Any:
    """An object with all options of ``load`` as attributes; raises TypeError (no such option) or OvspecError."""
    check_names(options, LOAD)
    found = {name: option.initial for name, (_, option) in LOAD.items()}
    for name, value in options.items():
        if value is not None:
            check(name, value, *LOAD[name])
            found[name] = value
    return SimpleNamespace(**found)
