"""Checkpoints that also see or hear: their text model is exported, with all of its tensors and none of the others."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hybrid
import pytest
import torch
import warm_worker
from conftest import PROMPTS, ROOT, TARGET
from families import DEEPER, DELTA_NET, EXPERTS, GROUPED, HEADED, LLAMA_4, VOCAB, WINDOWS
from family_models import run, warm_jobs
from kept import kept_model
from ovspec_export import Compression, export_pair, patches, worker
from ovspec_export.environments import Environment
from ovspec_export.families import FAMILIES as REGISTRY
from ovspec_export.families import TEXT_MODEL_CLASSES, TEXT_ONLY_FAMILIES
from ovspec_export.source_lookup import find_source
from ovspec_export.text_part import extract_text_model
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

import ovspec
from ovspec.base.errors import OvspecError
from ovspec.text.tokenizer import Tokenizer

TOKENS = 24
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
QWEN_VISION |= {"num_position_embeddings": 16, "patch_size": 4}
GEMMA_4 = {"global_head_dim": 32, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
QWEN_2_VISION = {"depth": 1, "num_heads": 2, "patch_size": 4, "hidden_size": 64, "embed_dim": 16}
QWEN_25_VISION = QWEN_2_VISION | {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 64, "window_size": 16}
QWEN_3_VISION = QWEN_VISION | {"deepstack_visual_indexes": [0]}
SHAPE = {"hidden_size": 96, "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 160}
MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
YARN = {"type": "yarn", "mrope_section": [3, 4, 5], "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA_VISION = VISION | {"vision_output_dim": 64, "projector_input_dim": 16, "projector_output_dim": 64}

# Family of the checkpoint -> the transformers class that makes it, its config's class and arguments, and the spreads of
# its random weights and embeddings.
CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any], float, float]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {"text_config": DEEPER | WINDOWS | {"query_pre_attn_scalar": 16}, "vision_config": VISION},
        1.5,
        0.03,
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        {"text_config": DEEPER | WINDOWS | GEMMA_4, "vision_config": VISION, "audio_config": None},
        0.5,
        0.1,
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": HEADED | {"model_type": "ministral3", "tie_word_embeddings": False},
            "vision_config": VISION | {"model_type": "pixtral"},
        },
        0.25,
        1.0,
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"text_config": DEEPER | DELTA_NET, "vision_config": QWEN_VISION},
        0.25,
        1.0,
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        {
            "text_config": DEEPER | DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 32},
            "vision_config": QWEN_VISION,
        },
        0.25,
        1.0,
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {"text_config": HEADED | LLAMA_4, "vision_config": LLAMA_VISION},
        0.25,
        1.0,
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        {"text_config": GROUPED | {"rope_scaling": MROPE}, "vision_config": QWEN_2_VISION},
        0.25,
        1.0,
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {"text_config": GROUPED | {"rope_scaling": MROPE, "rope_theta": 100.0}, "vision_config": QWEN_25_VISION},
        0.25,
        1.0,
    ),
    "qwen2_5_vl, other shape": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        {
            "text_config": GROUPED | SHAPE | {"rope_scaling": YARN, "rope_theta": 500.0},
            "vision_config": QWEN_25_VISION | {"out_hidden_size": 96},
            "tie_word_embeddings": True,
        },
        0.7,
        0.3,
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        {
            "text_config": HEADED | {"rope_scaling": MROPE | {"type": "default", "mrope_interleaved": True}},
            "vision_config": QWEN_3_VISION,
        },
        0.25,
        1.0,
    ),
}


# Compared in quick runs, each in a test of its own.
QUICK = ("gemma3", "qwen2_5_vl, other shape")


@pytest.fixture(autouse=True)
def warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the jobs of an export in processes that have imported everything before."""
    warm_jobs(monkeypatch)


def environment_of(family: str) -> Environment | None:
    return next(REGISTRY[text].environment for text in TEXT_MODEL_CLASSES[family.partition(",")[0]])


def make(family: str, folder: Path) -> list[int]:
    """Make a checkpoint of a family in ``folder``; return the prompt's and what its ``generate`` says after it."""
    model_class, config, arguments, spread, embedding = CHECKPOINTS[family]
    environment = environment_of(family)
    prompt = Tokenizer(ROOT / "models" / "demo").encode(PROMPTS[0]).tolist()[:12]
    arguments = {
        "config": config,
        "arguments": arguments,
        "folder": str(folder),
        "prompts": [prompt],
        "tokens": TOKENS,
        "spread": spread,
        "embedding": embedding,
        "norms": 0.0,
        "attention": "sdpa",
        "inside": model_class,
    }
    if environment:
        failure = run(environment, "make", **arguments)
        assert not failure, failure
    else:  # what is installed is imported here already
        warm_worker.make(**arguments)
    hybrid.copy_tokenizer(ROOT / "models" / "demo-hf" / "draft", folder)
    return prompt + json.loads((folder / "expected.json").read_text(encoding="utf-8"))[0]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A checkpoint of Gemma 3 with a vision part, and what it says."""

    def made(folder: Path) -> None:
        told = make("gemma3", folder / "hf")
        (folder / "told.json").write_text(json.dumps(told), encoding="utf-8")

    folder = kept_model(tmp_path_factory, "gemma-with-vision", made)
    return folder / "hf", json.loads((folder / "told.json").read_text(encoding="utf-8"))


def says_the_same(folder: Path, told: list[int], output: Path, cache_dir: Path) -> None:
    export_pair(str(folder), None, output, Compression("fp32"))
    lm = ovspec.load(output, precision="f32", cache_dir=cache_dir)
    assert len(set(told[-TOKENS:])) > 4
    assert lm.generate(told[:-TOKENS], max_tokens=TOKENS, ignore_eos=True).token_ids == told[-TOKENS:]
    assert [path.name for path in output.iterdir() if path.is_dir()] == []


@pytest.mark.slow
def test_the_text_model_of_gemma_says_what_the_whole_model_says(
    gemma: tuple[Path, list[int]], tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    says_the_same(*gemma, tmp_path / "pair", cache_dir)
    assert "hf: taking the text model out of it" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in CHECKPOINTS if family not in QUICK])
def test_the_text_model_says_what_the_whole_model_says(family: str, tmp_path: Path, cache_dir: Path) -> None:
    says_the_same(tmp_path / "hf", make(family, tmp_path / "hf"), tmp_path / "pair", cache_dir)


def changed(folder: Path, output: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None]) -> Path:
    """Copy a checkpoint to ``output`` with ``change`` applied to its config and its tensors."""
    shutil.copytree(folder, output)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    (output / "config.json").write_text(json.dumps(config))
    save_file(tensors, output / "model.safetensors", {"format": "pt"})
    return output


def flat(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Give a checkpoint of Qwen2.5-VL the form in which it was published."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    config |= {name: value for name, value in text.items() if name not in ("model_type", "tie_word_embeddings")}
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "vision_token_id": 151654}
    for name in list(tensors):
        old = re.sub(r"^model\.(?=visual)|language_model\.", "", name)
        tensors[old] = tensors.pop(name)


@pytest.mark.slow
def test_a_flat_config_gives_the_same_text_model(tmp_path: Path, cache_dir: Path) -> None:
    told = make("qwen2_5_vl, other shape", tmp_path / "hf")
    folder = changed(tmp_path / "hf", tmp_path / "flat", flat)
    names = load_file(folder / "model.safetensors").keys()
    assert all(name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "visual.")) for name in names)
    texts = [text_of(tmp_path / name, tmp_path / f"text-{name}") for name in ("hf", "flat")]
    configs = [json.loads((text / "config.json").read_text()) for text in texts]
    assert configs[1]["model_type"] == "qwen2" and configs[1]["tie_word_embeddings"]
    ropes = [{name: config[name] for name in ("rope_theta", "rope_scaling")} for config in configs]
    assert ropes[0] == ropes[1] and "mrope_section" not in ropes[0]["rope_scaling"]
    assert not [name for name in configs[1] if "vision" in name or "image" in name]
    new, old = (load_file(text / "model.safetensors") for text in texts)
    assert new.keys() == old.keys() and all(torch.equal(new[name], old[name]) for name in new)
    says_the_same(folder, told, tmp_path / "pair", cache_dir)


@pytest.mark.parametrize("name", TEXT_ONLY_FAMILIES)
def test_what_a_config_leaves_out_is_what_the_whole_model_takes(name: str) -> None:
    """The defaults in ``families.py`` are those in which the two config classes differ."""

    def defaults(model_type: str) -> dict[str, Any]:
        config = CONFIG_MAPPING[model_type]()
        return config.to_dict() | {"rope_theta": config.rope_parameters["rope_theta"]}

    whole, alone = defaults(name), defaults(TEXT_ONLY_FAMILIES[name].family)
    differ = {entry: value for entry, value in whole.items() if entry in alone and alone[entry] != value}
    for entry in ("model_type", "rope_parameters", "layer_types"):
        differ.pop(entry, None)
    assert differ == TEXT_ONLY_FAMILIES[name].config_defaults


def text_of(folder: Path, output: Path) -> Path:
    source = find_source(str(folder))
    assert source.has_non_text_parts
    return extract_text_model(source, output).path


def test_the_older_names_of_tensors_give_the_same_text_model(gemma: tuple[Path, list[int]], tmp_path: Path) -> None:
    """Before transformers 4.52 the language model came first, and the other parts stood beside it."""

    def rename(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            old = re.sub(r"^model\.language_model\.(model\.)?", "language_model.model.", name)
            old = re.sub(r"^model\.(vision_tower|multi_modal_projector)", r"\1", old)
            tensors[old.replace("lm_head", "language_model.lm_head")] = tensors.pop(name)

    new = load_file(text_of(gemma[0], tmp_path / "new") / "model.safetensors")
    older = changed(gemma[0], tmp_path / "older", rename)
    assert not any(name.startswith("model.") for name in load_file(older / "model.safetensors"))
    old = load_file(text_of(older, tmp_path / "old") / "model.safetensors")
    assert new.keys() == old.keys() and all(torch.equal(new[name], old[name]) for name in new)
    assert all(name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")) for name in new)


@pytest.mark.slow
def test_several_files_stay_several(gemma: tuple[Path, list[int]], tmp_path: Path, cache_dir: Path) -> None:
    """Files of the other parts alone are left out, and the index lists the new names."""
    folder = tmp_path / "sharded"
    shutil.copytree(gemma[0], folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    vision = [name for name in names if "language_model" not in name]
    text = [name for name in names if "language_model" in name]
    where = {}
    for number, part in enumerate((vision, text[::2], text[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    says_the_same(folder, gemma[1], tmp_path / "pair", cache_dir)


def test_a_tensor_of_no_known_part_is_refused(gemma: tuple[Path, list[int]], tmp_path: Path) -> None:
    def add(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.talker.weight"] = torch.zeros(3)

    folder = changed(gemma[0], tmp_path / "more", add)
    with pytest.raises(OvspecError, match=r"more: cannot tell whether its tensor model\.talker\.weight belongs"):
        export_pair(str(folder), None, tmp_path / "pair")
    assert not (tmp_path / "pair").exists()


def test_an_unknown_family_with_a_text_model_is_refused(gemma: tuple[Path, list[int]], tmp_path: Path) -> None:
    folder = changed(gemma[0], tmp_path / "other", lambda config, _: config.update(model_type="seer"))
    with pytest.raises(
        OvspecError, match=r"the text part of a seer model can't be exported; .* families gemma3, gemma3n"
    ):
        export_pair(str(folder), None, tmp_path / "pair")


def test_tied_and_untied_heads(gemma: tuple[Path, list[int]], tmp_path: Path) -> None:
    """transformers 5 reads ``tie_word_embeddings`` of the outer config, transformers 4 that of the inner one."""

    def config_with(outer: bool | None, inner: bool | None, head: bool) -> dict[str, Any]:
        def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
            config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"] = outer, inner
            tensors.pop("lm_head.weight", None)
            if head:
                tensors["lm_head.weight"] = torch.zeros(VOCAB, 64)

        name = f"{outer}-{inner}-{head}"
        folder = text_of(changed(gemma[0], tmp_path / name, change), tmp_path / f"text-{name}")
        assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == head
        return json.loads((folder / "config.json").read_text())

    assert config_with(False, True, head=True)["tie_word_embeddings"] is False
    assert config_with(False, True, head=False)["tie_word_embeddings"] is True
    assert config_with(True, None, head=False)["tie_word_embeddings"] is True
    assert config_with(None, False, head=False)["tie_word_embeddings"] is False  # loading it will say what is missing
    assert "tie_word_embeddings" not in config_with(None, None, head=False)  # as the class does


def without_tensor(tensor: str, folder: Path) -> Path:
    def remove(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del tensors[tensor]

    return changed(TARGET, folder, remove)


def with_scales(folder: Path) -> Path:
    def add(_: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1)

    return changed(TARGET, folder, add)


UNKNOWN_SCALES = r"quantised tensor model\.layers\.0\.mlp\S+ is not supported"


@pytest.mark.slow
@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_missing_tensor_is_named(tensor: str, tmp_path: Path) -> None:
    """transformers would fill it at random; with a wrong prefix, whole layers were random and nobody was told."""
    folder = without_tensor(tensor, tmp_path / "less")
    with pytest.raises(OvspecError, match=f"less: .*tensors missing .*, such as {re.escape(tensor)}"):
        export_pair(str(folder), None, tmp_path / "pair")
    assert not (tmp_path / "pair").exists()


def test_quantised_weights_are_not_taken_for_others(gemma: tuple[Path, list[int]], tmp_path: Path) -> None:
    folder = changed(gemma[0], tmp_path / "fp8", lambda config, _: config.update(quantization_config={}))
    with pytest.raises(OvspecError, match="fp8: its weights are quantised"):
        export_pair(str(folder), None, tmp_path / "pair")


@pytest.mark.slow
def test_scales_that_nobody_knows_are_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(OvspecError, match=UNKNOWN_SCALES):
        export_pair(str(with_scales(tmp_path / "scaled")), None, tmp_path / "pair")


def test_tensors_are_checked_when_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", vars(PreTrainedModel)["from_pretrained"])  # restored
    assert AutoModelForCausalLM.from_pretrained(without_tensor("model.norm.weight", tmp_path / "less"))
    patches.refuse_missing_tensors()
    with pytest.raises(OvspecError, match=r"tensors missing .*, such as model\.norm\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "less")
    with pytest.raises(OvspecError, match=UNKNOWN_SCALES):
        AutoModelForCausalLM.from_pretrained(with_scales(tmp_path / "scaled"))


def test_exports_check_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Checked(Exception): ...

    def check() -> None:
        raise Checked

    monkeypatch.setattr(patches, "adapt_optimum", lambda _: {})
    monkeypatch.setattr(patches, "refuse_missing_tensors", check)
    for change in ("apply_splits_in_turn", "match_hugging_face_tokens"):  # of the libraries
        monkeypatch.setattr(worker, change, lambda: None)
    with pytest.raises(Checked):
        worker.export_with_optimum([], "", "llama", False)


def test_a_family_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    folder = changed(TARGET, tmp_path / "new", lambda config, _: config.update(model_type="foo"))
    with pytest.raises(
        OvspecError, match=r"new: .*family foo cannot be exported \(ovspec and optimum-intel don't support the family"
    ):
        export_pair(str(folder), None, tmp_path / "pair")
