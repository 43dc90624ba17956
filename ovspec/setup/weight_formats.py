"""Time matrix products with weights in several formats, to find a faster format for a model.

The fastest format depends on the processor: without VNNI, zero points cost time, and 4-bit weights take longer to
unpack than to read.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

MULTIPLIED_BYTES = 64e6  # size of the int8 weights to multiply, too large for a core's cache
MAX_COPY_COUNT = 64
TIMING_TURNS = 5
TIMING_REPEATS = 4
GROUP_SIZES = (128, 64, 32)  # weights with a shared scale, the largest that fits
ELEMENT_TYPES = {(8, False): ov.Type.u8, (8, True): ov.Type.i8, (4, False): ov.Type.u4, (4, True): ov.Type.i4}


@dataclass(frozen=True)
class WeightFormat:
    """The storage format of weights. bits: 16 is f16. group: weights with a shared scale; None for a whole row.

    symmetric: without zero points.
    """

    bits: int
    group_size: int | None = None
    symmetric: bool = False

    def __str__(self) -> str:
        if self.bits == 16:
            return "fp16"
        group_text = f" in groups of {self.group_size}" * bool(self.group_size)
        return f"int{self.bits}{group_text}" + ", symmetric" * self.symmetric

    @property
    def export_options(self) -> str:
        """The options of ``ovspec export`` for this format."""
        if self.bits == 16:
            return "--weight-format fp16"
        group_text = f" --group-size {self.group_size} --ratio 1" * bool(self.group_size)
        return f"--weight-format int{self.bits}{group_text}" + " --sym" * self.symmetric


def find_export_options(format_name: str) -> str:
    """Return the options of ``ovspec export`` for a format of ``list_formats`` by its name."""
    weight_formats = (weight_format for group_size in GROUP_SIZES for weight_format in list_formats(group_size))
    return next(weight_format.export_options for weight_format in weight_formats if str(weight_format) == format_name)


def time_formats_for_model(constant_shapes: Counter[tuple[str, str]]) -> dict[str, float]:
    """Return milliseconds of a model's commonest product for one token, by weight format, the model's own first.

    constant_shapes: count of the constants in its IR by (type, shape). Returns {} if most are in an unknown format.
    """
    dominant_product = find_dominant_product(constant_shapes)
    if not dominant_product:
        return {}
    model_format, row_count, column_count = dominant_product
    other_formats = [weight_format for weight_format in list_formats(column_count) if weight_format != model_format]
    return time_formats([model_format, *other_formats], row_count, column_count)


def list_formats(column_count: int) -> list[WeightFormat]:
    """Return the possible formats for rows of this length."""
    group_sizes = [group_size for group_size in GROUP_SIZES if column_count % group_size == 0][:1]
    int8_formats = [WeightFormat(8), WeightFormat(8, symmetric=True)]
    int4_formats = [WeightFormat(4, group_size, symmetric) for group_size in group_sizes for symmetric in (False, True)]
    return [*int8_formats, *int4_formats, WeightFormat(16)]


def find_dominant_product(constant_shapes: Counter[tuple[str, str]]) -> tuple[WeightFormat, int, int] | None:
    """Return the format of most weights of a model, and rows and columns of its commonest product."""
    formats_by_type = {"u8": (8, False), "i8": (8, True), "u4": (4, False), "i4": (4, True), "f16": (16, False)}
    weight_counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for (element_type, shape_text), shape_count in constant_shapes.items():
        shape = tuple(map(int, shape_text.split(",")))
        if shape_count > 1 and len(shape) > 1 and shape[-1] > 1:  # the vocabulary's matrix occurs once; scales end in 1
            weight_counts[element_type, shape] = shape_count * int(np.prod(shape))
    if not weight_counts or weight_counts.most_common(1)[0][0][0] not in formats_by_type:
        return None
    element_type, shape = weight_counts.most_common(1)[0][0]
    bits, symmetric = formats_by_type[element_type]
    weight_format = WeightFormat(bits, symmetric=symmetric)
    if len(shape) == 3 and bits != 16:
        weight_format = WeightFormat(bits, shape[2], symmetric)
    return weight_format, shape[0], int(np.prod(shape[1:]))


def time_formats(weight_formats: list[WeightFormat], row_count: int, column_count: int) -> dict[str, float]:
    """Return milliseconds for multiplying a token with weights [rows, columns], by format name."""
    copy_count = min(max(1, round(MULTIPLIED_BYTES / (row_count * column_count))), MAX_COPY_COUNT)
    core = ov.Core()
    infer_requests: dict[str, ov.InferRequest] = {}
    for weight_format in weight_formats:
        properties = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(weight_format.group_size or 128)
        model = make_products_model(weight_format, row_count, column_count, copy_count)
        infer_request = core.compile_model(model, "CPU", properties).create_infer_request()
        infer_request.set_input_tensor(ov.Tensor(np.ones((1, column_count), np.float32)))
        infer_request.infer()
        infer_requests[str(weight_format)] = infer_request
    milliseconds_by_format: dict[str, list[float]] = {format_name: [] for format_name in infer_requests}
    for _ in range(TIMING_TURNS):
        for format_name, infer_request in infer_requests.items():
            for _ in range(TIMING_REPEATS):
                start_time = time.perf_counter()
                infer_request.infer()
                milliseconds_by_format[format_name].append((time.perf_counter() - start_time) * 1e3 / copy_count)
    return {
        format_name: statistics.median(milliseconds) for format_name, milliseconds in milliseconds_by_format.items()
    }


def make_products_model(weight_format: WeightFormat, row_count: int, column_count: int, copy_count: int) -> ov.Model:
    """Return a model of ``copy_count`` products of its input [tokens, columns] with random weights."""
    generator = np.random.default_rng(0)
    token_vectors = ops.parameter([-1, column_count], np.float32)
    random_matrices = [
        make_random_weights(weight_format, row_count, column_count, generator) for _ in range(copy_count)
    ]
    products = [ops.matmul(token_vectors, matrix, False, True) for matrix in random_matrices]
    sums = [ops.reduce_sum(product, ops.constant(-1), True) for product in products]
    return ov.Model([ops.result(ops.concat(sums, -1))], [token_vectors])  # type: ignore[misc]


def make_random_weights(
    weight_format: WeightFormat, row_count: int, column_count: int, generator: np.random.Generator
) -> ov.Node:
    """Return random weights [rows, columns] in a format, as nncf writes them."""
    if weight_format.bits == 16:
        return ops.convert(ops.constant(generator.standard_normal((row_count, column_count)).astype(np.float16)), "f32")
    element_type = ELEMENT_TYPES[weight_format.bits, weight_format.symmetric]
    shape = [row_count, column_count]
    if weight_format.group_size:
        shape = [row_count, column_count // weight_format.group_size, weight_format.group_size]
    scale_shape = [*shape[:-1], 1]
    weights = ops.convert(make_packed_constant(generator, shape, element_type, weight_format.bits), "f16")
    if not weight_format.symmetric:
        zero_points = make_packed_constant(generator, scale_shape, element_type, weight_format.bits)
        weights = ops.subtract(weights, ops.convert(zero_points, "f16"))
    weights = ops.multiply(weights, ops.constant(generator.random(scale_shape).astype(np.float16)))
    if weight_format.group_size:
        weights = ops.reshape(weights, [row_count, column_count], False)
    return ops.convert(weights, "f32")


def make_packed_constant(generator: np.random.Generator, shape: list[int], element_type: ov.Type, bits: int) -> ov.Node:
    packed_bytes = generator.integers(0, 256, -(-int(np.prod(shape)) * bits // 8), np.uint8)
    return ov.op.Constant(ov.Tensor(packed_bytes, shape, element_type), shared_memory=False)
