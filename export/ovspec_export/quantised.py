"""Checkpoints whose weights are quantised: which can be exported, and how they are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec_export.kept_weights import has_kept_weights

# transformers reads the other kinds only with packages that need a GPU, or that this project doesn't test (gptqmodel,
# accelerate, triton, compressed-tensors).
DEQUANTISED_FAMILIES = {"mxfp4": "gpt_oss"}  # kind -> the family in which transformers knows it


def check_quantisation(config: JsonObject, name: str) -> None:
    """Raise OvspecError if a checkpoint with this config has quantised weights that can't be read.

    The text model that is taken out of a checkpoint must not be quantised at all: the outer config may name layers of
    other parts, and is easily lost.
    """
    configs = [config]
    if isinstance(config.get("text_config"), dict):
        configs.append(config["text_config"])
    quantisation_keys = ("quantization_config", "compression_config")
    quantisations = [
        one_config[key] for one_config in configs for key in quantisation_keys if one_config.get(key) is not None
    ]
    if not quantisations:
        return
    method = "unknown"
    if isinstance(quantisations[0], dict):
        method = str(quantisations[0].get("quant_method"))
    if len(configs) > 1 or DEQUANTISED_FAMILIES.get(method) != config.get("model_type"):
        raise OvspecError(
            f"{name}: its weights are quantised ({method}), which can't be exported; name the checkpoint that isn't, "
            "and compress that."
        )


def load_checkpoint_model(source: str, trust_remote_code: bool, **loading_options: Any) -> Any:
    """Return the checkpoint's model, by default with weights in its own type; MXFP4 becomes bf16, as in optimum."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if has_kept_weights(Path(source)):
        from ovspec_export.kept_export import load_kept_model

        return load_kept_model(Path(source), trust_remote_code, **loading_options)
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
