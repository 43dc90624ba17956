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
# What drafting may lose, in rounds of plain decoding: at first, after recent gains, and of all rounds in the long run.
FORGET_GAIN = 0.95
FIRST_LOSS, MOST_LOSS, SHARE_LOST = 1.0, 4.0, 0.005


class Costs:
    """Milliseconds of an inference by its width in tokens, learned from each inference.

    An inference that isn't as wide as the one before takes ``change`` longer, because the engine prepares for the new
    width. For a small model that is as long as the inference itself.

    Args:
        measured: the costs of some widths, from a profile; without a profile, the first inferences set the scale.
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
        self.known = self._measured = bool(measured)
        self.ms = costs
        self.change = 0.0
        self.last = 0  # width of the last inference; 0 if that isn't to blame for a change
        self._beyond = float(costs[WIDEST] - costs[WIDEST // 2]) / (WIDEST // 2)  # for each token beyond WIDEST
        self._observed = self._changes = 0

    def __call__(self, width: int) -> float:
        if width <= WIDEST:
            return float(self.ms[width])
        return float(self.ms[WIDEST]) + self._beyond * (width - WIDEST)

    @property
    def settled(self) -> bool:
        """Whether the costs are from a profile or two inferences of the same width in turn."""
        return self._observed > 0 or self._measured

    def next(self, width: int) -> float:
        """Return the milliseconds of the next inference if it has this width."""
        return self(width) + (self.change if width != self.last else 0.0)

    def learn(self, width: int, ms: float) -> float:
        """Learn from an inference of ``width`` tokens that took ``ms``; return the time that was to be expected.

        It adjusts that width's cost and, less, all others. An inference wider than ``WIDEST`` read a prompt; it only
        adjusts the cost of such widths.
        """
        before, self.last = self.last, width
        changed = width != before
        if width > WIDEST:
            if self.known:
                self._beyond = max(0.0, (ms - float(self.ms[WIDEST])) / (width - WIDEST))
            return ms
        if not self.known:
            self.known = True
            self.ms = self.ms * (ms / self.ms[width])
        elif changed:
            self._changes += 1
            same = float(self.ms[width])
            extra = min(ms - same, 2 * same if self._changes < 3 else self.change + 0.5 * same)
            self.change = max(0.0, self.change + (extra - self.change) * max(0.1, 1 / self._changes))
        else:
            ratio = float(ms / self.ms[width])
            if self.settled:
                ratio = min(max(ratio, 0.5), 2.0)
            self._observed += 1
            self.ms *= ratio ** max(0.03, (0.5 if self._measured else 1.0) / self._observed)
            near = slice(max(1, width - 1), width + 2)
            self.ms[near] *= ratio**0.06
            self.ms[width] *= ratio**0.06
        return float(self.ms[width]) + (self.change if changed and before else 0.0)


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

    def doubt(self, by: float) -> None:
        """Move the overall rate towards what is assumed of a new drafter, as if older observations were forgotten."""
        self._all = [
            self._all[0] * by + (1 - by) * PRIOR_WEIGHT * FIRST_ACCEPTANCE,
            self._all[1] * by + (1 - by) * PRIOR_WEIGHT,
        ]

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
        self.doubt(FORGET)
        if proposal.confidence is not None:
            self._fade(int(np.searchsorted(EDGES, proposal.confidence[0], side="right")), FORGET)

    def _fade(self, index: int, by: float) -> None:
        """Move bin ``index`` towards the prior, which is what remains when all observations are forgotten."""
        self._accepted[index] = self._accepted[index] * by + (1 - by) * PRIOR_WEIGHT * PRIOR[index]
        self._reached[index] = self._reached[index] * by + (1 - by) * PRIOR_WEIGHT


class Allowance:
    """How much time drafting may still lose, in rounds of plain decoding.

    A small share of all rounds is added to it, and what drafting gains; what drafting loses is taken from it. So
    drafting loses at most that share and FIRST_LOSS, however wrong all estimates are. Recent gains allow some more, but
    that is soon forgotten, for they say little about the text to come.
    """

    def __init__(self) -> None:
        self.left = FIRST_LOSS

    def learn(self, tokens: float, lost: float) -> None:
        """Note that a round that committed ``tokens`` of each row has lost ``lost`` rounds; negative if it gained."""
        more = max(0.0, self.left - FIRST_LOSS) * FORGET_GAIN**tokens
        self.left = min(self.left, FIRST_LOSS) + more
        self.left = min(self.left + SHARE_LOST * tokens * (self.left < FIRST_LOSS) - lost, MOST_LOSS)


class Record:
    """How many of a drafter's tokens were accepted, and what its recent rounds yielded and cost."""

    def __init__(self) -> None:
        self.acceptance, self.allowance = Acceptance(), Allowance()
        self.tokens = self.ms = self.rounds = 0.0

    def learn(self, tokens: int, ms: float) -> None:
        """Learn from a round that committed ``tokens`` in ``ms``."""
        keep = 0.95
        self.tokens, self.ms = self.tokens * keep + tokens, self.ms * keep + ms
        self.rounds = self.rounds * keep + 1
