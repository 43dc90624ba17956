"""The loop: every accelerator proposes, the target alone decides, in one inference a round.

Plain decoding is this loop with nothing proposed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ovspec.decoder import Decoder, catch_up
from ovspec.drafting import NOTHING, Drafter, Proposal, Round
from ovspec.reading import pieces, share_beginnings


@dataclass(slots=True)
class Verdict:
    """What one round did to one row: ``tokens`` (accepted + 1,) were committed; none where it is reading its prompt.

    ``logits`` (accepted + 1, vocab) are the target's for each of them, valid until the next round. ``source`` has
    proposed. ``read``: tokens of the text so far that had to be fed.
    """

    tokens: np.ndarray
    proposed: int
    accepted: int
    logits: np.ndarray
    source: str
    read: int


def speculate(target: Decoder, drafter: Drafter | None, round: Round) -> list[Verdict]:
    """One round over all rows: propose, verify, commit, and leave no trace of what was rejected.

    Args:
        target: its row i follows the i-th sequence of ``round``, however far it has got.
        drafter: None for plain decoding.
        round: each of its sequences grows by at least one token.
    """
    began = time.perf_counter()
    proposals = [NOTHING] * len(round.sequences)
    if drafter and any(left > 0 for left in round.remaining):
        proposals = drafter.propose(round)
    drafted = time.perf_counter()
    share_beginnings(target, round.sequences)
    unseen = [catch_up(target, row, sequence) for row, sequence in enumerate(round.sequences)]
    read = pieces(target, unseen)
    fed = [
        np.concatenate((new, proposal.tokens)) if len(proposal.tokens) else new
        for new, proposal in zip(read, proposals, strict=True)
    ]
    wanted = [
        len(proposal.tokens) + 1 if len(piece) == len(new) else 0
        for proposal, piece, new in zip(proposals, read, unseen, strict=True)
    ]
    logits = target.feed(fed, wanted)
    verdicts = [commit(target, row, len(read[row]), proposals[row], logits[row], round) for row in range(len(read))]
    verified = time.perf_counter() - drafted
    accepted = [verdict.accepted for verdict in verdicts]
    read_a_prompt = sum(map(len, unseen)) > len(unseen)
    round.lookahead.learn(proposals, accepted, sum(map(len, fed)), drafted - began, verified, read_a_prompt)
    return verdicts


def commit(target: Decoder, row: int, read: int, proposal: Proposal, logits: np.ndarray, round: Round) -> Verdict:
    """Take the target's choices as long as the proposal agrees, and the one that follows.

    That one is the correction of the first wrong guess or, after a fully accepted proposal, the bonus token. Without
    ``logits`` the row is still reading.
    """
    if not len(logits):
        return Verdict(NOTHING.tokens, 0, 0, logits, "", read)
    sequence, proposed = round.sequences[row], len(proposal.tokens)
    tokens = round.samplers[row].verify(logits, sequence, proposal)
    accepted = len(tokens) - 1
    sequence.commit(tokens)
    if accepted < proposed:
        target.truncate(row, len(sequence) - 1)
    return Verdict(tokens, proposed, accepted, logits[: len(tokens)], proposal.source, read)
