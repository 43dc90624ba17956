"""Exports: whole or not at all, and only pairs that fit."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import CHECKPOINTS, PROMPTS, Reference
from ovspec_export import Compression, export_pair
from ovspec_export.export import backup_of, check_output, convert, replace_folder

import ovspec
from ovspec.kv import Rollback
from ovspec.manifest import read_manifest
from ovspec.vocabulary import check_same_vocabulary

TARGET, DRAFT = str(CHECKPOINTS / "target"), str(CHECKPOINTS / "draft")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_manifest_tells_what_is_there(pair: Path) -> None:
    manifest = read_manifest(pair)
    assert manifest
    assert manifest.draft
    assert {*manifest.files, "ovspec.json"} == set(contents(pair))
    assert (manifest.target.weight_format, manifest.target.probe.rollback) == ("fp32", Rollback("mask"))
    assert len(manifest.target.states) == 10
    assert manifest.tokenizer_differs_on == []
    needed = {"openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml", "tokenizer.json"}
    assert needed | {"generation_config.json", "chat_template.jinja", "draft/openvino_model.xml"} <= set(manifest.files)
    # Nothing of the machine that exported it.
    assert str(CHECKPOINTS.parent) not in (pair / "ovspec.json").read_text(encoding="utf-8")


def test_the_shipped_pair_is_whole() -> None:
    manifest = read_manifest(CHECKPOINTS.parent / "demo")
    assert manifest
    assert manifest.draft
    assert (manifest.target.weight_format, manifest.draft.weight_format) == ("int8", "int8")
    shipped = [*contents(CHECKPOINTS).values(), *contents(CHECKPOINTS.parent / "demo").values()]
    assert sum(map(len, shipped)) < 45e6


@pytest.mark.parametrize(
    ("compression", "drift"),
    [
        (Compression("fp16"), 0.02),
        (Compression("int8"), 0.2),
        (Compression("int8", sym=True), 0.2),
        (Compression("int4", group_size=64, ratio=0.8), 3.0),
        (Compression("int4", group_size=32, sym=True), 3.0),
    ],
    ids=lambda value: f"{value.weight_format}{'-sym' * value.sym}" if isinstance(value, Compression) else "",
)
@pytest.mark.slow
def test_weight_formats(
    tmp_path: Path, cache_dir: Path, reference: Reference, compression: Compression, drift: float
) -> None:
    """Each format loads, stays near the checkpoint, and is smaller than the one before it."""
    manifest = export_pair(TARGET, None, tmp_path / "out", compression)
    options = manifest.target.options
    assert options == {"group_size": compression.group_size, "ratio": compression.ratio, "sym": compression.sym}
    size = manifest.files["openvino_model.bin"]["size"]
    bits = {"fp16": 16, "int8": 8, "int4": 6}[compression.weight_format]
    assert size <= 9_441_408 * (bits + 1) / 8
    lm = ovspec.load(tmp_path / "out", precision="f32", cache_dir=cache_dir)
    ids = lm.encode(PROMPTS[1])
    assert np.abs(lm.next_logits(ids) - reference.logits(ids.tolist())[-1]).max() < drift


def test_a_folder_made_by_plain_optimum_cli_works(
    pair: Path, tmp_path: Path, cache_dir: Path, load: Callable[..., ovspec.LanguageModel]
) -> None:
    """The same files without our manifest: rollback is probed, the vocabulary compared at load."""
    plain = tmp_path / "plain"
    shutil.copytree(pair, plain)
    (plain / "ovspec.json").unlink()
    lm = ovspec.load(plain, pair / "draft", precision="f32", cache_dir=cache_dir)
    result = lm.generate(PROMPTS[0], max_tokens=24)
    assert result.token_ids == load().generate(PROMPTS[0], max_tokens=24).token_ids
    assert result.stats.accepted > 0
    assert result.stats.rollback == "mask"


def other_vocabulary(tmp_path: Path) -> Path:
    """The draft's checkpoint with two tokens swapped and one renamed."""
    folder = tmp_path / "other"
    shutil.copytree(DRAFT, folder)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = data["model"]["vocab"]
    by_id = {index: token for token, index in vocab.items()}
    a, b = by_id[300], by_id[301]
    vocab[a], vocab[b] = 301, 300
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


def test_a_pair_with_other_tokens_is_refused(tmp_path: Path, pair: Path) -> None:
    other = other_vocabulary(tmp_path)
    with pytest.raises(ovspec.OvspecError, match=r"cannot draft for .*2 ids of their vocabularies differ \(300 is "):
        export_pair(TARGET, str(other), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ovspec.OvspecError, match="2 ids of their vocabularies differ"):
        check_same_vocabulary(pair, other)


def test_wrong_sources_are_named(tmp_path: Path) -> None:
    for source, message in [
        (str(tmp_path / "nowhere"), "no such folder"),
        (str(tmp_path), "no config.json in it"),
        ("no-such-org/no-such-model", "neither a folder here nor a model that can be reached on the Hugging Face hub"),
    ]:
        with pytest.raises(ovspec.OvspecError, match=message):
            export_pair(source, None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("compression", "message"),
    [
        (Compression("int8", group_size=64), "--group-size and --ratio go with"),
        (Compression("fp16", sym=True), "--sym goes with"),
        (Compression("int4", ratio=1.5), "must be between 0 and 1"),
        (Compression("int3"), "not one of"),
    ],
)
def test_options_that_do_not_combine(tmp_path: Path, compression: Compression, message: str) -> None:
    with pytest.raises(ovspec.OvspecError, match=message):
        export_pair(TARGET, None, tmp_path / "out", compression)


def test_a_failed_conversion_keeps_the_last_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(TARGET, broken)
    (broken / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ovspec.OvspecError, match="optimum-cli could not export it"):
        convert(str(broken), tmp_path / "out", Compression("fp32"), lambda _: None)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match="holds files that ovspec did not export"):
        export_pair(TARGET, None, tmp_path)
    with pytest.raises(ovspec.OvspecError, match="is a file"):
        export_pair(TARGET, None, tmp_path / "thesis.txt")
    assert contents(tmp_path) == {"thesis.txt": b"precious"}


def test_an_interrupted_export_leaves_what_was_there(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "ovspec.json").write_text("{}", encoding="utf-8")
    (output / "old").write_text("old", encoding="utf-8")
    before = contents(tmp_path)
    script = "import sys; from ovspec.cli import main; sys.argv = ['ovspec', *sys.argv[1:]]; main()"
    for delay in (2.0, 6.0):
        process = subprocess.Popen(
            [sys.executable, "-c", script, "export", TARGET, "-o", str(output)],
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
        assert contents(tmp_path) == before


def test_a_replacement_killed_half_way_is_undone(tmp_path: Path) -> None:
    output, new = tmp_path / "out", tmp_path / "new"
    for folder, text in ((output, "old"), (new, "new")):
        folder.mkdir()
        (folder / "ovspec.json").write_text(text, encoding="utf-8")
    output.rename(backup_of(output))  # killed here
    check_output(output)
    assert contents(tmp_path)["out/ovspec.json"] == b"old"
    replace_folder(new, output)
    assert contents(tmp_path) == {"out/ovspec.json": b"new"}
    with pytest.raises(FileNotFoundError):
        replace_folder(tmp_path / "vanished", output)
    assert contents(tmp_path) == {"out/ovspec.json": b"new"}
    # A folder of that name that is not ours stays.
    backup_of(output).mkdir()
    (backup_of(output) / "mine").write_text("mine", encoding="utf-8")
    check_output(output)
    assert contents(tmp_path)[".out.old/mine"] == b"mine"


def test_damaged_exports_are_named(pair: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(pair, damaged)
    weights = damaged / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ovspec.OvspecError, match=r"openvino_model.bin: missing or not of the exported size"):
        ovspec.load(damaged)
    (damaged / "ovspec.json").write_text('{"format": 99}', encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match="update ovspec"):
        ovspec.load(damaged)
    (damaged / "ovspec.json").write_text("{nonsense", encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match="not valid JSON"):
        ovspec.load(damaged)


def test_load_exports_a_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ovspec.exporting

    monkeypatch.setattr(ovspec.exporting, "default_cache_dir", lambda: tmp_path)
    lm = ovspec.load(DRAFT, export=True, precision="f32")
    assert lm.generate("def f(", max_tokens=4, ignore_eos=True).stats.generated_tokens == 4
    [exported] = (tmp_path / "exports").iterdir()
    before = (exported / "ovspec.json").stat().st_mtime_ns
    ovspec.load(DRAFT, export=True, precision="f32")
    assert (exported / "ovspec.json").stat().st_mtime_ns == before
