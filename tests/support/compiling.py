"""Spare tests that load a model again and again what they don't look at: compiling it and comparing its engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ovspec.ir.compile import CompiledIR
from ovspec.ir.device import DeviceOptions
from ovspec.setup import engine_choice
from ovspec.setup.engine_choice import PagedCheck

AGREES = PagedCheck(True, "it agrees with the stateful decoder")


def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model that is loaded again, with the same options, be the one that was compiled before."""
    made: dict[str, CompiledIR] = {}
    for name in ("compile_ir", "compile_paged"):
        compiling = getattr(engine_choice, name)

        def once(
            folder: Path, options: DeviceOptions, *how: Any, name: str = name, compiling: Any = compiling
        ) -> CompiledIR:
            if any(map(callable, how)):  # it is rewritten, which no key can tell
                return compiling(folder, options, *how)
            key = repr((name, folder, options, how))
            if key not in made:
                made[key] = compiling(folder, options, *how)
            return made[key]

        monkeypatch.setattr(engine_choice, name, once)


def trust_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take it for granted that the paged engine agrees with the stateful one, as ``test_paged.py`` shows."""
    monkeypatch.setattr(engine_choice, "compare_engines", lambda *_: AGREES)
