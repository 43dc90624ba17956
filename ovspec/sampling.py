"""From logits to tokens: pure numpy functions."""

from __future__ import annotations

import numpy as np


def greedy(logits: np.ndarray) -> np.ndarray:
    """The most likely token at each place: (places, vocab) float32 -> (places,) int64."""
    return logits.argmax(axis=-1)
