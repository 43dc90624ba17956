"""How many tokens of prompts a round reads while others generate: as time allows, or a fixed number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ovspec.cache.decoder import FeedRule
from ovspec.drafting.costs import InferenceCosts

# A round may take this many times as long as a plain round of all rows. The aim is 2; the rest is for what an inference
# takes longer than expected.
MAX_SLOWDOWN = 1.8
MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = (
    8,
    256,
)  # tokens of prompts in a round; the most also bound how long a row waits before it joins
MIN_JOINING_TOKENS = 2  # fewest tokens of prompts in a round in which other rows read the rest of theirs
WIDTH_SLACK = 4  # tokens by which a round may stay narrower than it could be: a change of width takes time, too
NEWEST_WEIGHT = 0.1  # weight of the newest measurement


@dataclass(frozen=True)
class RoundLoad:
    """What a round does besides reading prompts."""

    generating_rows: int  # rows that get a token
    prefilling_rows: int = 0  # rows that read a prompt
    extra_tokens: int = 0  # tokens that the rows that generate have yet to read, besides one for each
    proposed_tokens: int = 0  # tokens

    @property
    def rows(self) -> int:
        return self.generating_rows + self.prefilling_rows

    @property
    def width(self) -> int:
        return self.generating_rows + self.extra_tokens + self.proposed_tokens


class PrefillBudget:
    """Learns what rows and tokens cost, and decides how much of a round's time is for prompts and for proposals.

    A row costs more than a token of a prompt or a proposal, because it has a context of its own. ``learns``: whether
    ``costs`` learns here, because no lookahead lets it learn. ``chunk``: tokens of prompts that every round reads; None
    for as many as it has time for.
    """

    def __init__(
        self, costs: InferenceCosts, rule: FeedRule, teaches_costs: bool, fixed_tokens: int | None = None
    ) -> None:
        self._costs, self._rule, self._teaches_costs, self._fixed_tokens = costs, rule, teaches_costs, fixed_tokens
        self._round_ms: dict[int, float] = {}  # milliseconds of a plain round by its number of rows
        self._learned_token_ms: float | None = None  # milliseconds of a further token
        self._last_width = 0  # tokens that the last round that read prompts had time for

    def proposal_ms(self, load: RoundLoad, unread_tokens: int) -> float:
        """Return how many milliseconds proposals may add to the next round; ``unread`` tokens of prompts come first."""
        if self._fixed_tokens or load.rows < 2:
            return math.inf
        return max(0.0, self._remaining_ms(load) - unread_tokens * self._token_ms) if self._costs.is_known else 0.0

    def prompt_tokens(self, load: RoundLoad, drafting_ms: float = 0.0) -> int:
        """Return how many tokens of prompts the next round reads, if proposing took ``drafted`` milliseconds."""
        if self._fixed_tokens or not load.generating_rows:
            return self._fixed_tokens or MAX_PROMPT_TOKENS
        least = max(MIN_PROMPT_TOKENS - load.extra_tokens, MIN_JOINING_TOKENS)
        if not self._costs.is_known:
            return least
        most = load.width + min(
            max(least, int((self._remaining_ms(load) - drafting_ms) / self._token_ms)), MAX_PROMPT_TOKENS
        )
        if not most - WIDTH_SLACK < self._last_width <= most:
            self._last_width = most
        return self._rule.fit_into_inferences(load.width, max(least, self._last_width - load.width))

    def learn(self, load: RoundLoad, prompt_tokens: int, elapsed_ms: float) -> None:
        """Learn from an inference that took ``ms`` and also read ``read`` tokens of prompts."""
        if not load.generating_rows:
            return
        if prompt_tokens + load.extra_tokens >= MIN_PROMPT_TOKENS and self._costs.is_known:
            known = self._plain_round_ms(load.generating_rows) + load.proposed_tokens * self._token_ms
            found = max((elapsed_ms - known) / (prompt_tokens + load.extra_tokens), 1e-3)
            self._learned_token_ms = (
                found
                if self._learned_token_ms is None
                else self._learned_token_ms + NEWEST_WEIGHT * (found - self._learned_token_ms)
            )
        elif load.width == load.generating_rows and not prompt_tokens:
            known = self._round_ms.setdefault(load.generating_rows, elapsed_ms)
            # An inference may take longer for many reasons, but hardly ever less time than it needs.
            self._round_ms[load.generating_rows] += (0.5 if elapsed_ms < known else NEWEST_WEIGHT) * (
                elapsed_ms - known
            )
            if self._teaches_costs:
                self._costs.learn_inference(load.generating_rows, elapsed_ms)

    @property
    def _token_ms(self) -> float:
        return self._learned_token_ms or self._costs(MAX_PROMPT_TOKENS) / MAX_PROMPT_TOKENS

    def _remaining_ms(self, load: RoundLoad) -> float:
        busy = self._plain_round_ms(load.generating_rows) + (load.extra_tokens + load.proposed_tokens) * self._token_ms
        return MAX_SLOWDOWN * self._plain_round_ms(load.rows) - busy

    def _plain_round_ms(self, rows: int) -> float:
        """Return the milliseconds of a round in which ``rows`` generate a token each."""
        if not rows:
            return 0.0
        expected = self._costs(rows)
        if not self._round_ms:
            return expected
        like = min(self._round_ms, key=lambda seen: abs(seen - rows))
        return max(self._round_ms[like] + expected - self._costs(like), 1e-3)
