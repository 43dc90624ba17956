"""What is said to be expected of a draft before it can be measured."""

from __future__ import annotations

import pytest
from conftest import ROOT
from ovspec_export.distill import expected
from ovspec_export.distill.expected import MOST, expected_speedup, measure_costs, share_of


def test_the_best_lookahead_counts() -> None:
    costs = [10.0, 11.0, 12.0, 20.0]
    # One token: 1.6 tokens in 11 + 1 ms; two: 1.9 in 12 + 2 ms; three: 2.0 in 20 + 3 ms; plain: one in 10 ms.
    assert expected_speedup([0.6, 0.9, 1.0], costs, 0.1) == pytest.approx(1.9 * 10 / 14)
    assert expected_speedup([0.6], costs, 0.1) == pytest.approx(1.6 * 10 / 12)
    assert expected_speedup([0.1, 0.1, 0.1], costs, 0.5) == 1.0  # nothing is proposed then


def test_inferences_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict[str, list[float]]()
    monkeypatch.setattr(expected, "tell", lambda **figures: told.update(figures))
    measure_costs(str(ROOT / "models" / "demo" / "draft"))
    assert len(told["costs"]) == MOST + 1 and all(0 < seconds < 1 for seconds in told["costs"])


def test_the_share_is_that_of_the_weights() -> None:
    target = ROOT / "models" / "demo"
    size = (target / "openvino_model.bin").stat().st_size
    assert share_of(target, size / 10) == pytest.approx(0.1)
