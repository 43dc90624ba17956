"""Makes the drafter that a call names: one drafter, a chain of two, or a user's own."""

from __future__ import annotations

import numpy as np

from ovspec.cache.decoder import Decoder
from ovspec.cache.head import HeadDecoder
from ovspec.drafting.chain import Chain
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.draft_model import DraftModel
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.head import Head
from ovspec.drafting.lookup import Index, Lookup
from ovspec.drafting.user_drafter import UserDrafter
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
        drafters.append(UserDrafter(choice.own, known))
    if draft:
        vocabulary = None if ids is None else DraftVocabulary(ids, width)
        head = HeadDecoder(draft, features_of) if features_of else None
        drafters.append(Head(head, vocabulary) if head else DraftModel(draft, vocabulary))
    for drafter in drafters:
        drafter.vocabulary = known
    return Chain(*drafters) if len(drafters) > 1 else drafters[0]
