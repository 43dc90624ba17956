"""A small model that guesses what the target will say (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import time

import numpy as np

from ovspec.decoder import Decoder, catch_up
from ovspec.drafting import NOTHING, Drafter, Proposal, Round, certain
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
        room = np.empty(max(budgets), dtype=np.int64)
        texts = [np.concatenate((sequence.tokens, room)) for sequence in round.sequences]
        ends = [len(sequence) for sequence in round.sequences]  # tokens of each text so far
        # First what the draft has not seen yet, then its own guesses; the last one is never fed.
        feed = [
            catch_up(self.decoder, row, sequence) if budgets[row] > 0 else NOTHING.tokens
            for row, sequence in enumerate(round.sequences)
        ]
        going = [row for row, budget in enumerate(budgets) if budget > 0]
        while going:
            began = time.perf_counter()
            logits = self.decoder.feed(feed, [int(row in going) for row in range(len(feed))])
            fed, feed = sum(map(len, feed)), [NOTHING.tokens] * len(budgets)
            seen, asked = list(ends), going
            going = []
            for row in asked:
                sampler, text = round.samplers[row], texts[row]
                guess = sampler.guess(logits[row][0], text[: ends[row]])
                if not guess:
                    continue
                more = [guess]
                text[ends[row]] = guess.token
                room_left = budgets[row] - len(guesses[row]) - 1
                if not sampler.constraints.ended(text[: ends[row] + 1]):
                    # What is forced behind a guess costs the draft no step of its own.
                    forced = sampler.constraints.forced(text[: ends[row] + 1])[:room_left]
                    more += [Guess(token, 1.0, certain(token)) for token in forced]
                    text[ends[row] + 1 : ends[row] + len(more)] = forced
                    going.append(row)
                ends[row] += len(more)
                guesses[row] += more
            round.lookahead.note_draft(fed, time.perf_counter() - began)
            going = [row for row in going if len(guesses[row]) < budgets[row]]
            going = round.lookahead.going_on(self.name, going, guesses)
            for row in going:
                feed[row] = texts[row][seen[row] : ends[row]]
        return [self._proposal(row_guesses) if row_guesses else NOTHING for row_guesses in guesses]

    def reset(self, rows: int) -> None:
        self.decoder.reset(rows)

    def reorder(self, rows: list[int]) -> None:
        self.decoder.reorder(rows)

    def _proposal(self, guesses: list[Guess]) -> Proposal:
        tokens = np.array([guess.token for guess in guesses], dtype=np.int64)
        confidence = np.array([guess.confidence for guess in guesses])
        # What was forced has a q in any case.
        drawn = [guess.q for guess in guesses if guess.q is not None]
        return Proposal(tokens, confidence, drawn if len(drawn) == len(guesses) else None, self.name)

    def _within_context(self, row: int, round: Round) -> int:
        budget, limit = round.budgets[row], self.decoder.context_length
        return budget if limit is None else max(0, min(budget, limit - len(round.sequences[row])))
