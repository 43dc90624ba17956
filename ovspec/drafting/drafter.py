"""The base class of drafters, and a row as a round and its drafter see it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ovspec.cache.sequence import Sequence
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import NO_PROPOSAL, Proposal, shorten_proposal
from ovspec.sampling.samplers import Sampler
from ovspec.text.vocabulary import ALL_IDS, KnownTokenIds


@dataclass(frozen=True)
class DraftLimits:
    """Limits of a row on proposals; None for no limit."""

    drafter_names: frozenset[str] | None = None  # names of the drafters that may propose
    lookahead: int | None = None  # maximum number of tokens in a round; with 0, none are forced, either


NO_DRAFT_LIMITS = DraftLimits()


class RowToDraft(NamedTuple):
    """One row at the beginning of a round, as its drafter sees it."""

    sequence: Sequence  # the tokens so far; the round commits to it
    sampler: Sampler
    budget: int  # maximum number of tokens that may still be committed, forced and proposed ones included
    drafters_may_propose: bool = (
        True  # whether drafters are asked; not before the first token, which must not wait for them
    )
    draft_limits: DraftLimits = NO_DRAFT_LIMITS
    logits_rows: int = 1  # at the end of the text, that need logits

    def draft_budget(self, drafter_name: str | None = None) -> int:
        """Return how many tokens that drafter, or any, may propose; one of the budget is the target's own."""
        limits = self.draft_limits
        if not self.drafters_may_propose:
            return 0
        if drafter_name and limits.drafter_names is not None and drafter_name not in limits.drafter_names:
            return 0
        budget = max(0, self.budget - 1)
        if limits.lookahead is not None:
            budget = min(budget, limits.lookahead)
        return budget

    def cut_to_allowed(self, proposal: Proposal) -> Proposal:
        """Return ``proposal`` up to the first token that a constraint forbids, or up to the end of the text.

        Nothing of it if a constraint or a user's function fails, which the target will find out for this row alone.
        """
        with self.sampler.stopwatch:
            try:
                allowed_count = self.sampler.constraints.count_allowed(self.sequence.tokens, proposal.tokens)
                return shorten_proposal(proposal, allowed_count)
            except Exception:
                return NO_PROPOSAL


class Drafter:
    """Proposes tokens for every row of a batch; reads only committed tokens and its own guesses.

    A drafter of your own needs only ``guess``; its attribute ``name``, by default its class's, is its name in
    statistics. The other methods are for drafters that keep state for each row.
    """

    name = ""  # its name in statistics; by default that of its class
    vocabulary: KnownTokenIds = ALL_IDS  # set by the model: other ids are never proposed
    seconds = 0.0  # spent in inference so far

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        """Return at most ``budget`` ids that may follow ``tokens`` (n,) int64, which must not be modified."""
        raise NotImplementedError(f"{type(self).__name__} must implement guess(tokens, budget)")

    def propose(self, rows: list[RowToDraft], lookahead: Lookahead) -> list[Proposal]:
        """Return a proposal for every row, cut to the length that the lookahead finds worthwhile."""
        budgets = [row.draft_budget(self.name) for row in rows]
        if not lookahead.should_draft(self.name, 0, budgets):
            return [NO_PROPOSAL] * len(rows)
        return [
            lookahead.cut_proposal(self._guess_for_row(row, min(budget, lookahead.max_proposed)), len(rows))
            for row, budget in zip(rows, budgets, strict=True)
        ]

    def reset(self, rows: int) -> None:
        """Forget everything and start over with ``rows`` rows."""

    def reorder(self, rows: list[int]) -> None:
        """Make new row i a copy of old row ``rows[i]``, or an empty one, as ``Decoder.reorder`` does."""

    def _guess_for_row(self, row: RowToDraft, budget: int) -> Proposal:
        if not budget:
            return NO_PROPOSAL
        guesses = itertools.islice(self.guess(row.sequence.tokens, budget), budget)
        tokens = np.array([int(guess) for guess in guesses], dtype=np.int64)
        unknown_id = self.vocabulary.first_unknown(tokens)
        if unknown_id is not None:
            tokens = tokens[: int((tokens == unknown_id).argmax())]
        return row.cut_to_allowed(Proposal(tokens, source=self.name))
