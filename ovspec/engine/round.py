"""The round: drafters propose tokens, and the target alone decides which to commit, in one inference.

Plain decoding is a round in which nothing is proposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ovspec.base.errors import InferenceError
from ovspec.cache.decoder import Decoder, needed_width
from ovspec.cache.prefill import PREFILL_ABOVE, prefill_chunks
from ovspec.cache.sequence import catch_up
from ovspec.drafting.drafter import Drafter, RowStep
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.drafting.proposal import NO_TOKENS, NOTHING, Proposal
from ovspec.engine.prefill_budget import Load, PrefillBudget


def run_round(
    target: Decoder,
    drafter: Drafter | None,
    lookahead: Lookahead,
    rows: list[RowStep],
    prefill_budget: PrefillBudget | None = None,
) -> RoundOutcome | None:
    """Commit at least one token to every row, and leave no trace of rejected tokens.

    A row that is still reading its prompt gets none, except forced tokens. Each row's results are stored in its
    ``RowStep``; if its constraints fail, only that row gets an ``error``. Returns what the lookahead can learn from
    the round, or None without a drafter.

    Args:
        target: its row i follows ``rows[i]``, of which it may have read only a part.
        drafter: None for plain decoding.
        lookahead: decides how many tokens to propose. If it is fixed at 0, constraints don't force tokens, either.
        prefill_budget: decides how much of the prompts is read, if rows that generate must not wait long.
    """
    for row in rows:
        if row.sampler.constraints.forces and 0 not in (lookahead.fixed, row.limits.lookahead):
            attempt(commit_forced, row)
    if drafter and prefill_budget:
        behind = [len(row.sequence) - len(held) for row, held in zip(rows, target.rows, strict=True)]
        unread = [count for count in behind if count > PREFILL_ABOVE]
        lookahead.begin(prefill_budget.most_ms(Load(len(rows) - len(unread), len(unread)), sum(unread)), paced=True)
    elif drafter:
        lookahead.begin()
    began = time.perf_counter()
    propose(rows, drafter, lookahead)
    proposed = time.perf_counter()
    load = find_unseen(rows, target)
    chunks = [row.unseen for row in rows]
    if len(rows) > 1 or prefill_budget:
        chunks = prefill_chunks(
            target, chunks, prefill_budget.room(load, 1e3 * (proposed - began)) if prefill_budget else None
        )
    feed_chunks(rows, chunks)
    fed, before = [row.fed for row in rows], target.seconds
    width = lookahead.target.fill(needed_width(target, fed)) if drafter else 0
    if any(map(len, fed)):
        logits = target.feed(fed, [row.wanted for row in rows], width)
        if prefill_budget:
            prompts = sum([row.read for row in rows if len(row.unseen) > PREFILL_ABOVE])
            prefill_budget.learn(load, prompts, 1e3 * (target.seconds - before))
        for index, row in enumerate(rows):
            if row.wanted:
                attempt(commit, row, logits[index], target, index)
    return outcome(rows, width, proposed - began, time.perf_counter() - proposed) if drafter else None


def attempt(step: Callable[..., None], row: RowStep, *arguments: Any) -> None:
    """Run a step of a row; if its constraints or a user's function fail, the row has ended, and the others go on."""
    began = time.thread_time()  # what other threads do meanwhile is not the row's fault
    try:
        step(row, *arguments)
    except InferenceError:
        raise
    except Exception as error:
        row.error, row.ended, row.proposal, row.accepted = error, True, NOTHING, 0
    row.constraint_seconds += time.thread_time() - began


def commit_forced(row: RowStep) -> None:
    """Commit the row's forced tokens. They need not be verified, because the target could choose nothing else."""
    constraints = row.sampler.constraints
    found = constraints.forced(row.sequence.tokens)[: row.budget]
    if found:
        row.forced = row.tokens = np.array(found, dtype=np.int64)
        row.sequence.commit(row.forced)
        row.budget -= len(found)
        row.ended = not row.budget or constraints.complete(row.sequence.tokens)


def propose(rows: list[RowStep], drafter: Drafter | None, lookahead: Lookahead) -> None:
    """Collect proposals from the drafter. A row without one tries the tokens that healing took back from its prompt."""
    if drafter and any(row.draftable() for row in rows):
        for row, proposal in zip(rows, drafter.propose(rows, lookahead), strict=True):
            row.proposal = proposal
    for row in rows:
        constraints = row.sampler.constraints
        if constraints.guesses and not row.ended and not len(row.proposal.tokens):
            likely = constraints.likely(row.sequence.tokens)
            if likely is not None:
                row.proposal, row.healed = row.permitted(Proposal(likely)), True


def find_unseen(rows: list[RowStep], target: Decoder) -> Load:
    """Set the tokens of each row that the target has not read; return what the round does besides reading prompts."""
    target.adopt([row.sequence for row in rows])
    for index, row in enumerate(rows):
        row.unseen = NO_TOKENS if row.ended else catch_up(target, index, row.sequence)
    generating = [row for row in rows if 0 < len(row.unseen) <= PREFILL_ABOVE]
    return Load(
        generating=len(generating),
        reading=sum([len(row.unseen) > PREFILL_ABOVE for row in rows]),
        rest=sum([len(row.unseen) - 1 for row in generating]),
        proposed=sum([len(row.proposal.tokens) for row in generating]),
    )


def feed_chunks(rows: list[RowStep], chunks: list[np.ndarray]) -> None:
    """Set what each row feeds: its chunk of unseen tokens and, if these are all, the proposal."""
    for row, chunk in zip(rows, chunks, strict=True):
        row.fed, row.read = chunk, len(chunk)
        if row.ended or row.read < len(row.unseen):
            row.proposal = NOTHING
            continue
        row.wanted = min(row.positions, row.read) + len(row.proposal.tokens)
        if len(row.proposal.tokens):
            row.fed = np.concatenate((chunk, row.proposal.tokens))


def commit(row: RowStep, logits: np.ndarray, target: Decoder, index: int) -> None:
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


def outcome(rows: list[RowStep], width: int, drafted: float, verified: float) -> RoundOutcome:
    forced = sum([len(row.forced) for row in rows if not row.ended])  # the last ones are never computed
    prefilled = any(row.healed for row in rows) or sum([len(row.unseen) for row in rows]) > len(rows) + forced
    judged = [(row.proposal, row.accepted) for row in rows]
    return RoundOutcome(judged, width, forced, prefilled, drafted, verified)
