"""Compile a gated layer in a separate process: ``crashes.py`` runs this file to see whether it survives.

It has two arguments: the device, and the properties as JSON. It imports nothing of ovspec, so it starts quickly.
"""

import contextlib
import json
import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # as in ovspec/__init__.py

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
from openvino import opset13 as ops  # noqa: E402

LAYER_WIDTH = 64  # OpenVINO computes such a layer in one operation if its sizes are multiples of 32


def make_gated_layer() -> ov.Model:
    """Return down(silu(gate(x)) * up(x)), a part of each layer of language models; its weights aren't compressed."""
    generator = np.random.default_rng(0)

    def multiply(values: ov.Node) -> ov.Node:
        weights = generator.standard_normal((LAYER_WIDTH, LAYER_WIDTH)).astype(np.float16)
        return ops.matmul(values, ops.convert(ops.constant(weights), "f32"), False, True)

    tokens = ops.parameter([-1, -1, LAYER_WIDTH], np.float32)
    gate = multiply(tokens)
    up_projection = multiply(tokens)
    silu = ops.multiply(gate, ops.sigmoid(gate))
    return ov.Model([ops.result(multiply(ops.multiply(silu, up_projection)))], [tokens])  # type: ignore[misc]


def disable_core_dumps() -> None:
    """Write no core dump when this process crashes, on systems with such a limit."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    disable_core_dumps()
    ov.Core().compile_model(make_gated_layer(), sys.argv[1], json.loads(sys.argv[2]))
