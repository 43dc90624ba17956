"""Drafting with a head on the target's own hidden states: EAGLE-3 (Li et al., arXiv 2503.01840) or an MTP layer."""

from __future__ import annotations

from ovspec.cache.head import HeadDecoder
from ovspec.drafting.draft_model import ModelDrafter
from ovspec.drafting.drafter import RowToDraft
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import Proposal
from ovspec.sampling.samplers import TrimmedVocabulary

# Maximum number of forced or unread tokens without features; the head reads them one by one.
MAX_TOKENS_WITHOUT_FEATURES = 8


class HeadDrafter(ModelDrafter):
    """Proposes tokens by a head, chosen like a draft model's; its vocabulary may be a part of the target's.

    It needs the features of the text, so it doesn't propose for a row with many tokens unread by the target.
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
