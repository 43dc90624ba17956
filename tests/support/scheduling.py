"""Which worker runs which file: those that take longest come first, so that no worker waits long for the last one.

Also when workers die: each test is run once, and each worker's place stays taken.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from typing import Any

import pytest
from durations import KEPT
from places import PLACE
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Tell each worker its place; xdist starts a worker's replacement as it started the worker."""
    for number, spec in enumerate(specs):
        spec.env[PLACE] = f"{number} of {len(specs)}"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None


class LongestFirst(OrderedDict[str, dict[str, bool]]):
    """Files with their tests, of which the one that took longest in earlier runs is taken first."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__()
        self.seconds = seconds

    def popitem(self, last: bool = True) -> tuple[str, dict[str, bool]]:
        assert not last
        file = max(self, key=lambda file: self.seconds.get(file, 0.0))
        return file, self.pop(file)


class FileScheduling(LoadFileScheduling):
    """Like xdist's own of version 3.8, which repeats a test in which a worker died, until eight have died of it.

    After a death, that one may also give a worker nothing that it can begin, and then wait for it, or give work to a
    worker that still collects, and fail.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        cache = getattr(config, "cache", None)  # there is none with -p no:cacheprovider
        self.workqueue = LongestFirst(cache.get(KEPT, {}) if cache else {})

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a worker; return the test in which it died, which isn't run again."""
        files = self.assigned_work[node]
        left = [(file, name) for file, tests in files.items() for name, done in tests.items() if not done]
        for file, name in left[:1]:
            files[file][name] = True
        self.assigned_work[node] = {file: tests for file, tests in files.items() if not all(tests.values())}
        super().remove_node(node)
        return left[0][1] if left else None

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker that has collected enough to begin: it runs a test when it knows the next one."""
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 2 and not node.shutting_down:
            self._assign_work_unit(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        with suppress(OSError):  # it has just died; what it was given is given to another when that is noticed
            super()._assign_work_unit(node)
