"""Makes the drafter of a session or batch."""

from __future__ import annotations

from ovspec.decoders.base import SessionDecoder
from ovspec.drafting.chain import Chain
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.draft_model import DraftModel
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.lookup import Index, Lookup
from ovspec.drafting.own import OwnDrafter
from ovspec.text.vocabulary import KnownIds


def make_drafter(
    choice: DraftChoice | None, draft: SessionDecoder | None, corpora: list[Index], known: KnownIds
) -> Drafter | None:
    """Return the drafter that ``choice`` names, a chain if there are two; None for plain decoding.

    Args:
        draft: a decoder of the draft model, if there is one.
        corpora: the texts that lookup may propose from.
        known: the ids that may be proposed.
    """
    if not choice:
        return None
    drafters: list[Drafter] = [Lookup(corpora)] if choice.lookup else []
    if choice.own is not None:
        drafters.append(OwnDrafter(choice.own, known))
    if draft:
        drafters.append(DraftModel(draft))
    for drafter in drafters:
        drafter.vocabulary = known
    return Chain(*drafters) if len(drafters) > 1 else drafters[0]
