"""A small model that guesses what the target will say (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import time

import numpy as np

from ovspec.decoders.base import Decoder, catch_up
from ovspec.decoders.prefill import share_prefixes
from ovspec.drafting.drafter import Drafter, Round
from ovspec.drafting.proposal import NOTHING, Proposal, certain
from ovspec.sampling.samplers import Guess, Sampler


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
        share_prefixes(self.decoder, round.sequences)
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
            seen, asked, going = list(ends), going, []
            for row in asked:
                sampler, end = round.samplers[row], ends[row]
                made, goes_on = guesses_at(sampler, logits[row][0], texts[row], end, budgets[row] - len(guesses[row]))
                ends[row] += len(made)
                guesses[row] += made
                going += [row] if goes_on else []
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


def guesses_at(
    sampler: Sampler, logits: np.ndarray, text: np.ndarray, end: int, budget: int
) -> tuple[list[Guess], bool]:
    """The guess from ``logits`` (vocab,) and what is forced behind it, at most ``budget``; and whether to go on.

    They are written into ``text``, of which the first ``end`` are there. What is forced costs the draft no step.
    """
    guess = sampler.guess(logits, text[:end])
    if not guess:
        return [], False
    text[end] = guess.token
    so_far = text[: end + 1]
    if sampler.constraints.ended(so_far):
        return [guess], False
    forced = sampler.constraints.forced(so_far)[: budget - 1]
    text[end + 1 : end + 1 + len(forced)] = forced
    return [guess, *(Guess(token, 1.0, certain(token)) for token in forced)], True
