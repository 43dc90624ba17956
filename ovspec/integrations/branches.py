"""Logits for a caller with its own choice of tokens, position by position, in several texts at a time.

Each text has its own KV cache. Proposed tokens are verified together with the tokens to read anyway, so if the caller
chooses them, as the target itself would, the next logits are already computed.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ovspec.api.model import LanguageModel
from ovspec.base.errors import OvspecError
from ovspec.cache.prefill import PREFILL_THRESHOLD
from ovspec.cache.sequence import Sequence, measure_common_prefix
from ovspec.drafting.drafter import RowToDraft
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.drafting.proposal import NO_TOKENS, Proposal, shorten_proposal
from ovspec.engine.decoders import DecoderSet
from ovspec.engine.results import FinishReason, Piece, ProposalStats, Stats
from ovspec.engine.round import RowOutcome
from ovspec.engine.scheduler import Scheduler
from ovspec.sampling.samplers import GreedySampler

MAX_BRANCHES = 8
# A branch is reused if at most this many tokens at its end are lost; otherwise the text gets a new branch.
MAX_LOST_TOKENS = 4
# A fork may copy this many cached tokens for each token it needn't read again; a paged cache copies none.
MAX_COPIED_PER_TOKEN = 32
# The caller doesn't announce the number of tokens still to come; this number is assumed.
EXPECTED_TOKENS = 64
# Maximum number of positions to compute logits for at once, when all are requested.
MAX_LOGITS_ROWS = 512


@dataclass(kw_only=True)
class LogitsRequestCounts(ProposalStats):
    """Counts of the requests for logits, and of the work they took."""

    requests: int = 0
    answered: int = 0  # requests without a forward pass
    inferences: int = 0  # forward passes of the target
    read: int = 0  # text tokens read by the target, without proposed tokens
    forks: int = 0  # branches started as a copy of another


class PassiveSampler(GreedySampler):
    """A sampler without choices, because the caller chooses. A draft proposes its most likely tokens."""

    def verify_proposal(self, *_: Any, **__: Any) -> np.ndarray:
        return NO_TOKENS


class Branch:
    """A text with its own decoders, as the only row of its batch.

    sequence: the text as last requested; the target may hold proposed tokens after it.
    known_logits: n -> the logits (vocab,) after the first n of the target's tokens.
    """

    finish_reason: FinishReason | None = None
    max_length = 0
    waits_for_memory = False

    def __init__(self, decoders: DecoderSet, has_drafter: bool, lookahead: Lookahead, sequence: Sequence) -> None:
        self.decoders = decoders
        self.sequence = sequence
        self.known_logits: dict[int, np.ndarray] = {}
        self.stats = Stats()
        self.next_row_to_draft = RowToDraft(sequence, PassiveSampler(), 1)
        self.last_outcome = RowOutcome()
        drafter = decoders.drafter if has_drafter else None
        # The lookahead learns from a round once the text has continued.
        self.scheduler = Scheduler(decoders.target, drafter, lookahead, [self], learn_from_round=lambda _: None)

    @property
    def cached_sequence(self) -> Sequence:
        """The tokens in the target's cache."""
        return self.decoders.target.rows[0]

    def make_row_to_draft(self) -> RowToDraft:
        return self.next_row_to_draft

    def add_outcome(self, outcome: RowOutcome) -> Piece:
        self.last_outcome = outcome
        return Piece("", [])

    def fail(self, error: Exception) -> Piece:
        raise error

    def cancel(self) -> Piece:
        return Piece("", [])


@dataclass
class VerifiedProposal:
    """A proposal verified after ``start`` tokens of ``branch``, in the round of ``outcome``.

    accepted: proposed tokens found in the continued text so far.
    """

    branch: Branch
    proposal: Proposal
    tokens_before: int
    outcome: RoundOutcome
    accepted: int = 0


class BranchPool:
    """Up to ``MAX_BRANCHES`` branches of a model. Thread-safe."""

    def __init__(self, model: LanguageModel) -> None:
        self.counts = LogitsRequestCounts()
        self._runtime = model.runtime
        decoders = self._runtime.decoder_pool.acquire()
        drafter, self._lookahead = decoders.select_drafter_and_lookahead(
            self._runtime.row_maker.make_complete_params({})
        )
        self._has_drafter = drafter is not None
        self._branches: list[Branch] = []  # the least recently used first
        self._add_branch(decoders)
        self._last_proposal: VerifiedProposal | None = None  # until the lookahead learns from it
        self._lock = threading.Lock()

    def request_logits(self, tokens: list[int], all_new_positions: bool = False) -> tuple[np.ndarray, int]:
        """Return (logits (positions, vocab) float32, how many of ``tokens`` needn't be read for them).

        The last position is after ``tokens``; without ``all_new_positions`` it is the only position. With it, there is
        also a position after each token new since the last request for this text, and a position before the first of
        these, as far back as they are known.

        Raises:
            OvspecError: ``tokens`` is empty, has an unknown id, or exceeds the context or the free memory.
        """
        if not tokens:
            raise OvspecError("The text is empty, but the model has no BOS token to start with; add text.")
        self._runtime.models.check_context_length(len(tokens))
        sequence = Sequence(tokens)
        text_length = len(sequence)
        with self._lock:
            branch = self._choose_branch(sequence)
            first_new = measure_common_prefix(branch.sequence, sequence)
            if self._last_proposal and self._last_proposal.branch is branch:
                self._count_accepted(self._last_proposal, sequence)
            cached_tokens = text_length
            if (
                measure_common_prefix(branch.cached_sequence, sequence) < text_length
                or text_length not in branch.known_logits
            ):
                cached_tokens = self._compute_branch_logits(branch, sequence, first_new, all_new_positions)
            self.counts.requests += 1
            self.counts.answered += cached_tokens == text_length
            branch.sequence = sequence
            first_row = text_length
            while all_new_positions and first_row > first_new and first_row - 1 in branch.known_logits:
                first_row -= 1
            return np.stack(
                [branch.known_logits[position] for position in range(first_row, text_length + 1)]
            ), cached_tokens

    # ------------------------------------------------------------ branches

    def _choose_branch(self, sequence: Sequence) -> Branch:
        """Return the branch with the longest common prefix with ``sequence``, unless it would lose too many tokens."""

        def rate_branch(branch: Branch) -> tuple[int, int]:
            return measure_common_prefix(branch.cached_sequence, sequence), -len(branch.sequence)

        best_branch = max(reversed(self._branches), key=rate_branch)
        shared_length = measure_common_prefix(best_branch.cached_sequence, sequence)
        self._branches.remove(best_branch)
        self._branches.append(best_branch)
        if len(best_branch.sequence) - measure_common_prefix(best_branch.sequence, sequence) <= MAX_LOST_TOKENS:
            return best_branch
        if len(self._branches) == MAX_BRANCHES:
            self._drop_branch(self._branches[0])
        if shared_length * MAX_COPIED_PER_TOKEN < len(best_branch.cached_sequence) or not shared_length:
            return self._add_branch(self._runtime.decoder_pool.acquire())
        branch = self._add_branch(self._runtime.models.fork_decoders(best_branch.decoders), best_branch.sequence.copy())
        branch.known_logits = {
            known_length: logits
            for known_length, logits in best_branch.known_logits.items()
            if known_length <= shared_length
        }
        self.counts.forks += 1
        return branch

    def _add_branch(self, decoders: DecoderSet, sequence: Sequence | None = None) -> Branch:
        """Add a branch with the text in ``decoders``, or with an empty text."""
        if sequence is None:
            decoders.reset(1)
        branch = Branch(decoders, self._has_drafter, self._lookahead, sequence or Sequence())
        self._branches.append(branch)
        return branch

    def _free_memory(self, tokens: int) -> None:
        """Drop the least recently used branches until ``tokens`` more tokens fit into memory."""
        while True:
            try:
                return self._runtime.models.ensure_memory(tokens, self._has_drafter)
            except OvspecError:
                if len(self._branches) == 1:
                    raise
                self._drop_branch(self._branches[0])

    def _drop_branch(self, branch: Branch) -> None:
        self._branches.remove(branch)
        branch.decoders.reset(0)  # frees its memory; its cache may be shared, so it is not returned to the pool

    # ------------------------------------------------------------ reading and proposing

    def _compute_branch_logits(
        self, branch: Branch, sequence: Sequence, first_new: int, all_new_positions: bool
    ) -> int:
        """Compute the logits after ``sequence`` in a round; return the number of its tokens already in the cache."""
        text_length = len(sequence)
        unread_tokens = sequence.tokens[min(measure_common_prefix(branch.cached_sequence, sequence), text_length - 1) :]
        unknown_id = self._runtime.prompt_encoder.tokenizer.known_ids.first_unknown(unread_tokens)
        if unknown_id is not None:
            raise OvspecError(f"Token id {unknown_id} is not in the vocabulary.")
        branch.sequence = sequence
        self._learn_from_proposal()
        is_prefill = len(unread_tokens) > PREFILL_THRESHOLD  # no drafting during prefill
        if is_prefill:
            self._free_memory(len(unread_tokens) + EXPECTED_TOKENS)
        expected_tokens = EXPECTED_TOKENS
        if context_length := self._runtime.models.target.ir.context_length:
            expected_tokens = min(expected_tokens, context_length - text_length)
        # With all logits requested, a decoder feeds any number of tokens in the same way: proposals change no bit.
        logits_rows = MAX_LOGITS_ROWS if all_new_positions or not is_prefill else 1
        branch.next_row_to_draft = RowToDraft(
            sequence, PassiveSampler(), 1 + expected_tokens, not is_prefill, logits_rows=logits_rows
        )
        self._run_round(branch)
        outcome = branch.last_outcome
        proposal = outcome.proposal
        cached_tokens = text_length - outcome.read_count
        known_logits = branch.known_logits
        branch.known_logits = {n: logits for n, logits in known_logits.items() if first_new <= n <= cached_tokens}
        first_position = text_length + len(proposal.tokens) - len(outcome.logits) + 1
        branch.known_logits |= dict(enumerate(outcome.logits.copy(), first_position))
        if proposal.tokens.size:
            self.counts.count_proposal(proposal.source, len(proposal.tokens), 0)
        if round_outcome := branch.scheduler.last_outcome:
            forced_tokens = 0 if is_prefill else outcome.read_count - 1
            round_outcome = replace(round_outcome, forced_tokens=forced_tokens, prefilled=is_prefill)
            self._last_proposal = VerifiedProposal(branch, proposal, text_length, round_outcome)
        return cached_tokens

    def _learn_from_proposal(self) -> None:
        """Let the lookahead learn how many tokens of the last proposal are in the continued text."""
        if last_proposal := self._last_proposal:
            reached_count = max(
                last_proposal.accepted, len(last_proposal.branch.sequence) - last_proposal.tokens_before
            )
            reached_proposal = shorten_proposal(last_proposal.proposal, reached_count)
            self._lookahead.learn_round(
                replace(last_proposal.outcome, proposals=[(reached_proposal, last_proposal.accepted)])
            )
            self._last_proposal = None

    def _run_round(self, branch: Branch) -> None:
        counts = self.counts
        target = branch.decoders.target
        drafter = branch.decoders.drafter
        target_seconds = target.seconds
        draft_seconds = drafter.seconds if drafter else 0.0
        branch.scheduler.run_next_round()
        counts.inferences += 1
        counts.read += branch.last_outcome.read_count
        counts.target_ms += 1e3 * (target.seconds - target_seconds)
        if drafter:
            counts.draft_ms += 1e3 * (drafter.seconds - draft_seconds)

    def _count_accepted(self, verified_proposal: VerifiedProposal, sequence: Sequence) -> None:
        accepted_count = (
            measure_common_prefix(verified_proposal.branch.cached_sequence, sequence) - verified_proposal.tokens_before
        )
        if accepted_count > verified_proposal.accepted:
            new_positions = range(verified_proposal.accepted, accepted_count)
            self.counts.count_accepted(
                verified_proposal.proposal.source, new_positions, len(verified_proposal.proposal.tokens)
            )
            verified_proposal.accepted = accepted_count
