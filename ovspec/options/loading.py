"""The options of ``ovspec.load``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypedDict

from ovspec.options import AT_LEAST_1, LOOKAHEAD
from ovspec.options.option import Option, check, check_names, declared
from ovspec.options.reading import folder, key_value


class RuntimeOptions(TypedDict, total=False):
    """The options that decide where and how models are compiled."""

    device: Annotated[str, Option("OpenVINO device: CPU, GPU, GPU.N, AUTO or AUTO:X,Y.", "CPU")]
    draft_device: Annotated[str | None, Option("OpenVINO device of the draft model.", usual="the target's")]
    precision: Annotated[
        Literal["f32", "bf16", "f16"] | None,
        Option("Number type that the model computes in.", usual="the device's own"),
    ]
    kv_precision: Annotated[
        Literal["f32", "bf16", "f16", "u8"] | None,
        Option(
            "Number type of the KV cache; u8 takes about half the memory of f16, but is not exact.",
            usual="the type of the arithmetic on the CPU, the device's own elsewhere",
        ),
    ]
    engine: Annotated[
        Literal["auto", "stateful", "paged"],
        Option(
            "Who manages the KV cache: OpenVINO (stateful) or ovspec, in blocks (paged); auto takes paged if it gives "
            "the same logits.",
            "auto",
        ),
    ]
    threads: Annotated[
        int | None, Option("Number of CPU threads to compute with.", limits=AT_LEAST_1, usual="OpenVINO's choice")
    ]
    properties: Annotated[
        Mapping[str, Any] | None,
        Option(
            "OpenVINO property for target and draft; takes precedence over the options above.",
            flags=("--property",),
            metavar="KEY=VALUE",
            parse=key_value,
        ),
    ]
    tune: Annotated[
        bool | None,
        Option(
            "Use OpenVINO's own settings, not those that 'ovspec tune' or the first load measured as fastest on this "
            "machine.",
            more="This is what ``tune=False`` or the environment variable OVSPEC_TUNE=0 does.",
            flags=("--no-tune",),
        ),
    ]
    cache_dir: Annotated[
        str | Path | None,
        Option("Folder where compiled models are cached.", usual="the user's cache", metavar="DIRECTORY", parse=folder),
    ]


class LoadOptions(RuntimeOptions, total=False):
    """The options of ``ovspec.load``, besides the model and its draft."""

    lookahead: Annotated[
        int | Literal["auto"],
        Option(
            "Tokens to propose per round: 0 for plain decoding, auto for the number that is expected to be fastest.",
            "auto",
            LOOKAHEAD,
            flags=(),
        ),
    ]
    lookup_corpus: Annotated[
        Sequence[str | Path], Option("Text file that lookup may also propose from.", tuple, metavar="FILE")
    ]
    verify: Annotated[
        bool,
        Option("First check that the files in the model's folder have the checksums they were exported with.", False),
    ]
    export: Annotated[
        bool,
        Option(
            "Export the checkpoints given as model and draft into the cache, unless they are there.", False, flags=()
        ),
    ]


RUNTIME, LOAD = declared(RuntimeOptions), declared(LoadOptions)


def load_options(options: LoadOptions) -> Any:
    """Return an object with all options of ``load`` as attributes.

    Raises TypeError for an unknown option and OvspecError for an invalid value.
    """
    check_names(options, LOAD)
    found = {name: option.initial for name, (_, option) in LOAD.items()}
    for name, value in options.items():
        if value is not None:
            check(name, value, *LOAD[name])
            found[name] = value
    return SimpleNamespace(**found)
