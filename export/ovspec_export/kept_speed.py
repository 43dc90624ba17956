"""Measures the faster of two forms of the same quantised weights on this processor."""

from __future__ import annotations

import functools
import math
import statistics
import time

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ovspec_export.packed_weights import PackedWeights
from ovspec_export.skeleton import make_product

ROWS, COLUMNS, GROUP_SIZE = 2048, 2048, 32  # of the matrix
TOKEN_COUNTS = (1, 4, 64)  # a token, a few tokens to verify, and a part of a prompt
TIMING_TURNS = 15


@functools.cache
def are_offsets_faster() -> bool:
    """Return whether groups with an offset are faster here than groups with a fractional zero point."""
    generator = np.random.default_rng(0)
    integers = generator.integers(0, 16, (ROWS, COLUMNS), np.uint8)
    numbers = generator.random((ROWS, COLUMNS // GROUP_SIZE)).astype(np.float16)
    forms = {
        "offsets": PackedWeights((integers - 8).astype(np.int8), "i4", numbers, offsets=numbers),
        "zero points": PackedWeights(integers, "u4", numbers, zero_points=numbers),
    }
    times = time_products(forms)
    return math.prod(times["offsets"]) < math.prod(times["zero points"])


def time_products(forms: dict[str, PackedWeights]) -> dict[str, list[float]]:
    """Return the median seconds of a product in each form, for each of ``TOKEN_COUNTS``; the forms take turns."""
    core = ov.Core()
    properties = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    requests: dict[str, ov.InferRequest] = {}
    for name, weights in forms.items():
        token_vectors = ops.parameter([1, -1, weights.shape[1]], np.float32)
        model = ov.Model([ops.result(make_product(token_vectors.output(0), weights))], [token_vectors])  # type: ignore[misc]
        requests[name] = core.compile_model(model, "CPU", properties).create_infer_request()
    seconds: dict[tuple[str, int], list[float]] = {(name, count): [] for name in forms for count in TOKEN_COUNTS}
    for _ in range(TIMING_TURNS):
        for name, count in seconds:
            requests[name].set_input_tensor(ov.Tensor(np.ones((1, count, COLUMNS), np.float32)))
            start_time = time.perf_counter()
            requests[name].infer()
            seconds[name, count].append(time.perf_counter() - start_time)
    return {name: [statistics.median(seconds[name, count]) for count in TOKEN_COUNTS] for name in forms}
