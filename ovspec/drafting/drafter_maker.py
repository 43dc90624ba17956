"""Makes a call's drafter: a single drafter, a chain of two, or a user's own."""

from __future__ import annotations

import numpy as np

from ovspec.cache.decoder import Decoder
from ovspec.cache.head import HeadDecoder
from ovspec.drafting.chain import DrafterChain
from ovspec.drafting.choice import DraftChoice
from ovspec.drafting.draft_model import ModelDrafter
from ovspec.drafting.drafter import Drafter
from ovspec.drafting.head import HeadDrafter
from ovspec.drafting.lookup import LookupDrafter, NgramIndex
from ovspec.drafting.user_drafter import UserDrafter
from ovspec.sampling.samplers import TrimmedVocabulary
from ovspec.text.vocabulary import KnownTokenIds


def make_drafter(
    choice: DraftChoice | None,
    draft_decoders: list[Decoder],
    target_decoder: Decoder | None,
    target_ids: np.ndarray | None,
    target_width: int,
    corpora: list[NgramIndex],
    known_ids: KnownTokenIds,
    head_name: str = "head",
) -> Drafter | None:
    """Return the drafter for ``choice``, a ``DrafterChain`` if there are two; None for plain decoding.

    Args:
        choice: the drafters; None or empty for plain decoding.
        draft_decoders: the decoder of the draft model, or the decoders of a head's layers, if ``choice`` has one.
        target_decoder: the target's decoder, if the draft is a head on the target's features.
        target_ids: the target's id of each logit of the draft, (n,) int64; None for the target's whole vocabulary.
        target_width: width of the target's logits.
        corpora: further texts for lookup's proposals.
        known_ids: the ids allowed in proposals.
        head_name: the head's name as a drafter.
    """
    if not choice:
        return None
    drafters: list[Drafter] = []
    if choice.lookup:
        drafters.append(LookupDrafter(corpora))
    if choice.user_drafter is not None:
        drafters.append(UserDrafter(choice.user_drafter, known_ids))
    if draft_decoders:
        trimmed_vocabulary = None if target_ids is None else TrimmedVocabulary(target_ids, target_width)
        if target_decoder:
            drafters.append(HeadDrafter(HeadDecoder(draft_decoders, target_decoder), trimmed_vocabulary, head_name))
        else:
            drafters.append(ModelDrafter(draft_decoders[0], trimmed_vocabulary))
    for drafter in drafters:
        drafter.vocabulary = known_ids
    return DrafterChain(*drafters) if len(drafters) > 1 else drafters[0]
