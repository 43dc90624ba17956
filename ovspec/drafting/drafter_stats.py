"""How often a drafter's tokens are accepted, and what drafting has saved, learned while generating."""

from __future__ import annotations

import bisect
import math

import numpy as np

from ovspec.drafting.proposal import Proposal

# Edges of the bins of confidence. High confidence is common, so the upper bins are narrow.
EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
PRIOR = (np.array([0.0, *EDGES]) + np.array([*EDGES, 1.0])) / 2
PRIOR_WEIGHT = 2.0
FIRST_ACCEPTANCE = 0.75  # conditional acceptance assumed of a drafter that hasn't proposed anything
FORGET = 0.95  # factor by which each new observation discounts the older ones
# A drafter may lose the time of this many plain rounds, and as much again as it has saved lately. After that it gets
# this share of all rounds for its trials.
ALLOWANCE = 1.2
TRIALS = 0.003
# Tokens that savings count for. What repeats for lookup is a matter of the text's kind, which may change at once; a
# model is about as good at one kind as at another.
RECENT, RECENT_OF_MODELS = 24, 400
MOST_SAVED = 16  # plain rounds: a drafter that is suddenly useless loses no more of what it has saved


class Acceptance:
    """Conditional acceptance of a drafter's tokens, by confidence and overall."""

    def __init__(self) -> None:
        self._accepted, self._reached = PRIOR_WEIGHT * PRIOR, np.full(len(PRIOR), PRIOR_WEIGHT)
        self._all_accepted, self._all_reached = FIRST_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT

    @property
    def mean(self) -> float:
        return self._all_accepted / self._all_reached

    def rates(self, proposal: Proposal) -> np.ndarray:
        """Return the conditional acceptance of each token, (n,)."""
        if proposal.confidence is None:
            return np.full(len(proposal.tokens), self.mean)
        bins = np.searchsorted(EDGES, proposal.confidence, side="right")
        return self._accepted[bins] / self._reached[bins]

    def rate(self, confidence: float) -> float:
        index = bisect.bisect_right(EDGES, confidence)
        return float(self._accepted[index] / self._reached[index])

    def learn(self, proposal: Proposal, accepted: int) -> None:
        for index in range(min(accepted + 1, len(proposal.tokens))):
            stood = index < accepted
            self._all_accepted = self._all_accepted * FORGET + stood
            self._all_reached = self._all_reached * FORGET + 1
            if proposal.confidence is not None:
                at = self._fade(proposal.confidence[index])
                self._accepted[at] += stood
                self._reached[at] += 1

    def fade(self, proposal: Proposal) -> None:
        """Trust the known rates a little less, because they keep ``proposal`` from being tried."""
        new = (1 - FORGET) * PRIOR_WEIGHT
        self._all_accepted = self._all_accepted * FORGET + new * FIRST_ACCEPTANCE
        self._all_reached = self._all_reached * FORGET + new
        if proposal.confidence is not None:
            self._fade(proposal.confidence[0])

    def _fade(self, confidence: float) -> int:
        """Move a bin towards the prior, which remains when all observations are forgotten; return its index."""
        index, new = bisect.bisect_right(EDGES, confidence), (1 - FORGET) * PRIOR_WEIGHT
        self._accepted[index] = self._accepted[index] * FORGET + new * PRIOR[index]
        self._reached[index] = self._reached[index] * FORGET + new
        return index


class Balance:
    """Plain rounds that drafting saved lately, less those it lost: it may lose no more than ``allowance``.

    ``recent``: tokens that savings count for.
    """

    def __init__(self, recent: float = RECENT_OF_MODELS) -> None:
        self._recent = recent
        self._saved = 0.0
        self._waited = 0.0  # tokens since the last round with a proposal

    @property
    def allowance(self) -> float:
        return ALLOWANCE + self._saved + self.trials

    @property
    def trials(self) -> float:
        """How many plain rounds a trial may cost by now, whatever is expected of it."""
        return TRIALS * self._waited

    def wait(self, tokens: float) -> None:
        """Note that ``tokens`` were generated for each row, by whichever means."""
        self._waited += tokens
        if self._saved > 0:
            self._saved *= math.exp(-tokens / self._recent)

    def add(self, saved: float) -> None:
        """Note that a round saved the time of ``saved`` plain rounds, or lost it."""
        if self._saved < 0:
            self._saved = min(0.0, self._saved + self.trials)
        self._saved, self._waited = min(self._saved + saved, MOST_SAVED), 0.0


class DrafterStats:
    """How often a drafter is right, and what its recent rounds have saved; ``recent`` as in ``Balance``."""

    def __init__(self, recent: float = RECENT_OF_MODELS) -> None:
        self.acceptance, self.balance = Acceptance(), Balance(recent)
        self.tokens = self.ms = self.rounds = 0.0  # sums over its recent rounds

    def learn(self, tokens: int, ms: float) -> None:
        self.tokens, self.ms = self.tokens * FORGET + tokens, self.ms * FORGET + ms
        self.rounds = self.rounds * FORGET + 1
