"""Times a model's settings, in turns with the incumbent, and measures their accuracy."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.files import read_cached, write_cached
from ovspec.cache.decoder import Decoder, FeedRule, RollbackMethod
from ovspec.cache.hybrid import paged_decoder_class
from ovspec.cache.stateful import StatefulDecoder
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions, is_gpu
from ovspec.sampling.logprobs import log_softmax
from ovspec.setup.engine_choice import CompiledModel, fast_arithmetic_rule
from ovspec.setup.exactness import FULL_TRIAL, Exactness, find_exactness_file
from ovspec.setup.paging import EXACT_PROPERTIES, check_paged, compile_paged
from ovspec.setup.profile import EngineSetting, Measurement, complete_device_options
from ovspec.setup.rollback_probing import probe_rollback

MAX_REPEATED_SECONDS = 0.02  # seconds for repetitions of a forward pass
LONG_PREFILL_SECONDS = 0.5  # seconds; a longer prefill is timed once


@dataclass(frozen=True)
class TuningEffort:
    """The amount of measuring."""

    prompt_tokens: int  # length of the timed prompt, and of the text before timed forward passes
    widths: tuple[int, ...]  # of the timed forward passes, in tokens
    repeats: int  # number of timings per setting
    is_full: bool  # whether to try all settings, and to probe exact arithmetic thoroughly
    accuracy_tokens: int = 256  # length of the text for measuring accuracy


class SettingTimer:
    """Times settings of a model against the incumbent, with the first tokens of ``text_ids`` (n,) as the prompt.

    ``options``: name the folder for cached findings.
    """

    def __init__(self, folder: Path, text_ids: np.ndarray, effort: TuningEffort, options: DeviceOptions) -> None:
        self.text_ids = text_ids
        self.prompt_ids = text_ids[: effort.prompt_tokens]
        self.effort = effort
        self._folder = folder
        self._options = options
        ir = compile_ir(folder, DeviceOptions(properties=EXACT_PROPERTIES))
        logits = StatefulDecoder(ir, RollbackMethod(None)).feed([text_ids], [len(text_ids)])[0]
        self._reference_logprobs = log_softmax(logits).astype(np.float32)

    def set_incumbent(self, setting: EngineSetting) -> Measurement:
        """Measure the incumbent, the setting to compare others with, and keep it loaded."""
        self._models = {setting: self._compile_model(setting)}
        self._incumbent_decoder = self._make_timed_decoder(self._models[setting])
        kl_divergence, top1_share = self._compare_with_reference(self._compute_logits(self._incumbent_decoder))
        self._time_prefill(self._incumbent_decoder)
        self._time_widths(self._incumbent_decoder)
        prefill_ms = min(self._time_prefill(self._incumbent_decoder) for _ in range(2))
        verify_ms, change_ms = self._time_widths(self._incumbent_decoder, self.effort.repeats)
        self.incumbent = Measurement(setting, verify_ms, prefill_ms, kl_divergence, top1_share, change_ms)
        return self.incumbent

    def measure_setting(self, setting: EngineSetting) -> Measurement:
        decoder = self._make_timed_decoder(self._load_model(setting))
        kl_divergence, top1_share = self._compare_with_reference(self._compute_logits(decoder))
        self._time_prefill(decoder)  # the first prefill is slower
        incumbent = self.incumbent
        time_ratios: list[dict[int, float]] = []  # one entry per round: time relative to the incumbent, by width
        prefill_ratios: list[float] = []
        changes_ms: list[float] = []
        for repeat in range(self.effort.repeats):
            if repeat == 0 or incumbent.prefill_ms * len(self.prompt_ids) < LONG_PREFILL_SECONDS * 1e3:
                prefill_ratios.append(self._time_prefill(decoder) / self._time_prefill(self._incumbent_decoder))
            times_ms, change_ms = self._time_widths(decoder)
            incumbent_times, _ = self._time_widths(self._incumbent_decoder)
            changes_ms.append(change_ms)
            time_ratios.append({width: times_ms[width] / incumbent_times[width] for width in incumbent_times})
        median_ratios = {
            width: statistics.median(time_ratio[width] for time_ratio in time_ratios) for width in incumbent.verify_ms
        }
        verify_ms = {width: median_ratios[width] * width_ms for width, width_ms in incumbent.verify_ms.items()}
        prefill_ms = statistics.median(prefill_ratios) * incumbent.prefill_ms
        return Measurement(setting, verify_ms, prefill_ms, kl_divergence, top1_share, statistics.median(changes_ms))

    def with_exactness(self, measurement: Measurement) -> Measurement:
        """Return ``measurement`` with the rule of exact arithmetic, and the time of a pass of its minimum width."""
        exactness = self._probe_exactness(measurement.setting)
        verify_ms = measurement.verify_ms
        if exactness.rule and (min_tokens := exactness.rule.fewest) not in verify_ms:
            decoder = self._make_timed_decoder(self._load_model(measurement.setting))
            max_width = max(verify_ms)
            self._time_prefill(decoder)
            times_ms, _ = self._time_widths(decoder, 2, (min_tokens, max_width))
            verify_ms = verify_ms | {min_tokens: verify_ms[max_width] * times_ms[min_tokens] / times_ms[max_width]}
        return replace(measurement, verify_ms=verify_ms, invariance=exactness.invariance, rule=exactness.rule)

    def _probe_exactness(self, setting: EngineSetting) -> Exactness:
        """Find the rule of exact arithmetic, and cache it for loads."""
        options = DeviceOptions(cache_dir=self._options.cache_folder)
        if not self._options.cache_folder:
            options = DeviceOptions(properties={"CACHE_DIR": ""})
        options = complete_device_options(options, setting)
        exactness_file = find_exactness_file(self._folder, options, setting.engine)
        return read_cached(Exactness, exactness_file) or write_cached(
            exactness_file, self._load_model(setting).find_exactness()
        )

    def probe_exactness_by_threads(self, setting: EngineSetting) -> dict[int, Exactness]:
        """Find the rule thoroughly, by number of threads: the default number, and a single thread."""
        exactness_by_threads: dict[int, Exactness] = {}
        for requested_threads in (None, 1):
            model = self._compile_model(setting, threads=requested_threads)
            thread_count = int(model.ir.compiled_model.get_property("INFERENCE_NUM_THREADS"))
            if thread_count not in exactness_by_threads:
                exactness_by_threads[thread_count] = model.find_exactness(FULL_TRIAL)
        return exactness_by_threads

    def measure_exact_price(self, setting: EngineSetting, feed_rule: FeedRule | None) -> float | None:
        """Return the time per token by ``feed_rule``, relative to fast arithmetic, after the prompt."""
        if not feed_rule:
            return None
        exact_decoder = self._compile_model(setting).make_decoder(feed_rule=feed_rule)
        decoders = (exact_decoder, self._compile_model(setting, two_queries=False).make_decoder())
        for decoder in decoders:
            decoder.feed([self.prompt_ids], [1])
        times_ms = [[self._time_width(decoder, 1)[1] for decoder in decoders] for _ in range(2 * self.effort.repeats)]
        return statistics.median(exact_ms / fast_ms for exact_ms, fast_ms in times_ms)

    def _load_model(self, setting: EngineSetting) -> CompiledModel:
        """Return the model in this setting, kept or compiled.

        Kept are the incumbent and the last other setting; memory may be too small for a third copy.
        """
        if setting not in self._models:
            self._models = {self.incumbent.setting: self._models[self.incumbent.setting]}
            self._models[setting] = self._compile_model(setting)
        return self._models[setting]

    def _compile_model(
        self, setting: EngineSetting, two_queries: bool = True, threads: int | None = None
    ) -> CompiledModel:
        # Not cached on a CPU: a model compiled only for timing isn't worth it; on a GPU, compiling takes minutes.
        options = self._options if is_gpu(self._options.device) else DeviceOptions(properties={"CACHE_DIR": ""})
        options = replace(options, threads=threads, properties=options.properties | setting.properties)
        if setting.engine == "paged":
            if setting.kv_precision and not (paged_check := check_paged(self._folder, options)).usable:
                raise OvspecError(paged_check.reason)
            ir = compile_paged(self._folder, options, two_queries)
            return CompiledModel(ir, "paged", "", paged_decoder_class(ir).rollback)
        ir = compile_ir(self._folder, options)
        return CompiledModel(ir, "stateful", "", probe_rollback(ir).rollback)

    def _make_timed_decoder(self, model: CompiledModel) -> Decoder:
        feed_rule = fast_arithmetic_rule(model.engine, model.ir.device)
        if model.engine == "paged" and not is_gpu(model.ir.device):
            # A second query for each token, as in exact arithmetic on a CPU, but no minimum of tokens or logits.
            feed_rule = FeedRule(queries=2)
        return model.make_decoder(feed_rule=feed_rule)

    def _compute_logits(self, decoder: Decoder) -> np.ndarray:
        """Return the logits of every position of the text."""
        decoder.reset(1)
        return decoder.feed([self.text_ids], [len(self.text_ids)])[0]

    def _time_prefill(self, decoder: Decoder) -> float:
        """Read the prompt; return ms per token."""
        decoder.reset(1)
        start_time = time.perf_counter()
        decoder.feed([self.prompt_ids], [len(self.prompt_ids)])
        return (time.perf_counter() - start_time) * 1e3 / len(self.prompt_ids)

    def _time_widths(
        self, decoder: Decoder, repeats: int = 1, widths: tuple[int, ...] = ()
    ) -> tuple[dict[int, float], float]:
        """Return the median milliseconds of forward passes after the text, by width, and of a change of width."""
        times_ms: dict[int, list[float]] = {width: [] for width in widths or self.effort.widths}
        changes_ms: list[float] = []
        for repeat in range(repeats + 1):
            for width in times_ms:
                first_ms, later_ms = self._time_width(decoder, width)
                if repeat:  # skip the first passes: they are slower, also after another model's passes
                    times_ms[width].append(later_ms)
                    changes_ms.append(first_ms - later_ms)
        medians_ms = {width: statistics.median(milliseconds) for width, milliseconds in times_ms.items()}
        return medians_ms, statistics.median(changes_ms)

    def _time_width(self, decoder: Decoder, width: int) -> tuple[float, float]:
        """Return the milliseconds of a forward pass of a new width, and of later passes of the same width."""
        times_ms: list[float] = []
        start_time = time.perf_counter()
        while len(times_ms) < 2 or (time.perf_counter() - start_time < MAX_REPEATED_SECONDS and len(times_ms) < 20):
            inference_start = time.perf_counter()
            decoder.feed([self.text_ids[:width]], [width])
            times_ms.append((time.perf_counter() - inference_start) * 1e3)
            decoder.truncate(0, len(self.prompt_ids))
        return times_ms[0], statistics.median(times_ms[1 + len(times_ms) // 4 :])

    def _compare_with_reference(self, logits: np.ndarray) -> tuple[float, float]:
        """Return the mean KL divergence from the reference (nats) and the share of equal top-1 tokens."""
        kl_divergence = 0.0
        for i in range(0, len(logits), 64):  # in pieces, because float64 takes much memory
            reference_logprobs = self._reference_logprobs[i : i + 64]
            logprobs = log_softmax(logits[i : i + 64])
            kl_divergence += float((np.exp(reference_logprobs) * (reference_logprobs - logprobs)).sum())
        top1_share = (self._reference_logprobs.argmax(1) == logits.argmax(1)).mean()
        return max(0.0, kl_divergence / len(logits)), float(top1_share)
