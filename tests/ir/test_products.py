"""Products of the same values are joined, which changes no bit; wide ones are cut into parts with the same sums."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from ovspec.ir.device import openvino_core
from ovspec.ir.matrix_products import join_products, split_wide_products

ROWS, GROUP = 16, 64


def weights(kind: str, width: int, count: int = ROWS, seed: int = 0) -> ov.Node:
    """Return random weights [count, width] as nncf writes them: u8 by row, or u4 by groups with u4 zero points."""
    random = np.random.default_rng(seed)
    if kind == "f32":
        return ops.constant(random.standard_normal((count, width)).astype(np.float32))
    shape = [count, width] if kind == "u8" else [count, width // GROUP, GROUP]
    small = [*shape[:-1], 1]

    def integers(shape: list[int]) -> ov.Node:
        count = int(np.prod(shape)) // (1 if kind == "u8" else 2)
        stored = random.integers(0, 256, count, dtype=np.uint8)
        tensor = ov.Tensor(stored, shape, ov.Type.u8 if kind == "u8" else ov.Type.u4)
        return ops.convert(ov.op.Constant(tensor, shared_memory=False), "f16")

    scales = ops.constant(random.random(small).astype(np.float16) / 100)
    made = ops.multiply(ops.subtract(integers(shape), integers(small)), scales)
    return ops.convert(made if kind == "u8" else ops.reshape(made, [count, width], False), "f32")


def model(kind: str, width: int) -> ov.Model:
    values = ops.parameter([-1, width], ov.Type.f32)
    return ov.Model([ops.result(ops.matmul(values, weights(kind, width), False, True))], [values])  # type: ignore[misc]


def computed(made: ov.Model, values: np.ndarray) -> np.ndarray:
    request = openvino_core().compile_model(made, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    return request.infer([values])[0].copy()


@pytest.mark.parametrize(("kind", "width", "cut"), [("u8", 512, 1), ("u4", 512, 1), ("u8", 256, 0), ("f32", 512, 0)])
def test_the_sums_stay(kind: str, width: int, cut: int) -> None:
    values = np.random.default_rng(1).standard_normal((5, width)).astype(np.float32)
    made = model(kind, width)
    before = computed(made, values)
    assert split_wide_products(made, max_summed_values=256) == cut
    products = [op for op in made.get_ops() if op.get_type_name() == "MatMul"]
    assert len(products) == 1 + cut
    assert all(product.input_value(1).get_shape() == [ROWS, width // (1 + cut)] for product in products)
    after = computed(made, values)
    assert np.abs(after - before).max() <= 1e-4 * np.abs(before).max()
    if not cut:
        assert np.array_equal(after, before)


def test_as_many_parts_as_it_takes() -> None:
    made = model("u4", 768)
    split_wide_products(made, max_summed_values=256)
    widths = [op.input_value(1).get_shape()[1] for op in made.get_ops() if op.get_type_name() == "MatMul"]
    assert widths == [256, 256, 256]


@pytest.mark.parametrize(("kinds", "joined"), [("u8 u8 u8", 3), ("u4 u4", 2), ("u8 u4 u8", 2), ("f32 f32", 0)])
def test_joining_changes_no_bit(kinds: str, joined: int) -> None:
    inputs = ops.parameter([-1, 256], ov.Type.f32)
    others = ops.relu(inputs)
    made = [
        ops.matmul(inputs, weights(kind, 256, 16 * (1 + place), place), False, True)
        for place, kind in enumerate(kinds.split())
    ]
    made.append(ops.matmul(others, weights("u8", 256, 32, 9), False, True))  # of other values
    whole = ov.Model([ops.result(each) for each in made], [inputs])  # type: ignore[misc]
    values = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)

    def results() -> list[np.ndarray]:
        request = (
            openvino_core().compile_model(whole, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
        )
        return [request.infer([values])[place].copy() for place in range(len(made))]

    before = results()
    assert join_products(whole) == joined
    assert sum(op.get_type_name() == "MatMul" for op in whole.get_ops()) == len(made) - max(0, joined - 1)
    for old, new in zip(before, results(), strict=True):
        assert np.array_equal(old, new)
