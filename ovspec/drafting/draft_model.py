"""Drafting with a small model of the target's vocabulary (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import time

import numpy as np

from ovspec.cache.decoder import BaseDecoder, count_computed_tokens
from ovspec.cache.prefill import PREFILL_THRESHOLD
from ovspec.cache.sequence import catch_up, measure_common_prefix
from ovspec.drafting.costs import WIDEST_INFERENCE
from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import NO_PROPOSAL, NO_TOKENS, Proposal
from ovspec.sampling.samplers import DraftedToken, TrimmedVocabulary
from ovspec.sampling.warp import certain_distribution


class ModelDrafter(Drafter):
    """Proposes the draft model's tokens, chosen by the row's sampler: by default with the target's warping and noise.

    Stops when another token would cost more than it is likely to save.
    """

    name = "draft"

    def __init__(self, decoder: BaseDecoder, trimmed_vocabulary: TrimmedVocabulary | None = None) -> None:
        self.decoder = decoder
        self._trimmed_vocabulary = trimmed_vocabulary

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.decoder.seconds

    def propose(self, rows: list[RowToDraft], lookahead: Lookahead) -> list[Proposal]:
        budgets = [self._row_budget(index, row, lookahead) for index, row in enumerate(rows)]
        drafting_rows = [index for index, budget in enumerate(budgets) if budget]  # rows to draft in the next step
        if not drafting_rows or not lookahead.can_afford_drafting(self.name, len(drafting_rows)):
            return [NO_PROPOSAL] * len(rows)
        self.decoder.reuse_prefixes([row.sequence for row in rows])
        # After a rewind or with a new text, the draft may have read other tokens.
        read_counts = {
            index: measure_common_prefix(rows[index].sequence, self.decoder.rows[index]) for index in drafting_rows
        }
        unread_count = sum(max(1, len(rows[index].sequence) - count) for index, count in read_counts.items())
        reads_prompt = unread_count > WIDEST_INFERENCE or not all(read_counts.values())
        draft_budgets = [budget and row.draft_budget(self.name) for row, budget in zip(rows, budgets, strict=True)]
        if not lookahead.should_draft(self.name, unread_count, draft_budgets, reads_prompt):
            return [NO_PROPOSAL] * len(rows)
        drafts = [RowDraft(row, budget, self._trimmed_vocabulary) for row, budget in zip(rows, budgets, strict=True)]
        # First feed the tokens the draft has not read yet, then its own tokens; the last token is never fed.
        fed_tokens = [NO_TOKENS] * len(rows)
        for index in drafting_rows:
            fed_tokens[index] = catch_up(self.decoder, index, rows[index].sequence)
        self._postpone_prompts(fed_tokens, drafting_rows, lookahead)
        while any(map(len, fed_tokens)):
            start = time.perf_counter()
            width = lookahead.draft_costs.choose_fill_width(count_computed_tokens(self.decoder, fed_tokens))
            logits = self.decoder.feed(fed_tokens, [int(index in drafting_rows) for index in range(len(rows))], width)
            extended_rows = [index for index in drafting_rows if drafts[index].extend_draft(logits[index][0])]
            lookahead.learn_draft_step(width, time.perf_counter() - start, reads_prompt)
            reads_prompt = False
            drafting_rows = lookahead.choose_rows_to_extend(
                self.name, extended_rows, [draft.drafted_tokens for draft in drafts]
            )
            fed_tokens = [
                draft.unfed_tokens if index in drafting_rows else NO_TOKENS for index, draft in enumerate(drafts)
            ]
        return [draft.make_proposal(self.name) for draft in drafts]

    def reset(self, rows: int) -> None:
        self.decoder.reset(rows)

    def reorder(self, rows: list[int]) -> None:
        self.decoder.reorder(rows)

    def _row_budget(self, index: int, row: RowToDraft, lookahead: Lookahead) -> int:  # noqa: ARG002
        """Return the maximum number of tokens to draft; 0 if the draft's own context is full."""
        budget = min(row.draft_budget(self.name), lookahead.max_proposed)
        context_length = self.decoder.context_length
        if context_length is None:
            return min(budget, row.budget)
        return min(budget, max(0, context_length - len(row.sequence)))

    def _postpone_prompts(self, fed_tokens: list[np.ndarray], drafting_rows: list[int], lookahead: Lookahead) -> None:
        """Cut prompts in ``fed_tokens`` that are too long, and remove their rows from ``drafting_rows``, both in place.

        The other rows must not wait for a whole prefill; with a prefill budget, not even if all rows have a prompt.
        """
        prompt_rows = [index for index in drafting_rows if len(fed_tokens[index]) > PREFILL_THRESHOLD]
        do_others_wait = lookahead.limits_waiting or len(prompt_rows) < len(drafting_rows)
        if lookahead.fixed_length is not None or len(drafting_rows) <= 1 or not do_others_wait:
            return
        prompt_room = lookahead.max_prompt_tokens()
        for index in prompt_rows:
            if len(fed_tokens[index]) > prompt_room:
                drafting_rows.remove(index)
                fed_tokens[index] = fed_tokens[index][:prompt_room]
            prompt_room -= len(fed_tokens[index])


class RowDraft:
    """A row's drafted tokens, at most ``budget``, from logits of ``trimmed_vocabulary``."""

    def __init__(self, row: RowToDraft, budget: int, trimmed_vocabulary: TrimmedVocabulary | None) -> None:
        self.drafted_tokens: list[DraftedToken] = []
        self._row = row
        self._budget = budget
        self._trimmed_vocabulary = trimmed_vocabulary
        self._tokens = np.concatenate((row.sequence.tokens, np.empty(budget, dtype=np.int64)))
        self._length = self._fed_length = len(row.sequence)

    @property
    def unfed_tokens(self) -> np.ndarray:
        return self._tokens[self._fed_length : self._length]

    def extend_draft(self, logits: np.ndarray) -> bool:
        """Add the token chosen from ``logits`` (vocab,), and the forced tokens after it, without a step for them.

        Returns whether to continue. If a constraint or a user's function fails, drafting stops; the target then reports
        the failure for this row alone.
        """
        sampler = self._row.sampler
        self._fed_length = self._length
        with sampler.stopwatch:
            try:
                drafted_token = sampler.choose_draft_token(
                    logits, self._tokens[: self._length], self._trimmed_vocabulary
                )
                if not drafted_token:
                    return False
                self._add_token(drafted_token)
                tokens = self._tokens[: self._length]
                if sampler.constraints.has_ended(tokens):
                    return False
                for forced_id in sampler.constraints.forced_tokens(tokens)[: self._budget - len(self.drafted_tokens)]:
                    self._add_token(DraftedToken(forced_id, 1.0, certain_distribution(forced_id)))
                return len(self.drafted_tokens) < self._budget
            except Exception:
                return False

    def make_proposal(self, drafter_name: str) -> Proposal:
        if not self.drafted_tokens:
            return NO_PROPOSAL
        tokens = np.array([drafted_token.token for drafted_token in self.drafted_tokens], dtype=np.int64)
        confidence = np.array([drafted_token.confidence for drafted_token in self.drafted_tokens])
        # Forced tokens always have a distribution.
        distributions = [
            drafted_token.distribution
            for drafted_token in self.drafted_tokens
            if drafted_token.distribution is not None
        ]
        return Proposal(tokens, confidence, distributions if len(distributions) == len(tokens) else None, drafter_name)

    def _add_token(self, drafted_token: DraftedToken) -> None:
        self._tokens[self._length] = drafted_token.token
        self.drafted_tokens.append(drafted_token)
        self._length += 1
