"""Each change that ``ovspec_export/families.py`` asks for is needed: when one of these fails, take the change out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from families import FAMILIES, VOCAB
from family_models import export_as_the_worker_does, make
from ovspec_export.families import FAMILIES as REGISTRY
from ovspec_export.families import UNCHANGED_FAMILIES, UNSUPPORTED_FAMILIES, UNTESTED_FAMILIES
from packaging.version import Version

import ovspec
from ovspec.ir.compile import compile_ir
from ovspec.ir.device import DeviceOptions
from ovspec.setup.rollback_probing import probe_rollback

TASK = "text-generation-with-past"
# Registered by optimum for this task, but no language models by themselves.
NO_LANGUAGE_MODELS = {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "gemma4_unified_text", "llama4"}
NO_LANGUAGE_MODELS |= {"llava-qwen2", "maira2", "marian", "mbart", "pegasus", "qwen3_omni_moe_talker_text"}
NO_LANGUAGE_MODELS |= {"qwen3_omni_moe_text", "qwen3_vl_text"}


def known_to_optimum() -> dict[str, Any]:
    """Return optimum's registry of model families."""
    from optimum.exporters.openvino import model_configs  # noqa: F401  (fills it)
    from optimum.exporters.tasks import TasksManager

    return TasksManager._SUPPORTED_MODEL_TYPE


def accepted(model_type: str) -> bool:
    """Return whether optimum exports a family with the transformers that is installed here."""
    config = known_to_optimum()[model_type]["openvino"][TASK].func
    here = Version(transformers.__version__)
    low, high = (getattr(config, f"{limit}_TRANSFORMERS_VERSION", None) for limit in ("MIN", "MAX"))
    return (not low or Version(low) <= here) and (not high or here <= Version(high))


@pytest.mark.parametrize("name", [name for name, family in REGISTRY.items() if family.ignores_version_limit])
def test_optimum_still_limits_the_version_of_transformers(name: str) -> None:
    assert not accepted(name)


@pytest.mark.parametrize("name", [name for name, family in REGISTRY.items() if family.environment])
def test_a_family_with_an_overlay_is_still_refused_without(name: str) -> None:
    assert not accepted(name)


@pytest.mark.parametrize("name", [name for name, family in REGISTRY.items() if family.alias_of])
def test_optimum_still_does_not_know_it(name: str) -> None:
    assert name not in known_to_optimum()


def test_optimum_still_knows_gpt_oss_by_its_name_only(tmp_path: Path) -> None:
    from optimum.intel.openvino.configuration import get_default_quantization_config

    assert get_default_quantization_config("openai/gpt-oss-20b", "int4")
    assert not get_default_quantization_config(str(tmp_path), "int4")


def test_every_family_of_optimum_is_listed() -> None:
    exported = {name for name, made in known_to_optimum().items() if TASK in made.get("openvino", {})}
    known = exported - NO_LANGUAGE_MODELS
    aliases = {name for name, family in REGISTRY.items() if family.alias_of}
    assert known | aliases | {"mamba2", "nemotron"} == REGISTRY.keys() | UNSUPPORTED_FAMILIES.keys()
    assert all(accepted(name) for name in (UNCHANGED_FAMILIES + " " + UNTESTED_FAMILIES).split())


def test_every_family_is_tested_or_listed_as_untested() -> None:
    tested = {family.model_type or name for name, family in FAMILIES.items()}
    assert tested == {name for name, family in REGISTRY.items() if not family.untested}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma4_text", "patches"),
        ("gemma4_text, experts", "experts_implementation"),
        ("glm4_moe", "experts_implementation"),
        ("qwen3_5_text", "patches"),
        ("mamba", "patches"),
        ("olmo3", "alias_of"),
    ],
)
def test_without_it_the_export_fails_or_is_worse(name: str, change: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    prompt = list(range(5, VOCAB, 400))
    expected = make(name, family, 0, tmp_path / "hf", [prompt], 5)
    failure = export_as_the_worker_does(name, family, tmp_path / "hf", tmp_path / "ir", without=change)
    if name == "qwen3_5_text":
        ir = compile_ir(tmp_path / "ir", DeviceOptions(precision="f32", properties={"CACHE_DIR": ""}))
        assert str(probe_rollback(ir).rollback) == "trim + replay"
    elif name == "mamba":  # optimum's own takes one token at a time; a short text is right
        lm = ovspec.load(tmp_path / "ir", "lookup", precision="f32", cache_dir=tmp_path)
        assert "cache_position" in lm.target.ir.inputs
        assert [lm.generate(prompt, max_tokens=5, ignore_eos=True, lookahead=0).token_ids] == expected
        assert [lm.generate(prompt, max_tokens=5, ignore_eos=True, lookahead=3).token_ids] == expected
    else:
        assert failure
