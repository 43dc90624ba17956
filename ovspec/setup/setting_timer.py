"""Times a model's settings, in turns with the incumbent, and measures how accurate they are."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_cached, write_cached
from ovspec.cache.decoder import Decoder, FeedRule, Rollback
from ovspec.cache.paged import PagedDecoder
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions, is_gpu
from ovspec.sampling.logprobs import log_softmax
from ovspec.setup.engine_choice import CompiledModel, fast_feed_rule
from ovspec.setup.exactness import FULL_TRIAL, Exactness, find_exactness_file
from ovspec.setup.paging import EXACT_PROPERTIES, check_paged, compile_paged
from ovspec.setup.profile import Measurement, Setting, complete_device_options
from ovspec.setup.rollback_probing import probe_rollback

REPEATED_SECONDS = 0.02  # seconds for which one inference is repeated
LONG_PREFILL_SECONDS = 0.5  # seconds; a prefill that takes longer is timed once


@dataclass(frozen=True)
class TuningEffort:
    """How much is measured."""

    prompt_tokens: int  # of the prompt that is timed, and before the timed inferences
    widths: tuple[int, ...]  # of the timed inferences, in tokens
    repeats: int  # how often each setting is timed
    is_full: bool  # whether all settings are tried, and exact arithmetic is probed thoroughly
    accuracy_tokens: int = 256  # tokens by which accuracy is judged


class SettingTimer:
    """Times settings of one model against the incumbent, after the first tokens of ``text`` (n,), read as a prompt.

    ``options``: say where what probing finds is remembered.
    """

    def __init__(self, folder: Path, text: np.ndarray, effort: TuningEffort, options: DeviceOptions) -> None:
        self.text, self.prompt, self.effort = text, text[: effort.prompt_tokens], effort
        self._folder, self._options = folder, options
        ir = compile_ir(folder, DeviceOptions(properties=EXACT_PROPERTIES))
        right = StatefulDecoder(ir, Rollback(None)).feed([text], [len(text)])[0]
        self._right = log_softmax(right).astype(np.float32)

    def set_incumbent(self, setting: Setting) -> Measurement:
        """Measure the setting that the others are compared with, and keep it loaded."""
        self._models = {setting: self._compile(setting)}
        self._decoder = self._decoder_of(self._models[setting])
        kl, top1 = self._distance(self._judge(self._decoder))
        self._prefill(self._decoder)
        self._round(self._decoder)
        prefill = min(self._prefill(self._decoder) for _ in range(2))
        times, change = self._round(self._decoder, self.effort.repeats)
        self.incumbent = Measurement(setting, times, prefill, kl, top1, change)
        return self.incumbent

    def measure_setting(self, setting: Setting) -> Measurement:
        decoder, mine = self._decoder_of(self._model(setting)), self.incumbent
        kl, top1 = self._distance(self._judge(decoder))
        self._prefill(decoder)  # the first one is slower
        ratios: list[dict[int, float]] = []  # one entry per round: time relative to the incumbent, by width
        prefills, changes = list[float](), list[float]()
        for repeat in range(self.effort.repeats):
            if repeat == 0 or mine.prefill_ms * len(self.prompt) < LONG_PREFILL_SECONDS * 1e3:
                prefills.append(self._prefill(decoder) / self._prefill(self._decoder))
            (theirs, change), (ours, _) = self._round(decoder), self._round(self._decoder)
            changes.append(change)
            ratios.append({width: theirs[width] / ours[width] for width in ours})
        verify = {width: statistics.median(r[width] for r in ratios) * ms for width, ms in mine.verify_ms.items()}
        prefill, change = statistics.median(prefills) * mine.prefill_ms, statistics.median(changes)
        return Measurement(setting, verify, prefill, kl, top1, change)

    def probe_measurement(self, measurement: Measurement) -> Measurement:
        """Return ``measurement`` with the rule of exact arithmetic, and the time of its fewest tokens."""
        exactness, verify = self._probe(measurement.setting), measurement.verify_ms
        if exactness.rule and (fewest := exactness.rule.fewest) not in verify:
            decoder, widest = self._decoder_of(self._model(measurement.setting)), max(verify)
            self._prefill(decoder)
            times, _ = self._round(decoder, 2, (fewest, widest))
            verify = verify | {fewest: verify[widest] * times[fewest] / times[widest]}
        return replace(measurement, verify_ms=verify, invariance=exactness.invariance, rule=exactness.rule)

    def _probe(self, setting: Setting) -> Exactness:
        """Find the rule of exact arithmetic, and remember it for loads."""
        uncached = {} if self._options.cache_folder else {"CACHE_DIR": ""}
        options = complete_device_options(
            DeviceOptions(cache_dir=self._options.cache_folder, properties=uncached), setting
        )
        file = find_exactness_file(self._folder, options, setting.engine)
        return read_cached(Exactness, file) or write_cached(file, self._model(setting).find_exactness())

    def probe_by_threads(self, setting: Setting) -> dict[int, Exactness]:
        """Find the rule thoroughly, with the usual number of threads and with one; by number of threads."""
        found: dict[int, Exactness] = {}
        for wanted in (None, 1):
            model = self._compile(setting, threads=wanted)
            threads = int(model.ir.compiled_model.get_property("INFERENCE_NUM_THREADS"))
            if threads not in found:
                found[threads] = model.find_exactness(FULL_TRIAL)
        return found

    def measure_exact_price(self, setting: Setting, rule: FeedRule | None) -> float | None:
        """Return how many times as long as in fast arithmetic a token takes by ``rule``, after the prompt."""
        if not rule:
            return None
        decoders = self._compile(setting).decoder(rule=rule), self._compile(setting, paired=False).decoder()
        for decoder in decoders:
            decoder.feed([self.prompt], [1])
        times = [[self._time(decoder, 1)[1] for decoder in decoders] for _ in range(2 * self.effort.repeats)]
        return statistics.median(exact / fast for exact, fast in times)

    def _model(self, setting: Setting) -> CompiledModel:
        """Return the incumbent's model or the one that was compiled last, or compile one: memory may not hold three."""
        if setting not in self._models:
            self._models = {self.incumbent.setting: self._models[self.incumbent.setting]}
            self._models[setting] = self._compile(setting)
        return self._models[setting]

    def _compile(self, setting: Setting, paired: bool = True, threads: int | None = None) -> CompiledModel:
        # Not cached on a CPU: what is compiled only to be measured isn't worth keeping; a GPU takes minutes for it.
        kept = self._options if is_gpu(self._options.device) else DeviceOptions(properties={"CACHE_DIR": ""})
        options = replace(kept, threads=threads, properties=kept.properties | setting.properties)
        if setting.engine == "paged":
            if setting.kv_precision and not (check := check_paged(self._folder, options)).usable:
                raise OvspecError(check.reason)
            return CompiledModel(compile_paged(self._folder, options, paired), "paged", "", PagedDecoder.rollback)
        ir = compile_ir(self._folder, options)
        return CompiledModel(ir, "stateful", "", probe_rollback(ir).rollback)

    def _decoder_of(self, model: CompiledModel) -> Decoder:
        # A second query for each token, as exact arithmetic has it on a CPU, and as many tokens and logits as are fed.
        paired = model.engine == "paged" and not is_gpu(model.ir.device)
        return model.decoder(rule=FeedRule(queries=2) if paired else fast_feed_rule(model.engine, model.ir.device))

    def _judge(self, decoder: Decoder) -> np.ndarray:
        """Return the logits of every position of the text."""
        decoder.reset(1)
        return decoder.feed([self.text], [len(self.text)])[0]

    def _prefill(self, decoder: Decoder) -> float:
        """Read the prompt; return ms per token."""
        decoder.reset(1)
        began = time.perf_counter()
        decoder.feed([self.prompt], [len(self.prompt)])
        return (time.perf_counter() - began) * 1e3 / len(self.prompt)

    def _round(
        self, decoder: Decoder, repeats: int = 1, widths: tuple[int, ...] = ()
    ) -> tuple[dict[int, float], float]:
        """Return the median milliseconds of inferences after the text by width, and what a change of width adds."""
        times: dict[int, list[float]] = {width: [] for width in widths or self.effort.widths}
        changes: list[float] = []
        for repeat in range(repeats + 1):
            for width in times:
                changed, same = self._time(decoder, width)
                if repeat:  # the first inferences of all, and those after another model's, are slower
                    times[width].append(same)
                    changes.append(changed - same)
        return {width: statistics.median(found) for width, found in times.items()}, statistics.median(changes)

    def _time(self, decoder: Decoder, width: int) -> tuple[float, float]:
        """Return the milliseconds of an inference after one of another width, and after some of the same."""
        found, began = [], time.perf_counter()
        while len(found) < 2 or (time.perf_counter() - began < REPEATED_SECONDS and len(found) < 20):
            start = time.perf_counter()
            decoder.feed([self.text[:width]], [width])
            found.append((time.perf_counter() - start) * 1e3)
            decoder.truncate(0, len(self.prompt))
        return found[0], statistics.median(found[1 + len(found) // 4 :])

    def _distance(self, logits: np.ndarray) -> tuple[float, float]:
        """Return the mean KL divergence from the reference (nats) and the share of equal top-1 tokens."""
        divergence = 0.0
        for i in range(0, len(logits), 64):  # in pieces, because float64 takes much memory
            right, ours = self._right[i : i + 64], log_softmax(logits[i : i + 64])
            divergence += float((np.exp(right) * (right - ours)).sum())
        same = (self._right.argmax(1) == logits.argmax(1)).mean()
        return max(0.0, divergence / len(logits)), float(same)
