"""The round: every accelerator proposes, the target alone decides, in one inference.

Plain decoding is this round with nothing proposed.
"""

from __future__ import annotations

import time

import numpy as np

from ovspec.decoders.base import Decoder
from ovspec.decoders.prefill import prefill_chunks, share_prefixes
from ovspec.decoders.sequence import catch_up
from ovspec.drafting.drafter import NO_LOGITS, Drafter, RoundRow
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.drafting.proposal import NO_TOKENS, NOTHING, Proposal


def run_round(
    target: Decoder, drafter: Drafter | None, lookahead: Lookahead, rows: list[RoundRow]
) -> RoundOutcome | None:
    """Commit at least one token to every row, and leave no trace of what was rejected.

    A row that is still reading its prompt gets none. What came of each row stands in it; what the lookahead can learn
    from the round is returned, where there is a drafter.

    Args:
        target: its row i follows ``rows[i]``, however far it has got.
        drafter: None for plain decoding.
        lookahead: how many tokens it pays to propose; 0 of them also keeps constraints from forcing any.
    """
    if lookahead.fixed != 0:
        for row in rows:
            if row.sampler.constraints.forces:
                commit_forced(row)
    began = time.perf_counter()
    propose(rows, drafter, lookahead)
    proposed = time.perf_counter()
    read(rows, target)
    logits = [NO_LOGITS] * len(rows)
    if any(len(row.fed) for row in rows):
        logits = target.feed([row.fed for row in rows], [row.wanted for row in rows])
    for index, row in enumerate(rows):
        if row.wanted:
            commit(row, logits[index], target, index)
    return outcome(rows, proposed - began, time.perf_counter() - proposed) if drafter else None


def commit_forced(row: RoundRow) -> None:
    """Commit what constraints leave no choice about. No model verifies it: the target could choose nothing else."""
    constraints = row.sampler.constraints
    found = constraints.forced(row.sequence.tokens)[: row.budget]
    if found:
        row.forced = row.tokens = np.array(found, dtype=np.int64)
        row.sequence.commit(row.forced)
        row.budget -= len(found)
        row.ended = not row.budget or constraints.complete(row.sequence.tokens)


def propose(rows: list[RoundRow], drafter: Drafter | None, lookahead: Lookahead) -> None:
    """Have the drafter propose, or else healing, which knows how the prompt had spelt its end."""
    if drafter and any(row.draftable for row in rows):
        for row, proposal in zip(rows, drafter.propose(rows, lookahead), strict=True):
            row.proposal = proposal
    for row in rows:
        constraints = row.sampler.constraints
        if constraints.guesses and not row.ended and not len(row.proposal.tokens):
            likely = constraints.likely(row.sequence.tokens)
            if likely is not None:
                row.proposal, row.healed = row.permitted(Proposal(likely)), True


def read(rows: list[RoundRow], target: Decoder) -> None:
    """Find out what each row feeds: all that the target has not seen and the proposal, or a chunk of its prompt."""
    if len(rows) > 1:
        share_prefixes(target, [row.sequence for row in rows])
    for index, row in enumerate(rows):
        row.unseen = NO_TOKENS if row.ended else catch_up(target, index, row.sequence)
    chunks = [row.unseen for row in rows]
    if len(rows) > 1:
        chunks = prefill_chunks(target, chunks)
    for row, row.fed in zip(rows, chunks, strict=True):
        row.read = len(row.fed)
        if row.read < len(row.unseen) or row.ended:
            row.proposal = NOTHING
            continue
        if len(row.forced) and row.read == len(row.forced) + 1:
            # Asked for all logits, a decoder feeds forced tokens as plain decoding would feed them, to the bit.
            row.positions = row.read
        row.wanted = min(row.positions, row.read) + len(row.proposal.tokens)
        if len(row.proposal.tokens):
            row.fed = np.concatenate((row.fed, row.proposal.tokens))


def commit(row: RoundRow, logits: np.ndarray, target: Decoder, index: int) -> None:
    """Commit the target's choices as long as the proposal agrees with them, and the one that follows.

    That one is the correction of the first wrong guess or, after a fully accepted proposal, the bonus token; there is
    none where an accepted token ends the text.
    """
    proposed = len(row.proposal.tokens)
    own = logits[len(logits) - proposed - 1 :]
    chosen = row.sampler.verify(own, row.sequence, row.proposal.tokens, row.proposal.q)
    row.sequence.commit(chosen)
    row.logits = own[: len(chosen)] if len(chosen) else logits
    row.tokens = np.concatenate((row.forced, chosen)) if len(row.forced) else chosen
    if proposed and len(chosen):
        row.accepted = int((chosen[:proposed] == row.proposal.tokens[: len(chosen)]).sum())
        if row.accepted < proposed:
            target.truncate(index, len(row.sequence) - 1)
    if row.healed:
        row.proposal, row.accepted = NOTHING, 0


def outcome(rows: list[RoundRow], drafted: float, verified: float) -> RoundOutcome:
    """What the lookahead learns from: proposals and how many of their tokens stood, widths, and seconds."""
    forced = sum([len(row.forced) for row in rows])
    healed = any(row.healed for row in rows)
    return RoundOutcome(
        [(row.proposal, row.accepted) for row in rows],
        sum([len(row.fed) for row in rows]),
        forced,
        healed or sum([len(row.unseen) for row in rows]) > len(rows) + forced,
        drafted,
        verified,
    )
