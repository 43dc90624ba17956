"""A small model that guesses what the target will say (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import time

import numpy as np

from ovspec.decoder import Decoder, catch_up
from ovspec.drafting import NOTHING, Drafter, Proposal, Round
from ovspec.reading import share_beginnings
from ovspec.sampler import Guess


class DraftModel(Drafter):
    """Proposes what the draft model would say, chosen as the target's tokens are: the same warping and noise.

    Stops where one more token would cost more than it is likely to bring.
    """

    name = "draft"

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.decoder.seconds

    def propose(self, round: Round) -> list[Proposal]:
        share_beginnings(self.decoder, round.sequences)
        budgets = [self._within_context(row, round) for row in range(len(round.sequences))]
        unseen = [
            len(sequence) - len(self.decoder.rows[row]) if budgets[row] > 0 else 0
            for row, sequence in enumerate(round.sequences)
        ]
        remaining = [left if budgets[row] > 0 else 0 for row, left in enumerate(round.remaining)]
        if not any(budgets) or not round.lookahead.starts(self.name, sum(unseen), remaining):
            return [NOTHING] * len(budgets)
        guesses: list[list[Guess]] = [[] for _ in budgets]
        texts = [np.concatenate((s.tokens, np.empty(max(budgets), np.int64))) for s in round.sequences]
        # First what the draft has not seen yet, then its own guesses one by one; the last one is never fed.
        feed = [
            catch_up(self.decoder, row, sequence) if budgets[row] > 0 else NOTHING.tokens
            for row, sequence in enumerate(round.sequences)
        ]
        going = [row for row, budget in enumerate(budgets) if budget > 0]
        while going:
            began = time.perf_counter()
            logits = self.decoder.feed(feed, [int(row in going) for row in range(len(feed))])
            fed, feed = sum(map(len, feed)), [NOTHING.tokens] * len(budgets)
            for row in going:
                end = len(round.sequences[row]) + len(guesses[row])
                guess = round.samplers[row].guess(logits[row][0], texts[row][:end])
                texts[row][end] = guess.token
                guesses[row].append(guess)
            round.lookahead.note_draft(fed, time.perf_counter() - began)
            going = [row for row in going if len(guesses[row]) < budgets[row]]
            going = round.lookahead.going_on(self.name, going, guesses)
            for row in going:
                end = len(round.sequences[row]) + len(guesses[row])
                feed[row] = texts[row][end - 1 : end]
        return [self._proposal(row_guesses) if row_guesses else NOTHING for row_guesses in guesses]

    def reset(self, rows: int) -> None:
        self.decoder.reset(rows)

    def reorder(self, rows: list[int]) -> None:
        self.decoder.reorder(rows)

    def _proposal(self, guesses: list[Guess]) -> Proposal:
        tokens = np.array([guess.token for guess in guesses], dtype=np.int64)
        confidence = np.array([guess.confidence for guess in guesses])
        drawn = [guess.q for guess in guesses if guess.q is not None]
        return Proposal(tokens, confidence, drawn or None, self.name)

    def _within_context(self, row: int, round: Round) -> int:
        budget, limit = round.budgets[row], self.decoder.context_length
        return budget if limit is None else max(0, min(budget, limit - len(round.sequences[row])))
