"""ovspec: fast, lossless text generation on OpenVINO.

>>> import ovspec
>>> lm = ovspec.load("models/demo", draft=True)
>>> lm.generate("def fib(", max_tokens=64).text
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ovspec.drafting import Drafter as Drafter
    from ovspec.errors import OvspecError as OvspecError
    from ovspec.generate import Piece as Piece
    from ovspec.generate import Result as Result
    from ovspec.generate import Stats as Stats
    from ovspec.loading import load as load
    from ovspec.model import LanguageModel as LanguageModel
    from ovspec.sampling import SamplingParams as SamplingParams
    from ovspec.scoring import Score as Score
    from ovspec.scoring import Selection as Selection
    from ovspec.session import Mark as Mark
    from ovspec.session import Session as Session

__version__ = "0.1.0"

_HOMES = {
    "Drafter": "ovspec.drafting",
    "SamplingParams": "ovspec.sampling",
    "OvspecError": "ovspec.errors",
    "Piece": "ovspec.generate",
    "Result": "ovspec.generate",
    "Stats": "ovspec.generate",
    "LanguageModel": "ovspec.model",
    "load": "ovspec.loading",
    "Mark": "ovspec.session",
    "Score": "ovspec.scoring",
    "Selection": "ovspec.scoring",
    "Session": "ovspec.session",
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
]


def __getattr__(name: str) -> Any:
    # Imported on first use: 'ovspec --help' must not wait for openvino.
    if name not in _HOMES:
        raise AttributeError(f"module 'ovspec' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
