"""What a drafter is, and what it sees of a row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ovspec.decoders.sequence import Sequence
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import NO_TOKENS, NOTHING, Proposal, shorten
from ovspec.sampling.samplers import Sampler
from ovspec.text.vocabulary import ALL_IDS, KnownIds

NO_LOGITS = np.empty((0, 0), dtype=np.float32)


@dataclass(slots=True)
class RoundRow:
    """One row in one round: what it begins with, what is proposed, what is fed, and what comes of it.

    sequence: the tokens so far; the round commits to it.
    sampler: chooses the row's tokens, and has its constraints.
    budget: tokens that may still be committed; what may be forced and proposed follows from it.
    drafts: whether drafters are asked. They aren't before the first token, which must not wait for them.
    forced: (n,) committed first, because constraints leave no other.
    ended: nothing can follow, so the model isn't asked.
    proposal: what a drafter proposes to be verified.
    healed: healing has proposed what it knows of the prompt, which is nobody's proposal and in no statistics.
    unseen: (n,) the tokens that the target has not read, of which it reads the first ``read`` now.
    fed: (n,) these and the proposal.
    positions: at the end of the text, whose logits are wanted. With those of the proposal that makes ``wanted``.
    tokens: (n,) all that the round has committed: forced, accepted, and one of the target's own.
    accepted: how many of the proposal are among them.
    logits: (n, vocab) the target's, for each token that wasn't forced, or all that were wanted where the sampler chose
        none; valid until the next round.
    """

    sequence: Sequence
    sampler: Sampler
    budget: int
    drafts: bool = True
    forced: np.ndarray = field(default_factory=NO_TOKENS.copy)
    ended: bool = False
    proposal: Proposal = NOTHING
    healed: bool = False
    unseen: np.ndarray = field(default_factory=NO_TOKENS.copy)
    read: int = 0
    fed: np.ndarray = field(default_factory=NO_TOKENS.copy)
    positions: int = 1
    wanted: int = 0
    tokens: np.ndarray = field(default_factory=NO_TOKENS.copy)
    accepted: int = 0
    logits: np.ndarray = field(default_factory=NO_LOGITS.copy)

    @property
    def draftable(self) -> int:
        """Tokens that may be proposed. The target adds one of its own."""
        return max(0, self.budget - 1) if self.drafts and not self.ended else 0

    def permitted(self, proposal: Proposal) -> Proposal:
        """``proposal`` up to where a constraint forbids it or the text ends."""
        constraints = self.sampler.constraints
        return shorten(proposal, constraints.permitted(self.sequence.tokens, proposal.tokens))


class Drafter:
    """Proposes tokens for every row of a batch; reads committed tokens and its own guesses only.

    For a drafter of your own, ``guess`` is enough. The other methods are for drafters that keep state along the rows.
    """

    name = "own"  # in statistics
    vocabulary: KnownIds = ALL_IDS  # set by the model: other ids are never proposed
    seconds = 0.0  # spent in inference so far

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        """At most ``budget`` ids to follow ``tokens`` (n,) int64, which must not be changed."""
        raise NotImplementedError(f"{type(self).__name__} needs a method guess(tokens, budget)")

    def propose(self, rows: list[RoundRow], lookahead: Lookahead) -> list[Proposal]:
        """A proposal for every row, as long as the lookahead finds worthwhile."""
        if not lookahead.starts(self.name, 0, [row.draftable for row in rows]):
            return [NOTHING] * len(rows)
        return [lookahead.cut(self._proposal(row, min(row.draftable, lookahead.most)), len(rows)) for row in rows]

    def reset(self, rows: int) -> None:
        """Forget everything and start over with ``rows`` rows."""

    def reorder(self, rows: list[int]) -> None:
        """New row i is old row ``rows[i]``, or an empty one, as ``Decoder.reorder``."""

    def _proposal(self, row: RoundRow, budget: int) -> Proposal:
        if not budget:
            return NOTHING
        tokens = np.array([int(guess) for guess in self.guess(row.sequence.tokens, budget)][:budget], dtype=np.int64)
        unknown = self.vocabulary.first_unknown(tokens)
        if unknown is not None:
            tokens = tokens[: int((tokens == unknown).argmax())]
        return row.permitted(Proposal(tokens, source=self.name))
