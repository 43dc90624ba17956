"""The cost of drafting and verifying, and acceptance rates, learned while generating."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ovspec.drafting.proposal import Proposal

# Largest width whose cost is learned; for wider inferences, the cost is extrapolated linearly.
WIDEST = 64
# Edges of the bins of confidence. High confidence is common, so the upper bins are narrow.
EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
PRIOR = (np.concatenate(([0.0], EDGES)) + np.concatenate((EDGES, [1.0]))) / 2
PRIOR_WEIGHT = 2.0
# Conditional acceptance assumed of a drafter before it has proposed anything.
FIRST_ACCEPTANCE = 0.75
FORGET = 0.95  # factor by which each new observation of acceptance discounts the older ones
# A drafter is on trial for this many rounds. Then it pauses if its tokens cost more than plain ones by a margin of
# doubt / rounds. Each pause is twice as long as the last. The later values hold after its first pause.
FIRST_TRIAL, LATER_TRIAL = 4.5, 1.5
FIRST_DOUBT, LATER_DOUBT = 1.0, 0.2
FIRST_PAUSE, LONGEST_PAUSE = 8, 128


class Costs:
    """Milliseconds of an inference by its width in tokens, learned from each inference.

    Args:
        measured: the costs of some widths, from a profile; without a profile, the first inference sets the scale.
    """

    def __init__(self, measured: Mapping[int, float] | None = None) -> None:
        widths = np.arange(WIDEST + 1)
        if measured and len(measured) > 1:
            known = sorted(measured)
            times = [measured[width] for width in known]
            slope = max(0.0, (times[-1] - times[-2]) / (known[-1] - known[-2]))
            costs = np.interp(widths, known, times) + slope * np.maximum(0, widths - known[-1])
        else:
            costs = 1 + 0.05 * np.maximum(0, widths - 1.0)
        self.known = bool(measured)
        self.ms = costs
        self._beyond = float(costs[WIDEST] - costs[WIDEST // 2]) / (WIDEST // 2)  # for each token beyond WIDEST
        self._observed = 0
        self._widths_seen: set[int] = set()

    def __call__(self, width: int) -> float:
        if width <= WIDEST:
            return float(self.ms[width])
        return float(self.ms[WIDEST]) + self._beyond * (width - WIDEST)

    def learn(self, width: int, ms: float) -> None:
        """Learn from an inference of ``width`` tokens that took ``ms``: adjust that width's cost and, less, all others.

        An inference wider than ``WIDEST`` read a prompt; it only adjusts the cost of such widths.
        """
        if width > WIDEST:
            if self.known:
                self._beyond = max(0.0, (ms - float(self.ms[WIDEST])) / (width - WIDEST))
            return
        self._observed += 1
        first_of_width = width not in self._widths_seen
        self._widths_seen.add(width)
        if not self.known:
            self.known = True
            self.ms = self.ms * (ms / self.ms[width])
            return
        ratio = min(max(ms / self.ms[width], 0.5), 2.0)
        if first_of_width:  # it may include the time to make kernels
            ratio = min(ratio, 1.1)
        everywhere = max(0.03, 0.5 / self._observed)
        self.ms *= ratio**everywhere
        near = slice(max(1, width - 1), width + 2)
        self.ms[near] *= ratio**0.06
        self.ms[width] *= ratio**0.06


class Acceptance:
    """Conditional acceptance of a drafter's tokens, by confidence and overall."""

    def __init__(self) -> None:
        self._accepted, self._reached = PRIOR_WEIGHT * PRIOR, np.full(len(PRIOR), PRIOR_WEIGHT)
        self._all = [FIRST_ACCEPTANCE * PRIOR_WEIGHT, PRIOR_WEIGHT]

    @property
    def mean(self) -> float:
        return self._all[0] / self._all[1]

    def rates(self, proposal: Proposal) -> np.ndarray:
        """Return the conditional acceptance of each token, (n,)."""
        if proposal.confidence is None:
            return np.full(len(proposal.tokens), self.mean)
        bins = np.searchsorted(EDGES, proposal.confidence, side="right")
        return self._accepted[bins] / self._reached[bins]

    def rate(self, confidence: float) -> float:
        index = int(np.searchsorted(EDGES, confidence, side="right"))
        return float(self._accepted[index] / self._reached[index])

    def learn(self, proposal: Proposal, accepted: int) -> None:
        reached = min(accepted + 1, len(proposal.tokens))
        for index in range(reached):
            stood = index < accepted
            self._all = [self._all[0] * FORGET + stood, self._all[1] * FORGET + 1]
            if proposal.confidence is not None:
                at = int(np.searchsorted(EDGES, proposal.confidence[index], side="right"))
                self._fade(at, FORGET)
                self._accepted[at] += stood
                self._reached[at] += 1

    def fade(self, proposal: Proposal) -> None:
        """Trust the known rates a little less, because they keep ``proposal`` from being tried."""
        self._all = [
            self._all[0] * FORGET + (1 - FORGET) * PRIOR_WEIGHT * FIRST_ACCEPTANCE,
            self._all[1] * FORGET + (1 - FORGET) * PRIOR_WEIGHT,
        ]
        if proposal.confidence is not None:
            self._fade(int(np.searchsorted(EDGES, proposal.confidence[0], side="right")), FORGET)

    def _fade(self, index: int, by: float) -> None:
        """Move bin ``index`` towards the prior, which is what remains when all observations are forgotten."""
        self._accepted[index] = self._accepted[index] * by + (1 - by) * PRIOR_WEIGHT * PRIOR[index]
        self._reached[index] = self._reached[index] * by + (1 - by) * PRIOR_WEIGHT


class Record:
    """What a drafter's recent rounds gained and cost, and its pauses."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.tokens = self.ms = self.rounds = 0.0
        self.pause = 0  # rounds left of it
        self._trial, self._doubt, self._next_pause = FIRST_TRIAL, FIRST_DOUBT, FIRST_PAUSE

    def learn(self, tokens: int, ms: float, plain_ms: float) -> None:
        """Learn from a round that committed ``tokens`` in ``ms``; plain decoding takes ``plain_ms`` for a token."""
        keep = 0.95
        self.tokens, self.ms = self.tokens * keep + tokens, self.ms * keep + ms
        self.rounds = self.rounds * keep + 1
        if self.rounds > 4 and self.ms < self.tokens * plain_ms:
            self._next_pause = FIRST_PAUSE

    def loses(self, plain_ms: float) -> bool:
        """Return whether the drafter's tokens have cost more than plain ones by more than the margin of doubt."""
        if self.rounds < self._trial:
            return False
        return self.ms > self.tokens * plain_ms * (1 + self._doubt / self.rounds)

    def take_a_pause(self) -> None:
        self.pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        self._trial, self._doubt = LATER_TRIAL, LATER_DOUBT
        self.tokens = self.ms = self.rounds = 0.0
