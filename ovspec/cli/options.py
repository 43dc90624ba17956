"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

PRECISIONS = ("f32", "bf16", "f16")
ENGINES = ("auto", "stateful", "paged")  # as engine.ENGINES, which would import openvino
KV_PRECISIONS = ("f32", "bf16", "f16", "u8")


def parse_properties(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    properties = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE, as in --property NUM_STREAMS=1.")
        properties[key.strip()] = text.strip()
    return properties


def runtime_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Where and how models are compiled."""
    options = [
        click.option("--device", default="CPU", show_default=True, help="CPU, GPU, GPU.N, AUTO or AUTO:X,Y."),
        click.option("--draft-device", help="Device of the draft model.  [default: that of --device]"),
        click.option("--precision", type=click.Choice(PRECISIONS), help="Arithmetic.  [default: the device's own]"),
        click.option(
            "--kv-precision",
            type=click.Choice(KV_PRECISIONS),
            help="KV cache.  [default: as the arithmetic on the CPU]",
        ),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default="auto",
            show_default=True,
            help="What drives the model: OpenVINO's own KV cache (stateful), or ours in blocks (paged), "
            "which auto takes where it gives the same logits.",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="CPU threads.  [default: OpenVINO's choice]"),
        click.option(
            "--property",
            "properties",
            multiple=True,
            metavar="KEY=VALUE",
            callback=parse_properties,
            help="OpenVINO property for the target and the draft; wins over the options above; may be repeated.",
        ),
        click.option(
            "--no-tune",
            "tune",
            flag_value=False,
            type=bool,
            default=None,
            help="Take OpenVINO's own settings, not those that 'ovspec tune' or the first load found fastest here.",
        ),
        click.option(
            "--cache-dir", type=click.Path(file_okay=False), help="Compiled models.  [default: the user's cache]"
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command
