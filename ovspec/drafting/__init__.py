"""Drafters: whatever proposes tokens. The target alone decides which of them stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ovspec.sequence import Sequence


@dataclass(frozen=True)
class Proposal:
    """Tokens (n,) int64 that may come next."""

    tokens: np.ndarray


NOTHING = Proposal(np.empty(0, dtype=np.int64))


class Drafter(Protocol):
    """Proposes tokens for every row of a batch; reads committed tokens and its own guesses only."""

    @property
    def seconds(self) -> float:
        """Spent in the drafter's own inferences so far."""
        ...

    def propose(self, sequences: list[Sequence], budgets: list[int]) -> list[Proposal]:
        """At most ``budgets[row]`` tokens to follow ``sequences[row]``."""
        ...

    def reset(self, rows: int) -> None:
        """Forget everything and start over with ``rows`` rows."""
        ...

    def reorder(self, rows: list[int]) -> None:
        """New row i is old row ``rows[i]``, as ``Decoder.reorder``."""
        ...
