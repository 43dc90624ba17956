"""ovspec: fast, lossless text generation on OpenVINO.

>>> import ovspec
>>> lm = ovspec.load("models/demo", draft=True)
>>> lm.generate("def fib(", max_tokens=64).text
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

# OpenVINO, nncf and optimum would use this package to report their use over the network; they work without it.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

if TYPE_CHECKING:
    from ovspec.api.loading import load
    from ovspec.api.model import LanguageModel
    from ovspec.api.session import Session
    from ovspec.api.session_file import Mark
    from ovspec.api.verify import result_from_json
    from ovspec.base.errors import OvspecError
    from ovspec.drafting.drafter import Drafter
    from ovspec.engine.results import Piece, Result, Stats
    from ovspec.engine.scoring import Score, Selection
    from ovspec.params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Drafter": "ovspec.drafting.drafter",
    "SamplingParams": "ovspec.params",
    "OvspecError": "ovspec.base.errors",
    "Piece": "ovspec.engine.results",
    "Result": "ovspec.engine.results",
    "Stats": "ovspec.engine.results",
    "LanguageModel": "ovspec.api.model",
    "load": "ovspec.api.loading",
    "result_from_json": "ovspec.api.verify",
    "Mark": "ovspec.api.session_file",
    "Score": "ovspec.engine.scoring",
    "Selection": "ovspec.engine.scoring",
    "Session": "ovspec.api.session",
}
__all__ = [
    "Drafter",
    "LanguageModel",
    "Mark",
    "OvspecError",
    "Piece",
    "Result",
    "SamplingParams",
    "Score",
    "Selection",
    "Session",
    "Stats",
    "__version__",
    "load",
    "result_from_json",
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Imported on first use, because 'ovspec --help' shouldn't wait for openvino.
    if name not in _HOMES:
        raise AttributeError(f"module 'ovspec' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
