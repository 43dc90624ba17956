"""A chain of two drafters, in which the second is asked where the first has no good proposal."""

from __future__ import annotations

from ovspec.drafting.drafter import Drafter, RowStep
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import NO_PROPOSAL, Proposal


class Chain(Drafter):
    """Asks the first drafter, which costs nothing, then the second for rows without a good proposal."""

    name = "chain"

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first = first
        self._second = second

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._first.seconds + self._second.seconds

    def propose(self, rows: list[RowStep], lookahead: Lookahead) -> list[Proposal]:
        name = self._second.name
        proposals: list[Proposal] = []
        second_rows: list[RowStep] = []  # as the second drafter sees them: rows with a good proposal don't ask it
        for row, proposal in zip(rows, self._first.propose(rows, lookahead), strict=True):
            proposals.append(proposal)
            second_rows.append(row)
            if len(proposal.tokens):
                if row.draft_budget(name) and lookahead.prefers_drafter(name, proposal, len(rows)):
                    proposals[-1] = NO_PROPOSAL
                else:
                    second_rows[-1] = row._replace(drafters_may_propose=False)
        if not any(row.draft_budget(name) for row in second_rows):
            return proposals
        fallbacks = self._second.propose(second_rows, lookahead)
        return [first if len(first.tokens) else second for first, second in zip(proposals, fallbacks, strict=True)]

    def reset(self, rows: int) -> None:
        self._first.reset(rows)
        self._second.reset(rows)

    def reorder(self, rows: list[int]) -> None:
        self._first.reorder(rows)
        self._second.reorder(rows)
