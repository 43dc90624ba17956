"""A chain of two drafters, in which the second is asked where the first has no good proposal."""

from __future__ import annotations

from ovspec.drafting.drafter import Drafter, RowStep
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import NOTHING, Proposal


class Chain(Drafter):
    """Asks the first drafter, which costs nothing, then the second for rows without a good proposal."""

    name = "chain"

    def __init__(self, first: Drafter, second: Drafter) -> None:
        self._first, self._second = first, second

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._first.seconds + self._second.seconds

    def propose(self, rows: list[RowStep], lookahead: Lookahead) -> list[Proposal]:
        second, proposals, left = self._second.name, list[Proposal](), list[RowStep]()
        for row, found in zip(rows, self._first.propose(rows, lookahead), strict=True):
            if len(found.tokens) and row.draftable(second) and lookahead.prefers(second, found, len(rows)):
                found = NOTHING
            proposals.append(found)
            left.append(row._replace(drafts=False) if len(found.tokens) else row)
        if not any(row.draftable(second) for row in left):
            return proposals
        others = self._second.propose(left, lookahead)
        return [found if len(found.tokens) else other for found, other in zip(proposals, others, strict=True)]

    def reset(self, rows: int) -> None:
        self._first.reset(rows)
        self._second.reset(rows)

    def reorder(self, rows: list[int]) -> None:
        self._first.reorder(rows)
        self._second.reorder(rows)
