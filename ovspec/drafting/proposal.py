"""Proposals: the tokens proposed by a drafter for a row."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ovspec.sampling.warp import WarpedLogits


@dataclass(frozen=True)
class Proposal:
    """Proposed next tokens, (n,) int64.

    ``confidence`` (n,), 0 to 1: the drafter's confidence in each token, on the drafter's own scale; the lookahead
    learns the corresponding acceptance. ``distributions``: for rejection sampling, each token's distribution.
    ``source``: the drafter's name. ``from_healing``: whether the tokens are healed prompt tokens; statistics leave them
    out.
    """

    tokens: np.ndarray
    confidence: np.ndarray | None = None
    distributions: list[WarpedLogits] | None = None
    source: str = ""
    from_healing: bool = False


NO_TOKENS = np.empty(0, dtype=np.int64)
NO_PROPOSAL = Proposal(NO_TOKENS)


def shorten_proposal(proposal: Proposal, length: int) -> Proposal:
    """Return ``proposal`` cut to its first ``length`` tokens."""
    if length >= len(proposal.tokens):
        return proposal
    if length <= 0:
        return NO_PROPOSAL
    confidence = None if proposal.confidence is None else proposal.confidence[:length]
    distributions = proposal.distributions and proposal.distributions[:length]
    return replace(proposal, tokens=proposal.tokens[:length], confidence=confidence, distributions=distributions)
