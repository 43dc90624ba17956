"""Spare tests that load a model again and again what they don't look at: compiling it and comparing its engines."""

from __future__ import annotations

import copy
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import openvino as ov
import pytest

from ovspec.ir.compile import CompiledIR
from ovspec.ir.device import DeviceOptions
from ovspec.setup import engine_choice, paging
from ovspec.setup.paging import PagedCheck
from ovspec.text import tokenizer

AGREES = PagedCheck(True, "its logits agree with the stateful engine's")
COMPILING: list[tuple[ModuleType, str]] = [
    (engine_choice, "compile_ir"),
    (engine_choice, "compile_paged"),
    (paging, "compile_ir"),
    (tokenizer, "compile_tokenizer"),
]
MOST = 16  # compiled models of each kind that a worker keeps
SMALL = 32e6  # bytes of a model's files; larger ones take too much memory to be kept


@pytest.fixture(scope="session", autouse=True)
def compiled_models() -> Iterator[None]:
    """Compile each small model once in a worker, unless its files or parts of ovspec have been replaced since.

    Tests of ``ovspec.ir.compile`` itself, and of tuning, which takes it from there, compile as users do.
    """
    with pytest.MonkeyPatch.context() as patched:
        for module, name in COMPILING:
            patched.setattr(module, name, KeptModels(getattr(module, name)))
        yield


class KeptModels:
    """What a function compiled, which it returns again for the same files and arguments."""

    def __init__(self, compiling: Callable[..., Any]) -> None:
        self.compiling = compiling
        self._models: OrderedDict[Any, Any] = OrderedDict()  # the one used last is the last

    def __call__(self, place: Path, *arguments: Any, **named: Any) -> Any:
        files = sorted(place.glob("*")) if place.is_dir() else [place, place.with_suffix(".bin")]
        stats = [(str(file), file.stat()) for file in files if file.is_file()]
        rewritten = any(map(callable, (*arguments, *named.values())))  # which no key can tell
        if rewritten or not stats or sum(stat.st_size for _, stat in stats) > SMALL:
            return self.compiling(place, *arguments, **named)
        stamps = [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        key = str(place), repr((arguments, named)), *stamps, *surroundings()
        if key not in self._models:
            self._models[key] = self.compiling(place, *arguments, **named)
        self._models.move_to_end(key)
        if len(self._models) > MOST:
            self._models.popitem(last=False)
        model = self._models[key]
        return copy.copy(model) if isinstance(model, CompiledIR) else model  # one may be closed


class Same:
    """Equal only to another of the same object, which it keeps alive."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


def surroundings() -> Iterator[Any]:
    """Yield all that decides how a model is compiled and that a test may replace for a while."""
    yield Same(ov.Core.compile_model)
    yield tuple(os.environ.get(name) for name in ("ONEDNN_MAX_CPU_ISA", "OV_CPU_MAX_ISA"))
    modules = [module for name, module in sys.modules.copy().items() if name.startswith("ovspec.ir.")]
    for module in [*modules, engine_choice, paging]:  # as lists: another thread may import meanwhile
        yield from (Same(value) for name, value in list(vars(module).items()) if not name.startswith("__"))


@pytest.fixture
def compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile each model that the test loads, which no other test has used or will use."""
    for module, name in COMPILING:
        monkeypatch.setattr(module, name, getattr(module, name).compiling)


def compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a model that is loaded again, with the same options, be the one that was compiled before."""
    made: dict[str, CompiledIR] = {}
    for module, name in ((engine_choice, "compile_ir"), (engine_choice, "compile_paged"), (paging, "compile_ir")):
        compiling = getattr(module, name)

        def once(
            folder: Path, options: DeviceOptions, *how: Any, name: str = name, compiling: Any = compiling
        ) -> CompiledIR:
            if any(map(callable, how)):  # it is rewritten, which no key can tell
                return compiling(folder, options, *how)
            key = repr((name, folder, options, how))
            if key not in made:
                made[key] = compiling(folder, options, *how)
            return made[key]

        monkeypatch.setattr(module, name, once)


def trust_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take it for granted that the paged engine agrees with the stateful one, as ``test_paged.py`` shows."""
    monkeypatch.setattr(paging, "check_paged_logits", lambda *_: AGREES)
