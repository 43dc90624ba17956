"""Integers with scales in a graph: it computes with the weights that they mean, and OpenVINO doesn't unpack them."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from ovspec_export.kept_weights import KeptForms, quantise_to_int8
from ovspec_export.packed_weights import PackedWeights, make_weights_node, measure_rounding, round_to_f16_if_exact
from ovspec_export.skeleton import MARK_STEP, GraphFiller, make_marked_zeros

from ovspec.base.errors import OvspecError

ROWS, COLUMNS = 64, 256
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def packed(kind: str, group: int, zeros: str | None = None, seed: int = 0, **changes: Any) -> PackedWeights:
    """Return random weights. zeros: kind of the zero points: "integer" or "f16"."""
    draws = np.random.default_rng(seed)
    low, high = {"i4": (-8, 8), "u4": (0, 16), "i8": (-128, 128), "u8": (0, 256)}[kind]
    dtype = np.int8 if kind.startswith("i") else np.uint8
    groups = COLUMNS // group
    made = {
        "integers": draws.integers(low, high, (ROWS, COLUMNS)).astype(dtype),
        "element_type": kind,
        "scales": draws.uniform(0.001, 0.01, (ROWS, groups)).astype(np.float16),
    }
    if zeros:
        points = draws.uniform(0, high - 1, (ROWS, groups))
        made["zero_points"] = points.astype(np.float16) if zeros == "f16" else points.astype(np.uint8)
    return PackedWeights(**made | changes)


FORMS = {
    "Q4_0": packed("i4", 32),
    "Q8_0": packed("i8", 32),
    "Q6_K": packed("i8", 16),
    "Q4_K": packed("u4", 32, "f16"),
    "Q5_K": packed("u8", 32, "f16"),
    "AWQ": packed("u4", 128, "integer"),
    "GPTQ in 8 bits": packed("u8", 128, "integer"),
    "channel": packed("i4", COLUMNS),
    "channel, u8": packed("u8", COLUMNS, "integer"),
    "f32 scales": packed("i4", 32, scales=np.random.default_rng(1).random((ROWS, COLUMNS // 32)).astype(np.float32)),
}
ORDERED = packed("u4", 64, "integer", column_order=np.random.default_rng(2).permutation(COLUMNS))
OFFSETS = packed("i4", 32, offsets=np.random.default_rng(3).normal(size=(ROWS, COLUMNS // 32)).astype(np.float16))


class OneMatrix:
    """Implements ``KeptWeights`` for the parameter "w"."""

    def __init__(self, weights: PackedWeights | np.ndarray, is_transposed: bool = False) -> None:
        self.weights = weights
        self.is_transposed = is_transposed

    def list_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"w": (ROWS, COLUMNS)}

    def list_matrices(self) -> dict[str, bool]:
        return {"w": self.is_transposed}

    def read_values(self, name: str) -> np.ndarray:
        raise NotImplementedError

    def read_matrix(self, name: str, with_offsets: bool) -> PackedWeights | np.ndarray:
        assert name == "w" and not with_offsets
        return self.weights

    def describe_kind(self, name: str) -> str:
        return f"the kind of {name}"


def product_with(weights: PackedWeights | np.ndarray, is_transposed: bool = False, count: int = 1) -> ov.Model:
    """Return a graph that multiplies its input [1, tokens, columns] with the weights, ``count`` times."""
    values = ops.parameter([1, -1, COLUMNS], np.float32)
    zeros = make_marked_zeros((COLUMNS, ROWS) if is_transposed else (ROWS, COLUMNS), MARK_STEP)
    matrix = ops.constant(zeros)
    products = [ops.result(ops.matmul(values, matrix, False, not is_transposed)) for _ in range(count)]
    model = ov.Model(products, [values])  # type: ignore[arg-type]
    GraphFiller(model, OneMatrix(weights, is_transposed)).fill({"w": MARK_STEP})
    return model


def lookup_in(weights: PackedWeights) -> ov.Model:
    ids = ops.parameter([1, -1], np.int32)
    rows = ops.gather(ops.constant(make_marked_zeros((ROWS, COLUMNS), MARK_STEP)), ids, ops.constant(0))
    model = ov.Model([ops.result(rows)], [ids])  # type: ignore[arg-type]
    GraphFiller(model, OneMatrix(weights)).fill({"w": MARK_STEP})
    return model


def unpacked_constants(model: ov.CompiledModel) -> list[ov.Node]:
    """Return the constants of a compiled graph that are as large as the matrix, and floats."""
    return [
        op
        for op in model.get_runtime_model().get_ops()
        if op.get_rt_info()["layerType"].astype(str) == "Const"
        and np.prod(op.get_output_shape(0)) >= ROWS * COLUMNS
        and "float" in str(op.get_output_element_type(0))
    ]


@pytest.mark.parametrize("name", FORMS)
def test_products_and_lookups_are_of_the_weights(name: str) -> None:
    values = np.random.default_rng(9).normal(size=(1, 5, COLUMNS)).astype(np.float32)
    product = ov.Core().compile_model(product_with(FORMS[name]), "CPU", PROPERTIES)
    expected = values.astype(np.float64) @ FORMS[name].unpack().T.astype(np.float64)
    assert np.abs(product(values)[0] - expected).max() < 1e-5 * np.abs(expected).max()
    lookup = ov.Core().compile_model(lookup_in(FORMS[name]), "CPU", PROPERTIES)
    ids = np.array([[3, 60, 3, 0]], np.int32)
    assert np.array_equal(lookup(ids)[0][0], FORMS[name].unpack()[ids[0]])
    assert not unpacked_constants(product) and not unpacked_constants(lookup)


@pytest.mark.parametrize("name", FORMS)
def test_graph_means_the_weights_to_the_bit(name: str) -> None:
    model = ov.Model([ops.result(make_weights_node(FORMS[name]))], [])  # type: ignore[arg-type]
    assert np.array_equal(ov.Core().compile_model(model, "CPU", PROPERTIES)()[0], FORMS[name].unpack())


@pytest.mark.parametrize("weights", [ORDERED, OFFSETS], ids=["columns in another order", "offsets"])
def test_products_with_changed_values(weights: PackedWeights) -> None:
    values = np.random.default_rng(9).normal(size=(1, 5, COLUMNS)).astype(np.float32)
    model = product_with(weights, count=3)
    expected = values.astype(np.float64) @ weights.unpack().T.astype(np.float64)
    for product in ov.Core().compile_model(model, "CPU", PROPERTIES)(values).values():
        assert np.abs(product - expected).max() < 1e-5 * np.abs(expected).max()
    # The values are changed once for all products of them.
    kinds = [op.get_type_name() for op in model.get_ops()]
    assert kinds.count("Gather") + kinds.count("ReduceSum") == 1


def test_offsets_are_added_and_the_order_is_the_models() -> None:
    plain = packed("i4", 32)
    difference = OFFSETS.unpack() - plain.unpack()
    assert OFFSETS.offsets is not None
    assert np.allclose(difference, np.repeat(OFFSETS.offsets, 32, 1), atol=1e-6)
    assert np.array_equal(ORDERED.unpack()[:, ORDERED.column_order], packed("u4", 64, "integer").unpack())


def test_matrices_stored_the_other_way_round_are_turned() -> None:
    values = np.random.default_rng(9).normal(size=(1, 5, COLUMNS)).astype(np.float32)
    for weights in (FORMS["Q4_0"], FORMS["Q4_0"].unpack(), FORMS["Q4_0"].unpack().astype(np.float16)):
        reference = weights.unpack() if isinstance(weights, PackedWeights) else weights.astype(np.float32)
        product = ov.Core().compile_model(product_with(weights, is_transposed=True), "CPU", PROPERTIES)(values)[0]
        assert np.allclose(product, values @ reference.T, atol=1e-4)


def test_constants_that_are_transposed_in_the_graph_are_found() -> None:
    values = ops.parameter([1, -1, COLUMNS], np.float32)
    matrix = ops.constant(np.ascontiguousarray(make_marked_zeros((COLUMNS, ROWS), MARK_STEP).T))
    model = ov.Model([ops.result(ops.matmul(values, matrix, False, True))], [values])  # type: ignore[arg-type]
    GraphFiller(model, OneMatrix(FORMS["Q4_0"], is_transposed=True)).fill({"w": MARK_STEP})
    numbers = np.random.default_rng(9).normal(size=(1, 5, COLUMNS)).astype(np.float32)
    product = ov.Core().compile_model(model, "CPU", PROPERTIES)(numbers)[0]
    assert np.allclose(product, numbers @ FORMS["Q4_0"].unpack().T, atol=1e-4)


EXPERTS = 4  # among whom the rows are divided


def product_of_experts(weights: PackedWeights | np.ndarray, turned: bool = False) -> ov.Model:
    """Return a graph that multiplies its input [experts, tokens, columns] with each expert's rows.

    turned: the rows are columns in the graph.
    """
    values = ops.parameter([EXPERTS, -1, COLUMNS], np.float32)
    zeros = make_marked_zeros((EXPERTS, ROWS // EXPERTS, COLUMNS), MARK_STEP)
    matrices = ops.constant(np.ascontiguousarray(zeros.swapaxes(1, 2)) if turned else zeros)
    model = ov.Model([ops.result(ops.matmul(values, matrices, False, not turned))], [values])  # type: ignore[arg-type]
    filler = GraphFiller(model, OneMatrix(weights))
    filler.fill({"w": MARK_STEP})
    assert list(filler.forms.counts.values()) == [EXPERTS]
    return model


@pytest.mark.parametrize("name", [*FORMS, "f16", "f32"])
def test_products_of_experts_are_of_their_rows(name: str) -> None:
    weights = FORMS[name] if name in FORMS else FORMS["Q4_0"].unpack().astype(name.replace("f", "float"))
    rows = weights.unpack() if isinstance(weights, PackedWeights) else weights.astype(np.float32)
    values = np.random.default_rng(9).normal(size=(EXPERTS, 5, COLUMNS)).astype(np.float32)
    product = ov.Core().compile_model(product_of_experts(weights), "CPU", PROPERTIES)(values)[0]
    expected = values @ rows.reshape(EXPERTS, -1, COLUMNS).swapaxes(1, 2)
    assert np.abs(product - expected).max() < 1e-5 * np.abs(expected).max()


def test_experts_are_only_multiplied_by_rows() -> None:
    with pytest.raises(OvspecError, match="because the operation MatMul in the OpenVINO graph uses w;"):
        product_of_experts(FORMS["Q4_0"], turned=True)


def test_floats_of_16_bits_stay_that() -> None:
    bits = (np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    values = np.random.default_rng(9).normal(size=(1, 5, COLUMNS)).astype(np.float32)
    product = ov.Core().compile_model(product_with(bits), "CPU", PROPERTIES)(values)[0]
    assert np.allclose(product, values @ (bits.astype(np.uint32) << 16).view(np.float32).T, atol=1e-4)


def test_a_matrix_that_is_not_found_is_no_small_matter() -> None:
    values = ops.parameter([1, -1, COLUMNS], np.float32)
    model = ov.Model([ops.result(values)], [values])  # type: ignore[arg-type]
    with pytest.raises(OvspecError, match="because w is not a separate matrix in the OpenVINO graph"):
        GraphFiller(model, OneMatrix(FORMS["Q4_0"])).fill({"w": MARK_STEP})


def test_weights_with_another_order_are_only_multiplied() -> None:
    with pytest.raises(OvspecError, match="because the operation Gather in the OpenVINO graph uses w;"):
        lookup_in(ORDERED)


def test_forms_are_named() -> None:
    forms = KeptForms()
    forms.add("Q4_K", OFFSETS)
    forms.add("F16", np.zeros((2, 2), np.float16))
    assert list(forms.counts) == [("Q4_K", "i4 in groups of 32 and sums of groups"), ("F16", "f16")]
    assert [FORMS[name].form for name in ("channel", "Q4_K", "AWQ")] == [
        "i4",
        "u4 in groups of 32 with f16 zero points",
        "u4 in groups of 128 with integer zero points",
    ]


def test_rounding_to_int8_is_of_a_256th() -> None:
    values = np.random.default_rng(0).normal(1, 0.05, (ROWS, COLUMNS)).astype(np.float32)
    values[3] = 0
    steps = np.maximum(values.max(1), 0) - np.minimum(values.min(1), 0)
    assert (np.abs(quantise_to_int8(values).unpack() - values).max(1) <= steps / 255 + 1e-6).all()
    assert not quantise_to_int8(values).unpack()[3].any()


def test_rounding_is_measured() -> None:
    exact = FORMS["Q4_0"]
    doubled = PackedWeights(exact.integers, "i4", exact.scales * np.float16(1.5))
    assert measure_rounding(exact, exact) == 0
    assert measure_rounding(doubled, exact) == pytest.approx(0.5, rel=1e-3)


def test_scales_are_f16_only_if_that_is_exact() -> None:
    assert round_to_f16_if_exact(np.array([0.5, 3.0])).dtype == np.float16
    assert round_to_f16_if_exact(np.array([0.1])).dtype == np.float32
    assert round_to_f16_if_exact(np.array([1e6])).dtype == np.float32
