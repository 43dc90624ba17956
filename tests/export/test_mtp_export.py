"""The MTP layers that checkpoints bring along: hybrids, experts, tied embeddings, text parts, appended layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import hybrid
import pytest
import torch
from conftest import ROOT
from families import FAMILIES, VOCAB
from family_models import warm_jobs
from ovspec_export import export_pair, mtp_vocabulary
from ovspec_export.mtp_layout import find_mtp_layers
from ovspec_export.source_lookup import find_source
from ovspec_export.sources import MtpSource, find_own_mtp_layer
from safetensors.torch import load_file, save_file

import ovspec
from ovspec.setup.manifest import read_manifest

SLOW = pytest.mark.slow
QWEN_NAMES = {"fc": "mtp.fc", "embedding": "mtp.pre_fc_norm_embedding", "hidden": "mtp.pre_fc_norm_hidden"}
QWEN_NAMES |= {"norm": "mtp.norm", "layer": "mtp.layers.0"}
# With copies of the target's embedding and lm_head, as DeepSeek and GLM have them.
APPENDED_NAMES = {"fc": "eh_proj", "embedding": "enorm", "hidden": "hnorm", "norm": "shared_head.norm"}


def write_checkpoint(
    folder: Path, family: str, *, appended: bool = False, vision: str = "", tied: bool = False, vocabulary: int = VOCAB
) -> Path:
    """Write a random model of a family with an MTP layer into ``folder``, and return it."""
    import transformers

    torch.manual_seed(0)
    config_class = getattr(transformers, FAMILIES[family].config)
    config = config_class(**FAMILIES[family].arguments | {"tie_word_embeddings": tied, "vocab_size": vocabulary})
    entries = config.to_dict()
    one_layer = entries | {"num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0}
    layer_count, width = config.num_hidden_layers, config.hidden_size
    tensors: list[dict[str, torch.Tensor]] = []
    for part, part_config in ((folder, config), (folder / "layer", config_class(**one_layer))):
        model = transformers.AutoModelForCausalLM.from_config(part_config)
        for weights in model.parameters():
            if weights.ndim > 1:
                torch.nn.init.normal_(weights, std=0.5 if len(weights) >= VOCAB else 0.2)
        model.save_pretrained(part)
        inner = "model." if not vision or part != folder else "model.language_model."
        stored = load_file(part / "model.safetensors").items()
        tensors.append(
            {name.replace("model.language_model.", "model.").replace("model.", inner): x for name, x in stored}
        )
    shutil.rmtree(folder / "layer")
    names = QWEN_NAMES
    if appended:
        layer = f"model.layers.{layer_count}"
        names = {part: f"{layer}.{name}" for part, name in APPENDED_NAMES.items()} | {"layer": layer}
        tensors[0][f"{layer}.embed_tokens.weight"] = tensors[1]["model.embed_tokens.weight"].clone()
        tensors[0][f"{layer}.shared_head.head.weight"] = tensors[1]["model.embed_tokens.weight"].clone()
    added = {f"{names['fc']}.weight": 0.1 * torch.randn(width, 2 * width)}
    added |= {f"{names[name]}.weight": torch.rand(width) for name in ("embedding", "hidden", "norm")}
    added |= {
        name.replace("model.layers.0", names["layer"]): weights.clone()
        for name, weights in tensors[1].items()
        if name.startswith("model.layers.0.")
    }
    save_file(tensors[0] | added, folder / "model.safetensors", {"format": "pt"})
    stored_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if vision:
        stored_config = {"model_type": vision, "text_config": stored_config, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(stored_config), encoding="utf-8")
    hybrid.copy_tokenizer(ROOT / "models" / "demo-hf" / "target", folder)
    return folder


CASES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"tied": True},
    "qwen3_5_moe_text": {"vision": "qwen3_5_moe"},
    "glm4_moe": {"appended": True},
    "qwen3_next": {},
    "qwen3": {},
}


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name == "qwen3" else SLOW) for name in CASES])
def test_a_model_keeps_its_layer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself; the export compares the layer with torch. It proposes, and the texts stay the same."""
    warm_jobs(monkeypatch)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **CASES[family])
    manifest = export_pair(str(checkpoint), None, tmp_path / "pair")
    assert manifest.draft and manifest.draft.source == "checkpoint, MTP layer"
    lm = ovspec.load(tmp_path / "pair", "mtp", cache_dir=tmp_path / "cache")
    options: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    plain, drafted = (lm.generate("def f(x):", **options, lookahead=count) for count in (0, 2))
    assert lm.target.arithmetic_note == "exact" and drafted.token_ids == plain.token_ids
    assert drafted.stats.drafters["mtp"]["proposed"] > 10
    export_pair(str(checkpoint), "none", tmp_path / "alone")
    assert not (tmp_path / "alone" / "draft").exists()


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense") / "checkpoint", "qwen3")


def test_a_large_vocabulary_is_trimmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To what the model itself uses most, in texts that it writes during the export."""
    monkeypatch.setattr(mtp_vocabulary, "TEXT_SECONDS", 8.0)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3", vocabulary=mtp_vocabulary.MAX_FULL_VOCABULARY + 1)
    export_pair(str(checkpoint), "mtp", tmp_path / "pair")
    lm = ovspec.load(tmp_path / "pair", "mtp", cache_dir=tmp_path / "cache")
    assert (
        lm.draft
        and lm.draft.ir.target_ids is not None
        and len(lm.draft.ir.target_ids) == mtp_vocabulary.TRIMMED_VOCABULARY
    )
    assert not [*(tmp_path / "pair").rglob("*.npy")] and not (tmp_path / "pair" / "texts").exists()
    text = lm.generate("def f(x):", max_tokens=8, ignore_eos=True, lookahead=2)
    assert text.stats.drafters["mtp"]["proposed"] and read_manifest(tmp_path / "pair", verify=True)


def spoil(tensors: dict[str, torch.Tensor], name: str, weights: torch.Tensor | None) -> None:
    del tensors[name]
    if weights is not None:
        tensors[name] = weights


WRONG: dict[str, tuple[str, torch.Tensor | None, str]] = {
    "no fc": ("mtp.fc.weight", None, "lacks the tensor fc.weight"),
    "no norm": ("mtp.pre_fc_norm_hidden.weight", None, "lacks the tensor feature_norm.weight"),
    "no gate": ("mtp.layers.0.mlp.gate_proj.weight", None, "lacks the tensor"),
    "other width": ("mtp.pre_fc_norm_embedding.weight", torch.ones(3), "has a tensor of the wrong shape"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "no fc" else SLOW) for name in WRONG])
def test_damaged_layers_are_named(name: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is left of the export."""
    warm_jobs(monkeypatch)
    checkpoint = shutil.copytree(dense, tmp_path / "checkpoint")
    tensor, weights, told = WRONG[name]
    tensors = load_file(checkpoint / "model.safetensors")
    spoil(tensors, tensor, weights)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    with pytest.raises(ovspec.OvspecError, match=told):
        export_pair(str(checkpoint), None, tmp_path / "pair")
    assert not (tmp_path / "pair").exists()


def test_a_model_without_a_layer(pair: Path, tmp_path: Path) -> None:
    checkpoint = str(ROOT / "models" / "demo-hf" / "target")
    with pytest.raises(ovspec.OvspecError, match="has no MTP layer, or only a quantised MTP layer; choose another"):
        export_pair(checkpoint, "mtp", tmp_path / "pair")
    assert find_own_mtp_layer(find_source(checkpoint)) is None
    with pytest.raises(ovspec.OvspecError, match="not an MTP layer; set `draft='draft'`"):
        ovspec.load(pair, "mtp")


def test_names_of_tensors(dense: Path) -> None:
    """Qwen's, and those of layers that are appended to the target's; of several layers, each has its own."""
    layer = find_own_mtp_layer(find_source(str(dense)))
    assert isinstance(layer, MtpSource) and layer.model_type == "qwen3" and layer.size_in_bytes > 1000
    assert {"fc.weight", "norm.weight", "embedding_norm.weight", "feature_norm.weight"} <= {*layer.tensor_shapes()}
    appended = [f"model.layers.{at}.{name}" for at in (4, 5) for name in ("eh_proj.weight", "mlp.up_proj.weight")]
    copies = ["model.layers.4.embed_tokens.weight", "model.layers.4.shared_head.head.weight"]
    layers = find_mtp_layers([*appended, *copies, "model.layers.3.mlp.up_proj.weight"], {"num_hidden_layers": 4})
    assert [sorted(each.values()) for each in layers] == [["fc.weight", "layer.mlp.up_proj.weight"]] * 2
    assert not find_mtp_layers(["model.layers.4.mlp.up_proj.weight"], {"num_hidden_layers": 4}), "a layer that is left"
