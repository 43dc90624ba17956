"""guidance programs on a GPU: drafts answer requests there, and change nothing."""

from __future__ import annotations

import pytest
from gpu_texts import MARKS, on_gpu
from programs import branches, loops, schemas

import ovspec.guidance

pytestmark = MARKS


@pytest.mark.parametrize("device", ["GPU", "AUTO:GPU,CPU"])
def test_programs(device: str) -> None:
    plain, drafting = (
        ovspec.guidance.OpenVINO(on_gpu(draft, device=device), echo=False, enable_monitoring=False)
        for draft in ("none", "lookup,draft")
    )
    for program in (schemas, branches, loops):
        assert program(drafting) == program(plain)
    assert drafting.stats.accepted > 0
    assert drafting.stats.inferences < plain.stats.inferences
