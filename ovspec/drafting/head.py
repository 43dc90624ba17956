"""Drafting with a head on the target's own hidden states: EAGLE-3 (Li et al., arXiv 2503.01840) or an MTP layer."""

from __future__ import annotations

from ovspec.cache.head import HeadDecoder
from ovspec.drafting.draft_model import ModelDrafter
from ovspec.drafting.drafter import RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import Proposal
from ovspec.sampling.samplers import TrimmedVocabulary

# The maximum number of tokens, forced or unread, that the head reads one by one for lack of features.
MAX_TOKENS_WITHOUT_FEATURES = 8


class HeadDrafter(ModelDrafter):
    """Proposes the head's tokens, a subset of the target's, chosen like a draft model's tokens.

    It needs the features of the text, so it doesn't propose where the target has a long prefill first.
    """

    def __init__(self, decoder: HeadDecoder, trimmed_vocabulary: TrimmedVocabulary | None, name: str = "head") -> None:
        super().__init__(decoder, trimmed_vocabulary)
        self.name = name
        self._head_decoder = decoder

    def propose(self, rows: list[RowToDraft], lookahead: Lookahead) -> list[Proposal]:
        try:
            return super().propose(rows, lookahead)
        finally:
            self._head_decoder.drop_guessed_entries()

    def _row_budget(self, index: int, row: RowToDraft, lookahead: Lookahead) -> int:
        known_count = self._head_decoder.count_known_features(index, row.sequence)
        if not known_count or len(row.sequence) - 1 - known_count > MAX_TOKENS_WITHOUT_FEATURES:
            return 0
        return super()._row_budget(index, row, lookahead)
