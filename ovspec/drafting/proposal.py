"""Proposals: the tokens that a drafter proposes for a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ovspec.sampling.warp import WarpedLogits


@dataclass(frozen=True)
class Proposal:
    """Tokens (n,) int64 that may come next.

    ``confidence`` (n,), 0 to 1: how sure the drafter is of each, on a scale of its own; the lookahead learns what
    acceptance it means. ``q``: the distribution that each token was drawn from, for rejection sampling. ``source``: the
    drafter's name. ``healed``: whether healing took the tokens back from the prompt; statistics leave them out.
    """

    tokens: np.ndarray
    confidence: np.ndarray | None = None
    q: list[WarpedLogits] | None = None
    source: str = ""
    healed: bool = False


NO_TOKENS = np.empty(0, dtype=np.int64)
NOTHING = Proposal(NO_TOKENS)


def shorten(proposal: Proposal, length: int) -> Proposal:
    """Return ``proposal`` cut to its first ``length`` tokens."""
    if length >= len(proposal.tokens):
        return proposal
    if length <= 0:
        return NOTHING
    confidence = None if proposal.confidence is None else proposal.confidence[:length]
    drawn = proposal.q and proposal.q[:length]
    return replace(proposal, tokens=proposal.tokens[:length], confidence=confidence, q=drawn)
