"""Log-probabilities of tokens in the model's own distribution, in nats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ovspec.sampling.warp import largest


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithms of the model's own probabilities. ``top``: (token id, log-probability), most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """(..., vocab) float32 logits -> log-probabilities in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def token_logprob(logits: np.ndarray, token: int, count: int) -> TokenLogprob:
    """Of ``token`` and the ``count`` most likely, from the model's logits (vocab,)."""
    logprobs, top = log_softmax(logits), list[tuple[int, float]]()
    if count:
        ids = largest(logits, min(count, len(logits)))
        ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
        top = [(int(index), float(logprobs[index])) for index in ids]
    return TokenLogprob(token, float(logprobs[token]), top)
