"""Run an ovspec command in this process and record its results."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ovspec
import ovspec.ir.compile
import ovspec.setup.pair_loading
from ovspec.base import progress
from ovspec.cli import cli
from ovspec.engine.row import Row


@dataclass
class Outcome:
    """The results of a command. ``together``: the largest number of rows that were generated at a time."""

    code: int
    out: str
    err: str
    rows: list[Row] = field(default_factory=list)
    together: int = 0
    lm: Any = None
    tuned: bool = False
    compiled: list[Any] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.rows[0].result().token_ids

    @property
    def text(self) -> str:
        return self.rows[0].result().text

    @property
    def stopped(self) -> bool:
        return self.rows[0].finish_reason not in (None, "length")

    @property
    def stats(self) -> Any:
        return self.rows[0].stats

    def property(self, name: str) -> str:
        return str(self.lm.target.ir.compiled_model.get_property(name))


LOADED: dict[str, tuple[Any, bool]] = {}


def runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_dir: Path, quiet: float = 600.0
) -> Iterator[Callable[..., Outcome]]:
    """Yield a function that runs a command in this process. Models are loaded once for each set of options.

    ``quiet``: seconds after which a step of the command is shown.
    """
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", quiet)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_dir))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OVSPEC_TUNE", "1")
    load, init, compile_properties = ovspec.load, Row.__init__, ovspec.ir.compile.make_compile_properties
    found = Outcome(0, "", "")

    def load_once(*arguments: Any, **options: Any) -> Any:
        key = repr((arguments, sorted(options.items())))
        if key not in LOADED or {"cache_dir", "lookup_corpus"} & options.keys():
            LOADED[key] = load(*arguments, **options), found.tuned
        found.lm, found.tuned = LOADED[key]
        return found.lm

    def note_tuning(*_: Any) -> None:
        found.tuned = True

    def note_compiling(options: Any) -> dict[str, str]:
        found.compiled.append((options, properties := compile_properties(options)))
        return properties

    def noted(row: Row, *arguments: Any, **options: Any) -> None:
        init(row, *arguments, **options)
        found.rows.append(row)
        found.together = max(found.together, sum(not each.finish_reason for each in found.rows))

    monkeypatch.setattr(ovspec, "load", load_once, raising=False)
    monkeypatch.setattr(Row, "__init__", noted)
    monkeypatch.setattr(ovspec.setup.pair_loading, "load_or_tune_profile", note_tuning)
    monkeypatch.setattr(ovspec.ir.compile, "make_compile_properties", note_compiling)

    def run(command: str, *arguments: Any, stdin: str = "") -> Outcome:
        nonlocal found
        found = Outcome(0, "", "")
        done = CliRunner().invoke(cli, [command, *map(str, arguments)], input=stdin)
        found.code, found.out, found.err = done.exit_code, done.stdout, done.stderr
        if done.exception and not isinstance(done.exception, SystemExit):
            if not isinstance(done.exception, (ovspec.OvspecError, OSError)):
                raise done.exception
            found.code, found.err = 1, found.err + str(done.exception)
        return found

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield run
    for number, handler in handlers.items():  # chat and export install their own
        signal.signal(number, handler)
