"""Stateless random numbers, and sampling tokens with them."""

from __future__ import annotations

import math

import numpy as np

from ovspec.sampling.warp import WarpedLogits

# Purposes of noise: independent draws at the same position need different noise.
CHOICE_NOISE, DRAFT_NOISE, ACCEPT_NOISE, RESIDUAL_NOISE = range(4)


def make_noise(seed: int, sample: int, position: int, vocab_size: int, purpose: int = CHOICE_NOISE) -> np.ndarray:
    """Return uniform noise, (vocab,) uint32, a function of the arguments. A smaller ``vocab_size`` yields a prefix."""
    generator = np.random.PCG64DXSM(np.random.SeedSequence((seed, sample, position, purpose)))
    return generator.random_raw((vocab_size + 1) // 2).view(np.uint32)[:vocab_size]


def draw_uniform(seed: int, sample: int, position: int, purpose: int) -> float:
    """Return a uniform number in (0, 1), with the 53 bits of a float."""
    random_bits = np.random.PCG64DXSM(np.random.SeedSequence((seed, sample, position, purpose))).random_raw()
    return ((int(random_bits) >> 11) + 0.5) * 2.0**-53


def draw_token(warped_logits: WarpedLogits, noise_bits: np.ndarray) -> tuple[int, float]:
    """Draw a token; return (token, its probability).

    This is the Gumbel-max trick, as a race won by the smallest E / exp(logit). E = -log(1 - u) is exponential for
    uniform u, derived from ``noise_bits`` (vocab,). Because u < E, a token can only win if its u / exp(logit) is less
    than the time of the most likely token, so only these few are computed in double precision.
    """
    if warped_logits.ids is not None:
        noise_bits = noise_bits[warped_logits.ids]
    top_index = int(warped_logits.logits.argmax())
    weights = np.exp(warped_logits.logits - warped_logits.logits[top_index])
    top_race_time = -math.log1p(-(float(noise_bits[top_index]) + 0.5) * 2.0**-32)
    candidate_indices = np.flatnonzero(
        noise_bits.astype(np.float32) < weights * np.float32(top_race_time * 2.0**32 * 1.0001)
    )
    race_times = -np.log1p(-(noise_bits[candidate_indices] + 0.5) * 2.0**-32) / weights[candidate_indices]
    winner_index = int(candidate_indices[race_times.argmin()])
    token = winner_index if warped_logits.ids is None else int(warped_logits.ids[winner_index])
    return token, float(weights[winner_index] / weights.sum())


def residual_probabilities(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return max(p - q, 0), (vocab,), not normalised, to draw from after a draw from ``q`` was rejected."""
    residual = np.maximum(p - q, 0)
    return residual if residual.any() else p  # p = q, and the rejection was a rounding error


def draw_from_probabilities(probabilities: np.ndarray, noise_bits: np.ndarray) -> int:
    """Draw a token from probabilities (vocab,) float64, which need not sum to 1, with noise of the same width."""
    possible_ids = np.flatnonzero(probabilities)
    return int(
        possible_ids[(-np.log1p(-(noise_bits[possible_ids] + 0.5) * 2.0**-32) / probabilities[possible_ids]).argmin()]
    )
