"""Log-probabilities of tokens in the model's own distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ovspec.sampling.warp import largest


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
