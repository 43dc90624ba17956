"""What can't be distilled is refused in a sentence, before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import DRAFT, ROOT, TARGET
from distilling import LAYERS, TARGET_CONFIG, Distilling, distilling, made_head
from heads import write_head
from ovspec_export.distill import stages
from ovspec_export.distill.plan import DistillOptions, estimate_memory, make_plan
from ovspec_export.mtp import make_new_mtp_layer, save_mtp_layer
from ovspec_export.source_lookup import find_source
from safetensors.torch import load_file, save_file

from ovspec.base.errors import OvspecError


@pytest.fixture
def distil(
    pair: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Distilling:
    monkeypatch.setattr(stages, "run_worker_job", lambda *_, **__: pytest.fail("a job ran"))
    # What is refused depends on what is given, not on the room of this machine.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1e12, used=0, free=1e12))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1e12))
    return distilling(pair, made_head(tmp_path_factory), tmp_path)


def refused(distil: Distilling, message: str, **options: Any) -> None:
    """A distillation is refused with this message and leaves nothing behind."""
    before = sorted(distil.folder.rglob("*"))
    with pytest.raises(OvspecError, match=message) as error:
        make_plan(DistillOptions(**{"model": str(distil.model), "output": distil.output} | options))
    assert "\n" not in str(error.value) and str(error.value).endswith(".")
    assert sorted(distil.folder.rglob("*")) == before


def test_files_and_folders(distil: Distilling) -> None:
    head = distil.given["checkpoint"]
    refused(distil, "nowhere: no such file or folder; give a text file", text=(Path("nowhere"),))
    chats = distil.folder / "chats.jsonl"
    chats.write_text("[1, 2]\n", encoding="utf-8")
    refused(distil, "chats.jsonl, line 1: not a chat", text=(chats,))
    refused(distil, "nowhere: no such file", topics=Path("nowhere"))
    refused(distil, "nowhere: no such file or folder, and not a hub id", model="./nowhere")
    refused(distil, "checkpoint: an EAGLE-3 head, not a model; give the target model of this head", model=head)
    refused(
        distil,
        "contains the model model, or lies in the model's folder; choose another `output`",
        output=distil.model / "head",
    )
    refused(
        distil,
        "contains the model model, or lies in the model's folder; choose another `work`",
        work=distil.model / "work",
    )
    refused(distil, "contains `output`, or lies in `output`; choose another `work`", work=distil.output / "work")
    refused(distil, "thesis: is a file; choose another `output`", output=touched(distil.folder / "thesis"))
    refused(distil, "thesis: is a file, not a folder; choose another `work`", work=distil.folder / "thesis")
    shutil.copytree(distil.model, distil.folder / "exported")
    for overwrite in (False, True):
        told = "exported: contains an exported model, not the result of distilling; choose another `output`"
        refused(distil, told, output=distil.folder / "exported", overwrite=overwrite)


def touched(file: Path) -> Path:
    file.touch()
    return file


def test_what_is_no_language_model(distil: Distilling) -> None:
    file = distil.model / "openvino_model.xml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"logits"', '"other"'), encoding="utf-8")
    refused(distil, "not a text generation model")
    file.write_text(text, encoding="utf-8")
    weights = file.with_suffix(".bin")
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(distil, "openvino_model.bin: truncated")


def test_targets_that_have_no_heads(distil: Distilling) -> None:
    """Of which layers share their keys, exported or not: the same sentence; a draft model may be taught for them."""
    entries = {"num_hidden_layers": 3}
    config = distil.model / "config.json"
    config.write_text(json.dumps(TARGET_CONFIG | entries), encoding="utf-8")
    told = "this target can't use a head: only {} of its {} layers have their own keys and values"
    refused(distil, f"model: {told.format(2, 3)}")
    (distil.model / "ovspec.json").unlink()  # which has the size of the config
    assert not make_plan(DistillOptions(str(distil.model), distil.output, draft=str(DRAFT))).tap_layers
    checkpoint = copied(TARGET, distil.folder / "shared", num_kv_shared_layers=1)
    refused(distil, f"{checkpoint.name}: {told.format(1, 2)}", model=str(checkpoint))
    for number, first in enumerate(("sliding_attention", "linear_attention")):
        checkpoint = copied(TARGET, distil.folder / str(number), layer_types=[first, "full_attention"])
        assert make_plan(DistillOptions(str(checkpoint), distil.output)).tap_layers == [0, 1]


def copied(checkpoint: Path, folder: Path, **entries: Any) -> Path:
    """Copy a checkpoint, with more entries in its config."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | entries
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_mtp_layers(folder: Path, count: int) -> Path:
    """Write new MTP layers of the target, which share all but their decoder layer, into ``folder``."""
    save_mtp_layer(make_new_mtp_layer(TARGET_CONFIG), TARGET_CONFIG, folder)
    tensors = load_file(folder / "model.safetensors")
    own = [name for name in tensors if ".layers.0." in name]
    tensors |= {name.replace(".0.", f".{at}.", 1): tensors[name].clone() for name in own for at in range(1, count)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_drafts(distil: Distilling, pair: Path) -> None:
    head = distil.given["checkpoint"]
    refused(distil, "checkpoint: the vocabulary of an EAGLE-3 head can't be trimmed", draft=head, trim_vocabulary=99)
    refused(distil, "`trim_vocabulary` is 9; it must be from 64 to 4096", draft=str(DRAFT), trim_vocabulary=9)
    refused(distil, "`draft_vocabulary` works only for heads", draft=str(DRAFT), draft_vocabulary=9)
    refused(distil, "ir: a head's OpenVINO IR can't be trained", draft=distil.given["ir"])
    refused(distil, "`kind='mtp'` trains an MTP layer, but `draft` is another kind of model", draft=head, kind="mtp")
    refused(
        distil,
        "`kind='head'` trains an EAGLE-3 head, but `draft` is another kind of model",
        draft=str(DRAFT),
        kind="head",
    )
    mtp_plan = make_plan(DistillOptions(str(distil.model), distil.output, kind="mtp"))
    assert (mtp_plan.kind, mtp_plan.tap_layers, mtp_plan.draft_vocab_size) == ("mtp", [], 16384)
    several = write_mtp_layers(distil.folder / "several", 2)
    refused(distil, "several: has 2 MTP layers, but only a single MTP layer can be trained", draft=str(several))
    wide = write_head(distil.folder / "wide", target=TARGET_CONFIG | {"hidden_size": 192}, layer_ids=LAYERS)
    refused(distil, "wide cannot draft for model: the head reads 576 values per token from 3", draft=str(wide))
    tokenizer = json.loads((DRAFT / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[300:302]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    other = copied(DRAFT, distil.folder / "other")
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    refused(distil, "other cannot draft for model: .*; choose a draft with the same tokenizer", draft=str(other))
    # An exported draft, of which the checkpoint is needed.
    shutil.copytree(pair, distil.folder / "pair")
    exported = str(distil.folder / "pair" / "draft")
    refused(distil, "draft: the original checkpoint small-hf was not found; set `draft`", draft=exported)
    shutil.copytree(DRAFT, distil.folder / "small-hf")
    plan = make_plan(DistillOptions(str(distil.model), distil.output, draft=exported))
    assert plan.draft and plan.draft.path == distil.folder / "small-hf"
    (distil.folder / "pair" / "ovspec.json").unlink()
    refused(distil, "draft: an OpenVINO IR can't be trained, and the folder doesn't name", draft=exported)


def test_room(distil: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2e9, used=1e9, free=1e9))
        told = r"\.out\.distill: distilling with this `size_limit` needs about 10\.\d\d GB there, but only 1\.00 GB"
        refused(distil, told)
        assert make_plan(DistillOptions(str(distil.model), distil.output, size_limit=0.5))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0.9e9))
    refused(distil, r"model: distilling needs about \d\.\d\d GB of memory, but only 900\.0 MB is free; close other")


def test_the_memory_of_larger_models(distil: Distilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 1 B fits into 16 GB and not into 4, one of 3 B fits into 32 GB."""
    sizes = {
        1: {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
        3: {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8},
    }
    needed = {}
    for billions, size in sizes.items():
        entries = {"vocab_size": 128256, "num_hidden_layers": 16, "head_dim": 2048 // 32, **size}
        folder = copied(TARGET, distil.folder / f"{billions}b", **entries)
        monkeypatch.setattr("ovspec_export.sources.Source.parameter_count", billions * 10**9)
        needed[billions] = estimate_memory(make_plan(DistillOptions(str(folder), distil.output)))
    assert 4e9 < needed[1] < 8e9
    assert needed[1] < needed[3] < 16e9


def test_torch_devices(distil: Distilling) -> None:
    refused(distil, r"`torch_device='nonsense'`: torch can't use this device", torch_device="nonsense")


def test_layers_that_a_head_reads(distil: Distilling) -> None:
    for layers, read in ((2, [0, 1]), (6, [1, 3, 5]), (7, [2, 3, 4]), (30, [2, 15, 27])):
        folder = copied(TARGET, distil.folder / f"of {layers}", num_hidden_layers=layers)
        assert make_plan(DistillOptions(str(folder), distil.output)).tap_layers == read
        assert find_source(str(folder)).get_config_number("layers") == layers


def test_the_demo_pair_can_be_distilled(tmp_path: Path) -> None:
    """It has no manifest entry that a distillation would need."""
    plan = make_plan(DistillOptions(str(ROOT / "models" / "demo"), tmp_path / "out", size_limit=0.5))
    assert (plan.kind, plan.tap_layers, plan.result_name) == ("head", [1, 2, 4], "out")
