"""The pace: how many tokens of prompts a round reads while other rows generate, as time allows or as many as told."""

from __future__ import annotations

import math

from ovspec.drafting.costs import Costs

# A round that reads prompts may take this many times as long as a plain round of the rows that generate. The aim is 2;
# the rest is for what an inference takes longer than expected.
LIMIT = 1.8
FEWEST, MOST = 8, 256  # tokens of prompts in a round; the most also bound how long a row waits before it joins
RECENT = 0.2  # weight of the newest measurement


class Pace:
    """Learns what a prompt's token costs beside rows that generate, and how many of them a round has time for.

    Args:
        costs: milliseconds of an inference by its width.
        narrowest: the fewest tokens that an inference computes, see ``Decoder``.
        learns: whether ``costs`` learns from ``learn``, because no lookahead lets it learn.
        chunk: how many tokens of prompts every round reads, however long that takes; None for as many as it has time
            for.
    """

    def __init__(self, costs: Costs, narrowest: int, learns: bool, chunk: int | None = None) -> None:
        self._costs, self._narrowest, self._learns, self._chunk = costs, narrowest, learns, chunk
        self._ms: float | None = None  # of a prompt's token

    def most_ms(self, generating: int, reading: int) -> float:
        """Return how many milliseconds proposals may add to a round of rows that generate and rows that read prompts.

        Proposals must not keep new rows waiting, because a fuller batch gains more: the more rows read, the less of
        what the round may take longer is left for proposals, and nothing if as many read as generate.
        """
        if not reading or self._chunk:
            return math.inf
        if not self._costs.known:
            return 0.0
        share = max(0, generating - reading) / (generating + reading)
        return (LIMIT - 1) * self._plain(generating) * share

    def room(self, generating: list[int], drafted: float = 0.0) -> int:
        """Return how many tokens of prompts the next round reads.

        Args:
            generating: the number of tokens that the round computes for each row that generates.
            drafted: milliseconds that proposing them took.
        """
        if self._chunk or not generating:
            return self._chunk or MOST
        if not self._costs.known:
            return FEWEST
        ms = self._ms or self._costs(MOST) / MOST
        left = LIMIT * self._plain(len(generating)) - self._costs(sum(generating)) - drafted
        return min(max(FEWEST, int(left / ms)), MOST)

    def learn(self, generating: list[int], read: int, ms: float) -> None:
        """Learn from an inference that took ``ms`` and also read ``read`` tokens of prompts."""
        width = sum(generating)
        if read > FEWEST // 2:
            found = max((ms - self._costs(width)) / read if self._costs.known or not width else 0.0, 1e-3)
            self._ms = found if self._ms is None else self._ms + RECENT * (found - self._ms)
        elif self._learns and width and not read:
            self._costs.learn(width, ms)

    def _plain(self, rows: int) -> float:
        """Return the milliseconds of a round in which ``rows`` generate a token each."""
        return self._costs(max(self._narrowest, rows))
