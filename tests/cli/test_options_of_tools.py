"""Every option of the commands that measure and export is run with a value and has an effect."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_runs import LOADED, Outcome, runs
from conftest import ROOT, USERS_CACHE

import ovspec

DEMO = ROOT / "models" / "demo"
SMALL = DEMO / "draft"  # which loads sooner


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path) -> Iterator[Callable[..., Outcome]]:
    yield from runs(monkeypatch, tmp_path, cache_dir)


COMPILED: dict[str, tuple[tuple[str, ...], Callable[[Any, dict[str, str]], bool]]] = {
    "device": (("--device", "AUTO:CPU"), lambda options, _: options.device == "AUTO:CPU"),
    "precision": (("--precision", "f32"), lambda _, given: given["INFERENCE_PRECISION_HINT"] == "f32"),
    "kv_precision": (("--kv-precision", "u8"), lambda _, given: "KV_CACHE_PRECISION:u8" in given["DEVICE_PROPERTIES"]),
    "threads": (("--threads", "1"), lambda _, given: given["INFERENCE_NUM_THREADS"] == "1"),
    "properties": (("--property", "INFERENCE_NUM_THREADS=1"), lambda _, given: given["INFERENCE_NUM_THREADS"] == "1"),
    "cache_dir": (("--cache-dir", "here"), lambda _, given: given["CACHE_DIR"].startswith("here")),
}


@pytest.mark.parametrize("names", [("device", "kv_precision", "threads"), ("precision", "properties", "cache_dir")])
@pytest.mark.parametrize("command", ["inspect", "perplexity"])
def test_where_and_how_models_are_compiled(run: Callable[..., Outcome], command: str, names: tuple[str, ...]) -> None:
    """OpenVINO gets the values of the options, those that set other properties with one load."""
    options = [part for name in names for part in COMPILED[name][0]]
    LOADED.clear()
    found = measuring(run, command, "--engine", "stateful", "--arithmetic", "fast", *options)
    assert found.code == 0, found.err
    assert found.compiled
    for name in names:
        assert all(COMPILED[name][1](*each) for each in found.compiled), name


def measuring(run: Callable[..., Outcome], command: str, *options: Any) -> Outcome:
    Path("notes.txt").write_text("import os\n" * 20, encoding="utf-8")
    return run(command, SMALL, *["notes.txt"] * (command == "perplexity"), *options)


@pytest.mark.parametrize("command", [pytest.param("inspect", marks=pytest.mark.slow), "perplexity"])
def test_commands_that_measure(run: Callable[..., Outcome], command: str) -> None:
    """``test_cli.py`` has a quick test of either engine with inspect."""
    for engine in ("stateful", "paged"):
        found = measuring(run, command, "--json", "--engine", engine)
        assert found.code == 0, found.err
        told = json.loads(found.out)
        assert (told["target"]["engine"] if command == "inspect" else found.lm.target.engine) == engine
    if command == "perplexity":
        assert measuring(run, command, "--engine", "stateful").tuned
        assert not measuring(run, command, "--engine", "stateful", "--no-tune").tuned
        windows = [json.loads(measuring(run, command, "--json", "--context", n).out)["context"] for n in (20, 30)]
        assert windows == [20, 30]


@pytest.mark.parametrize("command", ["inspect", "perplexity"])
def test_commands_that_measure_take_no_draft(run: Callable[..., Outcome], command: str) -> None:
    refused = measuring(run, command, "--draft-device", "CPU")
    assert (refused.code, "No such option '--draft-device'" in refused.err) == (2, True)


def test_inspect_checks_files(run: Callable[..., Outcome], pair: Path) -> None:
    found = run("inspect", pair, "--verify", "--engine", "stateful", "--arithmetic", "fast")
    assert "All files match the checksums from their export." in found.out


def test_a_report_says_how_a_model_runs_here_and_names_no_file(run: Callable[..., Outcome], tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert run("inspect", SMALL, "--report", file, "--engine", "paged").code == 0
    report = json.loads(file.read_text("utf-8"))
    assert report["devices"]["CPU"]
    assert report["models"]["target"]["engine"] == "paged"
    assert [*report["timings"]["inference_ms"]] == ["1", "2", "4", "8", "16"]
    assert all(times["fastest"] > 0 for times in report["timings"]["inference_ms"].values())
    assert report["text"]["equal"]
    assert report["text"]["lookup"]["text"] == report["text"]["plain"]["text"]
    assert str(ROOT) not in file.read_text("utf-8")
    assert "there is no folder nowhere" in run("inspect", SMALL, "--report", "nowhere/report.json").err


def test_inspect_without_the_profile(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    from ovspec.setup import inspection

    asked: list[bool] = []
    known = inspection.read_profile
    monkeypatch.setattr(inspection, "read_profile", lambda *each: asked.append(True) or known(*each))
    assert run("inspect", SMALL, "--no-tune").code == 0
    assert not asked
    assert run("inspect", SMALL).code == 0
    assert asked


def test_tune(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests only that the options arrive; the measuring is tested elsewhere."""
    from ovspec.setup import tuning

    def measured(folder: Path, options: Any, goal: str, **_: Any) -> Any:  # noqa: ARG001
        raise ovspec.OvspecError(f"would tune {options.device} for {goal} and keep it in {options.cache_dir}")

    monkeypatch.setattr(tuning, "tune_model", measured)
    found = run("tune", DEMO, "--for", "decode", "--cache-dir", "here", "--json")
    assert "would tune CPU for decode and keep it in here" in found.err
    assert "would tune AUTO:CPU for balanced" in run("tune", DEMO, "--device", "auto:cpu").err
    assert "--device TPU: no such device" in run("tune", DEMO, "--device", "TPU").err


# ---------------------------------------------------------------- distill

TO_DISTILL: dict[str, tuple[tuple[str, ...], Any]] = {
    "output": (("-o", "out"), Path("out")),
    "text": (("--text", "notes", "--text", "src"), (Path("notes"), Path("src"))),
    "topics": (("--topics", "topics.txt"), Path("topics.txt")),
    "kind": (("--kind", "mtp"), "mtp"),
    "draft": (("--draft", "small"), "small"),
    "trim_vocabulary": (("--trim-vocabulary", "8000"), 8000),
    "draft_vocabulary": (("--draft-vocabulary", "4096"), 4096),
    "minutes": (("--minutes", "2.5"), 2.5),
    "tokens": (("--tokens", "7"), 7),
    "torch_device": (("--torch-device", "cuda"), "cuda"),
    "size_limit": (("--size-limit", "0.5"), 0.5),
    "work": (("--work", "there"), Path("there")),
    "overwrite": (("--overwrite",), True),
}


def test_options_of_distill(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """The options reach the distillation, which tests/export/distill checks; its end is the exit code."""
    import ovspec_export

    calls: list[Any] = []
    monkeypatch.setattr(ovspec_export, "distill_model", lambda options: calls.append(options) or len(calls) * 3 - 3)
    given = [part for flags, _ in TO_DISTILL.values() for part in flags]
    assert [run("distill", "a-model", *given).code for _ in range(2)] == [0, 3]
    assert calls[0].model == "a-model"
    assert {name: getattr(calls[0], name) for name in TO_DISTILL} == {name: v for name, (_, v) in TO_DISTILL.items()}
    assert run("distill", "a-model", "-o", "out").code == 6
    usual = ovspec_export.DistillOptions("a-model", Path("out"))
    assert calls[2] == usual, "the defaults are the same"
    for wrong, told in (
        ((), "Missing option '-o'"),
        (("-o", "out", "--trim-vocabulary", "9"), "--trim-vocabulary works only with a draft model"),
        (("-o", "out", "--minutes", "0.5"), "--minutes"),
        (("-o", "out", "--size-limit", "0"), "--size-limit"),
    ):
        found = run("distill", "a-model", *wrong)
        assert found.code == 2 and told in found.err
    assert len(calls) == 3


def test_refusals_of_distill_name_flags(run: Callable[..., Outcome]) -> None:
    draft = ROOT / "models" / "demo-hf" / "draft"
    found = run("distill", DEMO, "-o", "out", "--draft", draft, "--draft-vocabulary", "99")
    assert found.code == 1
    assert "leave --draft-vocabulary out, and set --trim-vocabulary for a draft model." in found.err


def test_distill_without_the_packages(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ovspec_export"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find(name, *more))
    found = run("distill", DEMO, "-o", "out")
    assert (found.code, found.out) == (1, "")
    assert found.err == (
        "Distilling needs the package torch, but it is not installed; run pip install '.[export]' in a clone of ovspec."
    )


# ---------------------------------------------------------------- export

TO_COMPRESSION = {
    "group_size": ("--group-size", "64", 64),
    "ratio": ("--ratio", "0.5", 0.5),
    "sym": ("--sym", None, True),
    "backup_precision": ("--backup-precision", "int8_sym", "int8_sym"),
    "awq": ("--awq", None, True),
    "scale_estimation": ("--scale-estimation", None, True),
    "gptq": ("--gptq", None, True),
    "lora_correction": ("--lora-correction", None, True),
    "calibration": ("--calibration", "notes.txt", Path("notes.txt")),
    "samples": ("--samples", "7", 7),
}
TO_EXPORT = {
    "chat_template": ("--chat-template", "chatml", "chatml"),
    "draft_layers": ("--draft-layers", "2", 2),
    "evaluate": ("--evaluate", "notes.txt", Path("notes.txt")),
    "overwrite": ("--overwrite", None, True),
    "trust_remote_code": ("--trust-remote-code", None, True),
}
OTHERS_OF_EXPORT = {"draft", "output", "list_pairs", "weight_format", "draft_weight_format", "list_families", "prepare"}


def test_options_of_export(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """The options reach the exporter; the exporter's own tests check what they do."""
    from types import SimpleNamespace

    from ovspec.setup import exporting

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    package = SimpleNamespace(
        Compression=lambda name, **options: {"format": name} | options,
        export_pair=lambda *arguments, **options: calls.append((arguments, options)),
    )
    monkeypatch.setattr(exporting, "import_export_package", lambda: package)
    given = [
        part for flag, value, _ in (*TO_COMPRESSION.values(), *TO_EXPORT.values()) for part in (flag, value) if part
    ]
    formats = ("--weight-format", "int4", "--draft-weight-format", "int8")
    found = run("export", "a-target", "--draft", "a-draft", "-o", "out", *formats, *given)
    assert found.code == 0, found.err
    (target, draft, output, first, second), options = calls[0]
    assert (target, draft, output) == ("a-target", "a-draft", Path("out"))
    assert (first["format"], second["format"]) == ("int4", "int8")
    assert {name: first[name] for name in TO_COMPRESSION} == {
        name: value for name, (*_, value) in TO_COMPRESSION.items()
    }
    assert all(options[name] == value for name, (*_, value) in TO_EXPORT.items())
    listed = run("export", "--list")
    assert listed.out
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "formats"),
    [
        ((), [None, None]),
        (("--weight-format", "keep"), ["keep", None]),
        (("--sym",), ["int8", None]),
        (("--draft", "a", "--draft-weight-format", "keep"), [None, "keep"]),
        (("--draft", "a", "--draft-weight-format", "int4", "--group-size", "64"), [None, "int4"]),
        (("--draft", "a", "--draft-weight-format", "int8", "--sym"), ["int8", "int8"]),
    ],
)
def test_weight_formats_of_export(
    options: tuple[str, ...],
    formats: list[str | None],
    run: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a format the exporter chooses; options for quantising say that the target is quantised anew."""
    from types import SimpleNamespace

    from ovspec.setup import exporting

    calls: list[tuple[Any, ...]] = []
    package = SimpleNamespace(
        Compression=lambda name, **_: name, export_pair=lambda *arguments, **_: calls.append(arguments)
    )
    monkeypatch.setattr(exporting, "import_export_package", lambda: package)
    found = run("export", "a-target", "-o", "out", *options)
    assert found.code == 0, found.err
    assert list(calls[0][3:]) == formats


def test_families_are_listed_and_prepared(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's cache, every overlay is there already; ``tests/export/test_environments.py`` makes new ones."""
    from ovspec_export import environments

    monkeypatch.setattr(environments, "default_cache_dir", lambda: USERS_CACHE)
    listed = run("export", "--list-families").out.splitlines()
    assert [line.split()[0] for line in listed] == sorted(line.split()[0] for line in listed)
    assert next(line for line in listed if line.startswith("qwen3_5_text ")).split()[1:4] == [
        "transformers",
        "5.2",
        "prepared",
    ]
    found = run("export", "--prepare", "qwen3_5", "lfm2", "llama")
    assert found.code == 0 and not found.out, found
    assert found.err.startswith("transformers 5.2: ") and len(found.err.splitlines()) == 1
    unknown = run("export", "--prepare", "foo")
    assert unknown.code == 1 and "models of the family foo cannot be exported" in unknown.err
    for wrong, told in (
        (("--prepare",), "--prepare needs families"),
        (("--prepare", "lfm2", "-o", "out"), "only downloads"),
    ):
        found = run("export", *wrong)
        assert found.code == 2 and told in found.err
    for wrong in (("--prepare", "lfm2", "--overwrite"), ("--list-families", "lfm2"), ("--list-families", "--prepare")):
        found = run("export", *wrong)
        assert found.code == 2 and ("leave the options out" in found.err or "leave the others out" in found.err)
    several = run("export", "one", "two", "-o", "out")
    assert several.code == 2 and "An export needs a single model" in several.err
