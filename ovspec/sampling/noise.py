"""Random numbers without a state, and drawing tokens with them."""

from __future__ import annotations

import math

import numpy as np

from ovspec.sampling.warp import WarpedLogits

# What noise is drawn for: independent draws at one index need noise of their own.
CHOICE, DRAFT, ACCEPT, RESIDUAL = range(4)


def noise(seed: int, row: int, position: int, vocab: int, purpose: int = CHOICE) -> np.ndarray:
    """(vocab,) uint32, uniform: a function of its arguments, the same for a smaller vocabulary as far as it goes."""
    source = np.random.PCG64DXSM(np.random.SeedSequence((seed, row, position, purpose)))
    return source.random_raw((vocab + 1) // 2).view(np.uint32)[:vocab]


def uniform(seed: int, row: int, position: int, purpose: int) -> float:
    """In (0, 1), with the 53 bits of a float."""
    raw = np.random.PCG64DXSM(np.random.SeedSequence((seed, row, position, purpose))).random_raw()
    return ((int(raw) >> 11) + 0.5) * 2.0**-53


def draw(kept: WarpedLogits, bits: np.ndarray) -> tuple[int, float]:
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
    index = int(near[times.argmin()])
    token = index if kept.ids is None else int(kept.ids[index])
    return token, float(weights[index] / weights.sum())


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What a rejected draw from ``q`` is replaced from, (vocab,), not normalised: max(p - q, 0)."""
    rest = np.maximum(p - q, 0)
    return rest if rest.any() else p  # p = q, and rounding has rejected


def draw_from(probabilities: np.ndarray, bits: np.ndarray) -> int:
    """A token by (vocab,) float64 probabilities, which need not sum to 1, and ``noise`` of the same width."""
    ids = np.flatnonzero(probabilities)
    return int(ids[(-np.log1p(-(bits[ids] + 0.5) * 2.0**-32) / probabilities[ids]).argmin()])
