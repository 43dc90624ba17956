"""A drafter's acceptance rates and time savings, learned during generation."""

from __future__ import annotations

import bisect
import math

import numpy as np

from ovspec.drafting.proposal import Proposal

# Edges of the bins of confidence. High confidence is common, so the upper bins are narrow.
CONFIDENCE_EDGES = np.array([0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995])
PRIOR_ACCEPTANCE = (np.array([0.0, *CONFIDENCE_EDGES]) + np.array([*CONFIDENCE_EDGES, 1.0])) / 2
PRIOR_WEIGHT = 2.0
FIRST_ACCEPTANCE = 0.75  # conditional acceptance assumed of a new drafter
OBSERVATION_RETENTION = 0.95  # factor by which each new observation discounts the older ones
# A drafter may lose the time of this many plain rounds, plus its recent savings. Further trials get this share of all
# rounds.
BASE_ALLOWED_LOSS_ROUNDS = 1.2
TRIAL_ROUND_SHARE = 0.003
# Length of memory for savings, in tokens. Lookup depends on repetitions, and so on the kind of text, with sudden
# changes; a draft model is about equally good at all kinds.
RECENT_TOKENS = {"lookup": 24}
RECENT_TOKENS_OF_MODELS = 400
MAX_SAVED_ROUNDS = 16  # limit of savings in plain rounds, and so of a suddenly useless drafter's losses


class AcceptanceRates:
    """Conditional acceptance of a drafter's tokens, by confidence and overall."""

    def __init__(self) -> None:
        self._accepted_by_bin = PRIOR_WEIGHT * PRIOR_ACCEPTANCE
        self._reached_by_bin = np.full(len(PRIOR_ACCEPTANCE), PRIOR_WEIGHT)
        self._accepted_sum = FIRST_ACCEPTANCE * PRIOR_WEIGHT
        self._reached_sum = PRIOR_WEIGHT

    @property
    def mean_rate(self) -> float:
        return self._accepted_sum / self._reached_sum

    def estimate_token_rates(self, proposal: Proposal) -> np.ndarray:
        """Return the conditional acceptance of each token, (n,)."""
        if proposal.confidence is None:
            return np.full(len(proposal.tokens), self.mean_rate)
        bin_indices = np.searchsorted(CONFIDENCE_EDGES, proposal.confidence, side="right")
        return self._accepted_by_bin[bin_indices] / self._reached_by_bin[bin_indices]

    def estimate_rate(self, confidence: float) -> float:
        """Return the conditional acceptance of a token."""
        bin_index = bisect.bisect_right(CONFIDENCE_EDGES, confidence)
        return float(self._accepted_by_bin[bin_index] / self._reached_by_bin[bin_index])

    def learn_proposal(self, proposal: Proposal, accepted: int) -> None:
        """Learn from a verified proposal; its first ``accepted`` tokens were accepted."""
        for token_index in range(min(accepted + 1, len(proposal.tokens))):
            is_accepted = token_index < accepted
            self._accepted_sum = self._accepted_sum * OBSERVATION_RETENTION + is_accepted
            self._reached_sum = self._reached_sum * OBSERVATION_RETENTION + 1
            if proposal.confidence is not None:
                bin_index = self._fade_confidence_bin(proposal.confidence[token_index])
                self._accepted_by_bin[bin_index] += is_accepted
                self._reached_by_bin[bin_index] += 1

    def fade_rates(self, proposal: Proposal) -> None:
        """Discount the known rates a little, because they have prevented a trial of ``proposal``."""
        prior_weight = (1 - OBSERVATION_RETENTION) * PRIOR_WEIGHT
        self._accepted_sum = self._accepted_sum * OBSERVATION_RETENTION + prior_weight * FIRST_ACCEPTANCE
        self._reached_sum = self._reached_sum * OBSERVATION_RETENTION + prior_weight
        if proposal.confidence is not None:
            self._fade_confidence_bin(proposal.confidence[0])

    def _fade_confidence_bin(self, confidence: float) -> int:
        """Move a confidence bin towards its prior, its value without observations; return its index."""
        bin_index = bisect.bisect_right(CONFIDENCE_EDGES, confidence)
        prior_weight = (1 - OBSERVATION_RETENTION) * PRIOR_WEIGHT
        self._accepted_by_bin[bin_index] = (
            self._accepted_by_bin[bin_index] * OBSERVATION_RETENTION + prior_weight * PRIOR_ACCEPTANCE[bin_index]
        )
        self._reached_by_bin[bin_index] = self._reached_by_bin[bin_index] * OBSERVATION_RETENTION + prior_weight
        return bin_index


class SavingsBalance:
    """The recent savings of drafting in plain rounds, less the losses, with a limit for losses.

    ``recent_tokens``: length of memory for savings, in tokens.
    """

    def __init__(self, recent_tokens: float) -> None:
        self._recent_tokens = recent_tokens
        self._saved_rounds = 0.0
        self._tokens_since_round = 0.0  # generated tokens since the last round with a proposal

    @property
    def allowed_loss_rounds(self) -> float:
        return BASE_ALLOWED_LOSS_ROUNDS + self._saved_rounds + self.allowed_trial_rounds

    @property
    def allowed_trial_rounds(self) -> float:
        """The maximum cost of a trial now, in plain rounds, whatever its expected gain."""
        return TRIAL_ROUND_SHARE * self._tokens_since_round

    def add_generated_tokens(self, tokens: float) -> None:
        """Note ``tokens`` generated tokens per row, with or without drafting."""
        self._tokens_since_round += tokens
        if self._saved_rounds > 0:
            self._saved_rounds *= math.exp(-tokens / self._recent_tokens)

    def add_round_savings(self, saved_rounds: float) -> None:
        """Note a round's savings in plain rounds; negative if it lost time."""
        if self._saved_rounds < 0:
            self._saved_rounds = min(0.0, self._saved_rounds + self.allowed_trial_rounds)
        self._saved_rounds = min(self._saved_rounds + saved_rounds, MAX_SAVED_ROUNDS)
        self._tokens_since_round = 0.0


class DrafterStats:
    """A drafter's acceptance, and the savings of its recent rounds."""

    def __init__(self, drafter_name: str = "") -> None:
        self.acceptance = AcceptanceRates()
        self.balance = SavingsBalance(RECENT_TOKENS.get(drafter_name, RECENT_TOKENS_OF_MODELS))
        # Sums over its recent rounds.
        self.recent_tokens = 0.0
        self.recent_ms = 0.0
        self.recent_rounds = 0.0

    def learn_savings(self, tokens: int, ms: float) -> None:
        """Learn from a round of ``ms`` milliseconds with ``tokens`` generated tokens."""
        self.recent_tokens = self.recent_tokens * OBSERVATION_RETENTION + tokens
        self.recent_ms = self.recent_ms * OBSERVATION_RETENTION + ms
        self.recent_rounds = self.recent_rounds * OBSERVATION_RETENTION + 1
