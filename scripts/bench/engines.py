"""Compare both engines, OpenVINO's default and the profile, and show where a step's time goes.

    python scripts/bench/engines.py DIR [--plot FILE] [--cache-dir DIR] [--contexts 128,1024,4096]

DIR is an exported model of real size, such as scripts/train/bench_pair.py makes; its profile is the one that
'ovspec tune' has kept. The settings take turns in one run, and times are medians. Use an idle machine.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from harness import (
    Option,
    Table,
    arguments,
    bytes_a_step,
    machine,
    milliseconds,
    read_bandwidth,
    take_turns,
)

from ovspec.base.files import read_text
from ovspec.cache.decoder import Decoder, Rollback
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.setup.paging import compile_paged
from ovspec.setup.profile import Setting, read_profile
from ovspec.setup.tuning import TUNING_TEXT_FILE
from ovspec.text.tokenizer import Tokenizer

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
REPEATS = 5
CHUNK = 128
PROMPT = 1024
GROUP = 128  # of dynamic quantisation
SETTINGS = {
    "OpenVINO's default": Setting("stateful"),
    "stateful f32": Setting("stateful", "f32", GROUP),
    "paged f32": Setting("paged", "f32", GROUP),
    "paged bf16": Setting("paged", "bf16", GROUP),
}
CACHES = {"OpenVINO's default": "u8"}  # types of the KV cache, where it isn't the arithmetic's


def decoder_for(folder: Path, setting: Setting, kv_precision: str | None = None, **properties: str) -> Decoder:
    device = DeviceOptions(kv_precision=kv_precision, properties=setting.properties | {"CACHE_DIR": ""} | properties)
    if setting.engine == "paged":
        return PagedDecoder(compile_paged(folder, device, paired=False))  # the widths as they are
    return StatefulDecoder(compile_ir(folder, device), Rollback("mask"), compaction_threshold=10**9)


def verify_curves(decoders: dict[str, Decoder], text: np.ndarray, context: int) -> dict[str, list[float]]:
    """Return the milliseconds of an inference of each width, at a context of ``context`` tokens, for each decoder."""
    for decoder in decoders.values():
        decoder.reset(1)
        decoder.feed([text[:context]], [1])

    def curve(name: str, _: int) -> list[float]:
        decoder = decoders[name]
        times = []
        for width in (1, *WIDTHS):  # the first inference after another model's is slower
            times.append(milliseconds(lambda: decoder.feed([text[:width]], [width])))  # noqa: B023
            decoder.truncate(0, context)
        if isinstance(decoder, StatefulDecoder):
            decoder.compact()  # dead slots of truncated tokens would cost time
        return times[1:]

    curves = take_turns(decoders, curve, REPEATS)
    return {name: list(map(statistics.median, zip(*turns, strict=True))) for name, turns in curves.items()}


def prefills(decoders: dict[str, Decoder], text: np.ndarray) -> dict[tuple[str, int], float]:
    """Return the seconds to read a prompt, for each decoder and size of its chunks."""

    def read(way: tuple[str, int], _: int) -> float:
        name, chunk = way
        began = time.perf_counter()
        decoders[name].reset(1)
        for start in range(0, PROMPT, chunk):
            decoders[name].feed([text[start : start + chunk]], [1])
        return time.perf_counter() - began

    times = take_turns([(name, chunk) for name in decoders for chunk in (PROMPT, CHUNK)], read, 2)
    return {way: statistics.median(seconds) for way, seconds in times.items()}


def where_time_goes(folder: Path, setting: Setting, text: np.ndarray) -> str:
    """Return the five most expensive operation types of a decode step, by OpenVINO's counters.

    Each with its share of the time of all operations and the number of its operations.
    """
    decoder = decoder_for(folder, setting, PERF_COUNT="YES")
    decoder.feed([text[:128]], [1])
    for _ in range(10):
        decoder.feed([text[:1]], [1])
    spent: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for node in decoder._request.openvino_request.profiling_info:  # type: ignore[attr-defined]
        spent[node.node_type] += node.real_time.total_seconds()
        counts[node.node_type] += node.real_time.total_seconds() > 0
    most = sorted(spent, key=lambda kind: -spent[kind])[:5]
    return ", ".join(f"{kind} {spent[kind] / sum(spent.values()):.1%} ({counts[kind]})" for kind in most)


def draw_curves(curves: dict[int, dict[str, list[float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    size = (4 * len(curves), 3.6)  # inches
    figure, axes = pyplot.subplots(1, len(curves), figsize=size, squeeze=False, sharey=True, layout="tight")
    for axis, (context, by_name) in zip(axes[0], curves.items(), strict=True):
        for name, curve in by_name.items():
            style = "o-" if name.startswith("paged") else "o--"
            axis.plot(WIDTHS, curve, style, markersize=3, label=name)
        axis.set(title=f"at a context of {context} tokens", xlabel="tokens in one inference")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("ms")
    axes[0][0].legend(fontsize=7)
    figure.savefig(file, dpi=110)


def main() -> None:
    args = arguments(
        __doc__,
        "folder",
        contexts=[128, 1024, 4096],
        cache_dir=Option(Path, "folder in which the profile is kept"),
        plot=Option(Path, "draw the verify curves to this file"),
    )
    settings = dict(SETTINGS)
    print(f"{args.folder.name} of {args.folder.parent.name}, {machine()}; dynamic quantisation in groups of {GROUP}")
    profile = read_profile(args.folder, DeviceOptions(cache_dir=args.cache_dir))
    if profile and (best := profile.choose_measurement(DeviceOptions(), "auto")):
        print(f"profile: {best.setting}; measured in {profile.seconds:.0f} s")
        if best.setting not in settings.values():
            settings["profile"] = best.setting
    text = np.resize(Tokenizer(args.folder).encode(read_text(TUNING_TEXT_FILE))[:512], max(args.contexts) + PROMPT)
    decoders = {name: decoder_for(args.folder, setting, CACHES.get(name)) for name, setting in settings.items()}
    seconds = prefills(decoders, text)
    print(f"\nSeconds to read a prompt of {PROMPT} tokens\n")
    table = Table("setting", "whole prompt at once", f"in chunks of {CHUNK}")
    for name in settings:
        table.row(name, f"{seconds[name, PROMPT]:.2f}", f"{seconds[name, CHUNK]:.2f}")
    curves = {}
    for context in args.contexts:
        curves[context] = verify_curves(decoders, text, context)
        print(f"\nMilliseconds for an inference of m tokens at a context of {context} tokens\n")
        table = Table("setting", *(f"m={width}" for width in WIDTHS), "m=8 / m=1")
        for name, curve in curves[context].items():
            table.row(name, *(f"{ms:.1f}" for ms in curve), f"{curve[WIDTHS.index(8)] / curve[0]:.2f}")
    if args.plot:
        draw_curves(curves, args.plot)
    weights = bytes_a_step(args.folder)
    bandwidth = read_bandwidth(1 << 30)
    decoders.clear()
    print(f"\nA step reads {weights / 1e6:.0f} MB of weights; memory is read at {bandwidth / 1e9:.1f} GB/s\n")
    table = Table("setting", "context", "weights read, GB/s", "share of the bandwidth")
    for name in settings:
        for context in args.contexts[:2]:
            speed = weights / (curves[context][name][0] / 1e3)
            table.row(name, context, f"{speed / 1e9:.1f}", f"{speed / bandwidth:.0%}")
    for name in [name for name in ("stateful f32", "paged f32", "profile") if name in settings]:
        print(f"\n{name}: time of a step by operation type: {where_time_goes(args.folder, settings[name], text)}")


if __name__ == "__main__":
    main()
