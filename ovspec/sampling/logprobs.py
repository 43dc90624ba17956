"""Log-probabilities of tokens in the model's own distribution, in nats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ovspec.base.json_types import JsonObject
from ovspec.sampling.warp import ids_of_largest_logits


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability. ``top``: (token id, log-probability) of the most likely tokens, most likely first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]

    def as_json(self, token_text: Callable[[int], str]) -> JsonObject:
        """Return the fields for JSON, with the text of each token."""
        top = [[token_id, logprob, token_text(token_id)] for token_id, logprob in self.top]
        return {"token_id": self.token_id, "text": token_text(self.token_id), "logprob": self.logprob, "top": top}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities, in float64, for ``logits`` (..., vocab) float32."""
    logprobs = logits.astype(np.float64)
    logprobs -= logprobs.max(axis=-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=-1, keepdims=True))
    return logprobs


def make_token_logprob(logits: np.ndarray, token_id: int, top_count: int) -> TokenLogprob:
    """Return the log-probability of ``token_id``, and of the ``top_count`` most likely ids, by ``logits`` (vocab,)."""
    logprobs = log_softmax(logits)
    top_logprobs: list[tuple[int, float]] = []
    if top_count:
        top_ids = ids_of_largest_logits(logits, min(top_count, len(logits)))
        top_ids = top_ids[np.argsort(-logits[top_ids], kind="stable")][:top_count]
        top_logprobs = [(int(token_id), float(logprobs[token_id])) for token_id in top_ids]
    return TokenLogprob(token_id, float(logprobs[token_id]), top_logprobs)
