"""Measure which settings are best for a model on this machine, for ``ovspec tune`` and first loads.

The machine's speed changes over time, so settings are timed in turns with the one that is used without a profile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from ovspec.base.errors import InferenceError, OvspecError
from ovspec.base.files import read_text, remember
from ovspec.base.progress import note
from ovspec.ir.compile import MODEL_FILE, check_weights
from ovspec.ir.config import model_config
from ovspec.ir.device import DeviceOptions, check_device, default_kv_precisions, is_gpu, is_virtual, native_precisions
from ovspec.ir.memory import room_for
from ovspec.setup.engine_choice import EngineName
from ovspec.setup.paging import check_paged
from ovspec.setup.profile import Goal, Profile, Setting, known_profile, largest_group, profile_file, weight_shapes
from ovspec.setup.setting_timer import Effort, SettingTimer
from ovspec.setup.weight_formats import formats_of
from ovspec.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("tuning_text.txt")
# A first load does not tune a model with more bytes of weights than this, because it would take too long.
LARGEST_UNASKED = 1.5e9
USUAL_GROUP = 32  # OpenVINO's default on the CPU
FULL = Effort(256, (1, 2, 4, 8, 16), 3, True)
SHORT = Effort(64, (1, 2, 4, 8), 3, False)


def tune(
    folder: Path,
    options: DeviceOptions,
    goal: Goal = "balanced",
    effort: Effort = FULL,
    tell: Callable[[str, float], None] = lambda *_: None,
) -> Profile:
    """Measure settings for the model in ``folder``.

    ``tell`` is called with what comes next and the share of the work that is done. Raises OvspecError if the device is
    AUTO or HETERO, or too little memory is free.
    """
    if is_virtual(check_device(options.device)):
        raise OvspecError(f"`device={options.device!r}`: name a single device to tune, such as CPU or GPU.")
    on_gpu = is_gpu(options.device)
    if not room_for(folder, 3):
        raise OvspecError(f"{folder}: not enough memory is free for tuning, which holds the model twice.")
    began = time.monotonic()
    tell("f32 without dynamic quantisation (reference for accuracy)", 0.0)
    judged = min(effort.judged, model_config(folder).context_length or effort.judged)
    text = np.resize(Tokenizer(folder).encode(read_text(TEXT)), max(effort.tokens, judged))
    timer = SettingTimer(folder, text, effort, options)
    usual = Setting("paged" if check_paged(folder, options).usable else "stateful")
    group = largest_group(folder)
    others = settings_on_gpu(usual.engine, group) if on_gpu else settings_to_try(usual.engine, group, effort.full)
    total = 3 + len(others)
    tell(f"{usual} (used without a profile)", 1 / total)
    measured = [timer.set_incumbent(usual)]
    if effort.full and usual.engine != "stateful" and not on_gpu:
        tell(f"{Setting('stateful')} (OpenVINO's default)", 2 / total)
        measured.append(timer.measure(Setting("stateful")))
    found = Profile(goal, effort.full, effort.tokens, 0.0, measured[-1], measured)
    for number, setting in enumerate(others, 3):
        tell(str(setting), number / total)
        # Its logits may not be numbers, as those of some models in f16; a GPU may have no kernels for it.
        with suppress(OvspecError if on_gpu else InferenceError):
            measured.append(timer.measure(setting))
    # A probe takes longer than measuring: only settings that may be chosen are probed, and the usual one only where
    # another might be less exact.
    while (best := found.choose(DeviceOptions(), "auto")) and not on_gpu:
        unprobed = best if best.invariance is None else measured[0]
        if unprobed.invariance is not None or best.invariance == 1:
            break
        tell(f"{unprobed.setting}: bits of every way of feeding", 1.0)
        measured[measured.index(unprobed)] = timer.probed(unprobed)
    if effort.full and best and not on_gpu:
        tell(f"{best.setting}: bits of long contexts, and of one thread", 1.0)
        found = replace(found, exactness=timer.exactness(best.setting))
        tell(f"{best.setting}: the price of exact arithmetic", 1.0)
        found = replace(found, price=timer.price(best.setting, next(iter(found.exactness.values())).rule))
    if effort.full and not on_gpu:
        tell("weights in other formats", 1.0)
        found = replace(found, formats_ms=formats_of(weight_shapes(folder)))
    return replace(found, seconds=time.monotonic() - began)


def settings_to_try(engine: EngineName, most_group: int | None, full: bool) -> list[Setting]:
    """Return the settings to compare with the usual ones: precisions, and groups of dynamic quantisation.

    A first load (not ``full``) tries only what is most likely to be faster: f32 with the largest group.
    """
    usual = default_kv_precisions(DeviceOptions())["CPU"]  # the precision in which OpenVINO computes by default
    if not full:
        largest = [group for group in (128, 64) if most_group and group <= most_group]
        return [Setting(engine, "f32", group) for group in largest[:1]]
    precisions = ["f32", *native_precisions()]
    if not most_group:
        return [Setting(engine, precision) for precision in precisions if precision != usual]
    groups = [group for group in (USUAL_GROUP, 64, 128) if group <= most_group]
    found = [Setting(engine, precision, group) for precision in precisions for group in groups]
    # Without quantised activations, weights in f32 are exact, as `--for accuracy` may require.
    return [each for each in found if each != Setting(engine, usual, USUAL_GROUP)] + [Setting(engine, "f32", 0)]


def settings_on_gpu(engine: EngineName, most_group: int | None) -> list[Setting]:
    """Return the settings to compare with a GPU's usual ones: precisions, dynamic quantisation, and a u8 KV cache."""
    groups = [Setting(engine, group=group) for group in (0, 32, 128) if most_group and group <= most_group]
    return [*groups, Setting(engine, "f32"), *[Setting(engine, kv_precision="u8")] * (engine == "paged")]


def tune_if_new(folder: Path, options: DeviceOptions) -> Profile | None:
    """Return the known profile, or measure and keep a short one; None if that is not possible or takes too long."""
    profile = known_profile(folder, options)
    if profile or options.device.upper() != "CPU" or not options.cache_folder:
        return profile
    if check_weights(folder / MODEL_FILE) > LARGEST_UNASKED:
        note(f"{folder}: too large to tune automatically; run 'ovspec tune {folder}' to find the fastest settings.")
        return None
    note(f"{folder}: measuring the fastest settings, once; 'ovspec tune' measures more, OVSPEC_TUNE=0 skips this.")
    try:
        return remember(profile_file(folder, options), tune(folder, options, effort=SHORT))
    except OvspecError as error:
        note(str(error))
        return None
