"""Comparing a model's engines in a process of its own, which a crash ends alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import ROOT

import ovspec
import ovspec.setup.engine_choice
import ovspec.setup.paging
from ovspec.ir.device import DeviceOptions
from ovspec.setup.engine_choice import check_stateful_kv_precision
from ovspec.setup.paging import check_paged, check_paged_logits, check_paged_logits_in_process

SMALL = ROOT / "models" / "demo" / "draft"


def test_it_finds_the_same(tmp_path: Path) -> None:
    options = DeviceOptions(precision="f32", cache_dir=tmp_path)
    assert check_paged_logits_in_process(SMALL, options) == check_paged_logits(SMALL, options)


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for Python")
@pytest.mark.parametrize(("ends", "told"), [("kill -SEGV $$", "SIGSEGV"), ("exit 3", "an error")])
def test_a_crash_is_told_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, told: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho >> {tmp_path / 'runs'}\n{ends}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(ovspec.setup.paging, "is_gpu", lambda _: True)
    options = DeviceOptions(kv_precision="u8", cache_dir=tmp_path)
    for _ in range(2):
        check = check_paged(SMALL, options)
        assert not check.usable
        assert check.reason == f"OpenVINO crashes ({told}) when it runs the model with a u8 KV cache"
    assert (tmp_path / "runs").read_text(encoding="utf-8") == "\n"


def test_a_cache_that_a_gpu_compresses_needs_the_paged_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ovspec.setup.engine_choice, "may_use_gpu", lambda _: True)
    check_stateful_kv_precision(SMALL, DeviceOptions("GPU"), "why")
    check_stateful_kv_precision(SMALL, DeviceOptions("AUTO", kv_precision="f32"), "why")
    with pytest.raises(
        ovspec.OvspecError,
        match=r"`kv_precision='u8'` works on a GPU only with the paged engine.*\(why\); leave `kv_precision` out\.$",
    ):
        check_stateful_kv_precision(SMALL, DeviceOptions("GPU", kv_precision="u8"), "why")
