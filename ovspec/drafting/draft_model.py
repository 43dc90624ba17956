"""Drafting with a small model that guesses the target's tokens (Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

import time

import numpy as np

from ovspec.cache.decoder import BaseDecoder, count_computed_tokens
from ovspec.cache.prefill import PREFILL_THRESHOLD
from ovspec.cache.sequence import catch_up, common_prefix
from ovspec.drafting.costs import WIDEST
from ovspec.drafting.drafter import Drafter, RowStep
from ovspec.drafting.lookahead import Lookahead
from ovspec.drafting.proposal import NO_TOKENS, NOTHING, Proposal
from ovspec.sampling.samplers import DraftVocabulary, Guess
from ovspec.sampling.warp import certain


class DraftModel(Drafter):
    """Proposes the draft model's tokens, chosen by the row's sampler: by default with the target's warping and noise.

    Stops when another token would cost more than it is likely to save.
    """

    name = "draft"

    def __init__(self, decoder: BaseDecoder, vocabulary: DraftVocabulary | None = None) -> None:
        self.decoder, self._vocabulary = decoder, vocabulary

    @property
    def seconds(self) -> float:  # type: ignore[override]
        return self.decoder.seconds

    def propose(self, rows: list[RowStep], lookahead: Lookahead) -> list[Proposal]:
        budgets = [self._budget(index, row, lookahead) for index, row in enumerate(rows)]
        going = [index for index, budget in enumerate(budgets) if budget]
        if not going or not lookahead.affords(self.name, len(going)):
            return [NOTHING] * len(rows)
        self.decoder.reuse_prefixes([row.sequence for row in rows])
        # The draft may hold tokens of another text: after a rewind, or of a text before this one.
        seen = {index: common_prefix(rows[index].sequence, self.decoder.rows[index]) for index in going}
        unseen = sum(max(1, len(rows[index].sequence) - count) for index, count in seen.items())
        missed = unseen > WIDEST or not all(seen.values())
        left = [row.draftable(self.name) if budget else 0 for row, budget in zip(rows, budgets, strict=True)]
        if not lookahead.starts(self.name, unseen, left, missed):
            return [NOTHING] * len(rows)
        drafts = [Drafting(row, budget, self._vocabulary) for row, budget in zip(rows, budgets, strict=True)]
        # First feed the tokens that the draft has not read yet, then its own guesses; the last guess is never fed.
        feed = [NO_TOKENS] * len(rows)
        for index in going:
            feed[index] = catch_up(self.decoder, index, rows[index].sequence)
        late = [index for index in going if len(feed[index]) > PREFILL_THRESHOLD]
        # The others must not wait until a prompt is read; with a prefill budget, not even if they read one, too.
        if lookahead.fixed is None and len(going) > 1 and (lookahead.paced or len(late) < len(going)):
            room = lookahead.prompt_room()
            for index in late:
                if len(feed[index]) > room:
                    going.remove(index)
                    feed[index] = feed[index][:room]
                room -= len(feed[index])
        while any(map(len, feed)):
            began, width = time.perf_counter(), lookahead.draft.fill(count_computed_tokens(self.decoder, feed))
            logits = self.decoder.feed(feed, [int(index in going) for index in range(len(rows))], width)
            extended = [index for index in going if drafts[index].extend(logits[index][0])]
            lookahead.note_draft(width, time.perf_counter() - began, missed)
            missed = False
            going = lookahead.going_on(self.name, extended, [draft.guesses for draft in drafts])
            feed = [draft.unfed if index in going else NO_TOKENS for index, draft in enumerate(drafts)]
        return [draft.proposal(self.name) for draft in drafts]

    def reset(self, rows: int) -> None:
        self.decoder.reset(rows)

    def reorder(self, rows: list[int]) -> None:
        self.decoder.reorder(rows)

    def _budget(self, index: int, row: RowStep, lookahead: Lookahead) -> int:  # noqa: ARG002
        """Return the maximum number of tokens to guess; 0 if the draft's own context is full."""
        limit = self.decoder.context_length
        room = row.budget if limit is None else max(0, limit - len(row.sequence))
        return min(row.draftable(self.name), lookahead.most, room)


class Drafting:
    """The guesses for one row, at most ``budget`` of them, from logits of ``vocabulary``."""

    def __init__(self, row: RowStep, budget: int, vocabulary: DraftVocabulary | None) -> None:
        self.guesses: list[Guess] = []
        self._row, self._budget, self._vocabulary = row, budget, vocabulary
        self._text = np.concatenate((row.sequence.tokens, np.empty(budget, dtype=np.int64)))
        self._end = self._fed = len(row.sequence)

    @property
    def unfed(self) -> np.ndarray:
        return self._text[self._fed : self._end]

    def extend(self, logits: np.ndarray) -> bool:
        """Add the guess from ``logits`` (vocab,) and the tokens forced after it, which cost no step.

        Returns whether to continue; not if a constraint or a user's function fails, which the target will find out for
        this row alone.
        """
        sampler = self._row.sampler
        self._fed = self._end
        with sampler.stopwatch:
            try:
                guess = sampler.guess(logits, self._text[: self._end], self._vocabulary)
                if not guess:
                    return False
                self._add(guess)
                text = self._text[: self._end]
                if sampler.constraints.ended(text):
                    return False
                for token in sampler.constraints.forced(text)[: self._budget - len(self.guesses)]:
                    self._add(Guess(token, 1.0, certain(token)))
                return len(self.guesses) < self._budget
            except Exception:
                return False

    def proposal(self, source: str) -> Proposal:
        if not self.guesses:
            return NOTHING
        tokens = np.array([guess.token for guess in self.guesses], dtype=np.int64)
        confidence = np.array([guess.confidence for guess in self.guesses])
        drawn = [guess.q for guess in self.guesses if guess.q is not None]  # forced guesses always have one
        return Proposal(tokens, confidence, drawn if len(drawn) == len(tokens) else None, source)

    def _add(self, guess: Guess) -> None:
        self._text[self._end] = guess.token
        self.guesses.append(guess)
        self._end += 1
