"""Checkpoints quantised as GPTQ, AWQ, compressed-tensors and bitsandbytes do it, packed as their packages do.

The packing is written from the packages' own (AutoGPTQ's and AutoAWQ's ``pack``, compressed-tensors' ``pack_to_int32``)
in plain loops, and shares nothing with the exporter's reading.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

TOKENIZER = Path(__file__).resolve().parents[2] / "models" / "demo-hf" / "draft"
# Values of bitsandbytes' create_normal_map.
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Rounded:
    """A layer's weights: ``scales[row, group] * (integers[row, column] - zeros[row, group])``, unsigned integers.

    groups: the group of each column.
    """

    integers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    groups: np.ndarray

    def weights(self) -> np.ndarray:
        """Return the weights in f32."""
        out = np.empty(self.integers.shape, np.float32)
        for column, group in enumerate(self.groups):
            steps = self.integers[:, column].astype(np.float32) - self.zeros[:, group]
            out[:, column] = steps * self.scales[:, group].astype(np.float32)
        return out


def rounded(
    weights: np.ndarray, bits: int, group: int, symmetric: bool, shuffled: bool = False, dtype: Any = np.float16
) -> Rounded:
    """Round weights [rows, columns]. group: columns that share a scale; -1 for all. shuffled: not neighbours."""
    rows, columns = weights.shape
    size = columns if group == -1 else group
    groups = np.repeat(np.arange(columns // size), size)
    if shuffled:
        groups = np.random.default_rng(rows + columns).permutation(groups)
    highest = 2**bits - 1
    scales, zeros = np.empty((rows, columns // size), dtype), np.empty((rows, columns // size), np.int64)
    integers = np.empty((rows, columns), np.int64)
    for number in range(columns // size):
        part = weights[:, groups == number]
        if symmetric:
            scale = np.abs(part).max(1) / (highest / 2)
            zero = np.full(rows, 2 ** (bits - 1))
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / highest
            zero = np.clip(np.rint(-low / scale), 1, highest).astype(np.int64)
        scales[:, number] = scale
        zeros[:, number] = zero
        steps = np.rint(part / scales[:, number : number + 1].astype(np.float32)) + zero[:, None]
        integers[:, groups == number] = np.clip(steps, 0, highest)
    return Rounded(integers, scales, zeros, groups)


def packed(numbers: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return int32 that each hold neighbours along an axis, the first, or that of ``order``, in the lowest bits."""
    count = 32 // bits
    numbers = np.moveaxis(numbers, axis, 0)
    if len(numbers) % count:
        numbers = np.concatenate([numbers, np.zeros((-len(numbers) % count, *numbers.shape[1:]), np.int64)])
    out = np.zeros((len(numbers) // count, *numbers.shape[1:]), np.uint32)
    for place in range(len(out)):
        for i in range(count):
            out[place] |= numbers[place * count + (order[i] if order else i)].astype(np.uint32) << np.uint32(i * bits)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(out, 0, axis)).view(np.int32))


def gptq_tensors(layer: Rounded, bits: int, shift: int = 1) -> dict[str, torch.Tensor]:
    """shift: how much less than the zero points the stored ones are."""
    return {
        "qweight": packed(layer.integers.T, bits, 0),
        "qzeros": packed(layer.zeros.T - shift, bits, 1),
        "scales": torch.from_numpy(np.ascontiguousarray(layer.scales.T)),
        "g_idx": torch.from_numpy(layer.groups.astype(np.int32)),
    }


def awq_tensors(layer: Rounded) -> dict[str, torch.Tensor]:
    return {
        "qweight": packed(layer.integers.T, 4, 1, AWQ_COLUMNS),
        "qzeros": packed(layer.zeros.T, 4, 1, AWQ_COLUMNS),
        "scales": torch.from_numpy(np.ascontiguousarray(layer.scales.T)),
    }


def compressed_tensors(layer: Rounded, bits: int, symmetric: bool) -> dict[str, torch.Tensor]:
    made = {
        "weight_packed": packed(layer.integers, bits, 1),
        "weight_scale": torch.from_numpy(layer.scales).to(torch.bfloat16),
        "weight_shape": torch.tensor(layer.integers.shape),
    }
    if not symmetric:
        made["weight_zero_point"] = packed(layer.zeros, bits, 0)
    if not np.array_equal(layer.groups, np.sort(layer.groups)):
        made["weight_g_idx"] = torch.from_numpy(layer.groups.astype(np.int32))
    return made


def nf4_tensors(weights: np.ndarray, nested: bool) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Return the tensors of bitsandbytes 0.50 for a layer in NF4, in blocks of 64, and its weights.

    nested: the blocks' scales have 8 bits, in blocks of 256 with a scale, after an offset is taken from all.
    """
    values = np.array(NF4, np.float32)
    blocks = weights.reshape(-1, 64)
    scales = np.abs(blocks).max(1).astype(np.float32)
    tensors: dict[str, Any] = {"weight.quant_map": values}
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weights.shape)}
    if nested:
        offset = float(scales.mean())
        levels = np.linspace(-1, 1, 256, dtype=np.float32)
        places, outer = np.empty(len(scales), np.uint8), []
        for start in range(0, len(scales), 256):
            part = scales[start : start + 256] - np.float32(offset)
            outer.append(np.abs(part).max())
            for place, scale in enumerate(part, start):
                places[place] = np.abs(levels - scale / outer[-1]).argmin()
                scales[place] = levels[places[place]] * outer[-1] + np.float32(offset)
        tensors |= {"weight.absmax": places, "weight.nested_absmax": np.array(outer, np.float32)}
        tensors |= {"weight.nested_quant_map": levels}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        tensors["weight.absmax"] = scales
    nearest = np.abs(blocks[:, :, None] / scales[:, None, None] - values).argmin(-1)
    upper, lower = nearest.reshape(-1, 2).T
    tensors["weight"] = (16 * upper + lower).astype(np.uint8)[:, None]
    tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    rounded_weights = (values[nearest] * scales[:, None]).reshape(weights.shape)
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, rounded_weights


def bitsandbytes_int8_tensors(weights: np.ndarray) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Return the tensors of bitsandbytes for a layer in int8, and its weights."""
    largest = np.abs(weights).max(1).astype(np.float32)
    integers = np.rint(weights * 127 / largest[:, None]).astype(np.int8)
    tensors = {"weight": torch.from_numpy(integers), "SCB": torch.from_numpy(largest)}
    rounded_weights = integers.astype(np.float32) * (largest * np.float32(1 / 127))[:, None]
    return tensors | {"weight_format": torch.tensor(0, dtype=torch.uint8)}, rounded_weights


def make_checkpoint(
    folder: Path,
    quantisation: dict[str, Any],
    pack: Callable[[np.ndarray], tuple[dict[str, torch.Tensor], np.ndarray]],
    family: type[PretrainedConfig] = LlamaConfig,
    **changes: Any,
) -> Path:
    """Write a random model with quantised layers into ``folder/packed``, and the same in f32 into ``folder/plain``.

    pack: returns the tensors of a layer, and its weights. Return the first folder.
    """
    options: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    options |= {"num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family(**options | changes)).eval()
    tensors: dict[str, torch.Tensor] = {}

    def add_layer(prefix: str, layer: torch.Tensor) -> torch.Tensor:
        parts, weights = pack(layer.detach().numpy())
        tensors.update({f"{prefix}.{part}": tensor for part, tensor in parts.items()})
        return torch.from_numpy(weights)

    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08)
        if name.endswith("_proj.weight"):
            parameter.data = add_layer(name.removesuffix(".weight"), parameter)
        elif ".experts." in name:
            prefix, layers = name.rpartition(".")[0], ["gate_proj", "up_proj"] if "gate" in name else ["down_proj"]
            for number, expert in enumerate(parameter.data):
                rows = [
                    add_layer(f"{prefix}.{number}.{layer}", part)
                    for layer, part in zip(layers, expert.chunk(len(layers)), strict=True)
                ]
                parameter.data[number] = torch.cat(rows)
        else:
            parameter.data = parameter.data.half().float()
            tensors[name] = parameter.data.half()
    model.save_pretrained(folder / "plain")
    (folder / "packed").mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "packed" / "model.safetensors")
    config = json.loads((folder / "plain" / "config.json").read_text(encoding="utf-8"))
    config |= {"quantization_config": quantisation, "dtype": "float16"}
    (folder / "packed" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for kind in ("packed", "plain"):
        for file in (*TOKENIZER.glob("tok*.json"), *TOKENIZER.glob("special*.json")):
            shutil.copy(file, folder / kind)
    return folder / "packed"
