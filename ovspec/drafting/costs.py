"""What an inference costs by its width, learned while generating."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from ovspec.cache.decoder import FAST_RULE, FeedRule

WIDEST = 64  # largest width whose cost is learned; beyond it, the cost is extrapolated linearly
FIRST_CHANGE = 0.2  # share of an inference that a change of width costs until it is known
MEASURED_CHANGES = 4  # number of changes that a profile's measurement counts for
# One inference counts as no faster or slower than by these factors, and slower by less if it may have made kernels.
FASTEST, SLOWEST, FIRST_SLOWEST = 0.1, 2.0, 1.1
# Exponents by which all costs follow an inference's factor, and those of its own width and wider ones besides. Both are
# larger at first: FIRST_... divided by the inferences of its width, or by all since a prompt was read, that included.
# An inference may take longer for many reasons, but hardly ever less time than it needs, so costs fall faster than they
# rise.
ALL_FOLLOW, OWN_FOLLOWS = 0.03, 0.06
FIRST_RISE, FIRST_FALL, FIRST_OWN = 0.5, 1.0, 0.3
# With a draft, the same width comes many times in a row. After this many, if a profile has measured what widths cost,
# an inference tells how fast the machine is now, by its clock or by other work: all follow more, its own width less.
STEADY = 3
ALL_FOLLOW_STEADY, OWN_FOLLOWS_STEADY = 0.1, 0.02
CHANGE_FOLLOWS = 0.1  # share by which the cost of a change of width follows what it took, 1 / their number at first


class Costs:
    """Milliseconds of an inference by its width in tokens, learned from each inference.

    An inference of another width than the one before takes longer, because OpenVINO prepares every layer anew. So a
    narrower inference is filled up to the last width if that takes less time.

    Args:
        measured: the costs of some widths, from a profile; without one, the first that comes again sets the scale.
        change: what a change of width adds, if it was measured.
        fills: whether the decoder can fill up an inference.
        rule: how the decoder feeds tokens: how many it computes, and how many at most, so that more are several
            inferences.
    """

    def __init__(
        self,
        measured: Mapping[int, float] | None = None,
        change: float | None = None,
        fills: bool = False,
        rule: FeedRule = FAST_RULE,
    ) -> None:
        widths, most = np.arange(WIDEST + 1), rule.most
        if measured and len(measured) > 1:
            known = sorted(measured)
            times = [measured[width] for width in known]
            slope = max(0.0, (times[-1] - times[-2]) / (known[-1] - known[-2]))
            costs = np.interp(widths, known, times) + slope * np.maximum(0, widths - known[-1])
        else:
            costs = 1 + 0.05 * np.maximum(0, widths - 1.0)
        if most and most < WIDEST:
            split = costs[most] * (widths // most) + np.where(widths % most, costs[widths % most], 0.0)
            costs = np.where(widths <= most, costs, split)
        self.known = self._measured = bool(measured)
        self.change = FIRST_CHANGE * float(costs[1]) if change is None else change  # added by a change of width
        self._rule = rule
        # The width that an inference of each width is computed at, and costs as much as.
        self._computed = np.array([min(rule.computed_tokens(max(1, width)), WIDEST) for width in range(WIDEST + 1)])
        self.ms = costs = costs[self._computed]
        self._changes = 0 if change is None else MEASURED_CHANGES  # from which ``change`` is learned
        self._fills = fills
        self._last = 0  # width of the last inference
        self._in_a_row = 0  # inferences of that width just before it
        self._filled = 0.0  # milliseconds spent on filling since an inference last needed its width
        self._beyond = float(costs[WIDEST] - costs[WIDEST // 2]) / (WIDEST // 2)  # for each further token
        self._observed = 0  # inferences since a prompt was read
        self._seen: Counter[int] = Counter()  # inferences of each width

    def __call__(self, width: int) -> float:
        if width <= WIDEST:
            return float(self.ms[width])
        return float(self.ms[WIDEST]) + self._beyond * (width - WIDEST)

    def next(self, change: float = 1.0) -> np.ndarray:
        """Return the next inference's ms by the width that it needs, (WIDEST + 1,), with this share of a change."""
        last = self._last
        if not 0 < last <= WIDEST:
            return self.ms
        found = self.ms + change * self.change
        found[last] = self.ms[last]
        if self._fills:
            np.minimum(found[:last], self.ms[last], out=found[:last])
        return found[self._computed]

    def fill(self, needed: int) -> int:
        """Return how many tokens the next inference should compute if ``needed`` have to be."""
        last = self._last
        if not (self._fills and needed and needed < last <= WIDEST):
            self._filled = 0.0
            return needed
        self._filled += max(0.0, float(self.ms[last] - self.ms[needed]))
        if self._filled <= self.change:
            return last
        self._filled = 0.0
        return needed

    def skip(self, width: int, prompt: bool = False) -> None:
        """Note an inference of ``width`` tokens whose time says nothing.

        If it read a ``prompt``, the context has another length from now on, which changes all costs alike: they follow
        almost as at first.
        """
        self._last = width
        if prompt:
            self._observed = 1

    def learn(self, width: int, ms: float, drafted: bool = True) -> float:
        """Learn from an inference of ``width`` tokens: adjust that width's cost most, and all others.

        One wider than ``WIDEST`` only adjusts the cost of such widths. Returns how many milliseconds it usually takes;
        0.0 at first, until a width comes again: the first of each makes kernels.

        ``drafted``: whether it is an inference of a draft model, or of a target that has one.
        """
        width = self._rule.computed_tokens(width)
        changed, self._last = width != self._last, width
        self._in_a_row = 0 if changed else self._in_a_row + 1
        if width > WIDEST:
            if self.known:
                self.ms = np.minimum(self.ms, ms)  # a narrower one can't take longer
                self._beyond = max(0.0, (ms - float(self.ms[WIDEST])) / (width - WIDEST))
            return ms
        self._observed += 1
        self._seen[width] += 1
        same = float(self.ms[width])
        usual = same + changed * self.change
        first = self._seen[width] == 1  # it may include the time to make kernels
        if not self.known:  # the first that makes none counts
            self.known = not first
            self.ms, self.change = self.ms * (ms / usual), self.change * (ms / usual)
            return ms if self.known else 0.0
        if changed and (ms < usual or not first):
            self._changes += 1
            seen = max(0.0, min(ms, SLOWEST * usual) - same)
            self.change += max(CHANGE_FOLLOWS, 1 / self._changes) * (seen - self.change)
            usual = same + self.change
        factor = min(max(ms / usual, FASTEST), FIRST_SLOWEST if first else SLOWEST)
        steady = self._measured and drafted and self._in_a_row >= STEADY
        follow = ALL_FOLLOW_STEADY if steady else ALL_FOLLOW
        own_follows = OWN_FOLLOWS_STEADY if steady else OWN_FOLLOWS
        self.ms *= factor ** max(follow, (FIRST_RISE if factor > 1 else FIRST_FALL) / self._observed)
        own = factor ** (own_follows if changed else max(own_follows, FIRST_OWN / self._seen[width]))
        self.ms[max(1, width - 1) :] *= own  # its neighbour and all wider ones
        self.ms[width] *= own
        self.ms = self.ms[self._computed]
        return usual
