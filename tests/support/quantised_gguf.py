"""GGUF files whose tensors are quantised, made of others in f32; the ``gguf`` package also says what they mean.

It rounds to the simple types. In blocks of other types the integers are random, and the scales such that the weights
are about as large as before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

# Type -> places of its blocks' f16 scales, in bytes, and their sizes compared with each other.
SCALES = {
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
    "Q3_K": {108: 1.0},
    "IQ4_NL": {0: 1.0},
    "IQ4_XS": {0: 1.0},
}
EXACT = ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4")  # types whose scales are f16 or powers of two, without minima
NEARLY_EXACT = ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


def random_blocks(kind: str, shape: tuple[int, ...], spread: float, seed: int) -> np.ndarray:
    """Return blocks of a type for weights of a shape, whose standard deviation is about ``spread``."""
    draws = np.random.default_rng(seed)
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = draws.integers(0, 256, (*shape[:-1], shape[-1] // elements * size), np.uint8)
    each = blocks.reshape(-1, size)
    if kind == "MXFP4":
        each[:, 0] = 127 + round(np.log2(spread)) - draws.integers(1, 4, len(each))
        return blocks
    for scale in (1.0, None):  # the second time with scales that give the spread
        if scale is None:
            scale = spread / dequantize(each, GGMLQuantizationType[kind]).std()
        for place, share in SCALES[kind].items():
            numbers = (scale * share * draws.uniform(0.8, 1.2, (len(each), 1))).astype(np.float16)
            each[:, place : place + 2] = numbers.view(np.uint8)
    return blocks


def quantise_file(source: Path, output: Path, kinds: list[str]) -> dict[str, str]:
    """Write ``source`` with each matrix in the next of ``kinds``, or the next but one …; return the types by name.

    So are the experts of a layer, but not its router. A matrix whose rows don't fit is in Q8_0 or, if they don't fit
    that, in f32.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(output, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        options: dict[str, Any] = {"sub_type": field.types[-1]} if field.types[0] == gguf.GGUFValueType.ARRAY else {}
        writer.add_key_value(name, field.contents(), field.types[0], **options)
    types: dict[str, str] = {}
    for tensor in reader.tensors:
        shape = list(reversed(tensor.shape.tolist()))
        values = np.array(tensor.data, np.float32).reshape(shape)
        is_small = values.ndim < 2 or min(values.shape) == 1 or "ffn_gate_inp" in tensor.name
        if is_small or (values.ndim > 2 and "_exps" not in tensor.name):
            writer.add_tensor(tensor.name, values)
            continue
        kind = kinds[len(types) % len(kinds)]
        if shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]:
            kind = "Q8_0"
        if shape[-1] % 32:
            writer.add_tensor(tensor.name, values)
            continue
        types[tensor.name] = kind
        if kind in SCALES or kind == "MXFP4":
            blocks = random_blocks(kind, values.shape, float(values.std()), len(types))
        else:
            blocks = quantize(values, GGMLQuantizationType[kind])
        writer.add_tensor(tensor.name, blocks, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return types
