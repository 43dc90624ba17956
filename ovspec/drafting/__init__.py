"""Drafters: whatever proposes tokens. The target alone decides which of them stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ovspec.sequence import Sequence
from ovspec.vocabulary import ALL_IDS, KnownIds

if TYPE_CHECKING:
    from ovspec.lookahead import Lookahead
    from ovspec.sampler import Sampler
    from ovspec.sampling import Kept


@dataclass(frozen=True)
class Proposal:
    """Tokens (n,) int64 that may come next.

    ``confidence`` (n,), 0 to 1: how sure the drafter is of each, on a scale of its own; the lookahead learns what it
    is worth. ``q``: what each token was drawn from, where it was drawn. ``source``: the drafter's name.
    """

    tokens: np.ndarray
    confidence: np.ndarray | None = None
    q: list[Kept] | None = None
    source: str = "own"


NOTHING = Proposal(np.empty(0, dtype=np.int64))


@dataclass(slots=True)
class Round:
    """What one round of speculation works on, a place in each list for each row.

    sequences: the tokens so far.
    remaining: tokens that may be proposed before the text is as long as it may become.
    samplers: who chooses the row's tokens.
    lookahead: how many tokens it pays to propose.
    """

    sequences: list[Sequence]
    remaining: list[int]
    samplers: list[Sampler]
    lookahead: Lookahead

    @property
    def budgets(self) -> list[int]:
        """Tokens that may be proposed in this round at most."""
        return [min(left, self.lookahead.most) for left in self.remaining]


class Drafter:
    """Proposes tokens for every row of a batch; reads committed tokens and its own guesses only.

    For a drafter of your own, ``guess`` is enough. The others are for drafters that keep state along the rows.
    """

    name = "own"  # in statistics
    vocabulary: KnownIds = ALL_IDS  # set by the model: other ids are never proposed
    seconds = 0.0  # spent in inference so far

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        """At most ``budget`` ids to follow ``tokens`` (n,) int64, which must not be changed."""
        raise NotImplementedError(f"{type(self).__name__} needs a method guess(tokens, budget)")

    def propose(self, round: Round) -> list[Proposal]:
        """A proposal for every row, as long as the lookahead finds worthwhile."""
        if not round.lookahead.starts(self.name, 0, round.remaining):
            return [NOTHING] * len(round.sequences)
        return [
            round.lookahead.cut(self._checked(self.guess(sequence.tokens, budget), budget), len(round.sequences))
            if budget > 0
            else NOTHING
            for sequence, budget in zip(round.sequences, round.budgets, strict=True)
        ]

    def reset(self, rows: int) -> None:
        """Forget everything and start over with ``rows`` rows."""

    def reorder(self, rows: list[int]) -> None:
        """New row i is old row ``rows[i]``, or an empty one, as ``Decoder.reorder``."""

    def _checked(self, guesses: Iterable[int], budget: int) -> Proposal:
        tokens = np.array([int(guess) for guess in guesses][:budget], dtype=np.int64)
        unknown = self.vocabulary.first_unknown(tokens)
        if unknown is not None:
            tokens = tokens[: int((tokens == unknown).argmax())]
        return Proposal(tokens, source=self.name)
