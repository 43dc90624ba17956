"""Makes the drafter that a call names: one drafter, a chain of two, or a user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.cache.decoder import Decoder
from ovspec.cache.head import HeadDecoder
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.draft_model import DraftModel
from ovspec.drafting.drafter import Drafter, RowStep
from ovspec.drafting.head import Head
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.lookup import Index, Lookup
from ovspec.drafting.proposal import NOTHING, Proposal
from ovspec.sampling.samplers import DraftVocabulary
from ovspec.text.vocabulary import KnownIds


def make_drafter(
    choice: DraftChoice | None,
    draft: Decoder | None,
    features_of: Decoder | None,
    ids: np.ndarray | None,
    width: int,
    corpora: list[Index],
    known: KnownIds,
) -> Drafter | None:
    """Return the drafter that ``choice`` names, a chain if there are two; None for plain decoding.

    Args:
        choice: what the call names.
        draft: the decoder of the draft model or head, if ``choice`` names one.
        features_of: the target's decoder, if the draft is a head, which reads features.
        ids: the ids that it proposes, in the order of its logits; None for all.
        width: of the target's logits.
        corpora: lookup may propose from these, too.
        known: the ids that may be proposed.
    """
    if not choice:
        return None
    drafters: list[Drafter] = [Lookup(corpora)] if choice.lookup else []
    if choice.own is not None:
        drafters.append(OwnDrafter(choice.own, known))
    if draft:
        vocabulary = None if ids is None else DraftVocabulary(ids, width)
        head = HeadDecoder(draft, features_of) if features_of else None
        drafters.append(Head(head, vocabulary) if head else DraftModel(draft, vocabulary))
    for drafter in drafters:
        drafter.vocabulary = known
    return Chain(*drafters) if len(drafters) > 1 else drafters[0]


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


class OwnDrafter(Drafter):
    """Calls a user's drafter ``own``, or what makes it; an exception in it becomes an OvspecError that names it."""

    def __init__(self, own: Drafter | Callable[[], Drafter], known: KnownIds) -> None:
        self.name = getattr(own, "__name__", type(own).__name__)
        self._drafter: Drafter
        if hasattr(own, "propose") and not isinstance(own, type):
            self._drafter = own  # type: ignore[assignment]
        else:
            self._drafter = self._call(own)  # type: ignore[arg-type]
        if not isinstance(self._drafter, Drafter):
            raise OvspecError(f"The drafter {self.name} isn't an `ovspec.Drafter`; make its class a subclass of it.")
        self._drafter.name = self.name = getattr(self._drafter, "name", "") or type(self._drafter).__name__
        self._drafter.vocabulary = known

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self._drafter.seconds

    def propose(self, rows: list[RowStep], lookahead: Lookahead) -> list[Proposal]:
        return self._call(self._drafter.propose, rows, lookahead)

    def reset(self, rows: int) -> None:
        self._call(self._drafter.reset, rows)

    def reorder(self, rows: list[int]) -> None:
        self._call(self._drafter.reorder, rows)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except OvspecError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}".rstrip(".: ")
            raise OvspecError(f"The drafter {self.name} raised {told}; correct it, or leave it out.") from error
