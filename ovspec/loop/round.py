"""The round: drafters propose tokens, and the target alone decides which to commit, in one inference.

Plain decoding is a round in which nothing is proposed.
"""

from __future__ import annotations

import time

import numpy as np

from ovspec.decoders.base import Decoder, needed_width
from ovspec.decoders.prefill import prefill_chunks, share_prefixes
from ovspec.decoders.sequence import catch_up
from ovspec.drafting.drafter import NO_LOGITS, Drafter, RoundRow
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.drafting.proposal import NO_TOKENS, NOTHING, Proposal


def run_round(
    target: Decoder, drafter: Drafter | None, lookahead: Lookahead, rows: list[RoundRow]
) -> RoundOutcome | None:
    """Commit at least one token to every row, and leave no trace of rejected tokens.

    A row that is still reading its prompt gets none, except forced tokens. Each row's results are stored in its
    ``RoundRow``. Returns what the lookahead can learn from the round, or None without a drafter.

    Args:
        target: its row i follows ``rows[i]``, of which it may have read only a part.
        drafter: None for plain decoding.
        lookahead: decides how many tokens to propose. If it is fixed at 0, constraints don't force tokens, either.
    """
    if lookahead.fixed != 0:
        for row in rows:
            if row.sampler.constraints.forces:
                commit_forced(row)
    began = time.perf_counter()
    propose(rows, drafter, lookahead)
    proposed = time.perf_counter()
    read(rows, target)
    logits, fed = [NO_LOGITS] * len(rows), [row.fed for row in rows]
    width = lookahead.target.fill(needed_width(target, fed)) if drafter else 0
    if any(map(len, fed)):
        logits = target.feed(fed, [row.wanted for row in rows], width)
    for index, row in enumerate(rows):
        if row.wanted:
            commit(row, logits[index], target, index)
    return outcome(rows, width, proposed - began, time.perf_counter() - proposed) if drafter else None


def commit_forced(row: RoundRow) -> None:
    """Commit the row's forced tokens. They need not be verified, because the target could choose nothing else."""
    constraints = row.sampler.constraints
    found = constraints.forced(row.sequence.tokens)[: row.budget]
    if found:
        row.forced = row.tokens = np.array(found, dtype=np.int64)
        row.sequence.commit(row.forced)
        row.budget -= len(found)
        row.ended = not row.budget or constraints.complete(row.sequence.tokens)


def propose(rows: list[RoundRow], drafter: Drafter | None, lookahead: Lookahead) -> None:
    """Collect proposals from the drafter. A row without one tries the tokens that healing took back from its prompt."""
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
    """Set what each row feeds: the tokens that the target has not read and the proposal, or a chunk of the prompt."""
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
        row.wanted = min(row.positions, row.read) + len(row.proposal.tokens)
        if len(row.proposal.tokens):
            row.fed = np.concatenate((row.fed, row.proposal.tokens))


def commit(row: RoundRow, logits: np.ndarray, target: Decoder, index: int) -> None:
    """Commit the accepted part of the proposal and one token of the target's own.

    That token replaces the first rejected one or, if the whole proposal was accepted, is the bonus token. There is none
    if an accepted token ends the text.
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


def outcome(rows: list[RoundRow], width: int, drafted: float, verified: float) -> RoundOutcome:
    """Return what the lookahead learns from: proposals, how many of their tokens were accepted, width and seconds."""
    forced = sum([len(row.forced) for row in rows if not row.ended])  # the last ones are never computed
    healed = any(row.healed for row in rows)
    return RoundOutcome(
        [(row.proposal, row.accepted) for row in rows],
        width,
        forced,
        healed or sum([len(row.unseen) for row in rows]) > len(rows) + forced,
        drafted,
        verified,
    )
