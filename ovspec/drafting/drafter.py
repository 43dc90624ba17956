"""Drafters: whatever proposes tokens. The target alone decides which of them stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ovspec.decoders.sequence import Sequence
from ovspec.drafting.proposal import AGAIN, NOTHING, Proposal, shorten
from ovspec.text.vocabulary import ALL_IDS, KnownIds

if TYPE_CHECKING:
    from ovspec.drafting.lookahead import Lookahead
    from ovspec.sampling.samplers import Sampler


@dataclass(slots=True)
class Round:
    """What one round of speculation works on, a place in each list for each row.

    sequences: the tokens so far.
    remaining: tokens that a drafter may propose before the text is as long as it may become.
    samplers: who chooses the row's tokens, and what constrains them.
    lookahead: how many tokens it pays to propose.
    room: tokens that may be committed because constraints leave no choice.
    """

    sequences: list[Sequence]
    remaining: list[int]
    samplers: list[Sampler]
    lookahead: Lookahead
    room: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room = self.room or [0] * len(self.sequences)

    @property
    def budgets(self) -> list[int]:
        """Tokens that a drafter may propose in this round at most."""
        return [min(left, self.lookahead.most) for left in self.remaining]

    def complete(self, row: int) -> bool:
        """Whether constraints leave nothing that could follow."""
        return self.samplers[row].constraints.complete(self.sequences[row].tokens)

    def again(self, row: int) -> Proposal:
        """What constraints find worth a guess."""
        found = self.samplers[row].constraints.likely(self.sequences[row].tokens)
        return NOTHING if found is None else self.permitted(row, Proposal(found, source=AGAIN))

    def permitted(self, row: int, proposal: Proposal) -> Proposal:
        """``proposal`` up to where it may not go on, or need not because the text has ended."""
        count = self.samplers[row].constraints.permitted(self.sequences[row].tokens, proposal.tokens)
        return shorten(proposal, count)


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
        proposals = [
            round.permitted(row, self._checked(self.guess(round.sequences[row].tokens, budget), budget))
            if budget > 0
            else NOTHING
            for row, budget in enumerate(round.budgets)
        ]
        return [round.lookahead.cut(proposal, len(proposals)) for proposal in proposals]

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
