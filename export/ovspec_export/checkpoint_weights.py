"""The weights of a checkpoint that GPTQ, AWQ, AutoRound, compressed-tensors or bitsandbytes quantised, as they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec_export.kept_weights import check_numbers
from ovspec_export.mtp_layout import find_mtp_layers
from ovspec_export.packed_layouts import (
    BITS,
    read_awq,
    read_bitsandbytes_int8,
    read_bitsandbytes_nf4,
    read_compressed_tensors,
    read_gptq,
)
from ovspec_export.packed_weights import PackedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
# Ends of the names of a layer's tensors, by the kind of layout, the one that each layer has first.
PACKED_PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": (
        "weight_scale",
        "weight_packed",
        "weight",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
    ),
    "bitsandbytes, int8": ("SCB", "weight", "weight_format"),
    "bitsandbytes, nf4": (
        NF4_STATE,
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
    ),
}
LAYER_NUMBER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")
IGNORED_PARTS = ("weight_shape", "input_scale", "input_zero_point", "k_scale", "v_scale", "rotary_emb.inv_freq")
INTEGER_FORMATS = ("pack-quantized", "int-quantized")


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's weights are quantised.

    layout: a key of ``PACKED_PARTS``. bits: of each integer; 0 if each layer says it itself.
    zero_shift: what is added to a stored zero point.
    rounds_inputs: the model was made to round what it multiplies the weights with, too.
    """

    layout: str
    bits: int = 0
    zero_shift: int = 0
    rounds_inputs: bool = False


def read_quantisation(config: JsonObject) -> Quantisation:
    """Return how the weights are quantised, from ``quantization_config`` of a config.

    Raises:
        ValueError: an export can't keep them, with the reason.
    """
    method = str(config.get("quant_method"))
    bits = config.get("bits", 4)
    if method in ("gptq", "awq", "auto-round") and bits not in BITS:
        raise ValueError(f"with {bits} bits")
    packing = str(config.get("packing_format", ""))
    if method == "gptq" or (method == "auto-round" and packing.endswith(("auto_gptq", "gptqmodel", "auto_round"))):
        stored_format = str(config.get("checkpoint_format", "gptq"))
        if stored_format not in ("gptq", "gptq_v2"):
            raise ValueError(f"in the format {stored_format}")
        return Quantisation("gptq", bits, zero_shift=int(stored_format == "gptq"))
    if method == "awq" or (method == "auto-round" and packing.endswith("auto_awq")):
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm" or bits != 4:
            raise ValueError(f"in the version {version}, with {bits} bits")
        return Quantisation("awq", bits)
    if method == "compressed-tensors":
        return read_compressed_quantisation(config)
    if method == "bitsandbytes":
        if config.get("load_in_8bit"):
            return Quantisation("bitsandbytes, int8", rounds_inputs=True)
        if (kind := config.get("bnb_4bit_quant_type", "fp4")) != "nf4":
            raise ValueError(f"to {kind}")
        return Quantisation("bitsandbytes, nf4")
    raise ValueError("in a way that isn't known")


def read_compressed_quantisation(config: JsonObject) -> Quantisation:
    """Return how compressed-tensors quantised the weights; raises ValueError like ``read_quantisation``."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError("it says nothing of groups")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("they are sparse, too")
    for group in groups.values():
        stored_format = group.get("format") or config.get("format")
        weights = group.get("weights") or {}
        if stored_format not in INTEGER_FORMATS or weights.get("type", "int") != "int":
            raise ValueError(f"in the format {stored_format}")
        if stored_format == "pack-quantized" and weights.get("num_bits") not in BITS:
            raise ValueError(f"with {weights.get('num_bits')} bits")
    return Quantisation(
        "compressed-tensors", rounds_inputs=any(group.get("input_activations") for group in groups.values())
    )


class CheckpointWeights:
    """Implements ``KeptWeights`` for the safetensors files in ``folder``, of which ``model`` is made.

    layer_count: the model has only so many of the checkpoint's layers; None for all.

    Raises:
        OvspecError: the model has no place for a tensor.
    """

    def __init__(
        self, folder: Path, quantisation: Quantisation, model: PreTrainedModel, layer_count: int | None = None
    ) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._quantisation = quantisation
        # Each file is opened again for each tensor, so that pages that were read can leave the memory.
        self._files: dict[str, Path] = {}
        self._stored_dtypes: dict[str, str] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118, as it isn't a dict
                    layer_number = LAYER_NUMBER.search(name)
                    if layer_count is not None and layer_number and int(layer_number[1]) >= layer_count:
                        continue
                    self._files[name] = file
                    self._stored_dtypes[name] = tensors.get_slice(name).get_dtype()
        for mtp_names in find_mtp_layers(list(self._files), model.config.to_dict()):
            for name in mtp_names:
                self._files.pop(name, None)  # the model has no place for it; it is a draft
        self._shapes = {name: tuple(weights.shape) for name, weights in model.state_dict().items()}
        mark, *_ = PACKED_PARTS[quantisation.layout]
        self._layers = {f"{name.removesuffix(mark)}weight" for name in self._files if name.endswith(f".{mark}")}
        self._check_names()

    def list_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter that the checkpoint has."""
        return {name: shape for name, shape in self._shapes.items() if name in self._layers or name in self._files}

    def list_matrices(self) -> dict[str, bool]:
        """Return the matrices in integers or 16 bits; none is transposed."""
        return {
            name: False
            for name, shape in self.list_shapes().items()
            if len(shape) == 2
            and (name in self._layers or (self._stored_dtypes[name] in ("F16", "BF16") and min(shape) > 1))
        }

    def describe_kind(self, name: str) -> str:
        """Return the name of the method, or of a float's type."""
        return self._quantisation.layout if name in self._layers else self._stored_dtypes[name]

    def read_values(self, name: str) -> np.ndarray:
        """Return the values of a parameter, float32."""
        if name in self._layers:
            return self._read_layer(name).unpack()
        values = self._read_tensor(name)
        if not np.isfinite(values).all():
            raise OvspecError(f"{self._folder}: its tensor {name} has values that are infinite or not numbers.")
        return np.array(values, np.float32).reshape(self._shapes[name])

    def read_matrix(self, name: str, with_offsets: bool) -> PackedWeights | np.ndarray:  # noqa: ARG002
        """Return a matrix as ``KeptWeights`` says."""
        if name in self._layers:
            return self._read_layer(name)
        if self._stored_dtypes[name] == "BF16":
            return self._read_bf16_bits(name)
        return self._read_tensor(name)

    def _read_layer(self, name: str) -> PackedWeights:
        prefix = name.removesuffix("weight")
        parts = PACKED_PARTS[self._quantisation.layout]
        tensors = {part: self._read_tensor(f"{prefix}{part}") for part in parts if f"{prefix}{part}" in self._files}
        readers: dict[str, Callable[[], PackedWeights]] = {
            "gptq": lambda: read_gptq(tensors, self._quantisation.bits, self._quantisation.zero_shift),
            "awq": lambda: read_awq(tensors, self._quantisation.bits),
            "compressed-tensors": lambda: read_compressed_tensors(tensors),
            "bitsandbytes, int8": lambda: read_bitsandbytes_int8(tensors),
            "bitsandbytes, nf4": lambda: read_bitsandbytes_nf4(tensors),
        }
        try:
            packed = readers[self._quantisation.layout]()
            if packed.shape != self._shapes[name]:
                raise ValueError(f"{packed.shape[0]} x {packed.shape[1]} weights in place of {self._shapes[name]}")
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise OvspecError(
                f"{self._folder}: its layer {prefix[:-1]} is not stored as its config says ({error}); download the "
                "model again."
            ) from None
        check_numbers(packed, prefix[:-1], str(self._folder))
        return packed

    def _read_tensor(self, name: str) -> np.ndarray:
        """Return a tensor as it is stored, in bf16 as f32."""
        import torch
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as tensors:
            tensor = tensors.get_tensor(name)
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    def _read_bf16_bits(self, name: str) -> np.ndarray:
        import torch
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as tensors:
            return tensors.get_tensor(name).view(torch.int16).numpy().view(np.uint16)

    def _check_names(self) -> None:
        """Raise OvspecError for a tensor that has no place in the model."""
        parts = ("weight", *PACKED_PARTS[self._quantisation.layout], *IGNORED_PARTS)
        prefixes = {name.removesuffix("weight") for name in self._layers if name in self._shapes}
        names_of_layers = {f"{prefix}{part}" for prefix in prefixes for part in parts}
        for name in self._files:
            if name in self._shapes or name in names_of_layers or name.endswith(IGNORED_PARTS):
                continue
            # AutoGPTQ writes biases of zeros for layers that have none.
            prefix, _, part = name.rpartition(".")
            if part == "bias" and f"{prefix}.weight" in self._layers and not self._read_tensor(name).any():
                continue
            raise OvspecError(f"{self._folder}: its tensor {name} has no place in a model of its family.")
