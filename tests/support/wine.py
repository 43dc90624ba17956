"""Loaded by 'dev.py test --windows': skips by name what wine can't show, or what needs packages that aren't there."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

# Oracles, clients and exporters. Everything else must be there.
ABSENT = {"torch", "transformers", "tokenizers", "anthropic", "openai", "scipy", "pyarrow", "pycparser"}
# Part of a test's name -> why wine doesn't show it.
TIMES = "wine tells no times of other processes"
CANNOT = {
    "test_a_new_option_is_one_entry": "packages are found by PYTHONPATH alone",
    "test_bounded_in_time": TIMES,
    "test_a_stopped_check_leaves_the_next_one_unharmed": TIMES,
    "test_a_slow_moment_is_no_verdict": TIMES,
}


def absent(error: BaseException | None) -> str | None:
    """Return the package whose absence an error tells, if it may be absent."""
    name = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else None
    return name if name in ABSENT else None


def skipped(item: Any, reason: str) -> tuple[str, int, str]:
    return str(item.path), 0, f"Skipped: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and (
        package := next((name for name in ABSENT if f"No module named '{name}" in str(report.longrepr)), None)
    ):
        report.outcome, report.longrepr = "skipped", skipped(collector, f"{package} isn't installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    if report.failed and call.excinfo and (package := absent(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", skipped(item, f"{package} isn't installed")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in CANNOT.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
