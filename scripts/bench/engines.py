"""Compare both engines, OpenVINO's default and the profile, and show where a step's time goes.

    python scripts/bench/engines.py DIR [--plot FILE] [--cache-dir DIR] [--contexts 128 1024 4096]

DIR is an exported model of real size, such as scripts/train/bench_pair.py makes; its profile is the one that
'ovspec tune' has kept. The settings take turns in one run, and times are medians. Use an idle machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
from cells import bytes_a_step, read_bandwidth

from ovspec.decoders.base import Decoder, Rollback
from ovspec.decoders.paged import PagedDecoder
from ovspec.decoders.stateful import StatefulDecoder
from ovspec.files import read_text
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions, available_devices
from ovspec.setup.engine import compile_paged
from ovspec.setup.profile import Setting, known_profile
from ovspec.setup.tuning import TEXT
from ovspec.text.tokenizer import Tokenizer

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)
REPEATS = 5
CHUNK = 128
PROMPT = 1024
# Types of the KV cache, where it isn't the arithmetic's. OpenVINO's own choice is u8.
CACHES = {"OpenVINO's default": "u8", "paged f32, KV f16": "f16"}


def decoder_for(folder: Path, setting: Setting, kv_precision: str | None) -> Decoder:
    options = DeviceOptions(kv_precision=kv_precision, properties=setting.properties | {"CACHE_DIR": ""})
    if setting.engine == "paged":
        return PagedDecoder(compile_paged(folder, options, paired=False))  # the widths as they are
    return StatefulDecoder(compile_ir(folder, options), Rollback("mask"), compact_at=10**9)


def milliseconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def verify_curves(decoders: dict[str, Decoder], text: np.ndarray, context: int) -> dict[str, dict[int, float]]:
    """Return the milliseconds of an inference at a context of ``context`` tokens, for each decoder by width."""
    for decoder in decoders.values():
        decoder.reset(1)
        decoder.feed([text[:context]], [1])
    times: dict[str, dict[int, list[float]]] = {name: {width: [] for width in WIDTHS} for name in decoders}
    for repeat in range(REPEATS + 1):
        for name, decoder in decoders.items():
            decoder.feed([text[:1]], [1])  # the first inference after another model's is slower
            decoder.truncate(0, context)
            for width in WIDTHS:
                taken = milliseconds(lambda d=decoder, w=width: d.feed([text[:w]], [w]))
                if repeat:  # the first inference of a width is slower
                    times[name][width].append(taken)
                decoder.truncate(0, context)
            if isinstance(decoder, StatefulDecoder):
                decoder.compact()  # dead slots of truncated tokens would cost time
    return {name: {w: statistics.median(found) for w, found in curve.items()} for name, curve in times.items()}


def prefills(decoders: dict[str, Decoder], text: np.ndarray) -> dict[str, tuple[float, float]]:
    """Return the seconds to read a prompt, (whole, in chunks), for each decoder."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in decoders}

    def read(decoder: Decoder, chunk: int) -> None:
        decoder.reset(1)
        for start in range(0, PROMPT, chunk):
            decoder.feed([text[start : min(start + chunk, PROMPT)]], [1])

    for repeat in range(3):
        for name, decoder in decoders.items():
            for found, chunk in zip(times[name], (PROMPT, CHUNK), strict=True):
                taken = milliseconds(lambda d=decoder, c=chunk: read(d, c)) / 1e3
                if repeat:
                    found.append(taken)
    return {name: (statistics.median(whole), statistics.median(chunks)) for name, (whole, chunks) in times.items()}


def where_time_goes(folder: Path, setting: Setting, text: np.ndarray) -> list[tuple[str, float, int]]:
    """Return the five most expensive operation types of a decode step, by OpenVINO's counters.

    Each is (type, share of the time of all operations, number of operations).
    """
    options = DeviceOptions(properties=setting.properties | {"CACHE_DIR": "", "PERF_COUNT": "YES"})
    paged = setting.engine == "paged"
    decoder: Decoder = (
        PagedDecoder(compile_paged(folder, options, paired=False))
        if paged
        else StatefulDecoder(compile_ir(folder, options), Rollback("mask"))
    )
    decoder.feed([text[:128]], [1])
    for _ in range(10):
        decoder.feed([text[:1]], [1])
    spent: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for node in decoder._request.raw.profiling_info:  # type: ignore[attr-defined]
        spent[node.node_type] += node.real_time.total_seconds()
        counts[node.node_type] += node.real_time.total_seconds() > 0
    total = sum(spent.values())
    return [
        (kind, seconds / total, counts[kind]) for kind, seconds in sorted(spent.items(), key=lambda item: -item[1])[:5]
    ]


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def plot(curves: dict[int, dict[str, dict[int, float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(4 * len(curves), 3.6), sharey=True)
    for axis, (context, by_name) in zip(np.atleast_1d(axes), curves.items(), strict=True):
        for name, curve in by_name.items():
            style = "-" if name.startswith("paged") else "--"
            axis.plot(list(curve), list(curve.values()), style, marker="o", markersize=3, label=name)
        axis.set_title(f"at a context of {context} tokens")
        axis.set_xlabel("tokens in one inference")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("ms")
    np.atleast_1d(axes)[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--cache-dir", type=Path, help="folder in which the profile is kept")
    parser.add_argument("--plot", type=Path, help="draw the verify curves to this file")
    args = parser.parse_args()
    profile = known_profile(args.folder, DeviceOptions(cache_dir=args.cache_dir))
    best = profile.choose(DeviceOptions(), "auto") if profile else None
    group = 128
    settings = {
        "OpenVINO's default": Setting("stateful"),
        "stateful f32": Setting("stateful", "f32", group),
        "paged f32": Setting("paged", "f32", group),
        "paged f32, KV f16": Setting("paged", "f32", group),
        "paged bf16": Setting("paged", "bf16", group),
    }
    if best and best.setting not in settings.values():
        settings["profile"] = best.setting
    text = np.resize(Tokenizer(args.folder).encode(read_text(TEXT))[:512], max(args.contexts) + PROMPT)
    cpu, cores = dict(available_devices())["CPU"], os.cpu_count()
    print(f"{args.folder.name} of {args.folder.parent.name}, {cpu}, {cores} cores, {platform.system()}, ", end="")
    print(f"OpenVINO {ov.get_version().split('-')[0]}; dynamic quantisation in groups of {group}")
    if profile and best:
        print(f"profile: {best.setting}; measured in {profile.seconds:.0f} s")
    decoders = {name: decoder_for(args.folder, setting, CACHES.get(name)) for name, setting in settings.items()}
    read = prefills(decoders, text)
    rows = [[name, f"{whole:.2f}", f"{chunks:.2f}"] for name, (whole, chunks) in read.items()]
    print(f"\nSeconds to read a prompt of {PROMPT} tokens\n")
    print(table(["setting", "whole prompt at once", f"in chunks of {CHUNK}"], rows), flush=True)
    curves = {}
    for context in args.contexts:
        curves[context] = verify_curves(decoders, text, context)
        print(f"\nMilliseconds for an inference of m tokens at a context of {context} tokens\n")
        rows = []
        for name, curve in curves[context].items():
            rows.append([name, *(f"{curve[width]:.1f}" for width in WIDTHS), f"{curve[8] / curve[1]:.2f}"])
        print(table(["setting", *(f"m={width}" for width in WIDTHS), "m=8 / m=1"], rows), flush=True)
    if args.plot:
        plot(curves, args.plot)
    weights, bandwidth = bytes_a_step(args.folder), read_bandwidth(1 << 30)
    del decoders
    print(f"\nA step reads {weights / 1e6:.0f} MB of weights; memory is read at {bandwidth / 1e9:.1f} GB/s\n")
    rows = []
    for name in settings:
        for context in args.contexts[:2]:
            speed = weights / (curves[context][name][1] / 1e3)
            rows.append([name, str(context), f"{speed / 1e9:.1f}", f"{speed / bandwidth:.0%}"])
    print(table(["setting", "context", "weights read, GB/s", "share of the bandwidth"], rows))
    for name, setting in settings.items():
        if name in ("paged f32", "profile", "stateful f32"):
            spent = where_time_goes(args.folder, setting, text)
            shares = ", ".join(f"{kind} {share:.1%} ({count})" for kind, share, count in spent)
            print(f"\n{name}: time of a step by operation type: {shares}")


if __name__ == "__main__":
    main()
