"""Pure numpy functions to shape logits before sampling a token.

Order, as in Hugging Face: logit bias, repetition penalty, presence and frequency penalty, min_tokens, temperature,
top-k, top-p, min-p, typical-p.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ovspec.base.errors import OvspecError
from ovspec.params import SamplingParams

RARE_TOKEN_SHARE = 1e-3  # less likely tokens, relative to the most likely token, rarely matter for top-p
MAXIMA_BLOCK_SIZE = 128  # size of blocks in the search for the largest logits
NO_TOKEN_LEFT = (
    "No token can be chosen, because all are excluded or the model's logits are NaN; exclude fewer tokens, or export "
    "the model again."
)


class WarpedLogits(NamedTuple):
    """Logits after warping, (n,) float32, of the remaining ``ids`` (n,); None for the whole vocabulary."""

    ids: np.ndarray | None
    logits: np.ndarray

    def probabilities(self, vocab_size: int) -> np.ndarray:
        """Return the probabilities, (vocab,) float64."""
        remaining_probabilities = softmax(self.logits.astype(np.float64))
        if self.ids is None and len(remaining_probabilities) == vocab_size:
            return remaining_probabilities
        ids = np.arange(len(remaining_probabilities)) if self.ids is None else self.ids
        probabilities = np.zeros(vocab_size)
        probabilities[ids[ids < vocab_size]] = remaining_probabilities[ids < vocab_size]
        return probabilities


def certain_distribution(token: int) -> WarpedLogits:
    """Return a distribution with probability 1 for ``token``."""
    return WarpedLogits(np.array([token]), np.zeros(1, dtype=np.float32))


def warp_logits(logits: np.ndarray, params: SamplingParams, ids: np.ndarray | None = None) -> WarpedLogits:
    """Apply temperature, top-k, top-p, min-p and typical-p, in this order, to ``logits`` (vocab,), or of ``ids`` (n,).

    The vocabulary is never sorted as a whole. Raises OvspecError if no token is left.
    """
    max_logit = logits.max()
    if not np.isfinite(max_logit):
        raise OvspecError(NO_TOKEN_LEFT)
    logits = (logits - max_logit) * np.float32(1 / max(params.temperature, 1e-30))  # the largest is 0
    if not params.truncating_options:
        return WarpedLogits(ids, logits)
    if 0 < params.top_k < len(logits):
        ids, logits = select_positions(ids, logits, ids_of_largest_logits(logits, params.top_k))
    if params.top_p < 1:
        weights = np.exp(logits)
        total_weight = float(weights.sum(dtype=np.float64))
        likely_positions = np.flatnonzero(weights >= RARE_TOKEN_SHARE)
        if weights[likely_positions].sum(dtype=np.float64) < params.top_p * total_weight:
            # All tokens below this threshold together have no more than the share 1 - top_p.
            likely_positions = np.flatnonzero(weights >= (1 - params.top_p) * total_weight / len(weights))
        ids, logits = select_positions(ids, logits, likely_positions)
        likeliest_positions = find_smallest_up_to_weight(
            -logits, weights[likely_positions], params.top_p * total_weight
        )
        ids, logits = select_positions(ids, logits, likeliest_positions)
    if params.min_p > 0:
        ids, logits = select_positions(ids, logits, np.flatnonzero(logits >= np.float32(math.log(params.min_p))))
    if params.typical_p < 1:
        weights = np.exp(logits)
        possible_positions = np.flatnonzero(weights)  # a banned token's information would be infinite
        ids, logits = select_positions(ids, logits, possible_positions)
        weights = weights[possible_positions]
        total_weight = float(weights.sum(dtype=np.float64))
        information_nats = np.float32(math.log(total_weight)) - logits  # in nats
        entropy = float((weights * information_nats).sum(dtype=np.float64)) / total_weight
        surprise = np.abs(information_nats - np.float32(entropy))
        typical_positions = find_smallest_up_to_weight(surprise, weights, params.typical_p * total_weight)
        ids, logits = select_positions(ids, logits, typical_positions)
    return WarpedLogits(ids, logits)


def select_positions(
    ids: np.ndarray | None, logits: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids and logits at ``positions``; ``ids`` is None for the whole vocabulary."""
    return positions if ids is None else ids[positions], logits[positions]


def find_smallest_up_to_weight(sort_keys: np.ndarray, weights: np.ndarray, weight_limit: float) -> np.ndarray:
    """Return the indices of the smallest ``sort_keys`` (n,) with a sum of ``weights`` (n,) of ``weight_limit`` or more.

    Ties with the last key are included. If there are many keys, only the bucket at the limit is sorted.
    """
    bucket_members = np.arange(len(sort_keys))
    weight_before = 0.0
    if len(sort_keys) > 2048:
        min_key = float(sort_keys.min())
        max_key = float(sort_keys.max())
        buckets = ((sort_keys - np.float32(min_key)) * np.float32(2047 / max(max_key - min_key, 1e-9))).astype(np.int32)
        weight_sums = np.cumsum(np.bincount(buckets, weights, 2049))
        reached_bucket = min(int(np.searchsorted(weight_sums, weight_limit)), int(buckets.max()))
        bucket_members = np.flatnonzero(buckets == reached_bucket)
        weight_before = float(weight_sums[reached_bucket - 1]) if reached_bucket else 0.0
        if not len(bucket_members):  # by rounding, the limit is the sum of all weights
            return np.arange(len(sort_keys))
    ordered_members = bucket_members[np.argsort(sort_keys[bucket_members], kind="stable")]
    weight_sums = weight_before + np.cumsum(weights[ordered_members], dtype=np.float64)
    last_rank = min(int(np.searchsorted(weight_sums, weight_limit)), len(ordered_members) - 1)
    return np.flatnonzero(sort_keys <= sort_keys[ordered_members[last_rank]])


def ids_of_largest_logits(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the ``count`` largest ``logits`` (vocab,), including ties with the smallest of these."""
    blocked_length = len(logits) // MAXIMA_BLOCK_SIZE * MAXIMA_BLOCK_SIZE
    if blocked_length // MAXIMA_BLOCK_SIZE > 2 * count:
        # The count-th largest block maximum is at most the count-th largest logit.
        block_maxima = logits[:blocked_length].reshape(-1, MAXIMA_BLOCK_SIZE).max(axis=1)
        candidate_ids = np.flatnonzero(logits >= np.partition(block_maxima, len(block_maxima) - count)[-count])
    else:
        candidate_ids = np.arange(len(logits))
    candidate_logits = logits[candidate_ids]
    return candidate_ids[candidate_logits >= np.partition(candidate_logits, len(candidate_logits) - count)[-count]]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
