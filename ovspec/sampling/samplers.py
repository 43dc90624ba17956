"""Samplers: they choose the tokens of a row and verify proposals.

Proposals are verified by comparison: the sampler makes the target's own choice at each position in order, as long as it
equals the proposed token. The choice doesn't depend on the proposal, so the text is the same with any drafter.
``RejectionSampler`` uses rejection sampling instead.
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
from ovspec.sampling.noise import (
    ACCEPT_NOISE,
    CHOICE_NOISE,
    DRAFT_NOISE,
    RESIDUAL_NOISE,
    draw_from_probabilities,
    draw_token,
    draw_uniform,
    make_noise,
    residual_probabilities,
)
from ovspec.sampling.warp import NO_TOKEN_LEFT, WarpedLogits, certain_distribution, warp_logits


class DraftedToken(NamedTuple):
    """A token proposed by a draft model.

    confidence: its probability by the draft model. distribution: its distribution when drawn, for rejection sampling.
    """

    token: int
    confidence: float
    distribution: WarpedLogits | None = None


@dataclass(frozen=True)
class TrimmedVocabulary:
    """The ids of a draft with a part of the target's vocabulary.

    target_ids: the target's id of each logit of the draft, (n,) int64. target_width: width of the target's logits.
    """

    target_ids: np.ndarray
    target_width: int


def spread_draft_logits(logits: np.ndarray, trimmed_vocabulary: TrimmedVocabulary | None) -> np.ndarray:
    """Return a draft's ``logits`` (n,) as logits of the target, (target_width,), with -inf for all other ids."""
    if not trimmed_vocabulary:
        return logits
    target_logits = np.full(trimmed_vocabulary.target_width, -np.inf, dtype=np.float32)
    target_logits[trimmed_vocabulary.target_ids] = logits
    return target_logits


class ThreadStopwatch:
    """Counts this thread's CPU time, because the row isn't responsible for other threads' work."""

    __slots__ = ("_seconds", "_start")

    def __init__(self) -> None:
        self._seconds = self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.thread_time()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.thread_time() - self._start

    def restart(self) -> float:
        """Return the seconds counted since the last call."""
        counted_seconds = self._seconds
        self._seconds = 0.0
        return counted_seconds


# By proposed token, the distribution it was drawn from; None if the tokens weren't drawn.
Distributions = list[WarpedLogits] | None


class Sampler(Protocol):
    """Chooses the tokens of a row."""

    constraints: Constraints
    stopwatch: ThreadStopwatch  # runs while the row's tokens are forced, drafted and chosen

    def verify_proposal(
        self, logits: np.ndarray, sequence: Sequence, proposed: np.ndarray, distributions: Distributions = None
    ) -> np.ndarray:
        """Return the tokens to commit, (n,) int64: the accepted tokens, then another token unless the text has ended.

        ``logits`` (n + 1, vocab) float32 are the target's after ``sequence`` and after each of ``proposed`` (n,) int64.
        """
        ...

    def choose_draft_token(
        self, logits: np.ndarray, tokens: np.ndarray, trimmed_vocabulary: TrimmedVocabulary | None = None
    ) -> DraftedToken | None:
        """Return the token to propose after ``tokens`` (n,), by a draft's ``logits``; None if no token is allowed.

        ``logits`` (vocab,) are of the target's ids, or of the ids of ``trimmed_vocabulary``.
        """
        ...


class ComparingSampler:
    """Verifies proposals by comparing them with its own choices."""

    def __init__(self, constraints: Constraints = UNCONSTRAINED) -> None:
        self.constraints = constraints
        self.stopwatch = ThreadStopwatch()

    def choose_token(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        """Return the token after ``tokens`` (n,), chosen from the target's ``logits`` (vocab,)."""
        raise NotImplementedError

    def verify_proposal(
        self,
        logits: np.ndarray,
        sequence: Sequence,
        proposed: np.ndarray,
        distributions: Distributions = None,  # noqa: ARG002
    ) -> np.ndarray:
        """Return the sampler's own choices up to the first difference from the proposal or the end of the text."""
        tokens = np.concatenate((sequence.tokens, proposed))
        chosen_ids: list[int] = []
        for position in range(len(logits)):
            tokens_before = tokens[: len(sequence) + position]
            if position and self.constraints.has_ended(tokens_before):
                break
            forced_id = self.constraints.forced_token(tokens_before)
            chosen_ids.append(self.choose_token(logits[position], tokens_before) if forced_id is None else forced_id)
            if position < len(proposed) and chosen_ids[-1] != proposed[position]:
                break
        return np.array(chosen_ids, dtype=np.int64)


class GreedySampler(ComparingSampler):
    """Chooses the most likely allowed token."""

    def verify_proposal(
        self, logits: np.ndarray, sequence: Sequence, proposed: np.ndarray, distributions: Distributions = None
    ) -> np.ndarray:
        if self.constraints.has_constraints:
            return super().verify_proposal(logits, sequence, proposed, distributions)
        chosen_ids = logits.argmax(axis=-1)
        if len(proposed):
            differences = chosen_ids[:-1] != proposed
            first_difference = int(differences.argmax())
            if differences[first_difference]:
                return chosen_ids[: first_difference + 1]
        return chosen_ids

    def choose_draft_token(
        self, logits: np.ndarray, tokens: np.ndarray, trimmed_vocabulary: TrimmedVocabulary | None = None
    ) -> DraftedToken | None:
        if not self.constraints.has_constraints:
            return draft_most_likely_token(logits, trimmed_vocabulary)
        logits = self.constraints.process_logits(spread_draft_logits(logits, trimmed_vocabulary), tokens)
        # If the most likely token of all is allowed, it is the choice, and the mask isn't needed.
        if not self.constraints.allows_token(int(logits.argmax()), tokens):
            logits = self.constraints.mask_logits(logits, tokens)
        return draft_most_likely_token(logits)

    def choose_token(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        logits = self.constraints.process_logits(logits, tokens)
        token = int(logits.argmax())
        if self.constraints.allows_token(token, tokens) and logits[token] > -np.inf:
            return token
        return require_token(draft_most_likely_token(self.constraints.mask_logits(logits, tokens)))


def draft_most_likely_token(
    logits: np.ndarray, trimmed_vocabulary: TrimmedVocabulary | None = None
) -> DraftedToken | None:
    token = int(logits.argmax())
    if not logits[token] > -np.inf:  # NaN isn't, either
        return None
    confidence = 1 / float(np.exp(logits - logits[token]).sum())
    if trimmed_vocabulary:
        token = int(trimmed_vocabulary.target_ids[token])
    return DraftedToken(token, confidence)


def require_token(drafted_token: DraftedToken | None) -> int:
    """Return the token of ``drafted_token``; raise OvspecError if it is None, because no token is allowed."""
    if not drafted_token:
        raise OvspecError(NO_TOKEN_LEFT)
    return drafted_token.token


class SharedNoiseSampler(ComparingSampler):
    """Draws with noise from seed, sample (the text's number) and position alone; the draft draws with the same."""

    def __init__(self, constraints: Constraints, params: Params, sample: int) -> None:
        super().__init__(constraints)
        assert params.seed is not None
        self._params = params
        self._seed = params.seed
        self._sample = sample
        self._noise_by_position: dict[
            int, np.ndarray
        ] = {}  # by position: noise used by the draft, but not yet by the target

    def verify_proposal(
        self, logits: np.ndarray, sequence: Sequence, proposed: np.ndarray, distributions: Distributions = None
    ) -> np.ndarray:
        chosen_ids = super().verify_proposal(logits, sequence, proposed, distributions)
        new_length = len(sequence) + len(chosen_ids)
        self._noise_by_position = {
            position: noise_bits for position, noise_bits in self._noise_by_position.items() if position >= new_length
        }
        return chosen_ids

    def choose_draft_token(
        self, logits: np.ndarray, tokens: np.ndarray, trimmed_vocabulary: TrimmedVocabulary | None = None
    ) -> DraftedToken | None:
        if trimmed_vocabulary and not self.constraints.has_constraints:
            return self._draw_token(logits, len(tokens), trimmed_vocabulary)
        logits = self.constraints.process_logits(spread_draft_logits(logits, trimmed_vocabulary), tokens)
        # If the token drawn from all is allowed, it also wins among the allowed tokens, and the mask isn't needed.
        if self.constraints.has_constraints and not self._params.truncating_options:
            drawn_token = self._draw_token(logits, len(tokens))
            if drawn_token and self.constraints.allows_token(drawn_token.token, tokens):
                return drawn_token
        logits = self.constraints.mask_logits(logits, tokens)
        return self._draw_token(logits, len(tokens))

    def choose_token(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        return require_token(self.choose_draft_token(logits, tokens))

    def _draw_token(
        self, logits: np.ndarray, position: int, trimmed_vocabulary: TrimmedVocabulary | None = None
    ) -> DraftedToken | None:
        if not logits.max() > -np.inf:
            return None
        vocab_size = trimmed_vocabulary.target_width if trimmed_vocabulary else len(logits)
        noise_bits = self._noise_by_position.get(position)
        if noise_bits is None or len(noise_bits) < vocab_size:
            noise_bits = make_noise(self._seed, self._sample, position, vocab_size, CHOICE_NOISE)
            self._noise_by_position[position] = noise_bits
        warped_logits = warp_logits(logits, self._params, trimmed_vocabulary and trimmed_vocabulary.target_ids)
        return DraftedToken(*draw_token(warped_logits, noise_bits[:vocab_size]))


class RejectionSampler:
    """Accepts x with probability min(1, p(x) / q(x)) and draws from max(p - q, 0) otherwise.

    Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). Both distributions are warped alike. For a
    proposed token that was not drawn, q is 1. The text depends on the proposal, but its distribution doesn't, as long
    as no drawn token is withheld because of its id.
    """

    def __init__(self, constraints: Constraints, params: Params, sample: int) -> None:
        assert params.seed is not None
        self.constraints = constraints
        self.stopwatch = ThreadStopwatch()
        self._params = params
        self._seed = params.seed
        self._sample = sample

    def verify_proposal(
        self, logits: np.ndarray, sequence: Sequence, proposed: np.ndarray, distributions: Distributions = None
    ) -> np.ndarray:
        tokens = np.concatenate((sequence.tokens, proposed))
        vocab_size = logits.shape[1]
        chosen_ids: list[int] = []
        for index, token in enumerate(proposed.tolist()):
            position = len(sequence) + index
            p = self._warp_logits(logits[index], tokens[:position]).probabilities(vocab_size)
            q = (distributions[index] if distributions else certain_distribution(token)).probabilities(vocab_size)
            if draw_uniform(self._seed, self._sample, position, ACCEPT_NOISE) * q[token] >= p[token]:
                noise_bits = make_noise(self._seed, self._sample, position, vocab_size, RESIDUAL_NOISE)
                chosen_ids.append(draw_from_probabilities(residual_probabilities(p, q), noise_bits))
                break
            chosen_ids.append(token)
            if self.constraints.has_ended(tokens[: position + 1]):
                break
        else:
            noise_bits = make_noise(self._seed, self._sample, len(tokens), vocab_size, CHOICE_NOISE)
            chosen_ids.append(draw_token(self._warp_logits(logits[-1], tokens), noise_bits)[0])
        return np.array(chosen_ids, dtype=np.int64)

    def choose_draft_token(
        self, logits: np.ndarray, tokens: np.ndarray, trimmed_vocabulary: TrimmedVocabulary | None = None
    ) -> DraftedToken | None:
        logits = self.constraints(spread_draft_logits(logits, trimmed_vocabulary), tokens)
        if logits.max() == -np.inf:
            return None
        warped_logits = warp_logits(logits, self._params)
        # Different noise, because the target's choice at this position must not depend on the draft's.
        noise_bits = make_noise(self._seed, self._sample, len(tokens), len(logits), DRAFT_NOISE)
        return DraftedToken(*draw_token(warped_logits, noise_bits), warped_logits)

    def _warp_logits(self, logits: np.ndarray, tokens: np.ndarray) -> WarpedLogits:
        return warp_logits(self.constraints(logits, tokens), self._params)


class UserSampler(ComparingSampler):
    """Calls a user's function once for each position reached, in order, as in plain decoding.

    Calling it for the draft could change its later results, so the draft proposes its most likely token instead.
    """

    def __init__(self, constraints: Constraints, function: SampleFunction, params: Params) -> None:
        super().__init__(constraints)
        self._function = function
        self._sampler_options = params.sampler_options or {}

    def choose_draft_token(
        self, logits: np.ndarray, tokens: np.ndarray, trimmed_vocabulary: TrimmedVocabulary | None = None
    ) -> DraftedToken | None:
        return draft_most_likely_token(self.constraints(spread_draft_logits(logits, trimmed_vocabulary), tokens))

    def choose_token(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        # Copies, because the function may keep or modify its arguments.
        returned_token = self._function(
            self.constraints(logits, tokens)[None].copy(), tokens.copy(), **self._sampler_options
        )
        try:
            token = int(np.asarray(returned_token).item())
        except (TypeError, ValueError):
            raise OvspecError(f"The sampler returned {returned_token!r}; it must return a token id.") from None
        if not 0 <= token < len(logits):
            raise OvspecError(f"The sampler returned {token}; it must return a token id (0 to {len(logits) - 1}).")
        if not self.constraints.allows_token(token, tokens):
            raise OvspecError(
                f"The sampler returned the excluded token {token} (logit -inf); it must choose another token."
            )
        return token


def make_sampler(params: Params, sample: int, constraints: Constraints) -> Sampler:
    """Return the sampler of a row. ``params`` have a seed if tokens are sampled; see ``SharedNoiseSampler``."""
    if params.sampler:
        return UserSampler(constraints, params.sampler, params)
    if not params.temperature:
        return GreedySampler(constraints)
    sampler_class = RejectionSampler if params.accept == "rejection" else SharedNoiseSampler
    return sampler_class(constraints, params, sample)
