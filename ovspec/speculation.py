"""The loop: every accelerator proposes, the target alone decides, in one inference a round.

Plain decoding is this loop with nothing proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ovspec.decoder import Decoder, catch_up
from ovspec.drafting import NOTHING, Drafter, Proposal
from ovspec.sequence import Sequence

# (places, vocab) float32 -> (places,) int64
Choose = Callable[[np.ndarray], np.ndarray]


@dataclass(slots=True)
class Verdict:
    """What one round did to one row: ``tokens`` (accepted + 1,) were committed."""

    tokens: np.ndarray
    proposed: int
    accepted: int


def speculate(
    target: Decoder, drafter: Drafter | None, sequences: list[Sequence], budgets: list[int], choose: Choose
) -> list[Verdict]:
    """One round over all rows: propose, verify, commit, and leave no trace of what was rejected.

    Args:
        target: its row i follows ``sequences[i]``, however far it has got.
        drafter: proposes at most ``budgets[i]`` tokens for row i; None for plain decoding.
        sequences: the rows; each grows by at least one token.
        choose: the target's own choice at each place.
    """
    proposals = [NOTHING] * len(sequences)
    if drafter and any(budgets):
        proposals = drafter.propose(sequences, budgets)
    unseen = [catch_up(target, row, sequence) for row, sequence in enumerate(sequences)]
    fed = [
        np.concatenate((new, proposal.tokens)) if len(proposal.tokens) else new
        for new, proposal in zip(unseen, proposals, strict=True)
    ]
    logits = target.feed(fed, [len(proposal.tokens) + 1 for proposal in proposals])
    return [
        commit(target, row, sequence, proposal, choose(logits[row]))
        for row, (sequence, proposal) in enumerate(zip(sequences, proposals, strict=True))
    ]


def commit(target: Decoder, row: int, sequence: Sequence, proposal: Proposal, choices: np.ndarray) -> Verdict:
    """Take the target's ``choices`` (proposed + 1,) as long as the proposal agrees, and the one that follows.

    That one is the correction of the first wrong guess or, after a fully accepted proposal, the bonus token.
    """
    proposed = accepted = len(proposal.tokens)
    if proposed:
        wrong = choices[:proposed] != proposal.tokens
        first = int(wrong.argmax())
        if wrong[first]:
            choices, accepted = choices[: first + 1], first
    sequence.commit(choices)
    if accepted < proposed:
        target.truncate(row, len(sequence) - 1)
    return Verdict(choices, proposed, accepted)
