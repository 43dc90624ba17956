"""How long files and fixtures took, printed at the end of a run. The files' times are kept for the next one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

COUNT = 10
KEPT = "ovspec/seconds"  # by file, in pytest's cache
FIXTURES: list[tuple[str, float]] = []  # set up since the last report, with their seconds


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        name = f"{fixturedef.baseid}::{fixturedef.argname}".removeprefix("::")
        FIXTURES.append((name, time.perf_counter() - began))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Let a report say what was set up for it, so that it comes from a worker too."""
    report = yield
    report.fixtures = FIXTURES.copy()
    FIXTURES.clear()
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    files, fixtures = Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                files[report.location[0]] += report.duration
            for name, seconds in getattr(report, "fixtures", ()):
                fixtures[name] += seconds
    if cache := getattr(config, "cache", None):  # there is none with -p no:cacheprovider
        cache.set(KEPT, {**cache.get(KEPT, {}), **files})
    show(terminalreporter, "files", files)
    show(terminalreporter, "fixtures", fixtures)


def show(terminalreporter: Any, kind: str, seconds: Counter[str]) -> None:
    terminalreporter.write_sep("=", f"slowest {kind} of {seconds.total():.0f} s")
    for name, spent in seconds.most_common(COUNT):
        terminalreporter.write_line(f"{spent:7.1f} s  {name}")
