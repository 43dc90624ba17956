"""Samplers: they choose the tokens of a row and verify proposals.

Proposals are verified by comparison: at each position in order, the target's own choice is taken, and the walk
continues while that equals the proposed token. The choice doesn't depend on the proposal, so the text is the same with
any drafter. ``RejectionSampler`` uses the other rule, rejection sampling.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.cache.sequence import Sequence
from ovspec.params import Params
from ovspec.params.generation import SampleFunction
from ovspec.sampling.constraint import UNCONSTRAINED, Constraints
from ovspec.sampling.noise import ACCEPT, CHOICE, DRAFT, RESIDUAL, draw, draw_from, noise, residual, uniform
from ovspec.sampling.warp import NOTHING_LEFT, WarpedLogits, certain, warp


class Guess(NamedTuple):
    """A draft model's guess: token, how likely the model finds it, and what it was drawn from (for rejection)."""

    token: int
    confidence: float
    q: WarpedLogits | None = None


@dataclass(frozen=True)
class DraftVocabulary:
    """The ids that a draft proposes, if they aren't all of the target's.

    ids: the target's id of each of the draft's logits, (n,) int64. width: of the target's logits.
    """

    ids: np.ndarray
    width: int

    def spread(self, logits: np.ndarray) -> np.ndarray:
        """Return ``logits`` (n,) as logits of the target, (width,), in which all other ids are impossible."""
        found = np.full(self.width, -np.inf, dtype=np.float32)
        found[self.ids] = logits
        return found


class Stopwatch:
    """Counts this thread's processor time, because what other threads do meanwhile is not the row's fault."""

    __slots__ = ("_began", "_seconds")

    def __init__(self) -> None:
        self._seconds = self._began = 0.0

    def __enter__(self) -> None:
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.thread_time() - self._began

    def lap(self) -> float:
        """Return the seconds counted since the last lap."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


# The distribution that each proposed token was drawn from; None if the tokens weren't drawn.
Distributions = list[WarpedLogits] | None


class Sampler(Protocol):
    """Chooses the tokens of one row."""

    constraints: Constraints
    stopwatch: Stopwatch  # runs while the row's tokens are forced, guessed and chosen

    def verify(
        self, logits: np.ndarray, sequence: Sequence, proposed: np.ndarray, q: Distributions = None
    ) -> np.ndarray:
        """Return what to commit, (n,) int64: the accepted tokens and, unless the last of them ends the text, one more.

        ``logits`` (n + 1, vocab) float32 are the target's after ``sequence`` and after each of ``proposed`` (n,) int64.
        """
        ...

    def guess(self, logits: np.ndarray, tokens: np.ndarray, vocabulary: DraftVocabulary | None = None) -> Guess | None:
        """Return a guess from a draft's ``logits`` after ``tokens`` (n,); None if no token may follow.

        ``logits`` (vocab,) are of the target's ids, or of those of ``vocabulary``.
        """
        ...


class ComparingSampler:
    """Verifies proposals by comparing them with its own choices."""

    def __init__(self, constraints: Constraints = UNCONSTRAINED) -> None:
        self.constraints, self.stopwatch = constraints, Stopwatch()

    def choose(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        """Return the token that follows ``tokens`` (n,), chosen from the target's ``logits`` (vocab,)."""
        raise NotImplementedError

    def verify(
        self,
        logits: np.ndarray,
        sequence: Sequence,
        proposed: np.ndarray,
        q: Distributions = None,  # noqa: ARG002
    ) -> np.ndarray:
        """Return its own choices up to the first that differs from the proposal or ends the text."""
        tokens = np.concatenate((sequence.tokens, proposed))
        chosen: list[int] = []
        for position in range(len(logits)):
            before = tokens[: len(sequence) + position]
            if position and self.constraints.ended(before):
                break
            forced = self.constraints.only(before)
            chosen.append(self.choose(logits[position], before) if forced is None else forced)
            if position < len(proposed) and chosen[-1] != proposed[position]:
                break
        return np.array(chosen, dtype=np.int64)


class GreedySampler(ComparingSampler):
    """Chooses the most likely of the tokens that may follow."""

    def verify(
        self, logits: np.ndarray, sequence: Sequence, proposed: np.ndarray, q: Distributions = None
    ) -> np.ndarray:
        if self.constraints.active:
            return super().verify(logits, sequence, proposed, q)
        choices = logits.argmax(axis=-1)
        if len(proposed):
            wrong = choices[:-1] != proposed
            first = int(wrong.argmax())
            if wrong[first]:
                return choices[: first + 1]
        return choices

    def guess(self, logits: np.ndarray, tokens: np.ndarray, vocabulary: DraftVocabulary | None = None) -> Guess | None:
        if not self.constraints.active:
            return most_likely(logits, vocabulary)
        logits = vocabulary.spread(logits) if vocabulary else logits
        logits = self.constraints.process(logits, tokens)
        # If the most likely token of all may follow, it is the choice, and the mask isn't needed.
        if not self.constraints.allow(int(logits.argmax()), tokens):
            logits = self.constraints.mask(logits, tokens)
        return most_likely(logits)

    def choose(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        logits = self.constraints.process(logits, tokens)
        token = int(logits.argmax())
        if self.constraints.allow(token, tokens) and logits[token] > -np.inf:
            return token
        return required(most_likely(self.constraints.mask(logits, tokens)))


def most_likely(logits: np.ndarray, vocabulary: DraftVocabulary | None = None) -> Guess | None:
    token = int(logits.argmax())
    if not logits[token] > -np.inf:  # NaN isn't, either
        return None
    confidence = 1 / float(np.exp(logits - logits[token]).sum())
    return Guess(int(vocabulary.ids[token]) if vocabulary else token, confidence)


def required(guess: Guess | None) -> int:
    """Return the token of ``guess``; raise OvspecError if it is None, because no token may follow."""
    if not guess:
        raise OvspecError(NOTHING_LEFT)
    return guess.token


class SharedNoiseSampler(ComparingSampler):
    """Draws with noise that depends only on seed, sample (number of the text) and position, also for the draft."""

    def __init__(self, constraints: Constraints, params: Params, sample: int) -> None:
        super().__init__(constraints)
        assert params.seed is not None
        self._params, self._seed, self._sample = params, params.seed, sample
        self._noise: dict[int, np.ndarray] = {}  # by position: what the draft drew with, kept until the target has, too

    def verify(
        self, logits: np.ndarray, sequence: Sequence, proposed: np.ndarray, q: Distributions = None
    ) -> np.ndarray:
        chosen = super().verify(logits, sequence, proposed, q)
        passed = len(sequence) + len(chosen)
        self._noise = {position: bits for position, bits in self._noise.items() if position >= passed}
        return chosen

    def guess(self, logits: np.ndarray, tokens: np.ndarray, vocabulary: DraftVocabulary | None = None) -> Guess | None:
        if vocabulary and not self.constraints.active:
            return self._draw(logits, len(tokens), vocabulary) if logits.max() > -np.inf else None
        logits = self.constraints.process(vocabulary.spread(logits) if vocabulary else logits, tokens)
        # If the token drawn from all may follow, it also wins among those that may, and the mask isn't needed.
        if self.constraints.active and not self._params.truncates and logits.max() > -np.inf:
            guess = self._draw(logits, len(tokens))
            if self.constraints.allow(guess.token, tokens):
                return guess
        logits = self.constraints.mask(logits, tokens)
        return self._draw(logits, len(tokens)) if logits.max() > -np.inf else None

    def choose(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        return required(self.guess(logits, tokens))

    def _draw(self, logits: np.ndarray, position: int, vocabulary: DraftVocabulary | None = None) -> Guess:
        width, bits = vocabulary.width if vocabulary else len(logits), self._noise.get(position)
        if bits is None or len(bits) < width:
            bits = noise(self._seed, self._sample, position, width, CHOICE)
            self._noise[position] = bits
        return Guess(*draw(warp(logits, self._params, vocabulary and vocabulary.ids), bits[:width]))


class RejectionSampler:
    """Accepts x with probability min(1, p(x) / q(x)) and draws from max(p - q, 0) otherwise.

    Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). Both distributions are warped alike. For a
    proposed token that was not drawn, q is 1. The text depends on the proposal, but its distribution doesn't, as long
    as no drawn token is withheld because of which token it is.
    """

    def __init__(self, constraints: Constraints, params: Params, sample: int) -> None:
        assert params.seed is not None
        self.constraints, self.stopwatch = constraints, Stopwatch()
        self._params, self._seed, self._sample = params, params.seed, sample

    def verify(
        self, logits: np.ndarray, sequence: Sequence, proposed: np.ndarray, q: Distributions = None
    ) -> np.ndarray:
        tokens = np.concatenate((sequence.tokens, proposed))
        seed, sample, vocab = self._seed, self._sample, logits.shape[1]
        chosen: list[int] = []
        for index, token in enumerate(proposed.tolist()):
            position = len(sequence) + index
            p = self._warped(logits[index], tokens[:position]).probabilities(vocab)
            drawn = (q[index] if q else certain(token)).probabilities(vocab)
            if uniform(seed, sample, position, ACCEPT) * drawn[token] >= p[token]:
                bits = noise(seed, sample, position, vocab, RESIDUAL)
                return np.array([*chosen, draw_from(residual(p, drawn), bits)], dtype=np.int64)
            chosen.append(token)
            if self.constraints.ended(tokens[: position + 1]):
                return np.array(chosen, dtype=np.int64)
        last = self._warped(logits[-1], tokens)
        return np.array([*chosen, draw(last, noise(seed, sample, len(tokens), vocab, CHOICE))[0]], dtype=np.int64)

    def guess(self, logits: np.ndarray, tokens: np.ndarray, vocabulary: DraftVocabulary | None = None) -> Guess | None:
        logits = self.constraints(vocabulary.spread(logits) if vocabulary else logits, tokens)
        if logits.max() == -np.inf:
            return None
        q = warp(logits, self._params)
        # Different noise, because the target's choice at this position must not depend on the draft's.
        return Guess(*draw(q, noise(self._seed, self._sample, len(tokens), len(logits), DRAFT)), q)

    def _warped(self, logits: np.ndarray, tokens: np.ndarray) -> WarpedLogits:
        return warp(self.constraints(logits, tokens), self._params)


class UserSampler(ComparingSampler):
    """Calls a user's function once for each position that is reached, in order, as in plain decoding.

    Calling it for the draft could change what it does next, so the draft proposes its most likely token instead.
    """

    def __init__(self, constraints: Constraints, function: SampleFunction, params: Params) -> None:
        super().__init__(constraints)
        self._function, self._keywords = function, params.sampler_options or {}

    def guess(self, logits: np.ndarray, tokens: np.ndarray, vocabulary: DraftVocabulary | None = None) -> Guess | None:
        return most_likely(self.constraints(vocabulary.spread(logits) if vocabulary else logits, tokens))

    def choose(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        # Copies, because the function may keep or modify its arguments.
        chosen = self._function(self.constraints(logits, tokens)[None].copy(), tokens.copy(), **self._keywords)
        try:
            token = int(np.asarray(chosen).item())
        except (TypeError, ValueError):
            raise OvspecError(f"The sampler returned {chosen!r}; it must return one token id.") from None
        if not 0 <= token < len(logits):
            raise OvspecError(f"The sampler returned {token}, which is not a token id (0 to {len(logits) - 1}).")
        if not self.constraints.allow(token, tokens):
            raise OvspecError(f"The sampler returned token {token}, which must not follow: its logit is -inf.")
        return token


def sampler_of(params: Params, sample: int, constraints: Constraints) -> Sampler:
    """Return the sampler of a row. ``params`` have a seed if tokens are drawn; see ``SharedNoiseSampler``."""
    if params.sampler:
        return UserSampler(constraints, params.sampler, params)
    if not params.temperature:
        return GreedySampler(constraints)
    kind = RejectionSampler if params.accept == "rejection" else SharedNoiseSampler
    return kind(constraints, params, sample)
