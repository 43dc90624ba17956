"""How many tokens of prompts a round reads while others generate: as time allows, or a fixed number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ovspec.cache.decoder import FeedRule
from ovspec.drafting.costs import Costs

# A round may take this many times as long as a plain round of all rows. The aim is 2; the rest is for what an inference
# takes longer than expected.
LIMIT = 1.8
FEWEST, MOST = 8, 256  # tokens of prompts in a round; the most also bound how long a row waits before it joins
LEAST = 2  # fewest tokens of prompts in a round in which other rows read the rest of theirs
STEADY = 4  # tokens by which a round may stay narrower than it could be: a change of width takes time, too
RECENT = 0.1  # weight of the newest measurement


@dataclass(frozen=True)
class Load:
    """What a round does besides reading prompts."""

    generating: int  # rows that get a token
    reading: int = 0  # rows that read a prompt
    rest: int = 0  # tokens that the rows that generate have yet to read, besides one for each
    proposed: int = 0  # tokens

    @property
    def rows(self) -> int:
        return self.generating + self.reading

    @property
    def width(self) -> int:
        return self.generating + self.rest + self.proposed


class PrefillBudget:
    """Learns what rows and tokens cost, and decides how much of a round's time is for prompts and for proposals.

    A row costs more than a token of a prompt or a proposal, because it has a context of its own. ``learns``: whether
    ``costs`` learns here, because no lookahead lets it learn. ``chunk``: tokens of prompts that every round reads; None
    for as many as it has time for.
    """

    def __init__(self, costs: Costs, rule: FeedRule, learns: bool, chunk: int | None = None) -> None:
        self._costs, self._rule, self._learns, self._chunk = costs, rule, learns, chunk
        self._rounds: dict[int, float] = {}  # milliseconds of a plain round by its number of rows
        self._token: float | None = None  # milliseconds of a further token
        self._width = 0  # tokens that the last round that read prompts had time for

    def most_ms(self, load: Load, unread: int) -> float:
        """Return how many milliseconds proposals may add to the next round; ``unread`` tokens of prompts come first."""
        if self._chunk or load.rows < 2:
            return math.inf
        return max(0.0, self._left(load) - unread * self._token_ms) if self._costs.known else 0.0

    def room(self, load: Load, drafted: float = 0.0) -> int:
        """Return how many tokens of prompts the next round reads, if proposing took ``drafted`` milliseconds."""
        if self._chunk or not load.generating:
            return self._chunk or MOST
        least = max(FEWEST - load.rest, LEAST)
        if not self._costs.known:
            return least
        most = load.width + min(max(least, int((self._left(load) - drafted) / self._token_ms)), MOST)
        if not most - STEADY < self._width <= most:
            self._width = most
        return self._rule.room_beside(load.width, max(least, self._width - load.width))

    def learn(self, load: Load, read: int, ms: float) -> None:
        """Learn from an inference that took ``ms`` and also read ``read`` tokens of prompts."""
        if not load.generating:
            return
        if read + load.rest >= FEWEST and self._costs.known:
            known = self._plain(load.generating) + load.proposed * self._token_ms
            found = max((ms - known) / (read + load.rest), 1e-3)
            self._token = found if self._token is None else self._token + RECENT * (found - self._token)
        elif load.width == load.generating and not read:
            known = self._rounds.setdefault(load.generating, ms)
            # An inference may take longer for many reasons, but hardly ever less time than it needs.
            self._rounds[load.generating] += (0.5 if ms < known else RECENT) * (ms - known)
            if self._learns:
                self._costs.learn(load.generating, ms)

    @property
    def _token_ms(self) -> float:
        return self._token or self._costs(MOST) / MOST

    def _left(self, load: Load) -> float:
        busy = self._plain(load.generating) + (load.rest + load.proposed) * self._token_ms
        return LIMIT * self._plain(load.rows) - busy

    def _plain(self, rows: int) -> float:
        """Return the milliseconds of a round in which ``rows`` generate a token each."""
        if not rows:
            return 0.0
        expected = self._costs(rows)
        if not self._rounds:
            return expected
        like = min(self._rounds, key=lambda seen: abs(seen - rows))
        return max(self._rounds[like] + expected - self._costs(like), 1e-3)
