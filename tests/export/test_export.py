"""Exports are whole or not made at all, and only pairs that fit are exported."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import CHECKPOINTS, PROMPTS, ROOT, Reference
from conftest import DRAFT as SMALL
from ovspec_export import Compression, convert, export_pair

import ovspec
from ovspec.setup.manifest import read_manifest
from ovspec.text.chat_template import load_chat_template
from ovspec.text.pairing import check_same_vocabulary

TARGET, DRAFT = str(CHECKPOINTS / "target"), str(CHECKPOINTS / "draft")


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Return Hugging Face's model of the demo target, which is exported here."""
    return Reference(Path(TARGET))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_manifest_tells_what_is_there(pair: Path) -> None:
    manifest = read_manifest(pair)
    assert manifest
    assert manifest.draft
    assert {*manifest.files, "ovspec.json"} == set(contents(pair))
    assert manifest.target.weight_format == "fp32"
    assert len(manifest.target.states) == 4
    assert manifest.tokenizer_differs_on == []
    needed = {"openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml", "tokenizer.json"}
    assert needed | {"generation_config.json", "chat_template.jinja", "draft/openvino_model.xml"} <= set(manifest.files)
    # The manifest has no path of the machine that exported it.
    assert str(CHECKPOINTS.parent) not in (pair / "ovspec.json").read_text(encoding="utf-8")


@pytest.mark.slow
def test_jobs_in_new_processes_give_the_same_files(pair: Path, tmp_path: Path) -> None:
    """As every export starts them; those of the pair had imported everything before."""
    export_pair(str(SMALL), None, tmp_path / "out", Compression("fp32"))
    alone, draft = contents(tmp_path / "out"), contents(pair / "draft")
    assert alone.pop("ovspec.json")
    assert alone.keys() == draft.keys()
    assert [name for name in draft if alone[name] != draft[name]] == []


def test_the_shipped_pair_is_whole() -> None:
    manifest = read_manifest(CHECKPOINTS.parent / "demo")
    assert manifest
    assert manifest.draft
    assert (manifest.target.weight_format, manifest.draft.weight_format) == ("int8", "int8")
    shipped = [*contents(CHECKPOINTS).values(), *contents(CHECKPOINTS.parent / "demo").values()]
    assert sum(map(len, shipped)) < 45e6


CALIBRATION = Path(__file__)  # any text will do
INT4 = {"weight_format": "int4", "group_size": 64}


@pytest.mark.parametrize(
    ("compression", "drift", "bits"),
    [
        (Compression("fp16"), 0.02, 16),
        (Compression("bf16"), 0.01, 16),
        (Compression("int8"), 0.2, 8),
        (Compression("int8", sym=True), 0.2, 8),
        (Compression(**INT4, ratio=0.8), 3.0, 6),
        (Compression("int4", group_size=32, sym=True), 3.0, 6),
        (Compression(**INT4, ratio=0.6, backup_precision="none"), 3.0, 14),
        (Compression(**INT4, ratio=0.6, backup_precision="int8_sym"), 3.0, 6),
        (Compression(**INT4, awq=True), 3.0, 6),
        (Compression(**INT4, awq=True, scale_estimation=True, calibration=CALIBRATION, samples=8), 3.0, 6),
        (Compression(**INT4, gptq=True, calibration=CALIBRATION, samples=8), 3.0, 6),
        (Compression(**INT4, lora_correction=True, calibration=CALIBRATION, samples=8), 3.0, 6),
        (Compression(**INT4, ratio=0.7, calibration=CALIBRATION, samples=8), 3.0, 6),
    ],
    ids=lambda value: (
        "-".join([value.weight_format, *value.requested_options()]) if isinstance(value, Compression) else ""
    ),
)
@pytest.mark.slow
def test_weight_formats(
    tmp_path: Path, cache_dir: Path, reference: Reference, compression: Compression, drift: float, bits: int
) -> None:
    """Each format loads, stays near the checkpoint, and is as small as it should be."""
    manifest = export_pair(TARGET, None, tmp_path / "out", compression)
    assert manifest.target.options == compression.requested_options()
    assert manifest.files["openvino_model.bin"].size <= 9_441_408 * (bits + 1) / 8
    assert not [name for name in manifest.files if "/" in name], "something was left in the folder"
    lm = ovspec.load(tmp_path / "out", precision="f32", cache_dir=cache_dir)
    ids = lm.encode(PROMPTS[1])
    moved = np.abs(lm.next_logits(ids) - reference.logits(ids.tolist())[-1]).max()
    assert moved < drift
    if bits < 16:
        assert moved > 0


@pytest.mark.slow
def test_a_draft_of_the_first_layers(tmp_path: Path, cache_dir: Path, reference: Reference) -> None:
    manifest = export_pair(TARGET, None, tmp_path / "out", Compression("fp32"), draft_layers=3)
    assert manifest.draft
    assert manifest.draft.source == "target, first 3 layers"
    assert len(manifest.draft.states) == 6
    lm = ovspec.load(tmp_path / "out", draft=True, precision="f32", cache_dir=cache_dir)
    result = lm.generate(PROMPTS[0], max_tokens=24)
    assert result.token_ids == reference.generate(PROMPTS[0], 24)
    assert result.stats.proposed > 0
    for layers in (0, 5, 9):
        with pytest.raises(ovspec.OvspecError, match="target has 5 layers, so choose 1 to 4"):
            export_pair(TARGET, None, tmp_path / "other", draft_layers=layers)


def test_a_pair_of_irs_is_copied(pair: Path, tmp_path: Path) -> None:
    """Published drafts are IRs, and one of them has no tokenizer.json."""
    draft = tmp_path / "published"
    shutil.copytree(pair / "draft", draft)
    (draft / "tokenizer.json").unlink()
    for options in ((Compression("int4"), None), (Compression(), Compression("fp16"))):
        with pytest.raises(ovspec.OvspecError, match="already an OpenVINO IR, so the weights can't be converted"):
            export_pair(str(pair), str(draft), tmp_path / "out", *options)
    manifest = export_pair(str(pair), str(draft), tmp_path / "out")
    assert manifest.draft
    assert (manifest.target.weight_format, manifest.draft.weight_format) == ("as it was", "as it was")
    weights = (tmp_path / "out" / "draft" / "openvino_model.bin").read_bytes()
    assert weights == (pair / "draft" / "openvino_model.bin").read_bytes()
    lm = ovspec.load(tmp_path / "out", draft=True, precision="f32", arithmetic="fast")
    assert lm.generate(PROMPTS[0], max_tokens=12, lookahead=3).stats.accepted > 0


def test_a_chat_template_is_put_in_place_of_all_others(pair: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(pair, source, ignore=shutil.ignore_patterns("draft", "ovspec.json"))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}", "utf-8")
    with pytest.raises(
        ovspec.OvspecError,
        match="`chat_template` is 'mine'; it must be a template's file or text, or one of default, tool_use",
    ):
        export_pair(str(source), None, out, chat_template="mine")
    assert not out.exists()
    (mine := tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!", "utf-8")
    ends = {
        mine: "hi!",
        "tool_use": "[{'role': 'user', 'content': 'hi'}]",
        "phi3": "<|user|>\nhi<|end|>\n<|assistant|>\n",
    }
    for given, prompt in ends.items():
        manifest = export_pair(str(source), None, out, chat_template=given, overwrite=True)
        assert "chat_template.jinja" in manifest.files
        assert not (out / "additional_chat_templates").exists()
        assert load_chat_template(out).render([{"role": "user", "content": "hi"}]) == prompt
        assert "bos" not in (out / "chat_template.jinja").read_text("utf-8"), "this model adds none"


@pytest.mark.slow
def test_what_an_export_has_lost(tmp_path: Path, reference: Reference, capsys: pytest.CaptureFixture[str]) -> None:
    """The quality table agrees with the same figures computed by torch and transformers alone."""
    import torch

    text = tmp_path / "text.txt"
    text.write_text("".join(PROMPTS[:4]), encoding="utf-8")
    export_pair(TARGET, DRAFT, tmp_path / "out", Compression("int8"), evaluate=text)
    [head, target, draft] = capsys.readouterr().err.splitlines()[-3:]
    assert head.split() == ["perplexity", "checkpoint", "KL,", "nats", "same", "top-1", "tokens"]
    perplexity, checkpoint, kl, top1 = (float(cell.strip("%")) for cell in target.split()[1:5])
    ids = torch.tensor([reference.tokenizer(text.read_text(encoding="utf-8"))["input_ids"]])
    assert ids.shape[1] < 1024, "the whole text is one window"
    with torch.no_grad():
        loss = reference.model(input_ids=ids, labels=ids).loss
    assert checkpoint == pytest.approx(float(loss.exp()), abs=2e-3)
    assert perplexity == pytest.approx(checkpoint, rel=0.02)
    assert 0 < kl < 0.01
    assert 95 < top1 <= 100
    assert draft.split()[0] == "draft"


def test_a_folder_made_by_plain_optimum_cli_works(
    pair: Path, tmp_path: Path, cache_dir: Path, load: Callable[..., ovspec.LanguageModel]
) -> None:
    """Without ovspec's manifest, the rollback is probed and the vocabularies are compared at load."""
    plain = tmp_path / "plain"
    shutil.copytree(pair, plain)
    (plain / "ovspec.json").unlink()
    lm = ovspec.load(plain, pair / "draft", precision="f32", cache_dir=cache_dir)
    result = lm.generate(PROMPTS[0], max_tokens=24, lookahead=3)
    assert result.token_ids == load().generate(PROMPTS[0], max_tokens=24).token_ids
    assert result.stats.accepted > 0
    assert result.stats.rollback == "blocks"


def other_vocabulary(tmp_path: Path) -> Path:
    """Make a copy of the draft's checkpoint with two tokens swapped."""
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


def edited(folder: Path, changes: dict[str, Any]) -> str:
    """Make a copy of the draft's checkpoint with ``changes`` in its config."""
    shutil.copytree(DRAFT, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return str(folder)


def test_wrong_sources_are_named(tmp_path: Path) -> None:
    pickled = Path(edited(tmp_path / "pickled", {}))
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    decoy = Path(edited(tmp_path / "decoy", {}))  # transformers would load the pickled weights
    (decoy / "model.safetensors").rename(decoy / "model-00001-of-00001.safetensors")
    (decoy / "pytorch_model.bin").write_bytes(b"a pickle")
    index = Path(edited(tmp_path / "index", {}))
    (index / "model.safetensors").rename(index / "pytorch_model.bin")
    (index / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "pytorch_model.bin"}}')
    adapter = Path(edited(tmp_path / "adapter", {}))
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "org/model"}')
    elsewhere = Path(edited(tmp_path / "elsewhere", {"auto_map": {"AutoModelForCausalLM": "org/other--x.X"}}))
    cut_off = Path(edited(tmp_path / "cut_off", {}))
    weights = (cut_off / "model.safetensors").read_bytes()
    (cut_off / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    nonsense = Path(edited(tmp_path / "nonsense", {}))
    (nonsense / "model.safetensors").write_bytes(b"not a checkpoint at all")
    mute = Path(edited(tmp_path / "mute", {}))
    for tokenizer in mute.glob("tokenizer*"):
        tokenizer.unlink()
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for source, message in [
        (str(tmp_path / "nowhere"), "no such file or folder"),
        (str(file), "damaged or truncated"),
        (str(tmp_path), "has no config.json"),
        ("C:/no-such-model", "no such file or folder, and not a hub id"),
        (
            "no-such-org/no-such-model",
            "no such folder, no complete copy in the hub's cache, and the hub cannot be reached",
        ),
        ("", "is empty"),
        (str(mute), "has no tokenizer"),
        (str(pickled), "has no model.safetensors and no model.safetensors.index.json"),
        (str(decoy), "has no model.safetensors and no model.safetensors.index.json"),
        (str(index), "lists pytorch_model.bin, not a safetensors file"),
        (str(adapter), "an adapter; merge the adapter into its base model"),
        (str(elsewhere), "loads code from another repository"),
        (str(cut_off), "model.safetensors: truncated"),
        (str(nonsense), "not a safetensors file"),
        (
            edited(tmp_path / "code", {"auto_map": {"AutoModelForCausalLM": "x.X"}}),
            "run 'ovspec export --trust-remote-code' if you trust the code",
        ),
        (edited(tmp_path / "t5", {"is_encoder_decoder": True}), "an encoder-decoder model"),
    ]:
        with pytest.raises(ovspec.OvspecError, match=message) as error:
            export_pair(source, None, tmp_path / "out", trust_remote_code=source == str(elsewhere))
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_output_is_not_the_source(pair: Path, tmp_path: Path) -> None:
    shutil.copytree(pair, tmp_path / "pair")
    before = contents(tmp_path)
    for output in (tmp_path / "pair", tmp_path / "pair" / "sub", tmp_path):
        with pytest.raises(ovspec.OvspecError, match="choose another `output`"):
            export_pair(str(tmp_path / "pair"), None, output, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("family", "why"),
    [("frobnicate", "ovspec and optimum-intel don't support the family"), ("deepseek_v3", "transformers 4.55")],
)
def test_families_that_cannot_be_exported(tmp_path: Path, family: str, why: str) -> None:
    with pytest.raises(ovspec.OvspecError, match=f"of the family {family} cannot be exported .*{why}") as error:
        export_pair(edited(tmp_path / "its", {"model_type": family}), None, tmp_path / "out")
    assert len(str(error.value)) < 400
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("compression", "message"),
    [
        (Compression("int8", group_size=64), "`group_size` works only with"),
        (Compression("int8", awq=True), "`awq` works only with"),
        (Compression("fp16", calibration=CALIBRATION), "`calibration` works only with"),
        (Compression("fp16", sym=True), "`sym` works only with"),
        (Compression("int4", ratio=1.5), "at most 1"),
        (Compression("int4", ratio=0.0), "above 0"),
        (Compression("int4", group_size=0), "must be positive"),
        (Compression("int4", gptq=True), "`gptq` needs a text"),
        (Compression("int4", gptq=True, lora_correction=True, calibration=CALIBRATION), "can't be combined"),
        (Compression("int4", scale_estimation=True, calibration=Path("nowhere")), "no such file"),
        (Compression("int3"), "`weight_format` is 'int3'; it must be one of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_do_not_combine(tmp_path: Path, compression: Compression, message: str) -> None:
    with pytest.raises(ovspec.OvspecError, match=message):
        export_pair(TARGET, None, tmp_path / "out", compression)


@pytest.mark.parametrize(("target", "draft"), [(DRAFT, None), (DRAFT, str(ROOT / "models" / "small-hf"))])
def test_a_group_size_that_does_not_fit_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, draft: str | None
) -> None:
    monkeypatch.setattr("ovspec_export.export.convert_source", None)
    message = r"`group_size` is 48, but the rows of \S+proj\.weight have \d+ weights, not .* to \d+, or to -1 for"
    with pytest.raises(ovspec.OvspecError, match=message):
        export_pair(target, draft, tmp_path / "out", Compression("int4", group_size=48))
    assert not list(tmp_path.iterdir())


def test_damaged_exports_are_named(pair: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(pair, damaged)
    weights = damaged / "openvino_model.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ovspec.OvspecError, match=r"openvino_model.bin: missing, or of another size than at the export"):
        ovspec.load(damaged)
    (damaged / "ovspec.json").write_text('{"format": 99}', encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match="update ovspec"):
        ovspec.load(damaged)
    (damaged / "ovspec.json").write_text("{nonsense", encoding="utf-8")
    with pytest.raises(ovspec.OvspecError, match="not valid JSON"):
        ovspec.load(damaged)


@pytest.mark.slow
def test_code_that_transformers_has_itself_is_not_taken_from_the_checkpoint(tmp_path: Path) -> None:
    """Older checkpoints of known families bring code that fails with today's transformers."""
    source = tmp_path / "hf"
    shutil.copytree(DRAFT, source)
    config = json.loads((source / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "code.Model"}}
    (source / "config.json").write_text(json.dumps(config))
    (source / "code.py").write_text("raise RuntimeError('the code was run')")
    text = tmp_path / "text.txt"
    text.write_text(PROMPTS[0])
    export_pair(str(source), None, tmp_path / "pair", draft_layers=1, evaluate=text, trust_remote_code=True)
    assert read_manifest(tmp_path / "pair")


def test_ctrl_c_is_kept_from_the_worker_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no sessions of processes: ``start_new_session`` is ignored there."""
    assert convert.make_process_group_arguments() == {"start_new_session": True} or sys.platform == "win32"
    monkeypatch.setattr(convert, "sys", SimpleNamespace(platform="win32"))
    monkeypatch.setattr(convert.subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    assert convert.make_process_group_arguments() == {"creationflags": 0x200}
