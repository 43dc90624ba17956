"""The needs of each model family for an export: an environment, and changes to optimum, each with its reason.

A family is the ``model_type`` of a checkpoint's config. Families without an entry are refused.
``tests/export/test_patches.py`` fails when a change here is no longer needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec.setup.known_pairs import read_known_pairs
from ovspec_export.environments import OPTIMUM_INTEL_2_2, OVERLAYS, TRANSFORMERS_4_57, TRANSFORMERS_5_2, Environment


@dataclass(frozen=True)
class Family:
    """How to export a family.

    environment: an overlay, if the installed transformers can't export it.
    ignores_version_limit: ignore optimum's limit for the version of transformers; our tests show it isn't needed.
    alias_of: for a family unknown to optimum, the family with the export config to use.
    experts_implementation: how transformers computes experts during tracing; its default can't be converted.
    patches: functions of ``patches.py`` to call before the export.
    remote_code: the checkpoint has its own code, and needs ``--trust-remote-code``.
    untested: this project's tests never export it.
    """

    environment: Environment | None = None
    ignores_version_limit: bool = False
    alias_of: str | None = None
    experts_implementation: str | None = None
    patches: tuple[str, ...] = ()
    remote_code: bool = False
    untested: bool = False


OLD_REMOTE_CODE_FAMILY = Family(TRANSFORMERS_4_57, remote_code=True, untested=True)

UNCHANGED_FAMILIES = (
    "arcee bloom cohere2 falcon glm4 gpt2 gpt_bigcode gpt_neox granite granitemoe hunyuan_v1_dense llama "
    "mistral mixtral mpt olmo2 opt phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2"
)
UNTESTED_FAMILIES = "afmoe biogpt codegen cohere gpt_neo gpt_neox_japanese gptj olmo persimmon phi phimoe xglm"
FAMILIES: dict[str, Family] = {
    # optimum limits these to transformers 5.0 and older, but they are the same in 5.5.
    **dict.fromkeys(
        ("gemma", "gemma2", "gemma3_text", "gemma3n_text", "glm", "exaone4"), Family(ignores_version_limit=True)
    ),
    # Inherits a limit of 5.0 in addition to its own of 5.5. Some have experts.
    "gemma4_text": Family(
        ignores_version_limit=True, experts_implementation="batched_mm", patches=("shorten_dummy_window",)
    ),
    # optimum chooses the int4 compression by the model's name; a snapshot of the hub has none.
    "gpt_oss": Family(patches=("compress_as_gpt_oss",)),
    # Unknown to optimum, but built like another family.
    "ministral": Family(alias_of="mistral"),
    "ministral3": Family(alias_of="mistral"),
    "seed_oss": Family(alias_of="mistral"),
    "ernie4_5": Family(alias_of="mistral"),
    "apertus": Family(alias_of="mistral"),
    "olmo3": Family(alias_of="olmo2"),
    "glm4_moe": Family(alias_of="qwen3_moe", experts_implementation="batched_mm"),
    # optimum's patches import cache classes missing in transformers 5.5.
    "qwen3_5_text": Family(TRANSFORMERS_5_2, patches=("pass_position_ids",)),
    "qwen3_5_moe_text": Family(TRANSFORMERS_5_2, patches=("pass_position_ids",)),
    "lfm2": Family(TRANSFORMERS_5_2),
    "lfm2_moe": Family(TRANSFORMERS_5_2),
    "qwen3_next": Family(TRANSFORMERS_4_57),
    # optimum-intel 2.1 refuses it in transformers 5.5, and its scan pads every step to a whole chunk.
    "granitemoehybrid": Family(OPTIMUM_INTEL_2_2),
    # Tracing fails in transformers 5.5.
    "llama4_text": Family(TRANSFORMERS_4_57),
    # Tracing fails there, too; and optimum's scan takes a whole prompt or a single token, and fails in a long text.
    "mamba": Family(TRANSFORMERS_4_57, patches=("scan_mamba_in_a_loop",)),
    "falcon_mamba": Family(TRANSFORMERS_4_57, patches=("scan_mamba_in_a_loop",)),
    # optimum refuses them with transformers 5.
    **dict.fromkeys(("bitnet", "dbrx"), Family(TRANSFORMERS_4_57, untested=True)),
    # The code in their checkpoints was written for transformers 4.
    **dict.fromkeys(
        ("aquila", "baichuan", "deci", "exaone", "internlm", "internlm2", "jais", "orion", "xverse"),
        OLD_REMOTE_CODE_FAMILY,
    ),
    # Exported by optimum without changes.
    **dict.fromkeys(UNCHANGED_FAMILIES.split(), Family()),
    **dict.fromkeys(UNTESTED_FAMILIES.split(), Family(untested=True)),
}
# The family of a checkpoint -> the classes of its text model, by the family of its ``text_config``.
TEXT_MODEL_CLASSES = {
    "gemma3": {"gemma3_text": "Gemma3ForCausalLM"},
    "gemma3n": {"gemma3n_text": "Gemma3nForCausalLM"},
    "gemma4": {"gemma4_text": "Gemma4ForCausalLM"},
    "qwen3_5": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "qwen3_5_moe": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "mistral3": {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"},
    "llama4": {"llama4_text": "Llama4ForCausalLM"},
    "qwen2_vl": {"qwen2": "Qwen2ForCausalLM"},
    "qwen2_5_vl": {"qwen2": "Qwen2ForCausalLM"},
    "qwen3_vl": {"qwen3": "Qwen3ForCausalLM"},
}
# Families with the text model's entries possibly at the top of config.json, without a ``text_config``.
FLAT_CONFIG_FAMILIES = ("qwen2_vl", "qwen2_5_vl")


@dataclass(frozen=True)
class TextOnlyFamily:
    """A family equal to ``family`` for text alone.

    A token of a text has the same position in time, height and width, so its three rotary embeddings are the same.

    config_defaults: the defaults of its config in transformers that differ from ``family``'s.
    """

    family: str
    config_defaults: JsonObject


QWEN2_VL_DEFAULTS: JsonObject = {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568}
QWEN2_VL_DEFAULTS |= {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
QWEN2_VL_DEFAULTS |= {"max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
QWEN2_VL_DEFAULTS |= {"bos_token_id": 151643, "eos_token_id": 151645}
TEXT_ONLY_FAMILIES = {
    "qwen2_vl_text": TextOnlyFamily("qwen2", QWEN2_VL_DEFAULTS),
    "qwen2_5_vl_text": TextOnlyFamily("qwen2", QWEN2_VL_DEFAULTS),
    "qwen3_vl_text": TextOnlyFamily("qwen3", {"rope_theta": 5e5, "max_position_embeddings": 128000}),
}
# Families registered by optimum, but with a failing export.
NEEDS_OLD_TRANSFORMERS = "optimum exports the family only with transformers 4.55 and older"
UNSUPPORTED_FAMILIES = {
    "mamba2": "optimum-intel doesn't support the family",
    "nemotron": "optimum-intel doesn't support the family",
    "zamba2": "optimum cannot save shared tensors of the family",
    **dict.fromkeys(
        ("arctic", "chatglm", "deepseek", "deepseek_v2", "deepseek_v3", "minicpm", "minicpm3", "qwen"),
        NEEDS_OLD_TRANSFORMERS,
    ),
}


def find_family(model_type: str, name: str) -> Family:
    """Return how to export checkpoints of this ``model_type``; raises OvspecError if impossible."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    reason = UNSUPPORTED_FAMILIES.get(model_type, "ovspec and optimum-intel don't support the family")
    raise OvspecError(
        f"{name}: models of the family {model_type} cannot be exported ({reason}); 'ovspec export --list-families' "
        "lists the possible families."
    )


def find_environments(names: Sequence[str]) -> dict[Environment, str]:
    """Return the overlays for the families ``names``, or "all", each with the names of its families.

    Raises:
        OvspecError: a family is unknown, or a name is a model's.
    """
    families = {*FAMILIES, *TEXT_MODEL_CLASSES, *UNSUPPORTED_FAMILIES}
    known_pairs = read_known_pairs()
    families_by_environment: dict[Environment, str] = {}
    for name in names:
        if name == "all":
            continue
        if name not in families and (name in known_pairs or "/" in name or "\\" in name or Path(name).is_dir()):
            raise OvspecError(
                f"{name}: a model, but 'ovspec export --prepare' needs a model family; give the model_type in the "
                "model's config.json, or a family listed by 'ovspec export --list-families'."
            )
        model_types = TEXT_MODEL_CLASSES.get(name, (name,))
        for environment in filter(None, (find_family(model_type, name).environment for model_type in model_types)):
            environment_families = (families_by_environment.get(environment), name)
            families_by_environment[environment] = " ".join(filter(None, environment_families))
    return dict.fromkeys(OVERLAYS, "all") if "all" in names else families_by_environment


def describe_families() -> list[str]:
    """Return a line for each family: its name, its environment, whether it is prepared, and its other needs."""
    outer_families = {
        text_family: [
            outer_family for outer_family, text_classes in TEXT_MODEL_CLASSES.items() if text_family in text_classes
        ]
        for text_family in FAMILIES
    }
    environments = {family.environment for family in FAMILIES.values()}
    prepared = {environment for environment in environments if environment and environment.is_prepared}
    lines = []
    for name, family in sorted(FAMILIES.items()):
        notes = [f"also inside {', '.join(outer_families[name])}"] if outer_families[name] else []
        notes += ["needs --trust-remote-code"] * family.remote_code + ["not tested"] * family.untested
        environment_name = "as installed"
        preparation_state = ""
        if family.environment:
            environment_name = family.environment.name
            preparation_state = "prepared" if family.environment in prepared else "not prepared"
        lines.append(f"{name:20} {environment_name:18} {preparation_state:13} {'; '.join(notes)}".rstrip())
    return lines
