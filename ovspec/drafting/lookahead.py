"""The lookahead: the number of tokens to propose, by a token's cost and its chance of acceptance.

Times are milliseconds of wall clock. A round of k proposed tokens costs k draft steps and a forward pass over k + 1
tokens. It yields 1 + a1 + a1 a2 + ... tokens on average, with ai the conditional acceptance of the i-th token. The rule
comes from renewal processes: propose another token while its chance of acceptance, times the current cost of a token,
exceeds its own cost. As acceptance is never certain, a drafter's losses are limited, too: see ``SavingsBalance``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ovspec.drafting.costs import WIDEST_INFERENCE, InferenceCosts
from ovspec.drafting.drafter_stats import FIRST_ACCEPTANCE, DrafterStats
from ovspec.drafting.proposal import NO_PROPOSAL, Proposal, shorten_proposal
from ovspec.sampling.samplers import DraftedToken

MAX_PROPOSED = 16  # maximum tokens proposed for a row in a round, unless the lookahead is fixed
# Prompt tokens per draft step while other rows draft; the reading rows get no proposal.
CATCH_UP_TOKENS = 64
POOR_ACCEPTANCE = 0.3  # with a fixed lookahead, lookup with a lower acceptance is skipped
MAX_FURTHER_STEPS = 4  # draft steps weighed together, because the first step alone may not be worth its time
# A draft proposes in most rounds, so a new width lasts for some rounds, and a round has to earn this share of the cost
# of the change. Lookup proposes occasionally, so its round has to earn all of it.
WIDTH_CHANGE_SHARE_OF_ROUND = 0.5
MIN_OBSERVATIONS = 4  # minimum number of rounds or tokens for a usable mean


@dataclass(frozen=True)
class RoundOutcome:
    """The proposals of a round, the number of tokens accepted, and the cost."""

    proposals: list[tuple[Proposal, int]]  # each row's proposal, and the number of its accepted tokens
    width: int  # computed tokens of the forward pass, over all rows, including padding
    forced_tokens: int  # number of forced tokens among them
    prefilled: bool  # whether other tokens, such as a prompt, were also fed: the times then don't measure proposals
    draft_seconds: float
    verify_seconds: float


class Lookahead:
    """Decides how many tokens a round proposes: before, during and after drafting.

    Args:
        fixed_length: number of tokens to propose in every round; None for as many as pay off.
        target_costs: the cost of verification.
        draft_costs: the cost of a step of the draft model.
    """

    def __init__(
        self,
        fixed_length: int | None = None,
        target_costs: InferenceCosts | None = None,
        draft_costs: InferenceCosts | None = None,
    ) -> None:
        self.fixed_length = fixed_length
        self.max_proposed = MAX_PROPOSED if fixed_length is None else fixed_length
        self.target_costs = target_costs or InferenceCosts()
        self.draft_costs = draft_costs or InferenceCosts()
        self.begin_round()
        self._drafter_stats: dict[str, DrafterStats] = {}
        self._overall_stats = DrafterStats()  # savings of all rounds and drafters, without acceptance
        self._draft_steps_ms: float | None = None  # usual time of the draft's steps in this round
        self._asked_drafters: set[str] = set()  # asked in this round, which takes time even without a proposal

    def begin_round(self, max_added_ms: float = math.inf, limits_waiting: bool = False) -> None:
        """Begin a round, with at most ``max_added_ms`` milliseconds for proposals.

        ``limits_waiting``: rows must not wait long while other rows read.
        """
        self.max_added_ms = max_added_ms
        self.limits_waiting = limits_waiting
        # Tokens and rows of this round after ``cut_proposal``.
        self._decided_tokens = 0
        self._decided_rows = 0

    # ------------------------------------------------------------ questions of drafters

    def can_afford_drafting(self, drafter_name: str, row_count: int, reading_ms: float = 0.0) -> bool:
        """Return whether drafting for ``row_count`` rows, after ``reading_ms`` of reading, is an allowed loss."""
        if self.fixed_length is not None:
            return True
        if not self.target_costs.is_known:  # this round will measure plain decoding
            return False
        width = 2 * row_count
        if width > WIDEST_INFERENCE:
            return False
        costs = self.target_costs.next_inference_costs()
        widening_ms = float(costs[width] - costs[row_count])
        return self._draft_step_ms(row_count) + reading_ms + widening_ms <= self._allowed_loss_ms(
            drafter_name, row_count
        )

    def should_draft(
        self, drafter_name: str, unread_count: int, remaining_counts: Sequence[int], reads_prompt: bool = False
    ) -> bool:
        """Return whether to ask a drafter with ``unread_count`` unread tokens.

        ``remaining_counts``: tokens left to generate, by row.
        ``reads_prompt``: whether a prompt, or a text as long, is unread; it is read once, so its time doesn't count.
        """
        if self.fixed_length is not None:
            return True
        stats = self._get_drafter_stats(drafter_name)
        row_count = sum(count > 0 for count in remaining_counts)
        reading_ms = self._draft_step_ms(unread_count) - self._draft_step_ms(row_count)
        if not self.can_afford_drafting(drafter_name, row_count, 0.0 if reads_prompt else reading_ms):
            return False
        # Assume at least the initial acceptance, to give a drafter another chance after a while.
        gain_ms = self._expected_gain(max(stats.acceptance.mean_rate, FIRST_ACCEPTANCE), row_count)
        # Costs measured beside other work may be wrong; a trial, paid from savings, corrects them.
        trial_ms = stats.balance.allowed_trial_rounds * row_count * self._plain_token_ms(row_count)
        is_trial_due = self._draft_step_ms(row_count) <= trial_ms
        if (
            gain_ms * max(remaining_counts) <= reading_ms and not is_trial_due
        ):  # reading costs more than the possible gain
            return False
        self._asked_drafters.add(drafter_name)
        return True

    def choose_rows_to_extend(
        self, drafter_name: str, rows: list[int], drafted_tokens: list[list[DraftedToken]]
    ) -> list[int]:
        """Return the ``rows`` worth another step of the draft model, after the tokens drafted so far."""
        if self.fixed_length is not None or not rows:
            return rows
        if not self.draft_costs.is_known:
            return []
        acceptance = self._get_drafter_stats(drafter_name).acceptance
        width = (
            len(drafted_tokens) + sum(map(len, drafted_tokens)) + self._decided_tokens
        )  # width of the target's forward pass so far
        max_steps = min(WIDEST_INFERENCE - width, MAX_FURTHER_STEPS)
        if max_steps < 1:
            return []
        # For 1, 2, ... further steps: the tokens gained on average if all so far are accepted, and the cost.
        steps = np.arange(1, max_steps + 1)
        gained_tokens = np.cumsum(acceptance.mean_rate**steps)
        step_ms = self._draft_step_ms(len(rows)) / len(rows)
        steps_ms = step_ms * steps
        wider_widths = slice(width + 1, width + max_steps + 1)
        amortized_costs = self.target_costs.next_inference_costs(WIDTH_CHANGE_SHARE_OF_ROUND)
        cost_ms = steps_ms + amortized_costs[wider_widths] - amortized_costs[width]
        costs = self.target_costs.next_inference_costs()
        lost_ms = (
            (self._draft_steps_ms or 0.0) + steps_ms * len(rows) + costs[wider_widths] - costs[len(drafted_tokens)]
        )
        cost_ms[lost_ms > self._allowed_loss_ms(drafter_name, len(drafted_tokens))] = math.inf
        token_ms = self._current_token_ms(len(drafted_tokens))
        extended_rows = []
        for row in rows:
            all_accepted_rate = math.prod(acceptance.estimate_rate(token.confidence) for token in drafted_tokens[row])
            if bool((all_accepted_rate * token_ms * gained_tokens > cost_ms).any()):
                extended_rows.append(row)
        return extended_rows

    def cut_proposal(self, proposal: Proposal, row_count: int) -> Proposal:
        """Return the part of a free ``proposal`` worth verifying; called once per row."""
        self._decided_rows += 1
        if not len(proposal.tokens):
            return NO_PROPOSAL
        if self.fixed_length is not None:
            return shorten_proposal(proposal, self.fixed_length)
        length, _ = self._find_best_length(proposal, row_count, self._decided_tokens)
        self._decided_tokens += length
        if not length:
            self._get_drafter_stats(proposal.source).acceptance.fade_rates(proposal)
            return NO_PROPOSAL
        return shorten_proposal(proposal, length)

    def prefers_drafter(self, drafter_name: str, proposal: Proposal, row_count: int) -> bool:
        """Return whether drafter ``drafter_name`` is likely to save more than the free ``proposal``."""
        acceptance = self._get_drafter_stats(proposal.source).acceptance
        if self.fixed_length is not None:
            is_poor = acceptance.mean_rate < min(
                POOR_ACCEPTANCE, self._get_drafter_stats(drafter_name).acceptance.mean_rate
            )
            if is_poor:
                acceptance.fade_rates(proposal)
            return is_poor
        if not self.can_afford_drafting(drafter_name, row_count):
            return False
        other_tokens = self._decided_tokens - len(proposal.tokens)
        drafter_token_ms = self._plain_token_ms(row_count) - self.estimate_saved_token_ms(drafter_name, row_count)
        is_better = drafter_token_ms < self._find_best_length(proposal, row_count, other_tokens)[1]
        if is_better:
            self._decided_tokens = other_tokens
        return is_better

    def estimate_saved_token_ms(self, drafter_name: str, row_count: int) -> float:
        """Return the milliseconds per token saved by drafting with ``drafter_name``; negative for a loss."""
        stats = self._get_drafter_stats(drafter_name)
        if stats.recent_rounds > MIN_OBSERVATIONS:
            return self._plain_token_ms(row_count) - stats.recent_ms / stats.recent_tokens
        return self._expected_gain(stats.acceptance.mean_rate, row_count)

    def max_prompt_tokens(self) -> int:
        """Return the maximum number of prompt tokens for a step of the draft while other rows draft."""
        if math.isinf(self.max_added_ms) or not self.draft_costs.is_known:
            return CATCH_UP_TOKENS
        token_ms = (self.draft_costs(CATCH_UP_TOKENS) - self.draft_costs(1)) / (CATCH_UP_TOKENS - 1)
        return min(max(CATCH_UP_TOKENS // 4, int(self.max_added_ms / 2 / max(token_ms, 1e-3))), CATCH_UP_TOKENS)

    # ------------------------------------------------------------ learning from rounds

    def learn_draft_step(self, width: int, seconds: float, reads_prompt: bool = False) -> None:
        """Learn from a step of the draft, combined with a prefill if ``reads_prompt``, see ``should_draft``."""
        usual_ms = self.draft_costs.learn_inference(width, seconds * 1e3)
        steps_ms = self._draft_steps_ms or 0.0
        if reads_prompt:
            self.max_added_ms -= usual_ms
        else:
            steps_ms += usual_ms
        self._draft_steps_ms = steps_ms

    def learn_round(self, outcome: RoundOutcome) -> None:
        """Learn the costs, the acceptance and the savings from a round."""
        drafter_names, self._asked_drafters = self._asked_drafters, set()
        steps_ms, self._draft_steps_ms = self._draft_steps_ms, None
        for proposal, accepted in outcome.proposals:
            if len(proposal.tokens):
                drafter_names.add(proposal.source)
                self._get_drafter_stats(proposal.source).acceptance.learn_proposal(proposal, accepted)
        row_count = len(outcome.proposals)
        width = outcome.width
        forced_count = outcome.forced_tokens
        if outcome.prefilled or width > WIDEST_INFERENCE:
            self.target_costs.note_untimed_inference(width, outcome.prefilled)
            return
        was_known = self.target_costs.is_known
        plain_token_ms = self._plain_token_ms(row_count)
        verify_ms = self.target_costs.learn_inference(width, outcome.verify_seconds * 1e3, self.draft_costs.is_known)
        if self.fixed_length is not None or not was_known:
            return
        draft_ms = outcome.draft_seconds * 1e3 if steps_ms is None else steps_ms
        token_count = sum(accepted for _, accepted in outcome.proposals) + row_count
        self._overall_stats.learn_savings(token_count + forced_count, verify_ms + draft_ms)
        # Forced tokens count neither as a drafter's gain nor as its cost.
        drafting_ms = verify_ms + draft_ms
        if forced_count:
            drafting_ms -= self.target_costs(width) - self.target_costs(width - forced_count)
        for stats in (self._overall_stats, *self._drafter_stats.values()):
            stats.balance.add_generated_tokens((token_count + forced_count) / row_count)
        saved_rounds = (token_count - drafting_ms / plain_token_ms) / row_count
        if drafter_names:
            self._overall_stats.balance.add_round_savings(saved_rounds)
        for stats in [self._get_drafter_stats(drafter_name) for drafter_name in drafter_names]:
            stats.learn_savings(token_count, drafting_ms)
            stats.balance.add_round_savings(saved_rounds)

    # ------------------------------------------------------------ internals

    def _get_drafter_stats(self, drafter_name: str) -> DrafterStats:
        if drafter_name not in self._drafter_stats:
            self._drafter_stats[drafter_name] = DrafterStats(drafter_name)
        return self._drafter_stats[drafter_name]

    def _plain_token_ms(self, row_count: int) -> float:
        """Return plain decoding's milliseconds per token."""
        return self.target_costs(row_count) / row_count

    def _draft_step_ms(self, width: int) -> float:
        """Return the milliseconds of a step of the draft, 0.0 if they aren't known."""
        return self.draft_costs(width) if self.draft_costs.is_known else 0.0

    def _allowed_loss_ms(self, drafter_name: str, row_count: int) -> float:
        """Return the allowed loss of a round with a proposal of ``drafter_name``, in milliseconds."""
        allowed_loss_rounds = min(
            self._get_drafter_stats(drafter_name).balance.allowed_loss_rounds,
            self._overall_stats.balance.allowed_loss_rounds,
        )
        return min(allowed_loss_rounds * row_count * self._plain_token_ms(row_count), self.max_added_ms)

    def _expected_gain(self, acceptance: float, row_count: int) -> float:
        """Return the gain at the conditional acceptance ``acceptance`` with the best number of drafted tokens."""
        step_ms = self._draft_step_ms(row_count)
        least_token_ms = math.inf  # stays infinite if the rows alone exceed WIDEST_INFERENCE
        expected_tokens = float(row_count)
        all_accepted_rate = 1.0
        for steps in range(1, min(MAX_PROPOSED, WIDEST_INFERENCE // row_count - 1) + 1):
            all_accepted_rate *= acceptance
            expected_tokens += row_count * all_accepted_rate
            round_ms = self.target_costs(row_count * (steps + 1)) + steps * step_ms
            least_token_ms = min(least_token_ms, round_ms / expected_tokens)
        return self._plain_token_ms(row_count) - least_token_ms

    def _current_token_ms(self, row_count: int) -> float:
        """Return the current cost of a token in milliseconds: the saving by an accepted token."""
        plain_token_ms = self._plain_token_ms(row_count)
        overall_stats = self._overall_stats
        if overall_stats.recent_tokens <= MIN_OBSERVATIONS:
            return plain_token_ms
        return min(plain_token_ms, overall_stats.recent_ms / overall_stats.recent_tokens)

    def _find_best_length(self, proposal: Proposal, row_count: int, other_tokens: int) -> tuple[int, float]:
        """Return the best number of tokens to verify beside ``other_tokens`` of other rows, and its ms per token."""
        if not self.target_costs.is_known:
            return len(proposal.tokens), 0.0
        plain_token_ms = self._plain_token_ms(row_count)
        width = row_count + other_tokens  # width of the forward pass without this proposal
        acceptance_rates = self._get_drafter_stats(proposal.source).acceptance.estimate_token_rates(proposal)[
            : max(0, WIDEST_INFERENCE - width)
        ]
        if not len(acceptance_rates):
            return 0, plain_token_ms
        # For 1, 2, ... tokens: the tokens gained on average, and their cost.
        gained_tokens = np.cumprod(acceptance_rates).cumsum()
        costs = self.target_costs.next_inference_costs()
        wider_costs = costs[width + 1 : width + 1 + len(acceptance_rates)]
        added_ms = wider_costs - costs[width]
        saved_ms = gained_tokens * self._current_token_ms(row_count) - added_ms
        # Each undecided row gets its share of the rest of this round's allowed loss.
        plain_round_ms = costs[row_count]
        spent_ms = float(costs[width] - plain_round_ms)
        undecided_rows = max(1, row_count - self._decided_rows + 1)
        row_share_ms = (self._allowed_loss_ms(proposal.source, row_count) - spent_ms) / undecided_rows
        max_spent_ms = max(spent_ms, spent_ms + row_share_ms, 0.0)  # free tokens are always allowed
        saved_ms[wider_costs - plain_round_ms > max_spent_ms] = -math.inf
        best_index = int(saved_ms.argmax())
        if saved_ms[best_index] <= 0:
            return 0, plain_token_ms
        return best_index + 1, float((plain_token_ms + added_ms[best_index]) / (1 + gained_tokens[best_index]))
