"""From logits to tokens: what can be asked for, and pure numpy functions that do it.

Order, as in Hugging Face: logit bias, repetition penalty, presence and frequency penalty, min_tokens, temperature,
top-k, top-p, min-p, typical-p. Tokens are drawn by the Gumbel-max trick, so that a draft model that is given the same
noise often draws the same token (Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ovspec.errors import OvspecError

# What noise is drawn for: independent draws at one place need noise of their own.
CHOICE, DRAFT, ACCEPT, RESIDUAL = range(4)
# Tokens that are less likely than this share of the most likely one seldom matter for top-p.
FEW = 1e-3
NOTHING_LEFT = "No token may follow: all are banned, or the model's logits are not numbers."
# Logits are looked through in blocks of this many for the largest.
BLOCK = 128


@dataclass(frozen=True)
class SamplingParams:
    """What a text depends on, besides prompt and model.

    max_tokens: tokens to generate at most; by default the generation config's ``max_new_tokens`` or 256, and never
        past the model's context. Asking for more than fits is an error.
    min_tokens: before so many tokens, nothing ends the text.
    stop: one string or several; the text ends in front of the first that appears.
    stop_ids: ids that end the text, as an end-of-sequence token does.
    ignore_eos: go on after an end-of-sequence token.
    temperature: 0 is greedy; 1 the model's own distribution.
    top_k: only the so many most likely tokens; 0 for all.
    top_p: only the most likely tokens that together have this probability.
    min_p: only tokens with at least this share of the most likely one's probability.
    typical_p: only the most typical tokens that together have this probability (arXiv 2202.00666).
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or text; by default the
        generation config's, or 1.
    presence_penalty: taken off the logits of tokens that the generated text has.
    frequency_penalty: taken off them once for each time.
    logit_bias: token id -> added to its logit; -inf bans it.
    seed: the same seed gives the same text, with any draft or none, alone or in a batch; by default a random one,
        which ``Stats.seed`` tells.
    n: texts to generate for each prompt.
    logprobs: for each token its log-probability, and those of the so many most likely, in the model's own
        distribution, before anything above.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises OvspecError where a value is out of range."""
        rules = {
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            "min_tokens": (self.min_tokens is None or self.min_tokens >= 0, "0 or more"),
            "temperature": (0 <= self.temperature < math.inf, "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "typical_p": (0 < self.typical_p <= 1, "above 0 and at most 1"),
            "repetition_penalty": (
                self.repetition_penalty is None or 0 < self.repetition_penalty < math.inf,
                "above 0",
            ),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a finite number"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a finite number"),
            "seed": (self.seed is None or 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
            "n": (self.n >= 1, "at least 1"),
            "logprobs": (self.logprobs is None or self.logprobs >= 0, "0 or more"),
        }
        for name, (right, range_) in rules.items():
            if not right:
                raise OvspecError(f"{name} is {getattr(self, name)}; it must be {range_}.")
        if any(math.isnan(bias) or bias == math.inf for bias in self.logit_bias.values()):
            raise OvspecError("logit_bias must be numbers, or -inf to ban a token.")
        if not all(self.stop_strings):
            raise OvspecError("A stop string is empty; leave it out.")
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            raise OvspecError(f"min_tokens is {self.min_tokens}, more than max_tokens, {self.max_tokens}.")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens before them."""
        repeats = self.repetition_penalty not in (None, 1.0)
        return repeats or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1


# ---------------------------------------------------------------- logits


def greedy(logits: np.ndarray) -> np.ndarray:
    """The most likely token at each place: (places, vocab) float32 -> (places,) int64."""
    return logits.argmax(axis=-1)


def penalize(logits: np.ndarray, tokens: np.ndarray, start: int, params: SamplingParams) -> None:
    """Apply the penalties of ``params`` in place.

    Args:
        logits: (vocab,) of the token that follows ``tokens``.
        tokens: (n,) all before it, of which those from ``start`` on were generated.
    """
    penalty = params.repetition_penalty
    if penalty is not None and penalty != 1.0:
        held = logits[tokens]
        logits[tokens] = np.where(held < 0, held * penalty, held / penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(tokens) > start:
        ids, counts = np.unique(tokens[start:], return_counts=True)
        logits[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)


class Kept(NamedTuple):
    """What warping leaves: ``logits`` (n,) float32 of ``ids`` (n,), or of the whole vocabulary where that is None."""

    ids: np.ndarray | None
    logits: np.ndarray

    def probabilities(self, vocab: int) -> np.ndarray:
        """(vocab,) float64"""
        kept = softmax(self.logits.astype(np.float64))
        if self.ids is None and len(kept) == vocab:
            return kept
        ids = np.arange(len(kept)) if self.ids is None else self.ids
        found = np.zeros(vocab)
        found[ids[ids < vocab]] = kept[ids < vocab]
        return found


def warp(logits: np.ndarray, params: SamplingParams) -> Kept:
    """Temperature, top-k, top-p, min-p and typical-p, one after the other: (vocab,) -> what may be drawn.

    The vocabulary is never sorted as a whole. Raises OvspecError where no token is left.
    """
    most = logits.max()
    if not np.isfinite(most):
        raise OvspecError(NOTHING_LEFT)
    logits = (logits - most) * np.float32(1 / max(params.temperature, 1e-30))  # the largest is 0
    if not params.truncates:
        return Kept(None, logits)
    ids: np.ndarray | None = None
    if 0 < params.top_k < len(logits):
        ids, logits = narrow(ids, logits, largest(logits, params.top_k))
    if params.top_p < 1:
        weights = np.exp(logits)
        total = float(weights.sum(dtype=np.float64))
        likely = np.flatnonzero(weights >= FEW)
        if weights[likely].sum(dtype=np.float64) < params.top_p * total:
            # All tokens below this share of what is left out have no more than that together.
            likely = np.flatnonzero(weights >= (1 - params.top_p) * total / len(weights))
        ids, logits = narrow(ids, logits, likely)
        ids, logits = narrow(ids, logits, leading(-logits, weights[likely], params.top_p * total))
    if params.min_p > 0:
        ids, logits = narrow(ids, logits, np.flatnonzero(logits >= np.float32(math.log(params.min_p))))
    if params.typical_p < 1:
        weights = np.exp(logits)
        possible = np.flatnonzero(weights)  # a banned token has no end of information
        ids, logits = narrow(ids, logits, possible)
        weights = weights[possible]
        total = float(weights.sum(dtype=np.float64))
        information = np.float32(math.log(total)) - logits  # in nats
        entropy = float((weights * information).sum(dtype=np.float64)) / total
        surprise = np.abs(information - np.float32(entropy))
        ids, logits = narrow(ids, logits, leading(surprise, weights, params.typical_p * total))
    return Kept(ids, logits)


def narrow(ids: np.ndarray | None, logits: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ids and logits at ``places``; ``ids`` None stands for the whole vocabulary."""
    return places if ids is None else ids[places], logits[places]


def leading(keys: np.ndarray, weights: np.ndarray, limit: float) -> np.ndarray:
    """Places of the smallest ``keys`` (n,), until their ``weights`` (n,) sum to ``limit``; equal keys stay together.

    Of many, only those in the bucket where the limit is reached are sorted.
    """
    inside, before = np.arange(len(keys)), 0.0
    if len(keys) > 2048:
        low, high = float(keys.min()), float(keys.max())
        buckets = ((keys - np.float32(low)) * np.float32(2047 / max(high - low, 1e-9))).astype(np.int32)
        sums = np.cumsum(np.bincount(buckets, weights, 2049))
        reached = min(int(np.searchsorted(sums, limit)), int(buckets.max()))
        inside = np.flatnonzero(buckets == reached)
        before = float(sums[reached - 1]) if reached else 0.0
        if not len(inside):  # rounding: the limit is all there is
            return np.arange(len(keys))
    order = inside[np.argsort(keys[inside], kind="stable")]
    sums = before + np.cumsum(weights[order], dtype=np.float64)
    last = min(int(np.searchsorted(sums, limit)), len(order) - 1)
    return np.flatnonzero(keys <= keys[order[last]])


def largest(logits: np.ndarray, count: int) -> np.ndarray:
    """Ids of the ``count`` largest of (vocab,), and of those that equal the smallest of them."""
    whole = len(logits) // BLOCK * BLOCK
    if whole // BLOCK > 2 * count:
        # The count-th largest of the blocks' largest is at most the count-th largest of all.
        peaks = logits[:whole].reshape(-1, BLOCK).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(peaks, len(peaks) - count)[-count])
    else:
        ids = np.arange(len(logits))
    found = logits[ids]
    return ids[found >= np.partition(found, len(found) - count)[-count]]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


# ---------------------------------------------------------------- drawing


def noise(seed: int, row: int, position: int, vocab: int, purpose: int = CHOICE) -> np.ndarray:
    """(vocab,) uint32, uniform: a function of its arguments, the same for a smaller vocabulary as far as it goes."""
    source = np.random.PCG64DXSM(np.random.SeedSequence((seed, row, position, purpose)))
    return source.random_raw((vocab + 1) // 2).view(np.uint32)[:vocab]


def uniform(seed: int, row: int, position: int, purpose: int) -> float:
    """In (0, 1), with the 53 bits of a float."""
    raw = np.random.PCG64DXSM(np.random.SeedSequence((seed, row, position, purpose))).random_raw()
    return ((int(raw) >> 11) + 0.5) * 2.0**-53


def draw(kept: Kept, bits: np.ndarray) -> tuple[int, float]:
    """(token, its probability): the Gumbel-max trick, as a race in which the smallest E / exp(logit) wins.

    E = -log(1 - u) is exponential for uniform u. Because u < E, only tokens whose u alone is ahead of the most likely
    token's time can win, and few are left to be looked at closely, in double precision.

    Args:
        bits: (vocab,) uint32 from ``noise``.
    """
    bits = bits if kept.ids is None else bits[kept.ids]
    top = int(kept.logits.argmax())
    weights = np.exp(kept.logits - kept.logits[top])
    time_of_top = -math.log1p(-(float(bits[top]) + 0.5) * 2.0**-32)
    near = np.flatnonzero(bits.astype(np.float32) < weights * np.float32(time_of_top * 2.0**32 * 1.0001))
    times = -np.log1p(-(bits[near] + 0.5) * 2.0**-32) / weights[near]
    place = int(near[times.argmin()])
    token = place if kept.ids is None else int(kept.ids[place])
    return token, float(weights[place] / weights.sum())


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What a rejected draw from ``q`` is replaced from, (vocab,), not normalised: max(p - q, 0)."""
    rest = np.maximum(p - q, 0)
    return rest if rest.any() else p  # p = q, and rounding has rejected


def draw_from(probabilities: np.ndarray, bits: np.ndarray) -> int:
    """A token by (vocab,) float64 probabilities, which need not sum to 1, and ``noise`` of the same width."""
    ids = np.flatnonzero(probabilities)
    return int(ids[(-np.log1p(-(bits[ids] + 0.5) * 2.0**-32) / probabilities[ids]).argmin()])


# ---------------------------------------------------------------- log-probabilities


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of the model's own probabilities. ``top``: (token id, log-probability), most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs_of(logits: np.ndarray, token: int, count: int) -> TokenLogprob:
    """Of ``token`` and the ``count`` most likely, from the model's logits (vocab,)."""
    most = float(logits.max())
    total = most + math.log(float(np.exp(logits - np.float32(most)).sum(dtype=np.float64)))
    top: list[tuple[int, float]] = []
    if count:
        ids = largest(logits, min(count, len(logits)))
        ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
        top = [(int(index), float(logits[index]) - total) for index in ids]
    return TokenLogprob(token, float(logits[token]) - total, top)
