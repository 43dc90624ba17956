"""Measure which settings are best for a model on this machine, for ``ovspec tune``.

The machine's speed changes over time, so settings are timed in turns with the one that is used without a profile.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import openvino as ov
import psutil
from openvino import opset13 as ops

from ovspec.decoders.base import FAST, Decoder, FeedRule, Rollback, SessionDecoder
from ovspec.decoders.paged import PagedDecoder
from ovspec.decoders.stateful import StatefulDecoder
from ovspec.errors import OvspecError
from ovspec.files import read_text
from ovspec.ir.compile import MODEL_FILE, check_weights, compile_ir
from ovspec.ir.device import DeviceOptions, core, default_kv_precision, native_precisions
from ovspec.ir.memory import room_for
from ovspec.sampling.logprobs import log_softmax
from ovspec.setup.engine import EXACT, CompiledModel, EngineName, check_paged, compile_paged
from ovspec.setup.exactness import FULL as FULL_TRIAL
from ovspec.setup.exactness import Exactness, find_exactness
from ovspec.setup.probing import find_probe
from ovspec.setup.profile import (
    Goal,
    Measurement,
    Profile,
    Setting,
    keep_profile,
    known_profile,
    largest_group,
)
from ovspec.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("tuning_text.txt")
WIDTHS = (1, 2, 4, 8, 16)
# A first load does not tune a model with more bytes of weights than this, because it would take too long.
LARGEST_UNASKED = 1.5e9
USUAL_GROUP = 32  # OpenVINO's default on the CPU
# A setting that takes more than this many times as long at every width is timed only once.
HOPELESS = 1.2
SETTLED = 0.02  # seconds for which one inference is repeated
LONG_PROMPT = 0.5  # seconds; a prefill that takes longer is timed once


@dataclass(frozen=True)
class Effort:
    """How much is measured: ``tokens`` of the text, ``widths`` of the timed inferences in tokens, and ``repeats``."""

    tokens: int
    widths: tuple[int, ...]
    repeats: int
    full: bool


FULL = Effort(256, WIDTHS, 3, True)
SHORT = Effort(64, (1, 2, 4, 8), 3, False)


def tune(
    folder: Path,
    options: DeviceOptions,
    goal: Goal = "balanced",
    effort: Effort = FULL,
    tell: Callable[[str, float], None] = lambda *_: None,
) -> Profile:
    """Measure settings for the model in ``folder``.

    ``tell`` is called before each setting with its text and the share of the work that is done.
    Raises OvspecError if the device is not the CPU or too little memory is free.
    """
    if options.device.upper() != "CPU":
        raise OvspecError(f"`device={options.device!r}`: only the CPU can be tuned.")
    if not room_for(folder, 3):
        raise OvspecError(f"{folder}: not enough memory is free for tuning, which holds the model twice.")
    began = time.monotonic()
    tell("f32 without dynamic quantisation (reference for accuracy)", 0.0)
    text = np.resize(Tokenizer(folder).encode(read_text(TEXT)), effort.tokens)
    timer = SettingTimer(folder, options.cache_folder, text, effort)
    engine: EngineName = "paged" if check_paged(folder, options).usable else "stateful"
    most_group = largest_group(folder)
    own, default = Setting(engine, None, default_kv_precision(DeviceOptions())), Setting("stateful")
    first = list(arithmetics(engine, most_group, effort))
    total = 3 + len(first) + (len(list(variants(own, most_group))) if effort.full else 0)
    tell(f"{own} (used without a profile)", 1 / total)
    timer.set_incumbent(own)
    tell(f"{default} (OpenVINO's default)", 2 / total)
    # The two differ in engine and KV cache, which changes the output little: the short version skips the second.
    reference = timer.measure(default) if effort.full else timer.incumbent
    usual = timer.probe(own)
    measured = [replace(timer.incumbent, invariance=usual.share, fewest=usual.fewest)]
    found = Profile(goal, effort.full, len(text), 0.0, reference, measured)

    def try_all(settings: Iterable[Setting]) -> None:
        for setting in settings:
            tell(str(setting), min(1.0, (2 + len(found.measurements)) / total))
            found.measurements.append(timer.measure(setting, found.most_kl("balanced")))

    try_all(first)
    if effort.full:
        best = found.choose(DeviceOptions(), "auto") or timer.incumbent
        try_all(variants(best.setting, most_group))
    # A probe takes longer than measuring: only settings that may be chosen are probed.
    while (best := found.choose(DeviceOptions(), "auto")) and best.invariance is None:
        tell(f"{best.setting}: bits of every way of feeding", 1.0)
        probed = timer.probe(best.setting)
        measured[measured.index(best)] = replace(best, invariance=probed.share, fewest=probed.fewest)
    if effort.full and best:
        tell(f"{best.setting}: bits of long contexts, and of one thread", 1.0)
        found = replace(found, exactness=timer.exactness(best.setting))
        tell(f"{best.setting}: the price of exact arithmetic", 1.0)
        found = replace(found, price=timer.price(best.setting, found.exactness))
    return replace(found, seconds=time.monotonic() - began)


def tune_if_new(folder: Path, options: DeviceOptions, tell: Callable[[str], None]) -> Profile | None:
    """Return the known profile, or measure and keep a short one; None if that is not possible or takes too long."""
    profile = known_profile(folder, options)
    if profile or options.device.upper() != "CPU" or not options.cache_folder:
        return profile
    if check_weights(folder / MODEL_FILE) > LARGEST_UNASKED:
        tell(f"{folder}: too large to tune automatically; run 'ovspec tune {folder}' to find the fastest settings.")
        return None
    tell(f"{folder}: measuring the fastest settings, once; 'ovspec tune' measures more, OVSPEC_TUNE=0 skips this.")
    try:
        profile = tune(folder, options, effort=SHORT)
    except OvspecError as error:
        tell(str(error))
        return None
    keep_profile(folder, options, profile)
    return profile


# ---------------------------------------------------------------- settings to try


def arithmetics(engine: EngineName, most_group: int | None, effort: Effort) -> Iterator[Setting]:
    """Yield a setting for each precision and each group size of dynamic quantisation."""
    groups = [group for group in ((32, 64, 128, 256) if effort.full else (64,)) if group <= (most_group or 0)]
    usual = default_kv_precision(DeviceOptions())  # the precision in which OpenVINO computes by default
    for precision in ["f32", *native_precisions()] if effort.full else [usual]:
        for group in groups if most_group else [None]:
            # OpenVINO's default is measured already, and 16-bit precisions round enough without large groups.
            if not (precision == usual and group in (None, USUAL_GROUP)) and not (precision != "f32" and group == 256):
                yield Setting(engine, precision, precision, group)


def variants(best: Setting, most_group: int | None) -> Iterator[Setting]:
    """Yield variants of ``best``: no rounded activations, the stateful engine, a smaller KV cache, other threads."""
    if most_group:
        yield Setting(best.engine, "f32", "f32", 0)
    if best.engine == "paged":
        yield replace(best, engine="stateful")
    # With an f32 cache, results don't depend on how tokens are grouped. f16 loses nothing only if the arithmetic
    # rounds more anyway.
    if most_group and best.precision == "f32" and best.group:
        yield replace(best, kv_precision="f16")
    physical, logical = psutil.cpu_count(logical=False) or 1, psutil.cpu_count() or 1
    for threads in sorted({max(2, physical // 2), logical} - {physical}):  # one core alone can't keep memory busy
        yield replace(best, threads=threads)
    for core_type in core_types():
        yield replace(best, core_type=core_type)


def core_types() -> list[str]:
    """Return PCORE_ONLY and ECORE_ONLY if the processor has both kinds of core."""
    port = ops.parameter([1], ov.Type.f32)
    model = ov.Model([ops.result(ops.relu(port))], [port])  # type: ignore[misc]

    def threads(kind: str) -> int:
        return core().compile_model(model, "CPU", {"SCHEDULING_CORE_TYPE": kind}).get_property("INFERENCE_NUM_THREADS")

    kinds = ["PCORE_ONLY", "ECORE_ONLY"]
    return kinds if len({threads("ANY_CORE"), *map(threads, kinds)}) > 1 else []


# ---------------------------------------------------------------- measuring


class SettingTimer:
    """Times settings of one model against the incumbent, after ``text`` (n,), token ids that are read as a prompt."""

    def __init__(self, folder: Path, cache: Path | None, text: np.ndarray, effort: Effort) -> None:
        self.text, self.effort = text, effort
        self._folder, self._cache = folder, cache
        self._rollback: Rollback | None = None  # of the stateful decoder, found when it is first needed
        ir = compile_ir(folder, DeviceOptions(properties=EXACT))
        right = StatefulDecoder(ir, Rollback(None)).feed([text], [len(text)])[0]
        self._right = log_softmax(right).astype(np.float32)

    def set_incumbent(self, setting: Setting) -> None:
        """Measure the setting that the others are compared with, and keep it loaded."""
        self._decoder, memory = self._load(setting)
        kl, top1 = self._distance(self._prefill(self._decoder)[1])
        self._round(self._decoder)
        prefill = min(self._prefill(self._decoder)[0] for _ in range(2))
        times, change = self._round(self._decoder, self.effort.repeats)
        self.incumbent = Measurement(setting, times, prefill, memory, kl, top1, change)

    def measure(self, setting: Setting, most_kl: float = math.inf) -> Measurement:
        """Measure accuracy and times; a setting that is far too slow or exceeds ``most_kl`` is timed only once."""
        (decoder, memory), mine = self._load(setting), self.incumbent
        kl, top1 = self._distance(self._prefill(decoder)[1])  # not timed: the first prefill is slower
        ratios: list[dict[int, float]] = []  # one entry per round: time relative to the incumbent, by width
        prefills: list[float] = []
        changes: list[float] = []
        for repeat in range(self.effort.repeats):
            if repeat == 0 or mine.prefill_ms * len(self.text) < LONG_PROMPT * 1e3:
                prefills.append(self._prefill(decoder)[0] / self._prefill(self._decoder)[0])
            (theirs, change), (ours, _) = self._round(decoder), self._round(self._decoder)
            changes.append(change)
            ratios.append({width: theirs[width] / ours[width] for width in ours})
            if kl > most_kl or min(ratios[-1].values()) > HOPELESS:
                break
        verify = {width: statistics.median(r[width] for r in ratios) * ms for width, ms in mine.verify_ms.items()}
        prefill, change = statistics.median(prefills) * mine.prefill_ms, statistics.median(changes)
        return Measurement(setting, verify, prefill, memory, kl, top1, change)

    def probe(self, setting: Setting) -> Exactness:
        """Find the rule of exact arithmetic with ``setting``."""
        return find_exactness(*self._to_probe(self._compile(setting)))

    def exactness(self, setting: Setting) -> dict[int, Exactness]:
        """The same, thoroughly, with the setting's number of threads and with one."""
        found: dict[int, Exactness] = {}
        for one in (setting, replace(setting, threads=1)):
            model = self._compile(one)
            threads = int(model.ir.compiled.get_property("INFERENCE_NUM_THREADS"))
            if threads not in found:
                found[threads] = find_exactness(*self._to_probe(model), FULL_TRIAL)
        return found

    def price(self, setting: Setting, found: dict[int, Exactness]) -> float | None:
        """Return how many times as long as in fast arithmetic a token takes in exact arithmetic, after the text.

        None if no rule was found for it, with the first number of threads in ``found``.
        """
        rule = next(iter(found.values())).rule
        if not rule:
            return None
        decoders = self._compile(setting).decoder(rule=rule), self._compile(setting, paired=False).decoder()
        for decoder in decoders:
            decoder.feed([self.text], [1])
        times = [[self._time(decoder, 1)[1] for decoder in decoders] for _ in range(2 * self.effort.repeats)]
        return statistics.median(exact / fast for exact, fast in times)

    def _to_probe(self, model: CompiledModel) -> tuple[Callable[[FeedRule], SessionDecoder], str, int]:
        return (lambda rule: model.decoder(rule=rule)), model.engine, model.ir.logits_width

    def _compile(self, setting: Setting, paired: bool = True) -> CompiledModel:
        # Not cached: what is compiled only to be measured is not worth keeping.
        options = DeviceOptions(properties=setting.properties | {"CACHE_DIR": ""})
        if setting.engine == "paged":
            return CompiledModel(compile_paged(self._folder, options, paired), "paged", "", PagedDecoder.rollback)
        ir = compile_ir(self._folder, options)
        self._rollback = self._rollback or find_probe(ir, self._cache, None).rollback
        return CompiledModel(ir, "stateful", "", self._rollback)

    def _load(self, setting: Setting) -> tuple[Decoder, int]:
        """Return a decoder and the bytes by which the process has grown after its first inference."""
        process = psutil.Process()
        before = process.memory_info().rss
        # A second query for each token, as exact arithmetic has it, and as many tokens as are fed.
        rule = FeedRule(queries=2) if setting.engine == "paged" else FAST
        decoder = self._compile(setting).decoder(rule=rule)
        decoder.feed([self.text[:8]], [1])
        return decoder, max(0, process.memory_info().rss - before)

    def _prefill(self, decoder: Decoder) -> tuple[float, np.ndarray]:
        """Read the text as a prompt; return ms per token and the logits of every position."""
        decoder.reset(1)
        began = time.perf_counter()
        logits = decoder.feed([self.text], [len(self.text)])[0]
        return (time.perf_counter() - began) * 1e3 / len(self.text), logits

    def _round(self, decoder: Decoder, repeats: int = 1) -> tuple[dict[int, float], float]:
        """Return the median milliseconds of ``repeats`` inferences after the text by width, and of a change of width.

        The change is what the first inference of a width takes more than the next ones.
        """
        times: dict[int, list[float]] = {width: [] for width in self.effort.widths}
        changes: list[float] = []
        for repeat in range(repeats + 1):
            for width in self.effort.widths:
                changed, same = self._time(decoder, width)
                if repeat:  # the first inferences of all, and those after another model's, are slower
                    times[width].append(same)
                    changes.append(changed - same)
        return {width: statistics.median(found) for width, found in times.items()}, statistics.median(changes)

    def _time(self, decoder: Decoder, width: int) -> tuple[float, float]:
        """Return the milliseconds of an inference after one of another width, and after one of the same.

        Fast ones are repeated, to get past the effects of the model that ran before.
        """
        found, began = [], time.perf_counter()
        while len(found) < 2 or (time.perf_counter() - began < SETTLED and len(found) < 20):
            start = time.perf_counter()
            decoder.feed([self.text[:width]], [width])
            found.append((time.perf_counter() - start) * 1e3)
            decoder.truncate(0, len(self.text))
        return found[0], statistics.median(found[1 + len(found) // 4 :])

    def _distance(self, logits: np.ndarray) -> tuple[float, float]:
        """Return the mean KL divergence from the reference (nats) and the share of equal top-1 tokens."""
        divergence = 0.0
        for i in range(0, len(logits), 64):  # in pieces, because float64 takes much memory
            right, ours = self._right[i : i + 64], log_softmax(logits[i : i + 64])
            divergence += float((np.exp(right) * (right - ours)).sum())
        same = (self._right.argmax(1) == logits.argmax(1)).mean()
        return max(0.0, divergence / len(logits)), float(same)
