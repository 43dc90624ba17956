"""The choice among given measurements, and that the user's own properties take precedence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, STRICT
from hypothesis import given
from hypothesis import strategies as st

import ovspec.setup.profile
from ovspec.base.files import write_cached
from ovspec.cache.decoder import FeedRule
from ovspec.cli.tune import format_tuning_report
from ovspec.ir.device import DeviceOptions, make_compile_properties
from ovspec.setup.exactness import Exactness
from ovspec.setup.profile import (
    CLEARLY_BETTER_COST_RATIO,
    GOALS,
    MAX_KL_DIVERGENCE,
    MAX_KL_FOR_ACCURACY,
    MAX_KL_RATIO,
    MIN_TOP1_SHARE,
    EngineSetting,
    Goal,
    Measurement,
    Profile,
    add_profiles_to_options,
    complete_device_options,
    find_max_activation_group,
    find_profile_file,
    read_profile,
    read_profile_json,
)

DEMO = ROOT / "models" / "demo"
USUAL = EngineSetting("paged")
KL = 10 * MAX_KL_DIVERGENCE  # of the default, so that the factor is what limits the others


def measured(
    setting: EngineSetting, step: float = 10.0, prefill: float = 1.0, kl: float = KL, invariance: float | None = 1.0
) -> Measurement:
    times = {width: step * width**0.3 for width in (1, 2, 4, 8)}
    return Measurement(setting, times, prefill, kl, 1.0, 0.0, invariance)


def profile(*measurements: Measurement, goal: Goal = "balanced") -> Profile:
    return Profile(goal, True, 256, 1.0, measured(EngineSetting("stateful")), [measured(USUAL), *measurements])


def chosen(found: Profile, options: DeviceOptions | None = None, engine: str = "auto") -> EngineSetting | None:
    best = found.choose_measurement(options or DeviceOptions(), engine)  # type: ignore[arg-type]
    return best and best.setting


FAST = EngineSetting("paged", "f32", 128)


def test_the_faster_one() -> None:
    assert chosen(profile(measured(FAST, step=5))) == FAST


def test_only_where_it_is_clearly_faster() -> None:
    assert chosen(profile(measured(FAST, step=9.9, prefill=1))) == USUAL
    later = replace(FAST, group=64)
    assert chosen(profile(measured(FAST, step=5), measured(later, step=4.95))) == FAST


@pytest.mark.parametrize(("factor", "expected"), [(0.99, FAST), (1.01, USUAL)])
def test_not_where_it_moves_the_output_more_than_the_default(factor: float, expected: EngineSetting) -> None:
    assert chosen(profile(measured(FAST, step=1, kl=KL * MAX_KL_RATIO * factor))) == expected


@pytest.mark.parametrize(("kl", "expected"), [(0.99 * MAX_KL_DIVERGENCE, FAST), (1.01 * MAX_KL_DIVERGENCE, USUAL)])
def test_what_is_less_than_quantising_weights_costs_is_allowed(kl: float, expected: EngineSetting) -> None:
    """However accurate the default is, but for the goal that asks for accuracy."""
    strict = measured(USUAL, kl=1e-7)
    found = replace(profile(measured(FAST, step=5, kl=kl)), reference=strict)
    found = replace(found, measurements=[strict, *found.measurements[1:]])
    assert chosen(found) == expected
    assert chosen(replace(found, goal="accuracy")) == USUAL


@pytest.mark.parametrize(
    ("top1", "default", "expected"),
    [
        (MIN_TOP1_SHARE, 1.0, FAST),
        (MIN_TOP1_SHARE - 0.01, 1.0, USUAL),
        (MIN_TOP1_SHARE - 0.01, MIN_TOP1_SHARE - 0.01, FAST),
    ],
)
def test_not_where_other_tokens_become_the_most_probable(top1: float, default: float, expected: EngineSetting) -> None:
    reference = replace(measured(EngineSetting("stateful")), top1=default)
    found = replace(profile(replace(measured(FAST, step=5), top1=top1)), reference=reference)
    assert chosen(found) == expected


def test_the_cost_is_that_of_the_rule() -> None:
    """A setting is faster only if it still is with the tokens that its rule adds, whether they were timed or not."""
    five = replace(measured(FAST, step=5), rule=FeedRule(queries=2, fewest=5, fewest_logits=5))
    four, eight = five.verify_ms[4], five.verify_ms[8]
    assert five.token_ms == pytest.approx(four + (eight - four) / 4)
    assert [five.inference_ms(width) for width in (1, 2, 4, 5)] == [five.token_ms] * 4
    assert five.inference_ms(8) == eight
    assert five.compute_goal_cost_ms("balanced") == pytest.approx(256 + 128 / 3 * (2 * five.token_ms + eight))
    assert five.compute_goal_cost_ms("decode") == five.token_ms
    slower = measured(USUAL, step=7.5)
    assert (
        replace(five, rule=None).compute_goal_cost_ms("decode")
        < slower.compute_goal_cost_ms("decode")
        < five.compute_goal_cost_ms("decode")
    )


@pytest.mark.parametrize("invariance", [0.0, 0.99])
def test_a_draft_must_not_change_the_text_for_a_little_speed(invariance: float) -> None:
    varying = measured(FAST, step=5, invariance=invariance)
    assert chosen(profile(varying)) == USUAL
    assert all(chosen(profile(varying, goal=goal)) == USUAL for goal in GOALS)
    assert chosen(profile(varying), DeviceOptions(precision="f32")) == FAST, "the user names a precision"
    # If even the usual setting varies, there is nothing to lose.
    usual = replace(profile(varying), measurements=[measured(USUAL, invariance=0.0), replace(varying, invariance=0.0)])
    assert chosen(usual) == FAST


def test_the_table_says_what_the_probe_found() -> None:
    found = replace(profile(measured(FAST, step=5)), exactness={2: Exactness(None, 1836, 3)})
    said = "\n".join(format_tuning_report("target", DEMO, found))
    differ = "3 of 1836 probed positions differ from one pass over their text"
    assert f"exact arithmetic, 2 threads: no rule found; {differ}" in said and "price" not in said
    found = replace(found, exactness={1: Exactness(STRICT, 1836, 0)}, price=1.07)
    said = "\n".join(format_tuning_report("target", DEMO, found))
    assert f"exact arithmetic, 1 thread: {STRICT}; 0 of 1836 probed positions differ" in said
    assert "price of exact arithmetic: a token takes 1.07x the time of fast arithmetic" in said
    assert "probed" not in "\n".join(format_tuning_report("target", DEMO, profile(measured(FAST, step=5))))


def test_goals() -> None:
    decoder = measured(replace(FAST, group=64), step=5, prefill=3)
    reader = measured(replace(FAST, group=32), step=12, prefill=0.1)
    exact = measured(replace(FAST, group=0), step=30, prefill=9, kl=0)
    found = {goal: chosen(profile(decoder, reader, exact, goal=goal)) for goal in GOALS}
    assert found["decode"] == decoder.setting
    assert found["prefill"] == reader.setting
    assert found["accuracy"] == exact.setting
    balanced = min((measured(USUAL), decoder, reader), key=lambda m: m.compute_goal_cost_ms("balanced"))
    assert found["balanced"] == balanced.setting


def test_what_the_user_names_wins() -> None:
    coarse = EngineSetting("paged", "bf16", 128)
    stateful = EngineSetting("stateful")
    found = profile(measured(FAST, step=5), measured(coarse, step=8), measured(stateful, step=9))
    assert chosen(found, DeviceOptions(precision="bf16")) == coarse
    assert chosen(found, DeviceOptions(properties={"INFERENCE_PRECISION_HINT": "bf16"})) == coarse
    assert chosen(found, engine="stateful") == stateful
    assert chosen(found, DeviceOptions(precision="f16")) == USUAL, "the usual setting names no precision"
    # The number of threads and the KV precision combine with any setting.
    options = DeviceOptions(threads=7, kv_precision="u8")
    assert chosen(found, options) == FAST
    properties = make_compile_properties(complete_device_options(options, FAST))
    assert properties["INFERENCE_NUM_THREADS"] == "7"
    assert properties["KV_CACHE_PRECISION"] == "u8"
    assert properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "128"
    assert chosen(found, DeviceOptions(properties={"DYNAMIC_QUANTIZATION_GROUP_SIZE": "999"})) == USUAL


SETTINGS = st.builds(
    EngineSetting,
    st.sampled_from(["paged", "stateful"]),
    st.sampled_from(["f32", "bf16", None]),
    st.sampled_from([None, 0, 32, 128]),
)
TIMES = st.floats(0.1, 100)
MEASUREMENTS = st.builds(measured, SETTINGS, TIMES, TIMES, st.sampled_from([0.0, KL / 10, KL, 2 * KL]))


@given(st.lists(MEASUREMENTS, max_size=8), st.sampled_from(GOALS))
def test_the_choice_is_allowed_and_nothing_allowed_is_clearly_better(found: list[Measurement], goal: Goal) -> None:
    best = profile(*found, goal=goal).choose_measurement(DeviceOptions(), "auto")
    most = MAX_KL_FOR_ACCURACY if goal == "accuracy" else MAX_KL_RATIO * KL
    paged = [m for m in (measured(USUAL), *found) if m.setting.engine == "paged"]  # as without a profile
    allowed = [m for m in paged if m.kl <= most]
    if not allowed:
        assert best == measured(USUAL), "the setting used without a profile"
        return
    assert best in allowed
    assert all(
        m.compute_goal_cost_ms(goal) > CLEARLY_BETTER_COST_RATIO * best.compute_goal_cost_ms(goal) for m in allowed
    )


def test_an_inexact_cache_is_chosen_only_where_it_is_asked_for() -> None:
    inexact = EngineSetting("paged", kv_precision="u8")
    found = profile(measured(inexact, step=1))
    assert chosen(found) == USUAL
    assert chosen(found, DeviceOptions("GPU", kv_precision="u8")) == inexact
    assert chosen(found, DeviceOptions("GPU", kv_precision="f16")) == USUAL


def test_each_device_has_its_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ovspec.setup.profile, "identify_machine", lambda device="CPU": ("machine", device))
    files = {find_profile_file(DEMO, DeviceOptions(device, cache_dir=tmp_path)) for device in ("CPU", "GPU", "GPU.1")}
    assert len(files) == 3


def test_kept_and_read_again(tmp_path: Path) -> None:
    options = DeviceOptions(cache_dir=tmp_path)
    found = profile(measured(FAST, step=5))
    write_cached(find_profile_file(DEMO, options), found)
    file = find_profile_file(DEMO, options)
    assert file
    assert read_profile(DEMO, options) == found
    assert read_profile(DEMO / "draft", options) is None, "the draft has another shape"
    assert read_profile(DEMO, DeviceOptions(device="AUTO:CPU", cache_dir=tmp_path)) is None
    file.write_text('{"goal": 1}', encoding="utf-8")
    assert read_profile(DEMO, options) is None
    assert find_profile_file(DEMO, DeviceOptions(properties={"CACHE_DIR": ""})) is None


def test_profiles_that_were_found_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used without touching those measured here; if they are the same, nothing changes."""
    monkeypatch.setattr("ovspec.setup.profile.default_cache_dir", lambda: tmp_path / "cache")
    options, draft = DeviceOptions(cache_dir=tmp_path / "here"), DEMO / "draft"
    own, other = profile(measured(FAST, step=5)), profile(measured(FAST, step=7))
    write_cached(find_profile_file(DEMO, options), own)
    text = read_profile_json(DEMO, options)
    assert add_profiles_to_options({DEMO: text, draft: None}, options) == options
    write_cached(find_profile_file(DEMO, DeviceOptions(cache_dir=tmp_path / "elsewhere")), other)
    found = read_profile_json(DEMO, DeviceOptions(cache_dir=tmp_path / "elsewhere"))
    adopted = add_profiles_to_options({DEMO: found, draft: None}, options)
    assert (read_profile(DEMO, adopted), read_profile(DEMO, options)) == (other, own)
    assert read_profile(draft, adopted) is None


def test_the_key_is_the_kind_of_model_not_its_weights(tmp_path: Path, pair: Path) -> None:
    import shutil

    options = DeviceOptions(cache_dir=tmp_path / "cache")
    copy = tmp_path / "copy"
    shutil.copytree(DEMO, copy)
    weights = bytearray((copy / "openvino_model.bin").read_bytes())
    weights[1000:2000] = bytes(1000)
    (copy / "openvino_model.bin").write_bytes(weights)
    assert find_profile_file(copy, options) == find_profile_file(DEMO, options)
    assert find_profile_file(pair, options) != find_profile_file(DEMO, options), "another weight format"
    assert find_max_activation_group(DEMO) == 384, "the hidden size"
    assert find_max_activation_group(pair) is None
