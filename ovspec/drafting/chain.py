"""A chain of two drafters, asked in turn."""

from __future__ import annotations

from dataclasses import replace

from ovspec.drafting.drafter import Drafter, RoundRow
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

    def propose(self, rows: list[RoundRow], lookahead: Lookahead) -> list[Proposal]:
        second = self._second.name
        proposals = [
            NOTHING
            if len(found.tokens) and row.draftable(second) and lookahead.prefers(second, found, len(rows))
            else found
            for row, found in zip(rows, self._first.propose(rows, lookahead), strict=True)
        ]
        left = [
            replace(row, drafts=False) if len(found.tokens) else row for row, found in zip(rows, proposals, strict=True)
        ]
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
