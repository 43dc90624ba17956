"""The loop: every accelerator proposes, the target alone decides, in one inference a round.

Plain decoding is this loop with nothing proposed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ovspec.decoders.base import Decoder, catch_up
from ovspec.decoders.prefill import prefill_chunks, share_prefixes
from ovspec.drafting.drafter import Drafter, Round
from ovspec.drafting.proposal import AGAIN, NOTHING, Proposal


@dataclass(slots=True)
class RoundResult:
    """What one round did to one row: ``tokens`` (n,) were committed; none where it is reading its prompt.

    The first ``forced`` of them came without being chosen, the next ``accepted`` had been proposed; one more, if any,
    is the target's own. ``logits`` (n - forced, vocab) are the target's for each of the others, valid until the next
    round. ``source`` has proposed. ``read``: tokens of the text so far that had to be fed.
    """

    tokens: np.ndarray
    forced: int
    proposed: int
    accepted: int
    logits: np.ndarray
    source: str
    read: int

    def sources(self) -> list[str]:
        """Where each of ``tokens`` came from: "forced", the drafter's name, or "target"."""
        proposed = ["forced"] * self.forced + [self.source] * self.accepted
        return proposed + ["target"] * (len(self.tokens) - len(proposed))


def speculate(target: Decoder, drafter: Drafter | None, round: Round) -> list[RoundResult]:
    """One round over all rows: propose, verify, commit, and leave no trace of what was rejected.

    Args:
        target: its row i follows the i-th sequence of ``round``, however far it has got.
        drafter: None for plain decoding.
        round: each of its sequences grows by at least one token, unless its prompt is still being read.
    """
    began, rows = time.perf_counter(), range(len(round.sequences))
    forced, ended = [NOTHING.tokens] * len(rows), [False] * len(rows)
    if any(sampler.constraints.forces for sampler in round.samplers):
        forced = [commit_forced(row, round) for row in rows]
        ended = [len(forced[row]) > 0 and round.complete(row) for row in rows]
        round.remaining = [0 if ended[row] else max(0, round.remaining[row] - len(forced[row])) for row in rows]
    proposals = [NOTHING] * len(rows)
    if drafter and any(left > 0 for left in round.remaining):
        proposals = drafter.propose(round)
    if any(sampler.constraints for sampler in round.samplers):
        proposals = [
            proposal if ended[row] or len(proposal.tokens) else round.again(row)
            for row, proposal in enumerate(proposals)
        ]
    drafted = time.perf_counter()
    share_prefixes(target, round.sequences)
    unseen = [NOTHING.tokens if ended[row] else catch_up(target, row, round.sequences[row]) for row in rows]
    read = prefill_chunks(target, unseen)
    read_all = [len(read[row]) == len(unseen[row]) for row in rows]
    proposals = [proposal if read_all[row] else NOTHING for row, proposal in enumerate(proposals)]
    fed = [
        np.concatenate((read[row], proposals[row].tokens)) if len(proposals[row].tokens) else read[row] for row in rows
    ]
    wanted = [len(proposals[row].tokens) + 1 if read_all[row] and not ended[row] else 0 for row in rows]
    # Asked for all logits, a decoder feeds what was forced as it would have been fed in plain decoding, to the bit.
    asked = [
        len(fed[row]) if len(forced[row]) and len(unseen[row]) == len(forced[row]) + 1 and wanted[row] else wanted[row]
        for row in rows
    ]
    logits = target.feed(fed, asked) if any(map(len, fed)) else [NO_LOGITS] * len(rows)
    if asked != wanted:
        logits = [each[len(each) - wanted[row] :] for row, each in enumerate(logits)]
    verdicts = [commit(target, row, forced[row], len(read[row]), proposals[row], logits[row], round) for row in rows]
    if drafter:
        verified = time.perf_counter() - drafted
        accepted, width = [verdict.accepted for verdict in verdicts], sum(map(len, fed))
        new = sum(map(len, forced))
        read_a_prompt = sum(map(len, unseen)) > len(unseen) + new or any(each.source == AGAIN for each in proposals)
        round.lookahead.learn(proposals, accepted, width, drafted - began, verified, read_a_prompt, new)
    return verdicts


NO_LOGITS = np.empty((0, 0), dtype=np.float32)


def commit_forced(row: int, round: Round) -> np.ndarray:
    """Commit what constraints leave no choice about, (n,) int64.

    No model needs to verify it: the target could choose nothing else.
    """
    constraints, sequence = round.samplers[row].constraints, round.sequences[row]
    if not constraints.forces or round.room[row] <= 0:
        return NOTHING.tokens
    found = np.array(constraints.forced(sequence.tokens)[: round.room[row]], dtype=np.int64)
    sequence.commit(found)
    return found


def commit(
    target: Decoder, row: int, forced: np.ndarray, read: int, proposal: Proposal, logits: np.ndarray, round: Round
) -> RoundResult:
    """Take the target's choices as long as the proposal agrees, and the one that follows.

    That one is the correction of the first wrong guess or, after a fully accepted proposal, the bonus token; there is
    none where an accepted token ends the text. Without ``logits`` the row is still reading, or all of the text was
    forced.
    """
    if not len(logits):
        return RoundResult(forced, len(forced), 0, 0, logits, "", read)
    sequence, proposed = round.sequences[row], len(proposal.tokens)
    tokens = round.samplers[row].verify(logits, sequence, proposal)
    accepted = int((tokens[:proposed] == proposal.tokens[: len(tokens)]).sum()) if proposed else 0
    sequence.commit(tokens)
    if accepted < proposed:
        target.truncate(row, len(sequence) - 1)
    committed = np.concatenate((forced, tokens)) if len(forced) else tokens
    if proposal.source == AGAIN:
        proposed = accepted = 0
    return RoundResult(committed, len(forced), proposed, accepted, logits[: len(tokens)], proposal.source, read)
