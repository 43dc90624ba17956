"""Models that OpenVINO crashes on while it compiles them run in f32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from compiling import trust_paged
from conftest import PROMPTS, ROOT, TARGET

import ovspec
from ovspec.ir import crashes
from ovspec.ir.crashes import choose_crash_free_options, has_uncompressed_gates, run_trial
from ovspec.ir.device import DeviceOptions, make_compile_properties
from ovspec.ir.instruction_set import list_instruction_sets
from ovspec.setup.exactness import find_exactness_file
from ovspec.setup.inspection import inspect_models

DEMO = ROOT / "models" / "demo"  # in int8
FAULT = "os.kill(os.getpid(), signal.SIGFPE)"
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="a process can't send itself such a signal on Windows")
# Compiles an IR as ovspec does, without looking for crashes.
COMPILES = """
import json, sys
import openvino as ov
from ovspec.ir.paged_attention import rewrite_to_paged
core = ov.Core()
model = core.read_model(sys.argv[1])
if sys.argv[3] == "paged":
    rewrite_to_paged(model)
core.compile_model(model, "CPU", json.loads(sys.argv[2]))
"""


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Callable[[], int]]:
    """Return a function that replaces the trial by other code, where bf16 is the default; it returns a counter."""

    def plant(code: str) -> Callable[[], int]:
        log = tmp_path / "trials"
        log.write_text("")
        count = f"open({str(log)!r}, 'a').write('x')"
        monkeypatch.setattr(crashes, "TRIAL_COMMAND", ("-c", f"import os, signal, time; {count}; {code}"))
        monkeypatch.setattr(crashes, "known_outcomes", {})
        monkeypatch.setattr(crashes, "shown_notes", set())
        named = "INFERENCE_PRECISION_HINT"
        monkeypatch.setattr(crashes, "resolve_precision", lambda options: options.fixed_properties.get(named, "bf16"))
        return lambda: len(log.read_text())

    return plant


def precision(lm: ovspec.LanguageModel) -> str:
    return lm.target.ir.compiled_model.get_property("INFERENCE_PRECISION_HINT").get_type_name()


@POSIX
@pytest.mark.parametrize("engine", ["paged", pytest.param("stateful", marks=pytest.mark.slow)])
def test_where_openvino_crashes_f32_is_used_and_told(
    plant: Callable[[str], Callable[[], int]],
    pair: Path,
    load: Callable[..., ovspec.LanguageModel],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
) -> None:
    trials = plant(FAULT)
    trust_paged(monkeypatch)
    lm = ovspec.load(pair, True, engine=engine, threads=1, cache_dir=tmp_path)  # type: ignore[arg-type]
    told = capsys.readouterr().err.splitlines()
    what = (
        "OpenVINO crashes on this machine (SIGFPE) when it compiles this model for bf16 with 1 thread, so the model is "
        "computed in f32"
    )
    assert [line.partition(";")[0] for line in told if "crashes" in line] == [
        f"{pair}: {what}",
        f"{pair / 'draft'}: {what}",
    ]
    assert precision(lm) == lm.target.ir.properties["KV_CACHE_PRECISION"] == "f32"
    expected = load().generate(PROMPTS[0], max_tokens=16).text
    assert lm.generate(PROMPTS[0], max_tokens=16).text == expected
    assert trials() == 1, "both models are of a kind"
    # Another process finds the answer on the disk, and looks for the same memory of exactness.
    monkeypatch.setattr(crashes, "known_outcomes", {})
    found = inspect_models(pair, DeviceOptions(threads=1, cache_dir=tmp_path), engine=engine)  # type: ignore[arg-type]
    assert found["target"]["kv_precision"] == "f32"
    assert trials() == 1
    options = DeviceOptions(threads=1, cache_dir=tmp_path)
    chosen = choose_crash_free_options(pair, options)
    assert find_exactness_file(pair, options, engine) == find_exactness_file(pair, chosen, engine)


@POSIX
def test_a_precision_that_crashes_is_refused(
    plant: Callable[[str], Callable[[], int]], pair: Path, tmp_path: Path
) -> None:
    plant(FAULT)
    sentence = r"crashes on this machine \(SIGFPE\) when it compiles this model for bf16 .*; set `precision='f32'`"
    with pytest.raises(ovspec.OvspecError, match=sentence):
        ovspec.load(pair, precision="bf16", cache_dir=tmp_path)
    with pytest.raises(ovspec.OvspecError, match=sentence):
        ovspec.load(pair, properties={"INFERENCE_PRECISION_HINT": "bf16"}, cache_dir=tmp_path)


@POSIX
@pytest.mark.parametrize("code", ["raise SystemExit(1)", "time.sleep(60)", "os.kill(os.getpid(), signal.SIGTERM)"])
def test_other_failures_of_the_trial_say_nothing(
    plant: Callable[[str], Callable[[], int]],
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
) -> None:
    trials = plant(code)
    monkeypatch.setattr(crashes, "TRIAL_SECONDS", 1.0)
    options = DeviceOptions(cache_dir=tmp_path / "cache")
    assert choose_crash_free_options(pair, options) is options
    assert choose_crash_free_options(pair, options) is options
    assert trials() == 1, "once in a process"
    monkeypatch.setattr(crashes, "known_outcomes", {})
    choose_crash_free_options(pair, options)
    assert trials() == 2, "but it isn't remembered"


@POSIX
def test_only_what_could_crash_is_tried(plant: Callable[[str], Callable[[], int]], pair: Path, tmp_path: Path) -> None:
    trials = plant(FAULT)
    for folder, options in [
        (DEMO, DeviceOptions(cache_dir=tmp_path)),
        (tmp_path, DeviceOptions(cache_dir=tmp_path)),
        (pair, DeviceOptions(precision="f32", cache_dir=tmp_path)),
        (pair, DeviceOptions(device="GPU", cache_dir=tmp_path)),
    ]:
        assert choose_crash_free_options(folder, options) is options
    assert trials() == 0
    assert has_uncompressed_gates(pair) and not has_uncompressed_gates(DEMO)
    for device, threads in (("CPU", 1), ("CPU", 2), ("AUTO:CPU", None)):
        chosen = choose_crash_free_options(pair, DeviceOptions(device, threads=threads, cache_dir=tmp_path))
        assert chosen.fixed_properties["INFERENCE_PRECISION_HINT"] == "f32"
    assert trials() == 3, "each setting has its own"


@pytest.mark.parametrize(
    ("kind", "shapes", "expected"),
    [
        ("f16", ["96, 64", "96, 64", "64, 96"], True),
        ("f32", ["96, 64", "96, 64", "64, 96"] * 2 + ["64, 64"] * 2, True),
        ("f32", ["96, 64", "96, 64", "64, 96", "96, 64", "64, 96"], True),  # attention is as wide as the gate
        ("f32", ["64, 64"] * 3, True),
        ("f32", ["256, 64", "64, 256"] * 2, False),  # no gate
        ("f32", ["192, 64", "64, 96"] * 2, False),  # gate and up in one matrix
        ("f32", ["4096, 64", "4096, 64", "32, 64", "32, 64"], False),  # embedding and lm_head, keys and values
        ("f16", ["96, 1", "96, 1", "64, 1"], False),  # scales
        ("u8", ["96, 64", "96, 64", "64, 96"], False),
    ],
)
def test_layers_with_a_gate(tmp_path: Path, kind: str, shapes: list[str], expected: bool) -> None:
    constants = [f'<data element_type="{kind}" shape="{shape}" offset="0" size="1" />' for shape in shapes]
    (tmp_path / "openvino_model.xml").write_text("\n".join(constants))
    assert has_uncompressed_gates(tmp_path) == expected


@pytest.mark.parametrize("engine", ["paged", pytest.param("stateful", marks=pytest.mark.slow)])
def test_the_trial_ends_as_the_model_does(pair: Path, engine: str) -> None:
    """Whether they crash depends on the processor."""
    options = DeviceOptions(precision="bf16", threads=1, properties={"CACHE_DIR": ""})
    properties = json.dumps(make_compile_properties(options))
    command = [sys.executable, "-c", COMPILES, str(pair / "openvino_model.xml"), properties, engine]
    ended = subprocess.run(command, check=False, capture_output=True, env=without_cores()).returncode
    found = run_trial("CPU", properties, *crashes.TRIAL_COMMAND)
    assert found == crashes.TrialOutcome(crashes.FAULTS_BY_EXIT_CODE.get(ended, ""))
    assert found and (found.fault or ended == 0)


def without_cores() -> dict[str, str]:
    """Return this environment; core dumps are switched off for processes that may crash."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    return dict(os.environ)


@pytest.mark.slow
def test_one_thread_with_weights_that_are_not_compressed(
    pair: Path, ovspec_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = ovspec_command("generate", pair, PROMPTS[0], "-n", "4", "--threads", "1", "--draft", "draft")
    assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("cap", ["", "AVX2"])
@pytest.mark.parametrize("weights", ["fp16", "fp32", "int8", "int4"])
def test_one_thread_in_every_format(
    tmp_path_factory: pytest.TempPathFactory, command_environment: dict[str, str], cap: str, weights: str
) -> None:
    from conftest import made_once
    from ovspec_export import Compression, export_pair

    if cap and cap not in list_instruction_sets():
        pytest.skip(f"this processor has no {cap}")
    folder = made_once(
        tmp_path_factory,
        f"one-thread-{weights}",
        lambda folder: export_pair(str(TARGET), None, folder, Compression(weights)),
    )
    capped = {"ONEDNN_MAX_CPU_ISA": cap, "OV_CPU_MAX_ISA": cap} if cap else {}
    for engine in ("paged", "stateful"):
        command = [sys.executable, "-m", "ovspec", "generate", str(folder), PROMPTS[0], "-n", "8", "--threads", "1"]
        done = subprocess.run(
            [*command, "--engine", engine],
            env=command_environment | capped,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, bool(done.stdout)) == (0, True), done.stderr
