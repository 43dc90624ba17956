"""What is said to be expected of a draft before it can be measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from conftest import ROOT
from ovspec_export.distill import speedup_estimate
from ovspec_export.distill.speedup_estimate import MAX_PROPOSED, estimate_speedup, estimate_step_share, measure_costs


def test_the_best_lookahead_counts() -> None:
    costs = [10.0, 11.0, 12.0, 20.0]
    # One token: 1.6 tokens in 11 + 1 ms; two: 1.9 in 12 + 2 ms; three: 2.0 in 20 + 3 ms; plain: one in 10 ms.
    assert estimate_speedup([0.6, 0.9, 1.0], costs, 0.1) == pytest.approx(1.9 * 10 / 14)
    assert estimate_speedup([0.6], costs, 0.1) == pytest.approx(1.6 * 10 / 12)
    assert estimate_speedup([0.1, 0.1, 0.1], costs, 0.5) == 1.0  # nothing is proposed then


def test_nothing_but_accepted_tokens_gains() -> None:
    """Whatever was measured: with 0.17 accepted tokens a round 3.55 times the speed was told."""
    for costs in ([10.0, 2.0, 3.0, 4.0], [10.0, 10.0, 10.0, 3.0], [10.0, 19.0, 12.0, 13.0]):
        assert 1.0 <= estimate_speedup([0.12, 0.15, 0.17], costs, 0.0) <= 1.17
    assert estimate_speedup([0.5, 0.6], [10.0, 19.0, 12.0], 0.0) == 1.0, "two tokens aren't quicker than one"


def test_a_machine_that_slows_down_does_not_change_what_more_tokens_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    told, moments = dict[str, list[float]](), iter(1.05**n for n in range(1000))
    monkeypatch.setattr(speedup_estimate, "report_progress", lambda **figures: told.update(figures))
    monkeypatch.setattr(speedup_estimate, "time", SimpleNamespace(perf_counter=lambda: next(moments)))
    measure_costs(str(ROOT / "models" / "demo" / "draft"))
    assert max(told["costs"]) < 1.25 * told["costs"][0]


def test_inferences_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict[str, list[float]]()
    monkeypatch.setattr(speedup_estimate, "report_progress", lambda **figures: told.update(figures))
    measure_costs(str(ROOT / "models" / "demo" / "draft"))
    assert len(told["costs"]) == MAX_PROPOSED + 1 and all(0 < seconds < 1 for seconds in told["costs"])


def test_the_share_is_that_of_the_weights() -> None:
    target = ROOT / "models" / "demo"
    size = (target / "openvino_model.bin").stat().st_size
    assert estimate_step_share(target, size / 10) == pytest.approx(0.1)
