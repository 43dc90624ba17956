"""A small model that guesses what the target will say (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import numpy as np

from ovspec.decoder import Decoder, catch_up
from ovspec.drafting import NOTHING, Proposal
from ovspec.sampling import greedy
from ovspec.sequence import Sequence


class DraftModel:
    """Proposes the draft model's own greedy continuation."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def seconds(self) -> float:
        return self.decoder.seconds

    def propose(self, sequences: list[Sequence], budgets: list[int]) -> list[Proposal]:
        budgets = [self._within_context(s, budget) for s, budget in zip(sequences, budgets, strict=True)]
        guesses: list[list[int]] = [[] for _ in sequences]
        # First what the draft has not seen yet, then its own guesses one by one; the last one is never fed.
        feed = [
            catch_up(self.decoder, row, sequence) if budgets[row] > 0 else NOTHING.tokens
            for row, sequence in enumerate(sequences)
        ]
        for step in range(max(budgets)):
            open_rows = [row for row, budget in enumerate(budgets) if budget > step]
            logits = self.decoder.feed(feed, [int(row in open_rows) for row in range(len(feed))])
            feed = [NOTHING.tokens] * len(sequences)
            for row in open_rows:
                token = greedy(logits[row])  # (1,)
                guesses[row].append(int(token[0]))
                feed[row] = token if step + 1 < budgets[row] else NOTHING.tokens
        return [Proposal(np.array(guess, dtype=np.int64)) for guess in guesses]

    def reset(self, rows: int) -> None:
        self.decoder.reset(rows)

    def reorder(self, rows: list[int]) -> None:
        self.decoder.reorder(rows)

    def _within_context(self, sequence: Sequence, budget: int) -> int:
        limit = self.decoder.context_length
        return budget if limit is None else max(0, min(budget, limit - len(sequence)))
