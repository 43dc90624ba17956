"""Log-probabilities of tokens in the model's own distribution, in nats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ovspec.sampling.warp import largest


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability. ``top``: (token id, log-probability) of the most likely tokens, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]

    def as_json(self, text_of: Callable[[int], str]) -> dict[str, Any]:
        """Return it as JSON values, with the text of each token."""
        top = [[token, logprob, text_of(token)] for token, logprob in self.top]
        return {"token_id": self.token_id, "text": text_of(self.token_id), "logprob": self.logprob, "top": top}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities, in float64, for ``logits`` (..., vocab) float32."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def token_logprob(logits: np.ndarray, token: int, count: int) -> TokenLogprob:
    """Return the log-probability of ``token``, and of the ``count`` most likely ones, from ``logits`` (vocab,)."""
    logprobs, top = log_softmax(logits), list[tuple[int, float]]()
    if count:
        ids = largest(logits, min(count, len(logits)))
        ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
        top = [(int(index), float(logprobs[index])) for index in ids]
    return TokenLogprob(token, float(logprobs[token]), top)
