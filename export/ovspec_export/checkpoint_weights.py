"""The weights of a checkpoint quantised by GPTQ, AWQ, AutoRound, compressed-tensors or bitsandbytes, as they are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.base.json_types import JsonObject
from ovspec_export.experts import find_expert_stacks, join_experts, join_matrices, list_expert_layers, unpack_experts
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
    from torch import Tensor
    from transformers import PreTrainedModel

NF4_STATE = "weight.quant_state.bitsandbytes__nf4"
# Suffixes of the names of a layer's tensors, by the kind of layout; the first is in every layer.
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
    """The quantisation of a checkpoint's weights.

    layout: a key of ``PACKED_PARTS``. bits: of each integer; 0 if it varies by layer.
    zero_shift: added to a stored zero point.
    rounds_inputs: the model expects inputs of products to be rounded, too.
    """

    layout: str
    bits: int = 0
    zero_shift: int = 0
    rounds_inputs: bool = False


def read_quantisation(config: JsonObject) -> Quantisation:
    """Return the quantisation of the weights, from ``quantization_config`` of a config.

    Raises:
        ValueError: an export can't keep them; the message has the reason.
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
            raise ValueError(f"in the version {version} with {bits} bits")
        return Quantisation("awq", bits)
    if method == "compressed-tensors":
        return read_compressed_quantisation(config)
    if method == "bitsandbytes":
        if config.get("load_in_8bit"):
            return Quantisation("bitsandbytes, int8", rounds_inputs=True)
        if (kind := config.get("bnb_4bit_quant_type", "fp4")) != "nf4":
            raise ValueError(f"in {kind}")
        return Quantisation("bitsandbytes, nf4")
    raise ValueError("in an unsupported way")


def read_compressed_quantisation(config: JsonObject) -> Quantisation:
    """Return the quantisation by compressed-tensors; raises ValueError like ``read_quantisation``."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError("without config_groups in config.json")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("with sparsity")
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
    """Implements ``KeptWeights`` for the safetensors files in ``folder``, from which ``model`` is made.

    layer_count: the model has only the first so many layers of the checkpoint; None for all.

    Raises:
        OvspecError: the model has no place for a tensor, or its experts can't be kept.
    """

    def __init__(
        self, folder: Path, quantisation: Quantisation, model: PreTrainedModel, layer_count: int | None = None
    ) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._quantisation = quantisation
        # Each file is opened again for each tensor, to let pages already read leave the memory.
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
                self._files.pop(name, None)  # the model has no place for it; it belongs to a draft
        self._parameter_shapes = {name: tuple(weights.shape) for name, weights in model.state_dict().items()}
        self._expert_stacks = find_expert_stacks(self._parameter_shapes)
        self._expert_layers: dict[str, list[str]] = {}  # by their matrix
        self._shapes = dict(self._parameter_shapes)
        for name, stack in self._expert_stacks.items():
            del self._shapes[name]
            for matrix in stack.matrices:
                self._expert_layers[matrix] = list_expert_layers(matrix, stack.shape[0])
                self._shapes |= dict.fromkeys(self._expert_layers[matrix], stack.shape[1:])
        mark, *_ = PACKED_PARTS[quantisation.layout]
        self._layers = {f"{name.removesuffix(mark)}weight" for name in self._files if name.endswith(f".{mark}")}
        self._check_names()

    def list_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter in the checkpoint."""
        return {
            name: shape
            for name, shape in self._parameter_shapes.items()
            if all(part in self._layers or part in self._files for part in self._list_parts(name))
        }

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
        name, *_ = self._expert_layers.get(name, [name])
        return self._quantisation.layout if name in self._layers else self._stored_dtypes[name]

    def read_values(self, name: str) -> np.ndarray:
        """Return the values of a parameter, float32."""
        if stack := self._expert_stacks.get(name):
            return join_matrices(stack, self._unpack_experts)
        if name in self._layers:
            return self._read_layers([name])[0].unpack()
        values = self._read_tensor(name)
        if not np.isfinite(values).all():
            raise OvspecError(
                f"{self._folder}: the tensor {name} has NaN or infinite values; download the model again."
            )
        return np.array(values, np.float32).reshape(self._shapes[name])

    def read_matrix(self, name: str, with_offsets: bool) -> PackedWeights | np.ndarray:  # noqa: ARG002
        """Return a matrix as described in ``KeptWeights``."""
        names = self._expert_layers.get(name, [name])
        packed_count = sum(layer in self._layers for layer in names)
        if packed_count == len(names):
            layers = self._read_layers(names)
            return layers[0] if names == [name] else self._join_experts(name, layers)
        dtypes = {self._stored_dtypes.get(layer) for layer in names}
        if packed_count or len(dtypes) > 1:
            raise OvspecError(
                f"{self._folder}: only some of the experts {name} are quantised, but ovspec needs all or none; export "
                "the unquantised checkpoint."
            )
        tensors = self._read_bf16_bits(names) if dtypes == {"BF16"} else self._read_tensors(names)
        return tensors[name] if names == [name] else np.concatenate([tensors[layer] for layer in names])

    def _unpack_experts(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of each expert in a matrix, float32."""
        return unpack_experts(self.read_matrix(name, False), len(self._expert_layers[name]))

    def _join_experts(self, name: str, experts: list[PackedWeights]) -> PackedWeights:
        try:
            if experts[0].element_type == "nf4":
                raise ValueError("OpenVINO would convert NF4 values of experts to floats")
            return join_experts(experts)
        except ValueError as error:
            raise OvspecError(
                f"{self._folder}: the quantised weights of the experts {name} can't be exported unchanged: {error}; "
                "export the unquantised checkpoint with `weight_format` instead."
            ) from None

    def _list_parts(self, name: str) -> list[str]:
        """Return a parameter's names in the files: its own, or the names of each expert's layers."""
        stack = self._expert_stacks.get(name)
        return [layer for matrix in stack.matrices for layer in self._expert_layers[matrix]] if stack else [name]

    def _read_layers(self, names: list[str]) -> list[PackedWeights]:
        """Return the weights of quantised layers."""
        prefixes = [name.removesuffix("weight") for name in names]
        parts = PACKED_PARTS[self._quantisation.layout]
        tensors = self._read_tensors(
            f"{prefix}{part}" for prefix in prefixes for part in parts if f"{prefix}{part}" in self._files
        )
        return [
            self._unpack_layer(
                name, {part: tensors[f"{prefix}{part}"] for part in parts if f"{prefix}{part}" in tensors}
            )
            for name, prefix in zip(names, prefixes, strict=True)
        ]

    def _unpack_layer(self, name: str, tensors: dict[str, np.ndarray]) -> PackedWeights:
        prefix = name.removesuffix("weight")
        try:
            readers: dict[str, Callable[[], PackedWeights]] = {
                "gptq": lambda: read_gptq(tensors, self._quantisation.bits, self._quantisation.zero_shift),
                "awq": lambda: read_awq(tensors, self._quantisation.bits),
                "compressed-tensors": lambda: read_compressed_tensors(tensors),
                "bitsandbytes, int8": lambda: read_bitsandbytes_int8(tensors),
                "bitsandbytes, nf4": lambda: read_bitsandbytes_nf4(tensors),
            }
            packed = readers[self._quantisation.layout]()
            if packed.shape != self._shapes[name]:
                rows, columns = packed.shape
                needed_shape = " x ".join(map(str, self._shapes[name]))
                raise ValueError(f"the layer has {rows} x {columns} weights, but the model needs {needed_shape}")
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise OvspecError(
                f"{self._folder}: the quantised layer {prefix[:-1]} is damaged or doesn't match config.json ({error}); "
                "download the model again."
            ) from None
        check_numbers(packed, prefix[:-1], str(self._folder))
        return packed

    def _read_tensor(self, name: str) -> np.ndarray:
        return self._read_tensors([name])[name]

    def _read_tensors(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Return tensors as stored, except bf16 as f32."""
        import torch

        return {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in self._load_tensors(names)
        }

    def _read_bf16_bits(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        import torch

        return {name: tensor.view(torch.int16).numpy().view(np.uint16) for name, tensor in self._load_tensors(names)}

    def _load_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name and its tensor; each file is opened once, as its header takes time to read."""
        from safetensors import safe_open

        names_by_file: defaultdict[Path, list[str]] = defaultdict(list)
        for name in names:
            names_by_file[self._files[name]].append(name)
        for file, file_names in names_by_file.items():
            with safe_open(file, "pt") as tensors:
                for name in file_names:
                    yield name, tensors.get_tensor(name)

    def _check_names(self) -> None:
        """Raise OvspecError for a tensor without a place in the model."""
        parts = ("weight", *PACKED_PARTS[self._quantisation.layout], *IGNORED_PARTS)
        prefixes = {name.removesuffix("weight") for name in self._layers if name in self._shapes}
        names_of_layers = {f"{prefix}{part}" for prefix in prefixes for part in parts}
        names_without_place = [
            name
            for name in self._files
            if name not in self._shapes and name not in names_of_layers and not name.endswith(IGNORED_PARTS)
        ]
        # AutoGPTQ writes biases of zeros for layers without a bias.
        bias_names = [
            name
            for name in names_without_place
            if name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in self._layers
        ]
        zero_biases = {name for name, bias in self._load_tensors(bias_names) if not bias.any()}
        if unknown_name := next((name for name in names_without_place if name not in zero_biases), None):
            raise OvspecError(
                f"{self._folder}: the tensor {unknown_name} is unexpected in a model of the family in config.json; "
                "download the model again."
            )
