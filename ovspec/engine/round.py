"""The round: drafters propose tokens, and the target alone decides which to commit, in one inference.

Plain decoding is a round in which nothing is proposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ovspec.base.errors import InferenceError
from ovspec.cache.decoder import Decoder, count_computed_tokens
from ovspec.cache.prefill import PREFILL_THRESHOLD, choose_prefill_chunks
from ovspec.cache.sequence import catch_up
from ovspec.drafting.drafter import Drafter, RowStep
from ovspec.drafting.lookahead import Lookahead, RoundOutcome
from ovspec.drafting.proposal import NO_PROPOSAL, NO_TOKENS, Proposal
from ovspec.engine.prefill_budget import PrefillBudget, RoundLoad

NO_LOGITS = np.empty((0, 0), dtype=np.float32)


class RowFeed(NamedTuple):
    """What a row feeds the target in a round."""

    tokens: np.ndarray  # (n,): tokens that the target has not read, then the proposal
    unseen_count: int  # how many are no proposal
    proposal: Proposal = NO_PROPOSAL
    logits_count: int = 0  # number of tokens, the last ones, after which logits are computed


class RowOutcome(NamedTuple):
    """What came of a row in a round, or so far, of the forced tokens alone."""

    tokens: np.ndarray = NO_TOKENS  # (n,), all committed: forced, accepted, the target's own
    forced_count: int = 0  # how many of these were forced; they come first
    ended: bool = False  # whether the text has ended with forced tokens or an error, so that the model isn't run for it
    proposal: Proposal = NO_PROPOSAL
    accepted_count: int = 0  # how many proposed tokens were accepted
    read_count: int = 0  # how many tokens the target read, without the proposal
    # (n, vocab), for each committed token that wasn't forced, or all computed ones if the sampler chose none; valid
    # until the next round.
    logits: np.ndarray = NO_LOGITS
    error: Exception | None = None  # why the text can't go on, if its constraints failed


NOTHING_FORCED = RowOutcome()


def run_round(
    target: Decoder,
    drafter: Drafter | None,
    lookahead: Lookahead,
    rows: list[RowStep],
    prefill_budget: PrefillBudget | None = None,
) -> tuple[list[RowOutcome], RoundOutcome | None]:
    """Commit at least one token to every row, and leave no trace of rejected tokens.

    A row that is still reading its prompt gets none, except forced tokens. Returns each row's outcome, and what the
    lookahead can learn from the round, or None without a drafter. If a row's constraints fail, only that row's outcome
    is an ``error``, and forced tokens may remain in its sequence; any other exception may leave tokens in all of them.

    Args:
        target: its row i follows ``rows[i]``, of which it may have read only a part.
        drafter: None for plain decoding.
        lookahead: decides how many tokens to propose. If it is fixed at 0, constraints don't force tokens, either.
        prefill_budget: decides how much of the prompts is read, if rows that generate must not wait long.
    """
    rows, outcomes = rows[:], [NOTHING_FORCED] * len(rows)
    for index, row in enumerate(rows):
        if row.sampler.constraints.commits_forced and 0 not in (lookahead.fixed_length, row.draft_limits.lookahead):
            outcomes[index] = run_row_step(commit_forced_tokens, row)
            rows[index] = continue_after_forced(row, outcomes[index])
    if drafter:
        begin_lookahead(lookahead, rows, target, prefill_budget)
    began = time.perf_counter()
    proposals = collect_proposals(rows, outcomes, drafter, lookahead)
    proposed = time.perf_counter()
    unseen = find_unseen_tokens(rows, outcomes, target)
    load = measure_load(unseen, proposals) if prefill_budget else None
    chunks = unseen
    if prefill_budget and load:
        chunks = choose_prefill_chunks(target, unseen, prefill_budget.prompt_tokens(load, 1e3 * (proposed - began)))
    elif len(rows) > 1:
        chunks = choose_prefill_chunks(target, unseen)
    feeds = make_row_feeds(rows, unseen, chunks, proposals)
    fed, before = [feed.tokens for feed in feeds], target.seconds
    width = lookahead.target_costs.fill_width(count_computed_tokens(target, fed)) if drafter else 0
    if any(map(len, fed)):
        logits = target.feed(fed, [feed.logits_count for feed in feeds], width)
        if prefill_budget and load:
            prompts = sum(
                [feed.unseen_count for feed, new in zip(feeds, unseen, strict=True) if len(new) > PREFILL_THRESHOLD]
            )
            prefill_budget.learn(load, prompts, 1e3 * (target.seconds - before))
        for index, (row, feed) in enumerate(zip(rows, feeds, strict=True)):
            if feed.logits_count:
                outcomes[index] = run_row_step(
                    commit_verified, row, outcomes[index], feed, logits[index], target, index
                )
            elif feed.unseen_count:
                outcomes[index] = outcomes[index]._replace(read_count=feed.unseen_count)
    if not drafter:
        return outcomes, None
    return outcomes, summarize_round(
        outcomes, unseen, proposals, width, proposed - began, time.perf_counter() - proposed
    )


def run_row_step(step: Callable[..., RowOutcome], row: RowStep, *arguments: Any) -> RowOutcome:
    """Run a step of a row; if its constraints or a user's function fail, the row has ended, and the others go on."""
    with row.sampler.stopwatch:
        try:
            return step(row, *arguments)
        except InferenceError:
            raise
        except Exception as error:
            return RowOutcome(ended=True, error=error)


def commit_forced_tokens(row: RowStep) -> RowOutcome:
    """Commit the row's forced tokens. They need not be verified, because the target could choose nothing else."""
    constraints = row.sampler.constraints
    forced = constraints.forced_tokens(row.sequence.tokens)[: row.budget]
    if not forced:
        return NOTHING_FORCED
    tokens = np.array(forced, dtype=np.int64)
    row.sequence.commit(tokens)
    ended = len(tokens) == row.budget or constraints.is_complete(row.sequence.tokens)
    return RowOutcome(tokens, len(tokens), ended)


def continue_after_forced(row: RowStep, outcome: RowOutcome) -> RowStep:
    """Return what the row goes on with after its forced tokens."""
    return row._replace(budget=row.budget - outcome.forced_count, asks_drafters=row.asks_drafters and not outcome.ended)


def begin_lookahead(lookahead: Lookahead, rows: list[RowStep], target: Decoder, budget: PrefillBudget | None) -> None:
    """Begin a round of the lookahead, with as much time as the prompts leave that the target has not read."""
    if not budget:
        lookahead.begin_round()
        return
    unread = [len(row.sequence) - len(cached) for row, cached in zip(rows, target.rows, strict=True)]
    prompts = [count for count in unread if count > PREFILL_THRESHOLD]
    lookahead.begin_round(
        budget.proposal_ms(RoundLoad(len(rows) - len(prompts), len(prompts)), sum(prompts)), paced=True
    )


def collect_proposals(
    rows: list[RowStep], outcomes: list[RowOutcome], drafter: Drafter | None, lookahead: Lookahead
) -> list[Proposal]:
    """Collect proposals from the drafter. A row without one tries the tokens that healing took back from its prompt."""
    proposals = [NO_PROPOSAL] * len(rows)
    if drafter and any(row.draft_budget() for row in rows):
        proposals = list(drafter.propose(rows, lookahead))
    for index, row in enumerate(rows):
        constraints = row.sampler.constraints
        if constraints.suggests and not outcomes[index].ended and not len(proposals[index].tokens):
            likely = constraints.suggest_tokens(row.sequence.tokens)
            if likely is not None:
                proposals[index] = row.cut_to_allowed(Proposal(likely, from_healing=True))
    return proposals


def find_unseen_tokens(rows: list[RowStep], outcomes: list[RowOutcome], target: Decoder) -> list[np.ndarray]:
    """Return the tokens of each row that the target has not read, after rolling it back; none of ended rows."""
    target.reuse_prefixes([row.sequence for row in rows])
    return [
        NO_TOKENS if outcome.ended else catch_up(target, index, row.sequence)
        for index, (row, outcome) in enumerate(zip(rows, outcomes, strict=True))
    ]


def measure_load(unseen: list[np.ndarray], proposals: list[Proposal]) -> RoundLoad:
    """Return what the round does besides reading prompts."""
    generating = [
        (len(new) - 1, len(proposal.tokens))
        for new, proposal in zip(unseen, proposals, strict=True)
        if 0 < len(new) <= PREFILL_THRESHOLD
    ]
    return RoundLoad(
        generating_rows=len(generating),
        prefilling_rows=sum([len(new) > PREFILL_THRESHOLD for new in unseen]),
        extra_tokens=sum([rest for rest, _ in generating]),
        proposed_tokens=sum([proposed for _, proposed in generating]),
    )


def make_row_feeds(
    rows: list[RowStep], unseen: list[np.ndarray], chunks: list[np.ndarray], proposals: list[Proposal]
) -> list[RowFeed]:
    """Return what each row feeds: its chunk of unseen tokens and, if these are all, the proposal."""
    feeds = []
    for row, new, chunk, proposal in zip(rows, unseen, chunks, proposals, strict=True):
        read, proposed = len(chunk), len(proposal.tokens)
        if not read or read < len(new):
            feeds.append(RowFeed(chunk, read))
        else:
            tokens = np.concatenate((chunk, proposal.tokens)) if proposed else chunk
            feeds.append(RowFeed(tokens, read, proposal, min(row.logits_rows, read) + proposed))
    return feeds


def commit_verified(
    row: RowStep, begun: RowOutcome, feed: RowFeed, logits: np.ndarray, target: Decoder, index: int
) -> RowOutcome:
    """Commit the accepted part of the proposal and one token of the target's own, after the forced ones of ``begun``.

    That token replaces the first rejected one or, if the whole proposal was accepted, is the bonus token. There is none
    if an accepted token ends the text.
    """
    proposal, accepted = feed.proposal, 0
    proposed = len(proposal.tokens)
    own = logits[len(logits) - proposed - 1 :]
    chosen = row.sampler.verify_proposal(own, row.sequence, proposal.tokens, proposal.distributions)
    row.sequence.commit(chosen)
    if proposed and len(chosen):
        accepted = int((chosen[:proposed] == proposal.tokens[: len(chosen)]).sum())
        if accepted < proposed:
            target.truncate(index, len(row.sequence) - 1)
    if proposal.from_healing:
        proposal, accepted = NO_PROPOSAL, 0
    tokens = np.concatenate((begun.tokens, chosen)) if begun.forced_count else chosen
    logits = own[: len(chosen)] if len(chosen) else logits
    return RowOutcome(tokens, begun.forced_count, False, proposal, accepted, feed.unseen_count, logits)


def summarize_round(
    outcomes: list[RowOutcome],
    unseen: list[np.ndarray],
    proposals: list[Proposal],
    width: int,
    drafted: float,
    verified: float,
) -> RoundOutcome:
    forced = sum(
        [outcome.forced_count for outcome in outcomes if not outcome.ended]
    )  # the last ones are never computed
    prefilled = any(proposal.from_healing for proposal in proposals) or sum(map(len, unseen)) > len(outcomes) + forced
    judged = [(outcome.proposal, outcome.accepted_count) for outcome in outcomes]
    return RoundOutcome(judged, width, forced, prefilled, drafted, verified)
