"""Time products with weights in several formats, to tell whether a model would be faster in another one.

Which format is fastest depends on the processor: without VNNI, zero points cost time, and weights of 4 bits are read
faster than they are unpacked.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

MULTIPLIED_BYTES = 64e6  # of the weights in int8 that are multiplied, so that no cache of a core holds them
MOST_COPIES = 64
TIMING_TURNS, TIMING_REPEATS = 5, 4
GROUP_SIZES = (128, 64, 32)  # weights that share a scale, the largest that fits
ELEMENT_TYPES = {(8, False): ov.Type.u8, (8, True): ov.Type.i8, (4, False): ov.Type.u4, (4, True): ov.Type.i4}


@dataclass(frozen=True)
class WeightFormat:
    """How weights are stored. bits: 16 is f16. group: weights that share a scale; None for a whole row.

    symmetric: without zero points.
    """

    bits: int
    group: int | None = None
    symmetric: bool = False

    def __str__(self) -> str:
        if self.bits == 16:
            return "fp16"
        groups = f" in groups of {self.group}" if self.group else ""
        return f"int{self.bits}{groups}{', symmetric' if self.symmetric else ''}"

    @property
    def export_options(self) -> str:
        """The options of ``ovspec export`` that make it."""
        if self.bits == 16:
            return "--weight-format fp16"
        groups = f" --group-size {self.group} --ratio 1" if self.group else ""
        return f"--weight-format int{self.bits}{groups}{' --sym' if self.symmetric else ''}"


def find_export_options(name: str) -> str:
    """Return the options of ``ovspec export`` for a format of ``list_formats`` by its name."""
    return next(each.export_options for size in GROUP_SIZES for each in list_formats(size) if str(each) == name)


def time_formats_for_model(shapes: Counter[tuple[str, str]]) -> dict[str, float]:
    """Return milliseconds of a model's commonest product for one token, by weight format, the model's own first.

    shapes: of the constants of its IR, by (type, shape). Returns {} if most are in a format that isn't known here.
    """
    if not (found := find_commonest_product(shapes)):
        return {}
    own, rows, columns = found
    return time_formats([own, *(each for each in list_formats(columns) if each != own)], rows, columns)


def list_formats(columns: int) -> list[WeightFormat]:
    """Return the formats that rows of this length can have."""
    groups = [size for size in GROUP_SIZES if columns % size == 0][:1]
    found = [WeightFormat(8), WeightFormat(8, symmetric=True)]
    return [*found, *(WeightFormat(4, size, sym) for size in groups for sym in (False, True)), WeightFormat(16)]


def find_commonest_product(shapes: Counter[tuple[str, str]]) -> tuple[WeightFormat, int, int] | None:
    """Return the format in which most weights of a model are, and rows and columns of its commonest product."""
    kinds = {"u8": (8, False), "i8": (8, True), "u4": (4, False), "i4": (4, True), "f16": (16, False)}
    sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for (kind, text), count in shapes.items():
        shape = tuple(map(int, text.split(",")))
        if count > 1 and len(shape) > 1 and shape[-1] > 1:  # the vocabulary's occurs once; scales end in 1
            sizes[kind, shape] = count * int(np.prod(shape))
    if not sizes or sizes.most_common(1)[0][0][0] not in kinds:
        return None
    kind, shape = sizes.most_common(1)[0][0]
    bits, symmetric = kinds[kind]
    group = shape[2] if len(shape) == 3 and bits != 16 else None
    return WeightFormat(bits, group, symmetric), shape[0], int(np.prod(shape[1:]))


def time_formats(formats: list[WeightFormat], rows: int, columns: int) -> dict[str, float]:
    """Return milliseconds for multiplying one token with weights [rows, columns] in each format, by its name."""
    copies = min(max(1, round(MULTIPLIED_BYTES / (rows * columns))), MOST_COPIES)
    core = ov.Core()
    requests = {}
    for each in formats:
        properties = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(each.group or 128)
        request = core.compile_model(
            make_products_model(each, rows, columns, copies), "CPU", properties
        ).create_infer_request()
        request.set_input_tensor(ov.Tensor(np.ones((1, columns), np.float32)))
        request.infer()
        requests[str(each)] = request
    times: dict[str, list[float]] = {name: [] for name in requests}
    for _ in range(TIMING_TURNS):
        for name, request in requests.items():
            for _ in range(TIMING_REPEATS):
                began = time.perf_counter()
                request.infer()
                times[name].append((time.perf_counter() - began) * 1e3 / copies)
    return {name: statistics.median(found) for name, found in times.items()}


def make_products_model(weights: WeightFormat, rows: int, columns: int, copies: int) -> ov.Model:
    """Return a model that multiplies its input [tokens, columns] with ``copies`` matrices of random weights."""
    draws = np.random.default_rng(0)
    tokens = ops.parameter([-1, columns], np.float32)
    found = [ops.matmul(tokens, make_random_weights(weights, rows, columns, draws), False, True) for _ in range(copies)]
    sums = [ops.reduce_sum(each, ops.constant(-1), True) for each in found]
    return ov.Model([ops.result(ops.concat(sums, -1))], [tokens])  # type: ignore[misc]


def make_random_weights(weights: WeightFormat, rows: int, columns: int, draws: np.random.Generator) -> ov.Node:
    """Return random weights [rows, columns] in a format, as nncf writes them."""
    if weights.bits == 16:
        return ops.convert(ops.constant(draws.standard_normal((rows, columns)).astype(np.float16)), "f32")
    kind = ELEMENT_TYPES[weights.bits, weights.symmetric]
    shape = [rows, columns // weights.group, weights.group] if weights.group else [rows, columns]
    scales = [*shape[:-1], 1]
    value = ops.convert(make_packed_constant(draws, shape, kind, weights.bits), "f16")
    if not weights.symmetric:
        value = ops.subtract(value, ops.convert(make_packed_constant(draws, scales, kind, weights.bits), "f16"))
    value = ops.multiply(value, ops.constant(draws.random(scales).astype(np.float16)))
    if weights.group:
        value = ops.reshape(value, [rows, columns], False)
    return ops.convert(value, "f32")


def make_packed_constant(draws: np.random.Generator, shape: list[int], kind: ov.Type, bits: int) -> ov.Node:
    count = -(-int(np.prod(shape)) * bits // 8)
    return ov.op.Constant(ov.Tensor(draws.integers(0, 256, count, np.uint8), shape, kind), shared_memory=False)
