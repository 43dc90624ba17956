"""Who chooses the tokens of a row, and how a proposal is held against the choice.

The rule is a comparison: at each place in order the target's own choice is taken, and the walk goes on while it equals
the proposed token. It needs to know nothing about the proposal, so it can't be biased by it, and the text is the same
with any drafter. ``Rejection`` is the other rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from ovspec.drafting import Proposal
from ovspec.errors import OvspecError
from ovspec.sampling import (
    ACCEPT,
    CHOICE,
    DRAFT,
    RESIDUAL,
    Kept,
    SamplingParams,
    draw,
    draw_from,
    greedy,
    noise,
    penalize,
    residual,
    uniform,
    warp,
)
from ovspec.sequence import Sequence

AcceptRule = Literal["compare", "rejection"]
ACCEPT_RULES = get_args(AcceptRule)
# (logits (1, vocab) float32, all tokens so far (n,) int64, **keywords) -> token id
SampleFunction = Callable[..., Any]


class Guess(NamedTuple):
    """What a draft model should propose: the token, how likely its model finds it, and what it was drawn from."""

    token: int
    confidence: float
    q: Kept | None = None


class Sampler(Protocol):
    """Chooses the tokens of one row."""

    sampled: bool  # whether chance has a part in it

    def verify(self, logits: np.ndarray, sequence: Sequence, proposal: Proposal) -> np.ndarray:
        """What to commit, (accepted + 1,) int64: the accepted tokens and one more.

        ``logits`` (proposed + 1, vocab) float32 are the target's after ``sequence`` and after each proposed token.
        """
        ...

    def guess(self, logits: np.ndarray, tokens: np.ndarray) -> Guess:
        """From a draft model's ``logits`` (vocab,) after ``tokens`` (n,), its own guesses included."""
        ...


class Greedy:
    """The most likely token."""

    sampled = False

    def verify(self, logits: np.ndarray, sequence: Sequence, proposal: Proposal) -> np.ndarray:  # noqa: ARG002
        choices = greedy(logits)
        proposed = len(proposal.tokens)
        if proposed:
            wrong = choices[:proposed] != proposal.tokens
            first = int(wrong.argmax())
            if wrong[first]:
                return choices[: first + 1]
        return choices

    def guess(self, logits: np.ndarray, tokens: np.ndarray) -> Guess:  # noqa: ARG002
        token = int(logits.argmax())
        return Guess(token, 1 / float(np.exp(logits - logits[token]).sum()))


class Processed:
    """Logits after bias, penalties and ``min_tokens``, which depend on what stands before them.

    Args:
        start: tokens of the prompt; what follows was generated.
        ends: ids that may not come before ``min_tokens``.
    """

    def __init__(self, params: SamplingParams, start: int, ends: frozenset[int]) -> None:
        self.params, self._start = params, start
        self._ends = np.array(sorted(ends), dtype=np.int64)
        self._biased = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)

    def __call__(self, logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """(vocab,) after ``tokens`` (n,); the argument is left as it is."""
        early = len(tokens) - self._start < (self.params.min_tokens or 0)
        if not (len(self._biased) or self.params.penalizes or early):
            return logits
        logits = logits.copy()
        known = self._biased < len(logits)
        logits[self._biased[known]] += self._bias[known]
        if self.params.penalizes:
            penalize(logits, tokens, self._start, self.params)
        if early:
            logits[self._ends[self._ends < len(logits)]] = -np.inf  # a draft's vocabulary may be the smaller one
        return logits


def walk(
    choose: Callable[[np.ndarray, np.ndarray], int], logits: np.ndarray, sequence: Sequence, proposal: Proposal
) -> np.ndarray:
    """``choose(logits (vocab,), tokens before (n,))`` at each place, while it chooses what was proposed."""
    tokens = np.concatenate((sequence.tokens, proposal.tokens))
    chosen: list[int] = []
    for place in range(len(logits)):
        chosen.append(choose(logits[place], tokens[: len(sequence) + place]))
        if place < len(proposal.tokens) and chosen[-1] != proposal.tokens[place]:
            break
    return np.array(chosen, dtype=np.int64)


class ProcessedGreedy:
    """The most likely token after bias and penalties."""

    sampled = False

    def __init__(self, process: Processed) -> None:
        self._process = process

    def verify(self, logits: np.ndarray, sequence: Sequence, proposal: Proposal) -> np.ndarray:
        return walk(self._choose, logits, sequence, proposal)

    def guess(self, logits: np.ndarray, tokens: np.ndarray) -> Guess:
        return Greedy().guess(self._process(logits, tokens), tokens)

    def _choose(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        return int(self._process(logits, tokens).argmax())


class Coupled:
    """Draws by noise that depends on seed, row and position alone; the draft draws with the same.

    Args:
        row: number of the text among those of one prompt.
    """

    sampled = True

    def __init__(self, process: Processed, seed: int, row: int) -> None:
        self._process, self._seed, self._row = process, seed, row
        self._noise: dict[int, np.ndarray] = {}  # what the draft has drawn with, until the target has

    def verify(self, logits: np.ndarray, sequence: Sequence, proposal: Proposal) -> np.ndarray:
        chosen = walk(lambda *place: self.guess(*place).token, logits, sequence, proposal)
        passed = len(sequence) + len(chosen)
        self._noise = {position: bits for position, bits in self._noise.items() if position >= passed}
        return chosen

    def guess(self, logits: np.ndarray, tokens: np.ndarray) -> Guess:
        position = len(tokens)
        bits = self._noise.get(position)
        if bits is None or len(bits) < len(logits):
            bits = self._noise[position] = noise(self._seed, self._row, position, len(logits), CHOICE)
        return Guess(*draw(warp(self._process(logits, tokens), self._process.params), bits[: len(logits)]))


class Rejection:
    """Accepts x with probability min(1, p(x) / q(x)) and draws from max(p - q, 0) otherwise.

    Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). Both distributions are warped alike. A
    proposal that was not drawn has all its probability in one place. The text depends on what was proposed, its
    distribution doesn't; as long as no drawn token is kept back for what it is.
    """

    sampled = True

    def __init__(self, process: Processed, seed: int, row: int) -> None:
        self._process, self._seed, self._row = process, seed, row

    def verify(self, logits: np.ndarray, sequence: Sequence, proposal: Proposal) -> np.ndarray:
        tokens = np.concatenate((sequence.tokens, proposal.tokens))
        params, seed, row, vocab = self._process.params, self._seed, self._row, logits.shape[1]
        chosen: list[int] = []
        for place, proposed in enumerate(proposal.tokens.tolist()):
            position = len(sequence) + place
            p = warp(self._process(logits[place], tokens[:position]), params).probabilities(vocab)
            if proposal.q:
                q = proposal.q[place].probabilities(vocab)
            else:
                q = np.zeros(vocab)
                q[proposed] = 1.0
            if uniform(seed, row, position, ACCEPT) * q[proposed] >= p[proposed]:
                bits = noise(seed, row, position, vocab, RESIDUAL)
                return np.array([*chosen, draw_from(residual(p, q), bits)], dtype=np.int64)
            chosen.append(proposed)
        last = warp(self._process(logits[-1], tokens), params)
        return np.array([*chosen, draw(last, noise(seed, row, len(tokens), vocab, CHOICE))[0]], dtype=np.int64)

    def guess(self, logits: np.ndarray, tokens: np.ndarray) -> Guess:
        q = warp(self._process(logits, tokens), self._process.params)
        # Noise of its own: the target's choice at this place must not depend on the draft's.
        return Guess(*draw(q, noise(self._seed, self._row, len(tokens), len(logits), DRAFT)), q)


class UserSampler:
    """A user's own function, called once for each position that is reached, in order, as in plain decoding.

    The draft can't call it without changing what it does next, so it proposes what is most likely.
    """

    sampled = True

    def __init__(self, process: Processed, function: SampleFunction, keywords: Mapping[str, Any]) -> None:
        self._process, self._function, self._keywords = process, function, keywords

    def verify(self, logits: np.ndarray, sequence: Sequence, proposal: Proposal) -> np.ndarray:
        return walk(self._choose, logits, sequence, proposal)

    def guess(self, logits: np.ndarray, tokens: np.ndarray) -> Guess:
        return Greedy().guess(self._process(logits, tokens), tokens)

    def _choose(self, logits: np.ndarray, tokens: np.ndarray) -> int:
        # Copies: what a user's function keeps or changes must stay what it is.
        chosen = self._function(self._process(logits, tokens)[None].copy(), tokens.copy(), **self._keywords)
        try:
            token = int(np.asarray(chosen).item())
        except (TypeError, ValueError):
            raise OvspecError(f"The sampler returned {chosen!r}; it must return one token id.") from None
        if not 0 <= token < len(logits):
            raise OvspecError(f"The sampler returned {token}, which is no token id (0 to {len(logits) - 1}).")
        return token


def sampler_of(
    params: SamplingParams,
    seed: int,
    row: int,
    start: int,
    ends: frozenset[int],
    accept: AcceptRule = "compare",
    function: SampleFunction | None = None,
    keywords: Mapping[str, Any] | None = None,
) -> Sampler:
    """The sampler for one row; arguments as ``Processed``, ``Coupled`` and ``UserSampler``.

    Raises:
        OvspecError: options that exclude each other.
    """
    process = Processed(params, start, ends)
    if accept not in ACCEPT_RULES:
        raise OvspecError(f"accept is {accept!r}; it must be one of {', '.join(ACCEPT_RULES)}.")
    if function:
        if params.temperature or params.truncates:
            raise OvspecError("A sampler draws by itself; leave temperature, top_k, top_p, min_p and typical_p out.")
        if accept == "rejection":
            raise OvspecError('accept="rejection" needs to know the distribution, which a sampler keeps to itself.')
        return UserSampler(process, function, keywords or {})
    if params.temperature:
        return (Rejection if accept == "rejection" else Coupled)(process, seed, row)
    if params.truncates:
        raise OvspecError("top_k, top_p, min_p and typical_p need a temperature above 0.")
    if params.penalizes or params.logit_bias or params.min_tokens:
        return ProcessedGreedy(process)
    return Greedy()
