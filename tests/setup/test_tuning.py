"""Tuning on the demo pair, and loading with the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from compiling import compile_once, trust_paged
from conftest import ROOT, Reference

import ovspec
import ovspec.api.model
import ovspec.setup.tuning
from ovspec.base.errors import InferenceError
from ovspec.cache.decoder import FAST_RULE, Decoder, FeedRule
from ovspec.cli import cli
from ovspec.ir.device import DeviceOptions
from ovspec.setup.engine_choice import CompiledModel
from ovspec.setup.exactness import Exactness
from ovspec.setup.profile import EngineSetting, Measurement, read_profile
from ovspec.setup.setting_timer import SettingTimer, TuningEffort
from ovspec.setup.tuning import SHORT_EFFORT, list_gpu_settings, tune_model

DEMO = ROOT / "models" / "demo"
SMALL = DEMO / "draft"  # what is told of all settings is told of a small model too
LITTLE = TuningEffort(16, (1, 2, 4, 8), 1, False)  # where no time matters


@pytest.fixture
def tuned_by_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OVSPEC_TUNE")
    yield


@pytest.mark.slow
def test_accuracy_is_measured_against_the_right_logits(tmp_path: Path) -> None:
    profile = tune_model(SMALL, DeviceOptions(cache_dir=tmp_path), effort=TuningEffort(64, (1, 2, 4, 8), 1, True))
    by_setting = {m.setting: m for m in profile.measurements}
    exact = next(m for setting, m in by_setting.items() if (setting.precision, setting.group) == ("f32", 0))
    assert exact.kl < 1e-8  # what f32 itself rounds; without VNNI, other settings compute the same
    assert exact.top1 == 1
    others = [m.kl for m in by_setting.values() if m is not exact]
    # OpenVINO's default quantises activations, but only on processors with VNNI.
    assert 1e-6 < profile.reference.kl < 1e-2 or max(others) < 1e-6
    assert all(kl < 1e-8 or kl > 10 * exact.kl for kl in others), "no setting that rounds more is as near"
    assert all(m.prefill_ms > 0 and all(ms > 0 for ms in m.verify_ms.values()) for m in by_setting.values())
    assert profile.measurements[0].setting == EngineSetting("paged")
    assert profile.reference is by_setting[EngineSetting("stateful")]
    paged = [m for setting, m in by_setting.items() if setting.engine == "paged"]
    assert all(m.invariance in (None, 1.0) for m in paged)
    assert all(found.is_exact and found.positions > 1000 for found in profile.exactness.values())
    assert 1 in profile.exactness
    accurate = replace(profile, goal="accuracy").choose_measurement(DeviceOptions(), "auto")
    assert accurate
    assert accurate.kl < 1e-6


def test_the_distance_is_the_kl_divergence(pair: Path, reference: Reference) -> None:
    """Compare with scipy, on logits with a known error."""
    from scipy.special import log_softmax, rel_entr

    text = np.random.default_rng(0).integers(3, 4096, 40)
    timer = SettingTimer(pair, text, SHORT_EFFORT, DeviceOptions(properties={"CACHE_DIR": ""}))
    right = reference.logits(text.tolist())
    wrong = right + np.random.default_rng(1).normal(size=right.shape).astype(np.float32)
    wrong[:10, 7] = 100.0
    p, q = (np.exp(log_softmax(logits.astype(np.float64), axis=1)) for logits in (right, wrong))
    kl, top1 = timer._compare_with_reference(wrong)
    assert kl == pytest.approx(rel_entr(p, q).sum(1).mean(), rel=1e-3)
    assert top1 == pytest.approx((right.argmax(1) == wrong.argmax(1)).mean(), abs=0.03)
    assert timer._compare_with_reference(right)[0] < 1e-7


def test_invariance_is_measured_on_the_exact_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    uncached = DeviceOptions(properties={"CACHE_DIR": ""})
    timer = SettingTimer(SMALL, np.arange(3, 43), TuningEffort(40, (1, 2, 4), 1, True), uncached)
    probed = timer.with_exactness(timer.set_incumbent(EngineSetting("paged", "f32", 32)))
    assert probed.invariance == 1 and probed.rule and probed.rule.fewest in probed.verify_ms
    monkeypatch.setattr("ovspec.setup.exactness.STRICTEST_RULES", {"paged": FAST_RULE})
    probed = timer.with_exactness(timer.set_incumbent(EngineSetting("paged", "f32", 32)))
    assert probed.rule is None
    assert probed.invariance is not None and probed.invariance < 1, "a token alone is found"


def test_the_fewest_tokens_of_a_rule_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = FeedRule(queries=2, fewest=5, fewest_logits=5)
    monkeypatch.setattr(CompiledModel, "find_exactness", lambda _: Exactness(rule, 77, 0))
    text, uncached = np.arange(3, 43), DeviceOptions(properties={"CACHE_DIR": ""})
    timer = SettingTimer(SMALL, text, TuningEffort(40, (1, 2, 4, 8), 1, False), uncached)
    measured = timer.set_incumbent(EngineSetting("paged"))
    probed = timer.with_exactness(measured)
    assert (probed.rule, probed.invariance) == (rule, 1.0)
    assert probed.verify_ms.keys() == {1, 2, 4, 5, 8} and probed.token_ms == probed.verify_ms[5] > 0
    assert {width: probed.verify_ms[width] for width in measured.verify_ms} == measured.verify_ms


def test_what_slows_the_machine_down_for_a_while_changes_no_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the machine becomes three times as slow halfway through, equal settings stay equal."""
    calls = []

    def slowed(self: SettingTimer, decoder: Decoder, width: int) -> tuple[float, float]:
        assert self.effort
        calls.append(decoder)
        ms = width * (1.0 if len(calls) < 80 else 3.0)
        return 2 * ms, ms

    trust_paged(monkeypatch)
    monkeypatch.setattr(SettingTimer, "_time_width", slowed)
    monkeypatch.setattr(SettingTimer, "_time_prefill", lambda self, d: 0.0 * len(d.feed([self.prompt_ids], [1])) + 1.0)
    profile = tune_model(SMALL, DeviceOptions(cache_dir=tmp_path), effort=SHORT_EFFORT)
    assert len(profile.measurements) > 1
    assert all(m.verify_ms == {width: width for width in m.verify_ms} for m in profile.measurements)
    assert all(m.verify_ms.keys() >= {1, 2, 4, 8} for m in profile.measurements)
    best = profile.choose_measurement(DeviceOptions(), "auto")
    assert best is profile.measurements[0], "nothing is clearly better"


def test_a_first_load_measures_once_and_keeps_it(
    tmp_path: Path, tuned_by_default: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuned_by_default is None
    compile_once(monkeypatch)
    trust_paged(monkeypatch)
    monkeypatch.setattr(ovspec.setup.tuning, "SHORT_EFFORT", LITTLE)
    lm = ovspec.load(SMALL, cache_dir=tmp_path)
    said = capsys.readouterr()
    assert "measuring the fastest settings, once" in said.err
    assert not said.out
    profile = read_profile(SMALL, DeviceOptions(cache_dir=tmp_path))
    assert profile
    assert not profile.full
    best = profile.choose_measurement(DeviceOptions(), "auto")
    assert best
    stats = lm.generate("def f(", max_tokens=3).stats
    assert stats.profile == str(best.setting)
    assert stats.engine == best.setting.engine
    monkeypatch.setattr(ovspec.setup.tuning, "tune_model", lambda *_, **__: pytest.fail("it was already measured"))
    assert ovspec.load(SMALL, cache_dir=tmp_path).generate("def f(", max_tokens=3).stats.profile == stats.profile
    assert not capsys.readouterr().err
    # Options that the user names override the profile.
    lm = ovspec.load(SMALL, cache_dir=tmp_path, precision="f32", threads=1, engine="stateful")
    properties = lm.target.ir.properties
    assert (properties["INFERENCE_PRECISION_HINT"], properties["INFERENCE_NUM_THREADS"]) == ("f32", "1")
    assert lm.target.engine == "stateful"
    plain = ovspec.load(SMALL, cache_dir=tmp_path, tune=False)
    assert plain.target.profile is None
    assert "DYNAMIC_QUANTIZATION_GROUP_SIZE" not in plain.target.ir.properties


def test_not_measured_unasked_where_it_would_take_long(
    tmp_path: Path, tuned_by_default: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuned_by_default is None
    compile_once(monkeypatch)
    trust_paged(monkeypatch)
    monkeypatch.setattr(ovspec.setup.tuning, "MAX_AUTO_TUNED_BYTES", 1e5)
    assert ovspec.load(SMALL, arithmetic="fast", cache_dir=tmp_path).target.profile is None
    assert "too large to tune automatically" in capsys.readouterr().err
    monkeypatch.setattr(ovspec.setup.tuning, "MAX_AUTO_TUNED_BYTES", 1e9)
    monkeypatch.setattr(ovspec.setup.tuning, "weights_fit_into_memory", lambda *_: False)
    assert ovspec.load(SMALL, arithmetic="fast", cache_dir=tmp_path).target.profile is None
    assert "not enough free memory, because tuning" in capsys.readouterr().err


def test_a_setting_whose_logits_are_not_numbers_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = SettingTimer.measure_setting

    def failing(self: SettingTimer, setting: EngineSetting) -> Measurement:
        if setting.precision == "f32":
            raise InferenceError("the model computed NaN or infinite logits")
        return measure(self, setting)

    monkeypatch.setattr(SettingTimer, "measure_setting", failing)
    trust_paged(monkeypatch)
    profile = tune_model(SMALL, DeviceOptions(cache_dir=tmp_path), effort=LITTLE)
    assert [m.setting for m in profile.measurements] == [EngineSetting("paged")]


@pytest.mark.slow
def test_the_command_shows_a_table_and_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ovspec.setup.tuning, "FULL_EFFORT", TuningEffort(32, (1, 2, 4, 8), 1, True))
    monkeypatch.setattr(
        ovspec.setup.tuning.tune_model,
        "__defaults__",
        ("balanced", TuningEffort(32, (1, 2, 4, 8), 1, True), lambda *_: None),
    )
    done = CliRunner().invoke(cli, ["tune", str(DEMO), "--for", "decode", "--cache-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "OpenVINO's own default" in done.stdout
    assert done.stdout.count("\n* ") == 2, "the target's choice and the draft's"
    assert done.stdout.count("chosen for decode") == 2
    assert done.stdout.count("weight format: int8; relative time of matrix products") == 2
    profile = read_profile(DEMO, DeviceOptions(cache_dir=tmp_path))
    assert profile
    assert profile.goal == "decode"
    assert profile.full
    done = CliRunner().invoke(cli, ["tune", str(DEMO), "--json", "--cache-dir", str(tmp_path)])
    found = json.loads(done.stdout)
    assert found.keys() == {"target", "draft"}
    assert found["target"]["chosen"]["setting"]["engine"] in ("paged", "stateful")
    assert next(iter(found["target"]["formats_ms"])) == "int8" and "fp16" in found["target"]["formats_ms"]


def test_a_profile_that_cannot_be_kept_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ovspec.setup.tuning, "tune_model", lambda *_, **__: pytest.fail("the profile can't be kept"))
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match=r"cannot be created .* --cache-dir"):
        CliRunner().invoke(
            cli, ["tune", str(DEMO), "--cache-dir", str(file / "cache")], catch_exceptions=False, standalone_mode=False
        )


def test_settings_on_a_gpu() -> None:
    told = [str(setting).removeprefix("paged, ") for setting in list_gpu_settings("paged", 64)]
    quantised = [f"default precision, dynamic quantisation {group}" for group in ("off", 32)]
    assert told == [*quantised, "f32", "default precision, KV cache u8"]
    assert list_gpu_settings("stateful", None) == [EngineSetting("stateful", "f32")]


def test_a_single_device_is_tuned(tmp_path: Path) -> None:
    with pytest.raises(ovspec.OvspecError, match="tuning needs a single device"):
        tune_model(DEMO, DeviceOptions(device="AUTO:CPU", cache_dir=tmp_path))
