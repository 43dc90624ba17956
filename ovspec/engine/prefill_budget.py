"""The number of prompt tokens in a round while other rows generate: limited by time, or fixed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ovspec.cache.decoder import FeedRule
from ovspec.drafting.costs import InferenceCosts

# Maximum time of a round, relative to a plain round of all rows. The aim is 2; the margin is for forward passes slower
# than expected.
MAX_SLOWDOWN = 1.8
MIN_PROMPT_TOKENS = 8  # per round
MAX_PROMPT_TOKENS = 256  # per round; also bounds the delay before a row can join
MIN_JOINING_TOKENS = 2  # prompt tokens per round while generating rows catch up
WIDTH_SLACK_TOKENS = 4  # a round keeps the last width if it is below the maximum by less: a change of width takes time
NEWEST_MEASUREMENT_WEIGHT = 0.1  # in a running average


@dataclass(frozen=True)
class RoundLoad:
    """A round's numbers of rows, and of tokens other than prompt tokens."""

    generating_rows: int  # rows about to get a token
    prefilling_rows: int = 0  # rows reading a prompt
    catch_up_tokens: int = 0  # unread tokens of generating rows, less one per row
    proposed_tokens: int = 0

    @property
    def row_count(self) -> int:
        return self.generating_rows + self.prefilling_rows

    @property
    def non_prompt_tokens(self) -> int:
        return self.generating_rows + self.catch_up_tokens + self.proposed_tokens


class PrefillBudget:
    """Learns the costs of rows and tokens, and divides a round's time between prompts and proposals.

    A row costs more than a prompt token or proposed token, because attention reads its whole context.

    Args:
        costs: the known costs of forward passes.
        feed_rule: the target's rule.
        teaches_costs: whether ``costs`` learns from the rounds here, for lack of a lookahead to teach it.
        fixed_tokens: fixed number of prompt tokens per round; None for a number limited by time.
    """

    def __init__(
        self, costs: InferenceCosts, feed_rule: FeedRule, teaches_costs: bool, fixed_tokens: int | None = None
    ) -> None:
        self._inference_costs = costs
        self._feed_rule = feed_rule
        self._teaches_costs = teaches_costs
        self._fixed_tokens = fixed_tokens
        self._plain_round_ms_by_rows: dict[int, float] = {}  # milliseconds of a plain round by number of rows
        self._learned_token_ms: float | None = None  # milliseconds per additional token
        self._last_round_tokens = 0  # width chosen for the last round with prompts

    def max_proposal_ms(self, load: RoundLoad, unread_tokens: int) -> float:
        """Return the time in milliseconds left for proposals in the next round, with ``unread_tokens`` of prompts."""
        if self._fixed_tokens or load.row_count < 2:
            return math.inf
        if not self._inference_costs.is_known:
            return 0.0
        return max(0.0, self._remaining_ms(load) - unread_tokens * self._token_ms)

    def choose_prompt_token_count(self, load: RoundLoad, drafting_ms: float = 0.0) -> int:
        """Return the number of prompt tokens for the next round, after ``drafting_ms`` spent on proposals."""
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
        """Learn from a forward pass of ``elapsed_ms`` with ``prompt_tokens`` tokens of prompts."""
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
            # Many things delay a forward pass, but nothing speeds it up: so a shorter time is the better measurement.
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
        """Return the time in milliseconds of a round without proposals or prompts, for ``row_count`` rows."""
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
