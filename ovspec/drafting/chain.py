"""A chain of two drafters: the second proposes for rows without a good proposal by the first."""

from __future__ import annotations

from ovspec.drafting.drafter import Drafter, RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import NO_PROPOSAL, Proposal


class DrafterChain(Drafter):
    """Asks the first drafter (lookup or a user's: at no cost), then the second for rows without a good proposal."""

    name = "chain"

    def __init__(self, first_drafter: Drafter, second_drafter: Drafter) -> None:
        self._first_drafter = first_drafter
        self._second_drafter = second_drafter

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._first_drafter.seconds + self._second_drafter.seconds

    def propose(self, rows: list[RowToDraft], lookahead: Lookahead) -> list[Proposal]:
        second_name = self._second_drafter.name
        proposals: list[Proposal] = []
        second_rows: list[RowToDraft] = []  # for the second drafter, which skips rows with a good proposal
        for row, proposal in zip(rows, self._first_drafter.propose(rows, lookahead), strict=True):
            proposals.append(proposal)
            second_rows.append(row)
            if len(proposal.tokens):
                if row.draft_budget(second_name) and lookahead.prefers_drafter(second_name, proposal, len(rows)):
                    proposals[-1] = NO_PROPOSAL
                else:
                    second_rows[-1] = row._replace(drafters_may_propose=False)
        if not any(row.draft_budget(second_name) for row in second_rows):
            return proposals
        fallback_proposals = self._second_drafter.propose(second_rows, lookahead)
        pairs = zip(proposals, fallback_proposals, strict=True)
        return [proposal if len(proposal.tokens) else fallback for proposal, fallback in pairs]

    def reset(self, rows: int) -> None:
        self._first_drafter.reset(rows)
        self._second_drafter.reset(rows)

    def reorder(self, rows: list[int]) -> None:
        self._first_drafter.reorder(rows)
        self._second_drafter.reorder(rows)
