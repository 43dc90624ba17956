"""The road of a call through the files of the package, as a reader of the code follows it."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from conftest import ROOT

from ovspec.engine.scheduler import Scheduler

HOME = str(ROOT / "ovspec")


@dataclass
class Road:
    """The stops of a call from its ``first`` function on.

    A stop is a file in which functions are called; a file that comes up again is a return. Properties, special methods
    and comprehensions are no calls to follow. From the first round on, only the first call of a function counts,
    because rounds repeat themselves.

    scheduled: whether the calls inside of the scheduler are followed.
    """

    first: Callable[..., Any]
    scheduled: bool = True
    stops: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun = self._rounds = False
        self._called, self._values = set[CodeType](), codes_of_properties()
        self._inside = threading.local()

    @property
    def files(self) -> list[str]:
        """The files in the order in which the road comes to them."""
        return [*dict.fromkeys(self.stops)]

    def note(self, frame: Any, event: str, _: Any) -> None:
        """Note a call; a function for ``sys.setprofile``."""
        code = frame.f_code
        self._begun = self._begun or code is self.first.__code__
        if self._begun and event == "call" and (self.scheduled or not getattr(self._inside, "scheduler", False)):
            self._rounds = self._rounds or code is Scheduler.run_next_round.__code__
            if self._counts(code):
                self._called.add(code)
                file = Path(code.co_filename).relative_to(HOME).as_posix()
                if self.stops[-1:] != [file]:
                    self.stops.append(file)
        if code in SCHEDULING and event in ("call", "return"):
            self._inside.scheduler = event == "call"

    def _counts(self, code: CodeType) -> bool:
        named = code.co_filename.startswith(HOME) and not code.co_name.startswith(("<", "__"))
        return named and code not in self._values and not (self._rounds and code in self._called)


SCHEDULING = {
    function.__code__ for function in (Scheduler.run_next_round, Scheduler.remove_rows, Scheduler.reset_decoders)
}


def codes_of_properties() -> set[CodeType]:
    """Return the code of all properties in the modules that are loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("ovspec")]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    attributes: list[Any] = [attribute for each in classes for attribute in vars(each).values()]
    getters = [each.fget for each in attributes if isinstance(each, property)]
    getters += [each.func for each in attributes if isinstance(each, functools.cached_property)]
    return {getter.__code__ for getter in getters if getter}
