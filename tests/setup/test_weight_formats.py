"""Which weight format a model has, and how products with others are timed."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from click.testing import CliRunner
from conftest import ROOT

from ovspec.cli import cli
from ovspec.cli.tune import advise_weight_formats
from ovspec.setup import weight_formats
from ovspec.setup.profile import count_weight_shapes
from ovspec.setup.weight_formats import (
    GROUP_SIZES,
    WeightFormat,
    find_dominant_product,
    find_export_options,
    list_formats,
    make_products_model,
    time_formats,
    time_formats_for_model,
)


def test_own_format_is_that_of_most_weights(pair: Path) -> None:
    found = find_dominant_product(count_weight_shapes(ROOT / "models" / "demo"))
    assert found and str(found[0]) == "int8"
    assert (
        find_dominant_product(count_weight_shapes(pair)) is None
        and time_formats_for_model(count_weight_shapes(pair)) == {}
    )  # f32
    grouped = Counter({("u4", "64, 2, 128"): 8, ("f16", "64, 2, 1"): 8, ("u8", "4096, 256"): 1})
    assert find_dominant_product(grouped) == (WeightFormat(4, 128), 64, 256)


@pytest.mark.parametrize("weights", list_formats(128), ids=str)
def test_what_is_timed_is_a_product_with_compressed_weights(weights: WeightFormat) -> None:
    core = ov.Core()
    model = make_products_model(weights, 64, 128, 2)
    kinds = {op.get_element_type().get_type_name() for op in model.get_ops() if op.get_type_name() == "Constant"}
    wanted = {16: "f16", 8: "i8" if weights.symmetric else "u8", 4: "i4" if weights.symmetric else "u4"}
    assert wanted[weights.bits] in kinds
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    layers = {op.get_rt_info()["layerType"].astype(str) for op in compiled.get_runtime_model().get_ops()}
    assert layers & {"FullyConnected", "MatMul"}
    assert np.isfinite(compiled(np.ones((1, 128), np.float32))[0]).all()


def test_times_are_of_every_format_and_grow_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_formats, "MULTIPLIED_BYTES", 4e6)  # no time is compared
    formats = [WeightFormat(8), WeightFormat(16)]
    times = time_formats(formats, 1024, 1024)
    assert list(times) == ["int8", "fp16"] and min(times.values()) > 0


def test_options_make_the_format() -> None:
    names = {str(each) for size in GROUP_SIZES for each in list_formats(size)}
    assert (
        find_export_options("int4 in groups of 64, symmetric") == "--weight-format int4 --group-size 64 --ratio 1 --sym"
    )
    known = CliRunner().invoke(cli, ["export", "--help"]).output
    for name in names:
        assert all(option in known for option in re.findall(r"--[a-z-]+", find_export_options(name)))


def test_a_faster_format_is_named_and_a_slower_one_is_not() -> None:
    told = advise_weight_formats({"int8": 1.0, "int8, symmetric": 0.8, "int4 in groups of 64": 0.95, "fp16": 2.0})
    assert "  int8, symmetric: 0.80x the time" in told
    assert [line for line in told if line.startswith("an export")] == [
        "an export with --weight-format int8 --sym should generate faster here"
    ]
    assert not any("export" in line for line in advise_weight_formats({"int8": 1.0, "fp16": 2.0}))
    assert advise_weight_formats({}) == []
