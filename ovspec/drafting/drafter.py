"""The base class of drafters, and a row as rounds and drafters see it."""

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
    """A row's limits on proposals; None for no limit."""

    drafter_names: frozenset[str] | None = None  # names of the allowed drafters
    lookahead: int | None = None  # maximum number of tokens per round; 0 also turns off forced tokens


NO_DRAFT_LIMITS = DraftLimits()


class RowToDraft(NamedTuple):
    """A row at the beginning of a round, as seen by drafters."""

    sequence: Sequence  # the tokens so far; the round appends to it
    sampler: Sampler
    budget: int  # maximum number of further tokens, including forced and proposed tokens
    drafters_may_propose: bool = True  # whether to ask drafters; not before the first token, to keep its latency low
    draft_limits: DraftLimits = NO_DRAFT_LIMITS
    logits_rows: int = 1  # number of positions with logits at the end of the text

    def draft_budget(self, drafter_name: str | None = None) -> int:
        """Return the maximum number of tokens the drafter (None: any drafter) may propose.

        A token of the budget is left for the target's own.
        """
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
        """Return ``proposal`` up to the first forbidden token, or up to the end of the text.

        Returns an empty proposal if a constraint or a user's function fails; the target then fails for this row alone.
        """
        with self.sampler.stopwatch:
            try:
                allowed_count = self.sampler.constraints.count_allowed(self.sequence.tokens, proposal.tokens)
                return shorten_proposal(proposal, allowed_count)
            except Exception:
                return NO_PROPOSAL


class Drafter:
    """The base class of drafters, for your own drafter; a row is one text of a batch.

    A custom drafter needs only ``guess``. Its attribute ``name``, by default the class name, is its name in statistics.
    A drafter with state per row also implements ``reset`` and ``reorder``. A drafter for all rows at once overrides
    ``propose``.
    """

    name = ""  # the name in statistics; by default the class name
    vocabulary: KnownTokenIds = ALL_IDS  # set by the model: other ids are never proposed
    seconds = 0.0  # time spent in forward passes so far

    def guess(self, tokens: np.ndarray, budget: int) -> Iterable[int]:
        """Return at most ``budget`` ids likely to follow ``tokens``, the text so far, (n,) int64; don't modify it."""
        raise NotImplementedError(f"{type(self).__name__} must implement guess(tokens, budget).")

    def propose(self, rows: list[RowToDraft], lookahead: Lookahead) -> list[Proposal]:
        """Return a proposal for each of ``rows``; by default the ids from ``guess``, cut to the most profitable length.

        The types are in ``ovspec.drafting``: ``drafter``, ``lookahead`` and ``proposal``.
        """
        budgets = [row.draft_budget(self.name) for row in rows]
        if not lookahead.should_draft(self.name, 0, budgets):
            return [NO_PROPOSAL] * len(rows)
        return [
            lookahead.cut_proposal(self._guess_for_row(row, min(budget, lookahead.max_proposed)), len(rows))
            for row, budget in zip(rows, budgets, strict=True)
        ]

    def reset(self, rows: int) -> None:
        """Drop the state of all rows, and start over with ``rows`` empty rows; called before any other method."""

    def reorder(self, rows: list[int]) -> None:
        """Make new row i a copy of old row ``rows[i]``, or an empty row if ``rows[i]`` is -1."""

    def _guess_for_row(self, row: RowToDraft, budget: int) -> Proposal:
        if not budget:
            return NO_PROPOSAL
        guesses = itertools.islice(self.guess(row.sequence.tokens, budget), budget)
        tokens = np.array([int(guess) for guess in guesses], dtype=np.int64)
        unknown_id = self.vocabulary.first_unknown(tokens)
        if unknown_id is not None:
            tokens = tokens[: int((tokens == unknown_id).argmax())]
        return row.cut_to_allowed(Proposal(tokens, source=self.name))
