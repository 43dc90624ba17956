"""The settings measured by ``tuning.py`` for a model on this machine, and the choice of the best."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ovspec.base.files import read_cached, write_atomically
from ovspec.cache.decoder import Arithmetic, FeedRule
from ovspec.ir.compile import MODEL_FILE
from ovspec.ir.device import DeviceOptions, default_cache_dir, identify_machine, is_virtual_device, parse_device_option
from ovspec.setup.engine_choice import (
    CompiledModel,
    EngineChoice,
    EngineName,
    load_compiled_model,
    load_model_giving_features,
)
from ovspec.setup.exactness import Exactness

Goal = Literal["decode", "prefill", "balanced", "accuracy"]
GOALS = get_args(Goal)
PROFILE_FORMAT = 9
# A setting is acceptable if its KL divergence is at most this many times the divergence of OpenVINO's own default, or
# at most this many nats, about the cost of int8 weights for a model of a billion parameters ...
MAX_KL_RATIO = 1.25
MAX_KL_DIVERGENCE = 3e-4
# ... and if this share of the most probable tokens matches, or as many as with the default.
MIN_TOP1_SHARE = 0.99
# The goal "accuracy" allows at most this many nats.
MAX_KL_FOR_ACCURACY = 1e-6
# A setting is preferred to an earlier one if it takes at most this share of the time.
CLEARLY_BETTER_COST_RATIO = 0.97


@dataclass(frozen=True)
class EngineSetting:
    """An engine and properties to try; None leaves a choice to OpenVINO.

    The KV cache has the arithmetic's type on a CPU, and f16 on a GPU, unless another type is set.
    """

    engine: EngineName
    precision: str | None = None
    group: int | None = None  # activations with a shared scale if weights are compressed; 0: not quantised
    kv_precision: str | None = None  # on a GPU; None: the default

    @property
    def properties(self) -> dict[str, str]:
        properties = {
            "INFERENCE_PRECISION_HINT": self.precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": self.group,
            "KV_CACHE_PRECISION": self.kv_precision,
        }
        return {name: str(setting) for name, setting in properties.items() if setting is not None}

    def __str__(self) -> str:
        quantisation_text = f", dynamic quantisation {self.group or 'off'}" * (self.group is not None)
        kv_cache_text = f", KV cache {self.kv_precision}" * bool(self.kv_precision)
        return f"{self.engine}, {self.precision or 'default precision'}{quantisation_text}{kv_cache_text}"


@dataclass(frozen=True)
class Measurement:
    """Speed and accuracy of a setting on the built-in text, compared with f32 without dynamic quantisation."""

    setting: EngineSetting
    verify_ms: dict[int, float]  # per forward pass after the text, by width in tokens
    prefill_ms: float  # per token of the prompt
    kl: float  # mean KL divergence in nats
    top1: float  # share of positions with the same most probable token
    change_ms: float = 0.0  # additional time of a pass after a pass of another width
    # Share of probed positions with the same logits, to the bit, however the text was fed; None: not probed.
    invariance: float | None = None
    rule: FeedRule | None = None  # the rule of exact arithmetic, if found

    def inference_ms(self, width: int) -> float:
        """Return the milliseconds of a forward pass fed with ``width`` tokens, by the rule of exact arithmetic."""
        min_tokens = self.rule.fewest if self.rule else 0
        return self.computation_ms(max(width, min_tokens))

    def computation_ms(self, width: int) -> float:
        """Return the milliseconds of a forward pass computing ``width`` tokens, timed or interpolated."""
        widths = sorted(self.verify_ms)
        return float(np.interp(width, widths, [self.verify_ms[width] for width in widths]))

    @property
    def token_ms(self) -> float:
        return self.inference_ms(1)

    def compute_goal_cost_ms(self, goal: Goal) -> float:
        """Return the milliseconds to minimise for ``goal``.

        For "balanced" they are for a prompt of 256 tokens and 128 forward passes, a third each of 2, 4 and 8 tokens.
        """
        if goal == "decode":
            return self.token_ms
        if goal == "prefill":
            return self.prefill_ms
        return 256 * self.prefill_ms + 128 / 3 * sum(map(self.inference_ms, (2, 4, 8)))

    def is_accurate_enough(self, goal: Goal, default_measurement: Measurement) -> bool:
        """Return whether ``goal`` allows this setting, by comparison with OpenVINO's ``default_measurement``."""
        if goal == "accuracy":
            return self.kl <= MAX_KL_FOR_ACCURACY
        return self.kl <= max(MAX_KL_RATIO * default_measurement.kl, MAX_KL_DIVERGENCE) and self.top1 >= min(
            MIN_TOP1_SHARE, default_measurement.top1
        )


@dataclass(frozen=True)
class Profile:
    """Measurements of a kind of model on a machine."""

    goal: Goal
    full: bool  # False for a first load's short version
    tokens: int  # length of the text
    seconds: float  # duration of the measurement
    reference: Measurement  # OpenVINO's default, the baseline for accuracy; in the short version measurements[0]
    measurements: list[Measurement]  # first the setting used without a profile; others must be clearly better
    exactness: dict[int, Exactness] = field(default_factory=dict)  # for the chosen setting, by number of threads
    price: float | None = None  # time per token in exact arithmetic, relative to fast arithmetic
    formats_ms: dict[str, float] = field(default_factory=dict)  # per product, by weight format; the model's is first

    def choose_measurement(self, options: DeviceOptions, engine: EngineChoice) -> Measurement | None:
        """Return the best measurement compatible with the user's options; None if there is none."""
        usual_measurement = self.measurements[0]
        fixed_properties = options.fixed_properties
        if engine == "auto":
            engine = usual_measurement.setting.engine
        permitted_measurements = [
            m
            for m in self.measurements
            if m.setting.engine == engine
            and all(fixed_properties.get(name, value) == value for name, value in m.setting.properties.items())
            # Rollback isn't exact with another cache type.
            and not (m.setting.kv_precision and "KV_CACHE_PRECISION" not in fixed_properties)
        ]
        accurate_measurements = [m for m in permitted_measurements if m.is_accurate_enough(self.goal, self.reference)]
        if "INFERENCE_PRECISION_HINT" not in fixed_properties:
            accurate_measurements = [
                m
                for m in accurate_measurements
                if m.invariance is None or m.invariance >= (usual_measurement.invariance or 0)
            ]
        if not accurate_measurements:
            return next(iter(permitted_measurements), None)
        least_cost = min(m.compute_goal_cost_ms(self.goal) for m in accurate_measurements)
        return next(
            m
            for m in accurate_measurements
            if least_cost > CLEARLY_BETTER_COST_RATIO * m.compute_goal_cost_ms(self.goal)
        )


def complete_device_options(options: DeviceOptions, setting: EngineSetting) -> DeviceOptions:
    return replace(options, properties=setting.properties | options.fixed_properties)


def load_model_with_profile(
    profile: Profile | None,
    folder: Path,
    options: DeviceOptions,
    engine: EngineChoice,
    arithmetic: Arithmetic | None = "fast",
    head: Path | None = None,
) -> CompiledModel:
    """Load like ``load_compiled_model``, with the best setting of ``profile`` for all options left open."""
    best_measurement = profile and profile.choose_measurement(options, engine)
    if best_measurement:
        options = complete_device_options(options, best_measurement.setting)
    if head:
        model = load_model_giving_features(folder, options, engine, arithmetic, head)
    else:
        model = load_compiled_model(folder, options, engine, arithmetic)
    if profile and best_measurement:
        model.profile = str(best_measurement.setting)
        model.kl_divergence = best_measurement.kl
        model.change_ms = best_measurement.change_ms
        model.verify_ms = {profile.tokens: best_measurement.prefill_ms * profile.tokens} | best_measurement.verify_ms
    return model


def find_profile_file(folder: Path, options: DeviceOptions) -> Path | None:
    """Return the profile's file for this machine and models with weights like ``folder``'s; None: no cache."""
    if not options.cache_folder:
        return None
    profile_key = repr((PROFILE_FORMAT, identify_machine(options.device), sorted(count_weight_shapes(folder).items())))
    return options.cache_folder / "profiles" / f"{hashlib.sha256(profile_key.encode()).hexdigest()[:24]}.json"


def count_weight_shapes(folder: Path) -> Counter[tuple[str, str]]:
    """Count the constants of the IR in ``folder`` by (type, shape)."""
    ir_text = (folder / MODEL_FILE).read_text(encoding="utf-8")
    return Counter(re.findall(r'<data element_type="(\w+)" shape="([\d, ]+)"', ir_text))


def find_max_activation_group(folder: Path) -> int | None:
    """Return the maximum group size for activations: the weights' group or row length; None if uncompressed."""
    shapes = count_weight_shapes(folder)
    integer_shapes = [
        shape for element_type, shape in shapes if element_type in ("i8", "u8", "i4", "u4") and "," in shape
    ]
    row_lengths = [int(shape.split(",")[-1]) for shape in integer_shapes]
    return min(
        (row_length for row_length in row_lengths if row_length > 1), default=None
    )  # scales and zero points end in 1


def read_profile(folder: Path, options: DeviceOptions) -> Profile | None:
    """Return the profile measured for models like ``folder``'s, or None."""
    if is_virtual_device(parse_device_option(options.device)):
        return None
    return read_cached(Profile, find_profile_file(folder, options))


def read_profile_json(folder: Path, options: DeviceOptions) -> str | None:
    """Return the profile measured for models like ``folder``'s, in JSON, or None."""
    file = find_profile_file(folder, options)
    return file.read_text(encoding="utf-8") if file and file.is_file() else None


def add_profiles_to_options(profiles: dict[Path, str | None], options: DeviceOptions) -> DeviceOptions:
    """Return ``options`` to load models with another machine's ``profiles``, in JSON by model folder.

    If this machine has other profiles, the given profiles go to a separate cache.
    """
    if all(profile_text in (None, read_profile_json(folder, options)) for folder, profile_text in profiles.items()):
        return options
    cache_name = hashlib.sha256(repr(sorted(map(str, profiles.values()))).encode()).hexdigest()[:16]
    options = replace(options, cache_dir=default_cache_dir() / "adopted" / cache_name)
    for folder, profile_text in profiles.items():
        if profile_text and (file := find_profile_file(folder, options)):
            write_atomically(file, profile_text)
    return options
