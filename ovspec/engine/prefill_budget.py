"""The number of prompt tokens that a round reads while other rows generate: as time allows, or a fixed number."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ovspec.cache.decoder import FeedRule
from ovspec.drafting.costs import InferenceCosts

# A round may take this many times as long as a plain round of all rows. The aim is 2; the rest is for inferences that
# take longer than expected.
MAX_SLOWDOWN = 1.8
MIN_PROMPT_TOKENS = 8  # in a round
MAX_PROMPT_TOKENS = 256  # in a round; bounds also how long a row waits before it joins
MIN_JOINING_TOKENS = 2  # prompt tokens in a round in which generating rows read extra tokens
WIDTH_SLACK_TOKENS = 4  # tokens by which a round may stay narrower than it could be: a change of width takes time, too
NEWEST_MEASUREMENT_WEIGHT = 0.1  # of the newest measurement in an average


@dataclass(frozen=True)
class RoundLoad:
    """A round's numbers of rows, and of tokens that aren't read from prompts."""

    generating_rows: int  # rows that get a token
    prefilling_rows: int = 0  # rows that read a prompt
    catch_up_tokens: int = 0  # unread tokens of generating rows, except one for each row
    proposed_tokens: int = 0

    @property
    def row_count(self) -> int:
        return self.generating_rows + self.prefilling_rows

    @property
    def non_prompt_tokens(self) -> int:
        return self.generating_rows + self.catch_up_tokens + self.proposed_tokens


class PrefillBudget:
    """Learns the costs of rows and tokens, and decides how much of a round's time is for prompts and for proposals.

    A row costs more than a token of a prompt or a proposal, because it has a context of its own.

    Args:
        teaches_costs: whether ``costs`` learns here, because no lookahead teaches it.
        fixed_tokens: number of prompt tokens that every round reads; None for as many as it has time for.
    """

    def __init__(
        self, costs: InferenceCosts, feed_rule: FeedRule, teaches_costs: bool, fixed_tokens: int | None = None
    ) -> None:
        self._inference_costs = costs
        self._feed_rule = feed_rule
        self._teaches_costs = teaches_costs
        self._fixed_tokens = fixed_tokens
        self._plain_round_ms_by_rows: dict[int, float] = {}  # milliseconds of a plain round by its number of rows
        self._learned_token_ms: float | None = None  # milliseconds of a further token
        self._last_round_tokens = 0  # tokens that the last round with prompts had time for

    def max_proposal_ms(self, load: RoundLoad, unread_tokens: int) -> float:
        """Return how many milliseconds proposals may add to the next round, after ``unread_tokens`` of prompts."""
        if self._fixed_tokens or load.row_count < 2:
            return math.inf
        if not self._inference_costs.is_known:
            return 0.0
        return max(0.0, self._remaining_ms(load) - unread_tokens * self._token_ms)

    def choose_prompt_token_count(self, load: RoundLoad, drafting_ms: float = 0.0) -> int:
        """Return how many tokens of prompts the next round reads, if proposing took ``drafting_ms``."""
        if self._fixed_tokens or not load.generating_rows:
            return self._fixed_tokens or MAX_PROMPT_TOKENS
        min_tokens = max(MIN_PROMPT_TOKENS - load.catch_up_tokens, MIN_JOINING_TOKENS)
        if not self._inference_costs.is_known:
            return min_tokens
        affordable_tokens = int((self._remaining_ms(load) - drafting_ms) / self._token_ms)
        max_tokens = load.non_prompt_tokens + min(max(min_tokens, affordable_tokens), MAX_PROMPT_TOKENS)
        if not max_tokens - WIDTH_SLACK_TOKENS < self._last_round_tokens <= max_tokens:
            self._last_round_tokens = max_tokens
        prompt_tokens = max(min_tokens, self._last_round_tokens - load.non_prompt_tokens)
        return self._feed_rule.choose_token_count_to_add(load.non_prompt_tokens, prompt_tokens)

    def learn_costs(self, load: RoundLoad, prompt_tokens: int, elapsed_ms: float) -> None:
        """Learn from an inference that took ``elapsed_ms`` and also read ``prompt_tokens`` tokens of prompts."""
        if not load.generating_rows:
            return
        if prompt_tokens + load.catch_up_tokens >= MIN_PROMPT_TOKENS and self._inference_costs.is_known:
            other_work_ms = self._plain_round_ms(load.generating_rows) + load.proposed_tokens * self._token_ms
            token_ms = max((elapsed_ms - other_work_ms) / (prompt_tokens + load.catch_up_tokens), 1e-3)
            if self._learned_token_ms is None:
                self._learned_token_ms = token_ms
            else:
                self._learned_token_ms += NEWEST_MEASUREMENT_WEIGHT * (token_ms - self._learned_token_ms)
        elif load.non_prompt_tokens == load.generating_rows and not prompt_tokens:
            average_ms = self._plain_round_ms_by_rows.setdefault(load.generating_rows, elapsed_ms)
            # An inference may take longer for many reasons, but hardly ever less time than it needs.
            measurement_weight = 0.5 if elapsed_ms < average_ms else NEWEST_MEASUREMENT_WEIGHT
            self._plain_round_ms_by_rows[load.generating_rows] += measurement_weight * (elapsed_ms - average_ms)
            if self._teaches_costs:
                self._inference_costs.learn_inference(load.generating_rows, elapsed_ms)

    @property
    def _token_ms(self) -> float:
        return self._learned_token_ms or self._inference_costs(MAX_PROMPT_TOKENS) / MAX_PROMPT_TOKENS

    def _remaining_ms(self, load: RoundLoad) -> float:
        tokens_beyond_plain_round = load.catch_up_tokens + load.proposed_tokens
        busy_ms = self._plain_round_ms(load.generating_rows) + tokens_beyond_plain_round * self._token_ms
        return MAX_SLOWDOWN * self._plain_round_ms(load.row_count) - busy_ms

    def _plain_round_ms(self, row_count: int) -> float:
        """Return the milliseconds of a round in which ``row_count`` rows generate a token each."""
        if not row_count:
            return 0.0
        expected_ms = self._inference_costs(row_count)
        if not self._plain_round_ms_by_rows:
            return expected_ms
        nearest_row_count = min(
            self._plain_round_ms_by_rows, key=lambda measured_row_count: abs(measured_row_count - row_count)
        )
        return max(
            self._plain_round_ms_by_rows[nearest_row_count] + expected_ms - self._inference_costs(nearest_row_count),
            1e-3,
        )
