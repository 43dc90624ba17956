"""Measure the best settings for a model on this machine, for ``ovspec tune`` and first loads.

The machine's speed changes over time, so settings are timed in turns with the setting used without a profile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from ovspec.base.errors import InferenceError, OvspecError
from ovspec.base.files import read_text, write_cached
from ovspec.base.progress import print_note
from ovspec.ir.compile import MODEL_FILE, check_weights_file
from ovspec.ir.config import read_model_config
from ovspec.ir.device import (
    DeviceOptions,
    default_kv_precisions,
    is_gpu,
    is_virtual_device,
    list_native_precisions,
    parse_device_option,
)
from ovspec.ir.memory import weights_fit_into_memory
from ovspec.setup.engine_choice import EngineName
from ovspec.setup.model_store import name_folder
from ovspec.setup.paging import check_paged
from ovspec.setup.profile import (
    EngineSetting,
    Goal,
    Profile,
    count_weight_shapes,
    find_max_activation_group,
    find_profile_file,
    read_profile,
)
from ovspec.setup.setting_timer import SettingTimer, TuningEffort
from ovspec.setup.weight_formats import time_formats_for_model
from ovspec.text.tokenizer import Tokenizer

TUNING_TEXT_FILE = Path(__file__).with_name("tuning_text.txt")
# A first load tunes only models with at most this many bytes of weights, because tuning larger models takes too long.
MAX_AUTO_TUNED_BYTES = 1.5e9
USUAL_GROUP_SIZE = 32  # OpenVINO's default on the CPU
FULL_EFFORT = TuningEffort(256, (1, 2, 4, 8, 16), 3, True)
SHORT_EFFORT = TuningEffort(64, (1, 2, 4, 8), 3, False)


def tune_model(
    folder: Path,
    options: DeviceOptions,
    goal: Goal = "balanced",
    effort: TuningEffort = FULL_EFFORT,
    report_progress: Callable[[str, float], None] = lambda *_: None,
) -> Profile:
    """Measure settings for the model in ``folder``.

    ``report_progress`` is called with the next step and the finished share of the work. Raises OvspecError if the
    device is AUTO or HETERO, or too little memory is free.
    """
    if is_virtual_device(parse_device_option(options.device)):
        raise OvspecError(f"`device={options.device!r}`: tuning needs a single device, such as CPU or GPU.")
    on_gpu = is_gpu(options.device)
    if not weights_fit_into_memory(folder, 3):
        raise OvspecError(
            f"{folder}: not enough free memory, because tuning loads the model twice; close other programs."
        )
    start_time = time.monotonic()
    report_progress("f32 without dynamic quantisation (reference for accuracy)", 0.0)
    accuracy_tokens = min(effort.accuracy_tokens, read_model_config(folder).context_length or effort.accuracy_tokens)
    text_ids = np.resize(
        Tokenizer(folder).encode(read_text(TUNING_TEXT_FILE)), max(effort.prompt_tokens, accuracy_tokens)
    )
    setting_timer = SettingTimer(folder, text_ids, effort, options)
    usual_setting = EngineSetting("paged" if check_paged(folder, options).usable else "stateful")
    largest_group = find_max_activation_group(folder)
    if on_gpu:
        settings = list_gpu_settings(usual_setting.engine, largest_group)
    else:
        settings = list_cpu_settings(usual_setting.engine, largest_group, effort.is_full)
    step_count = 3 + len(settings)
    report_progress(f"{usual_setting} (used without a profile)", 1 / step_count)
    measurements = [setting_timer.set_incumbent(usual_setting)]
    if effort.is_full and usual_setting.engine != "stateful" and not on_gpu:
        report_progress(f"{EngineSetting('stateful')} (OpenVINO's default)", 2 / step_count)
        measurements.append(setting_timer.measure_setting(EngineSetting("stateful")))
    profile = Profile(goal, effort.is_full, effort.prompt_tokens, 0.0, measurements[-1], measurements)
    for step_number, setting in enumerate(settings, 3):
        report_progress(str(setting), step_number / step_count)
        # Its logits may not be numbers, as in f16 with some models; a GPU may have no kernels for it.
        expected_error = OvspecError if on_gpu else InferenceError
        with suppress(expected_error):
            measurements.append(setting_timer.measure_setting(setting))
    # A probe takes longer than a measurement. So only candidates for the choice are probed, and the usual setting only
    # if the candidate might be less exact.
    while (best_measurement := profile.choose_measurement(DeviceOptions(), "auto")) and not on_gpu:
        unprobed_measurement = measurements[0]
        if best_measurement.invariance is None:
            unprobed_measurement = best_measurement
        if unprobed_measurement.invariance is not None or best_measurement.invariance == 1:
            break
        report_progress(f"{unprobed_measurement.setting}: bits of every way of feeding", 1.0)
        measurements[measurements.index(unprobed_measurement)] = setting_timer.with_exactness(unprobed_measurement)
    if effort.is_full and best_measurement and not on_gpu:
        report_progress(f"{best_measurement.setting}: bits of long contexts, and of one thread", 1.0)
        profile = replace(profile, exactness=setting_timer.probe_exactness_by_threads(best_measurement.setting))
        report_progress(f"{best_measurement.setting}: the price of exact arithmetic", 1.0)
        exact_rule = next(iter(profile.exactness.values())).rule
        profile = replace(profile, price=setting_timer.measure_exact_price(best_measurement.setting, exact_rule))
    if effort.is_full and not on_gpu:
        report_progress("weights in other formats", 1.0)
        profile = replace(profile, formats_ms=time_formats_for_model(count_weight_shapes(folder)))
    return replace(profile, seconds=time.monotonic() - start_time)


def list_cpu_settings(engine: EngineName, largest_group: int | None, is_full: bool) -> list[EngineSetting]:
    """Return the settings to compare with the usual setting: precisions, and groups of dynamic quantisation.

    A first load (not ``is_full``) tries only the setting most likely to be faster: f32 with the largest group.
    """
    default_precision = default_kv_precisions(DeviceOptions())["CPU"]
    if not is_full:
        group_sizes = [group_size for group_size in (128, 64) if largest_group and group_size <= largest_group]
        return [EngineSetting(engine, "f32", group_size) for group_size in group_sizes[:1]]
    precisions = ["f32", *list_native_precisions()]
    if not largest_group:
        return [EngineSetting(engine, precision) for precision in precisions if precision != default_precision]
    group_sizes = [group_size for group_size in (USUAL_GROUP_SIZE, 64, 128) if group_size <= largest_group]
    settings = [EngineSetting(engine, precision, group_size) for precision in precisions for group_size in group_sizes]
    usual_setting = EngineSetting(engine, default_precision, USUAL_GROUP_SIZE)
    # Without quantised activations, weights in f32 are exact, as `--for accuracy` may require.
    return [setting for setting in settings if setting != usual_setting] + [EngineSetting(engine, "f32", 0)]


def list_gpu_settings(engine: EngineName, largest_group: int | None) -> list[EngineSetting]:
    """Return the settings to compare with a GPU's defaults: precisions, dynamic quantisation, and a u8 KV cache."""
    settings = [
        EngineSetting(engine, group=group_size)
        for group_size in (0, 32, 128)
        if largest_group and group_size <= largest_group
    ]
    settings.append(EngineSetting(engine, "f32"))
    if engine == "paged":
        settings.append(EngineSetting(engine, kv_precision="u8"))
    return settings


def load_or_tune_profile(folder: Path, options: DeviceOptions) -> Profile | None:
    """Return the known profile, or measure and keep a short one; None if this is impossible or takes too long."""
    profile = read_profile(folder, options)
    if profile or options.device.upper() != "CPU" or not options.cache_folder:
        return profile
    name = name_folder(folder)
    if check_weights_file(folder / MODEL_FILE) > MAX_AUTO_TUNED_BYTES:
        print_note(f"{name}: too large to tune automatically; run 'ovspec tune {name}' to find the fastest settings.")
        return None
    print_note(f"{name}: measuring the fastest settings, once; 'ovspec tune' measures more, OVSPEC_TUNE=0 skips this.")
    try:
        return write_cached(find_profile_file(folder, options), tune_model(folder, options, effort=SHORT_EFFORT))
    except OvspecError as error:
        print_note(str(error))
        return None
