"""Checkpoints with quantised weights: the supported kinds, and their loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec_export.checkpoint_weights import read_quantisation
from ovspec_export.kept_weights import QUANTISATION_KEYS, has_kept_weights

# Kinds dequantised by transformers itself, with their only supported family. Other kinds need packages for GPUs, or
# packages untested here (gptqmodel, accelerate, triton, compressed-tensors).
DEQUANTISED_FAMILIES = {"mxfp4": "gpt_oss"}


def check_quantisation(config: JsonObject, name: str, can_keep: bool = True) -> None:
    """Raise OvspecError if a checkpoint with this config has quantised weights of an unsupported kind.

    A text model extracted from a checkpoint must not be quantised at all: the outer config may list layers of other
    parts, and is easily lost.

    can_keep: it is a model, so an export can keep its weights as they are.
    """
    quantisation = find_quantisation_config(config)
    if quantisation is None:
        return
    method = str(quantisation.get("quant_method"))
    has_parts = isinstance(config.get("text_config"), dict)
    if not has_parts and DEQUANTISED_FAMILIES.get(method) == config.get("model_type"):
        return
    reason = "and belong to a model with image or audio parts" if has_parts else "and belong to a head"
    if can_keep and not has_parts:
        try:
            read_quantisation(quantisation)
            return
        except ValueError as error:
            reason = str(error)
    raise OvspecError(
        f"{name}: its weights are quantised by {method} {reason}. This form can't be exported; export the unquantised "
        "checkpoint with `weight_format` instead."
    )


def find_quantisation_config(config: JsonObject) -> JsonObject | None:
    """Return the entries about quantised weights in a config, or in its text model's; None if there are none."""
    configs = [config]
    if isinstance(config.get("text_config"), dict):
        configs.append(config["text_config"])
    for one_config in configs:
        for key in QUANTISATION_KEYS:
            if (entries := one_config.get(key)) is not None:
                return entries if isinstance(entries, dict) else {"quant_method": "unknown"}
    return None


def has_kept_layout(config: JsonObject) -> bool:
    """Return whether an export can keep the weights of a checkpoint with this config."""
    quantisation = find_quantisation_config(config)
    if quantisation is None:
        return False
    try:
        read_quantisation(quantisation)
    except ValueError:
        return False
    return True


def load_checkpoint_model(
    source: str, trust_remote_code: bool, as_exported: bool = False, **loading_options: Any
) -> Any:
    """Return the checkpoint's model, by default with weights in its own type; MXFP4 becomes bf16, as in optimum.

    as_exported: round kept weights as in this process's export.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if has_kept_weights(Path(source)):
        from ovspec_export.kept_export import load_kept_model

        return load_kept_model(Path(source), trust_remote_code, as_exported, **loading_options)
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if getattr(config, "quantization_config", None):
        from transformers.utils.quantization_config import Mxfp4Config

        loading_options["quantization_config"] = Mxfp4Config(dequantize=True)
    loading_options = {
        "dtype": "auto",
        "use_safetensors": True,
        "trust_remote_code": trust_remote_code,
    } | loading_options
    return AutoModelForCausalLM.from_pretrained(source, **loading_options).eval()
